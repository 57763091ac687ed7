"""A converted model computes its source's logits bit for bit, until the adapter has learned something."""

import pytest
import torch
from transformers import DynamicCache

from tests.families import ALL, CONFIGS, MOE, plain_model, random_ids
from unspoken import RecyclerForCausalLM, convert
from unspoken.models.backbone import FAMILIES


def test_every_supported_family_is_tested():
    assert {model_type for model_type, _ in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_logits_equal_the_source_bit_for_bit(name, dtype):
    """B82: new modules beside a pretrained body were initialised at random."""
    source, ids = plain_model(name, dtype), random_ids(2, 9)
    with torch.no_grad():
        expected = source(ids, use_cache=False).logits
        cache = DynamicCache(config=source.config)
        expected_prompt = source(ids[:, :6], cache=cache).logits
        expected_steps = [source(ids[:, t : t + 1], cache=cache).logits for t in range(6, 9)]
        model = convert(source)
        assert isinstance(model, RecyclerForCausalLM)
        assert not model.model.adapter.proj.weight.any()
        assert torch.equal(model.model.adapter.norm.weight, torch.ones_like(model.model.adapter.norm.weight))
        for num_passes in (1, 2, 3):
            assert torch.equal(model(ids, use_cache=False, num_passes=num_passes).logits, expected)
        cache = DynamicCache(config=source.config)
        assert torch.equal(model(ids[:, :6], cache=cache, num_passes=2).logits, expected_prompt)
        for t, logits in zip(range(6, 9), expected_steps):
            assert torch.equal(model(ids[:, t : t + 1], cache=cache).logits, logits)


@pytest.mark.parametrize("name", ALL)
def test_the_loss_of_one_pass_is_the_source_loss(name):
    """Head scaling, soft caps and the experts' balancing loss of a family are kept."""
    source, ids = plain_model(name), random_ids(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    options = {"output_router_logits": True} if name in MOE else {}
    expected = source(ids, labels=labels, use_cache=False, **options)
    model = convert(source)
    outputs = model(ids, labels=labels, num_passes=1, **options)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-6, atol=0, check_dtype=False)
    if name in MOE:
        torch.testing.assert_close(outputs.aux_loss, expected.aux_loss)
        assert expected.aux_loss > 0
    two = model(ids, labels=labels, num_passes=2)
    torch.testing.assert_close(two.pass_losses[0], two.pass_losses[1], rtol=0, atol=0)
    torch.testing.assert_close(two.loss, 2 * model(ids, labels=labels, num_passes=1).loss)


@pytest.mark.parametrize("name", ALL)
def test_the_body_returns_its_state_after_the_final_norm(name):
    """What is recycled is what the head sees: the family's own head on our states gives the source's logits."""
    source, ids = plain_model(name, torch.float32), random_ids(1, 5)
    norm = [module for child, module in source.base_model.named_children() if "norm" in child]
    seen = []
    handle = norm[-1].register_forward_hook(lambda module, args, output: seen.append(output))
    hidden = convert(source).model(ids, use_cache=False, num_passes=1).last_hidden_state
    handle.remove()
    assert len(seen) == 1
    assert torch.equal(seen[0], hidden)
