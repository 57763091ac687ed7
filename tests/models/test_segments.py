"""Backward pass by pass adds the gradients of the whole graph."""

import pytest
import torch

from tests.families import REPRESENTATIVE, random_ids, tiny_model
from unspoken.models.segments import backward_by_pass


def _gradients(model, segmented: bool, **options) -> dict[str, torch.Tensor]:
    ids = random_ids(2, 9)
    labels = ids.clone()
    labels[0, 3:5] = -100
    model.zero_grad()
    output = model(ids, labels=labels, segmented=segmented, **options)
    if segmented:
        assert len(output.segments) == 1 + options["num_passes"]
        backward_by_pass(output.loss, output.segments)
    else:
        assert output.segments is None
        output.loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", [*REPRESENTATIVE, "llama"])
def test_gradients_equal_one_backward(name, k):
    text = {"output_router_logits": True} if name == "qwen3_moe" else {}
    model = tiny_model(name, text=text).train()
    whole, by_pass = (_gradients(model, segmented, num_passes=k) for segmented in (False, True))
    assert whole.keys() == by_pass.keys()
    assert "model.adapter.proj.weight" in whole
    for name_, gradient in whole.items():
        torch.testing.assert_close(by_pass[name_], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fields", [{"detach_between_passes": True}, {"pass_loss_weights": [0.0, 1.0]}])
def test_with_detached_passes_and_without_the_first_loss(fields):
    model = tiny_model("llama_tied", **fields).train()
    whole, by_pass = (_gradients(model, segmented, num_passes=2) for segmented in (False, True))
    for name, gradient in whole.items():
        torch.testing.assert_close(by_pass[name], gradient, rtol=1e-9, atol=1e-12)


def test_with_gradient_checkpointing():
    model = tiny_model("llama_tied").train()
    whole = _gradients(model, False, num_passes=3)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    by_pass = _gradients(model, True, num_passes=3)
    for name, gradient in whole.items():
        torch.testing.assert_close(by_pass[name], gradient, rtol=1e-9, atol=1e-12)


def test_the_graph_is_really_cut():
    """The losses' own backward reaches the head and no further."""
    model, ids = tiny_model("llama").train(), random_ids(2, 9)
    output = model(ids, labels=ids, num_passes=2, segmented=True)
    output.loss.backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert reached == {"lm_head.weight"}
