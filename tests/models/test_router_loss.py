"""The load-balancing loss of mixture-of-experts backbones."""

import torch

from tests.families import random_ids, tiny_model


def test_accumulation_counts_the_router_loss_once():
    """Added whole to every micro-batch, it would count as often as there are micro-batches."""
    model = tiny_model("qwen3_moe", text={"output_router_logits": True}).train()
    coefficient = model.config.text_config.router_aux_loss_coef
    ids = random_ids(3, 9)
    labels = ids.clone()
    labels[0, 4:] = -100
    num_targets = int((labels[:, 1:] != -100).sum())

    weights = 0.0
    for rows in (slice(0, 1), slice(1, 3)):
        with_router = model(ids[rows], labels=labels[rows], num_items_in_batch=num_targets)
        without = model(ids[rows], labels=labels[rows], num_items_in_batch=num_targets, output_router_logits=False)
        weights += ((with_router.loss - without.loss) / with_router.aux_loss).item()
    assert torch.isclose(torch.tensor(weights), torch.tensor(coefficient), rtol=1e-5)
    whole = model(ids, labels=labels)
    plain = model(ids, labels=labels, output_router_logits=False)
    assert torch.isclose(whole.loss - plain.loss, coefficient * whole.aux_loss.to(whole.loss.dtype), rtol=1e-5)


def test_each_pass_is_balanced_for_itself():
    """Over both passes at once, experts that serve one pass alone would look balanced."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    for reduction, divisor in (("sum", 1), ("mean", 2)):
        model = tiny_model("mixtral", text={"output_router_logits": True}, pass_loss_reduction=reduction).train()
        ids = random_ids(2, 9)
        output = model(ids, labels=ids, num_passes=2)
        assert len(output.router_logits) == 2 * model.config.num_hidden_layers
        layers = model.config.num_hidden_layers
        first, second = output.router_logits[:layers], output.router_logits[layers:]
        top_k = model.config.text_config.num_experts_per_tok
        expected = (load_balancing_loss_func(first, 4, top_k) + load_balancing_loss_func(second, 4, top_k)) / divisor
        torch.testing.assert_close(output.aux_loss, expected)
        both = load_balancing_loss_func(first + second, 4, top_k)
        assert not torch.isclose(2 * both / divisor, output.aux_loss, rtol=1e-4)
