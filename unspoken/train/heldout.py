"""The loss on held-out windows, pass by pass: the number that a training run is steered by.

The full evaluation (exact recurrence, bits per byte, depth) is `unspoken eval`.
"""

import torch

from unspoken.data.packing import PackedDataset
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.loss import IGNORE_INDEX, shift_labels


@torch.no_grad()
def held_out_losses(
    model: LatentForCausalLM, data: PackedDataset, num_sequences: int, batch_size: int, num_passes: int
) -> list[float]:
    """Mean next-token loss of passes 1..num_passes over the first `num_sequences` windows (all, if there are fewer).

    One forward of `num_passes` gives them all: pass i does not know how many follow. Precision is the caller's
    autocast; the model is left in the mode that it was in.
    """
    was_training = model.training
    model.eval()
    num_sequences = min(num_sequences, len(data))
    total, num_targets = torch.zeros(num_passes, dtype=torch.float64), 0
    for start in range(0, num_sequences, batch_size):
        rows = [data[i] for i in range(start, min(start + batch_size, num_sequences))]
        batch = {key: torch.stack([row[key] for row in rows]).to(model.device) for key in rows[0]}
        output = model(**batch, num_passes=num_passes, num_items_in_batch=1, use_cache=False, skip_logits=True)
        total += output.pass_losses.double().cpu()
        num_targets += int((shift_labels(batch["labels"]) != IGNORE_INDEX).sum())
    model.train(was_training)
    return (total / max(1, num_targets)).tolist()
