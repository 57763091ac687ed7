"""One optimizer step's batch: forward and backward, some rows at a time, and what is counted on the way."""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unspoken.latent.counts import step_counts, step_rule
from unspoken.models.backbone import attention_windows
from unspoken.models.loss import IGNORE_INDEX, shift_labels
from unspoken.train.parallel import Engine


class StepSums(NamedTuple):
    """What one optimizer step's batch gave: this process's part of the loss and of each pass's loss [k], detached; the
    number of targets of all processes; latent lengths and the like by name, each a sum and what it is a mean over; and
    this process's `COUNTS` (None: no latent steps)."""

    loss: Tensor
    pass_losses: Tensor
    num_targets: int
    latents: dict[str, tuple[Tensor, Tensor]]
    counts: Tensor | None


def forward_backward(
    engine: Engine,
    batch: dict[str, Tensor],
    rows_at_once: int,
    k: int,
    autocast: AbstractContextManager,
    **options: Any,
) -> StepSums:
    """Add the gradients of one optimizer step's batch (this process's rows of it), some rows at a time.

    The loss of every part is divided by the targets of the whole batch, over all processes, so the split changes
    nothing but rounding (a router's balancing loss, which is no mean over targets, depends on it as in transformers).
    options: of the model's forward.
    """
    own_targets = int((shift_labels(batch["labels"]) != IGNORE_INDEX).sum())
    num_targets = max(1, int(engine.ranks.sum([own_targets])[0]))
    device = engine.model.device
    loss: Tensor = torch.zeros((), device=device)
    pass_losses = torch.zeros(k, device=device)
    latents: dict[str, tuple[Tensor, Tensor]] = {}
    counts: Tensor | None = None
    num_rows = len(batch["labels"])
    if engine.segmented:
        options["segmented"] = True
    for start in range(0, num_rows, rows_at_once):
        part = {name: rows[start : start + rows_at_once].to(device) for name, rows in batch.items()}
        with engine.part(is_last=start + rows_at_once >= num_rows):
            with autocast:
                output = engine.forward(
                    **part, num_passes=k, num_items_in_batch=num_targets, use_cache=False, **options
                )
            engine.backward(output)
        loss += output.loss.detach()
        pass_losses += output.pass_losses
        for steps in output.pass_latents or ():
            found = _step_counts(engine.model.config, steps.lengths, part["labels"])
            counts = found if counts is None else counts + found
            for name, (total, count) in steps.sums(num_targets).items():
                before = latents.get(name, (0.0, 0.0))
                latents[name] = before[0] + total, before[1] + count
    engine.settle()
    return StepSums(loss, pass_losses, num_targets, latents, counts)


def _step_counts(config: Any, lengths: Tensor, labels: Tensor) -> Tensor:
    """The `COUNTS` of a pass over some rows."""
    has_target = shift_labels(labels) != IGNORE_INDEX
    rule = step_rule(config)
    assert rule is not None
    return step_counts(lengths, attention_windows(config.text_config), rule, has_target)
