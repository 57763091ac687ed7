"""The real small model: what holds for tiny random weights holds for SmolLM2-135M and real text."""

import pytest
import torch

from unspoken.data.stdlib_text import stdlib_documents
from unspoken.latent.reference import prefill_then_decode
from unspoken.models.convert import convert
from unspoken.models.load import load_source

FP32_LOGITS = 2e-3  # 30 layers of float32 rounding at logits of about 20; kernels differ with the sequence length


@pytest.fixture(scope="module")
def smollm2():
    return load_source("smollm2")


@pytest.fixture(scope="module")
def recycler(smollm2):
    return convert(smollm2[0], "recycler").eval()


def test_it_knows_the_capital_of_france(smollm2, recycler):
    tokenizer = smollm2[1]
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    completion = recycler.generate(**inputs, max_new_tokens=2, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(completion) == " Paris."


def test_decoding_real_text_equals_the_reference(smollm2, recycler):
    """With a working adapter: k=2 prefill and ten recurrent steps, a left-padded batch, against no cache at all."""
    tokenizer = smollm2[1]
    body, adapter, embed = recycler.model.backbone, recycler.model.adapter, recycler.get_input_embeddings()
    torch.manual_seed(0)
    torch.nn.init.normal_(adapter.proj.weight, std=2e-3)
    texts = [document.text[:90] for document in list(stdlib_documents())[:2]]
    texts[1] = texts[1][:40]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    assert len(prompts[0]) != len(prompts[1])
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    with torch.no_grad():
        made = recycler.generate(
            **batch, max_new_tokens=10, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        for row, prompt in enumerate(prompts):
            ids = torch.cat([torch.tensor(prompt), made.sequences[row, -10:]]).unsqueeze(0)
            hidden = prefill_then_decode(
                lambda x: body(inputs_embeds=x, use_cache=False).last_hidden_state,
                adapter,
                embed(ids),
                prompt_length=len(prompt),
                num_prefill_passes=2,
            )
            expected = recycler.lm_head(hidden[0, len(prompt) - 1 : -1])
            got = torch.stack([logits[row] for logits in made.logits])
            assert (got - expected).abs().max() < FP32_LOGITS
    adapter.proj.weight.data.zero_()
