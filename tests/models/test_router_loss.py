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
