"""The loss on held-out windows, pass by pass: the number that a training run is steered by.

The full evaluation (exact recurrence, bits per byte, depth) is `unspoken eval`.
"""

import torch

from unspoken.data.windows import Windows
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.loss import IGNORE_INDEX, shift_labels
from unspoken.train.metrics import Row
from unspoken.train.parallel import Ranks


@torch.no_grad()
def held_out_losses(
    model: LatentForCausalLM,
    data: Windows,
    num_sequences: int,
    batch_size: int,
    num_passes: int,
    ranks: Ranks | None = None,
) -> Row:
    """Mean next-token loss of passes 1..num_passes, and the mean latent length where there is one, over the first
    `num_sequences` windows (all, if there are fewer).

    One forward of `num_passes` gives them all: pass i does not know how many follow. Precision is the caller's
    autocast; the model is left in the mode that it was in. Processes take the windows in turn, and run as many
    forwards each, which sharded weights need.
    """
    ranks = ranks or Ranks()
    was_training = model.training
    model.eval()
    num_sequences = min(num_sequences, len(data))
    total, num_targets = torch.zeros(num_passes, dtype=torch.float64), 0
    latent_steps, num_tokens = 0, 0
    per_round = batch_size * ranks.size
    for first in range(ranks.rank * batch_size, -(-num_sequences // per_round) * per_round, per_round):
        rows = [data[i] for i in range(first, min(first + batch_size, num_sequences))]
        is_empty = not rows
        rows = rows or [data[0]]
        batch = {key: torch.stack([row[key] for row in rows]).to(model.device) for key in rows[0]}
        if is_empty:  # this process's turn in the last round, and no window is left
            batch["labels"].fill_(IGNORE_INDEX)
        output = model(**batch, num_passes=num_passes, num_items_in_batch=1, use_cache=False, skip_logits=True)
        total += output.pass_losses.double().cpu()
        num_targets += int((shift_labels(batch["labels"]) != IGNORE_INDEX).sum())
        if output.latents is not None and not is_empty:
            latent_steps += int(output.latents.lengths.sum())
            num_tokens += output.latents.lengths.numel()
    model.train(was_training)
    *sums, count, steps, tokens = ranks.sum([*total.tolist(), num_targets, latent_steps, num_tokens])
    row: Row = {f"loss_pass_{i}": loss / max(1, count) for i, loss in enumerate(sums, start=1)}
    return row | ({"latent_length": steps / tokens} if tokens else {})
