"""flex_attention, the path for GPUs, against SDPA with its mask, the reference path: the same rule in another form."""

import pytest
import torch
from transformers import DynamicCache

from tests.families import adaptive_model, random_ids

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention has no backward on a CPU")


def _pair(device: str, **text):
    models = [adaptive_model("llama", torch.float32, exit_threshold=0.15, router_bias=0.3, text=text) for _ in range(2)]
    models[1].set_attn_implementation("flex_attention")
    return [model.to(device) for model in models]


@pytest.mark.slow
@torch.no_grad()
def test_logits_and_decisions_are_those_of_the_reference_path():
    """Every shape of a mask is compiled anew, which takes a CPU a while."""
    reference, flex = _pair("cpu")
    ids = random_ids(2, 9)
    expected, actual = reference(ids), flex(ids)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-4)
    assert torch.equal(actual.latents.lengths, expected.latents.lengths)


@NEEDS_CUDA
@torch.no_grad()
def test_pads_documents_and_a_cache_on_a_gpu():
    device = "cuda"
    reference, flex = _pair(device, hidden_size=64)
    ids = random_ids(2, 11).to(device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], [*range(11)]], device=device)
    for inputs in ({"attention_mask": mask}, {"position_ids": packed}):
        expected, actual = reference(ids, **inputs), flex(ids, **inputs)
        real = mask.bool() if "attention_mask" in inputs else torch.ones_like(mask).bool()
        torch.testing.assert_close(actual.logits[real], expected.logits[real], rtol=0, atol=1e-4)
        assert torch.equal(actual.latents.lengths, expected.latents.lengths)
        assert 0 < expected.latents.lengths.float().mean() < 3
    caches, logits = [DynamicCache(), DynamicCache()], []
    for model, cache in zip((reference, flex), caches, strict=True):
        parts = [model(piece, cache=cache, use_cache=True).logits for piece in ids.split([8, 1, 2], dim=1)]
        logits.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)


@NEEDS_CUDA
def test_gradients_are_those_of_the_reference_path():
    reference, flex = _pair("cuda", hidden_size=64)
    ids = random_ids(2, 33).to("cuda")
    for model in (reference, flex):
        model.train()(ids, labels=ids).loss.backward()
    for (name, expected), (_, actual) in zip(reference.named_parameters(), flex.named_parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-5, msg=name)
