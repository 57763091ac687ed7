"""The plain baseline equals the family's own model."""

import pytest
import torch

from tests.families import REPRESENTATIVE, plain_model, random_ids
from unspoken import VanillaForCausalLM, convert


@pytest.mark.parametrize("name", [*REPRESENTATIVE, "cohere", "granite", "gemma2"])
def test_a_plain_latent_model_is_the_plain_model(name):
    source, ids = plain_model(name), random_ids(2, 9)
    with torch.no_grad():
        logits = source(ids, use_cache=False).logits
        loss = source(ids, labels=ids).loss
        text = source.generate(ids, max_new_tokens=8, do_sample=False)
        beams = source.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False)
        model = convert(source, "vanilla")
        assert isinstance(model, VanillaForCausalLM)
        assert torch.equal(model(ids, use_cache=False).logits, logits)
        torch.testing.assert_close(model(ids, labels=ids).loss, loss, rtol=1e-6, atol=0, check_dtype=False)
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), text)
        assert torch.equal(model.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False), beams)
    assert {n for n, _ in model.named_parameters() if "adapter" in n} == set()


def test_speculation_on_a_plain_model():
    source = plain_model("llama")
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    options = {"max_new_tokens": 10, "do_sample": False}
    expected = source.generate(prompt, **options)
    assert torch.equal(convert(source, "vanilla").generate(prompt, prompt_lookup_num_tokens=3, **options), expected)
