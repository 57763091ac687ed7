"""The sequential reference of latent steps as one function of inputs, which stands where a backbone does.

    body(inputs [B, T, d]) -> z_final [B, T, d]      token by token, step by step, everything run anew for each

In the backbone's place it makes every oracle of `latent/reference.py` that of a model with latent steps. It shares the
model's weights and gates, and nothing of its gathering, its masks and its slots.
"""

from typing import Any

import torch
from torch import Tensor

from unspoken.latent.reference import Grid, GridBackbone, mixed, one_token
from unspoken.latent.visibility import attention_masks
from unspoken.models.backbone import input_multiplier


class ThinkingBody:
    """model: one with latent steps, in evaluation mode, that goes as deep as its configuration says."""

    def __init__(self, model: Any):
        self.model, self.config = model.model, model.config
        self.run, self.knobs = grid_backbone(self.model), self.model.knobs(None, None, None)
        self.seen: list[_Row] = []

    def __call__(self, inputs: Tensor) -> Tensor:
        return torch.cat([torch.cat(self._read(row).finals, dim=1) for row in inputs.split(1)])

    def _read(self, inputs: Tensor) -> "_Row":
        """inputs [1, T, d]. What was made of a beginning is not made again: no token there can tell what follows."""
        row = max((row.shared_with(inputs) for row in self.seen), key=lambda row: len(row.finals), default=_Row(inputs))
        for time in range(len(row.finals), inputs.shape[1]):
            entry = inputs[:, time : time + 1]
            depth, threshold = self.knobs.last_step - 1, self.knobs.exit_threshold
            row.finals.append(mixed(*one_token(row.grid, self.run, self._gate, entry, time, depth, threshold)))
        self.seen.append(row)
        return row

    def _gate(self, state: Tensor, step: int) -> Tensor:
        if self.knobs.exit_at_step is not None:
            return state.new_ones(())
        return torch.sigmoid(self.model.router(state, step)).squeeze()


def grid_backbone(model: Any, body: Any = None) -> GridBackbone:
    """A base model's backbone, or another body of it, over any entries of the grid, told in a mask of its own who sees
    whom."""
    text_config = model.config.text_config if body is None else body.config
    backbone = model.backbone if body is None else body

    def run(inputs: Tensor, times: Tensor, visible: Tensor) -> Tensor:
        times, visible = times.to(inputs.device), visible.to(inputs.device)

        def seen(window: int | None) -> Tensor:
            inside = visible if window is None else visible & (times > times.unsqueeze(-1) - window)
            return inside.unsqueeze(0)

        outputs = backbone(
            inputs_embeds=inputs / input_multiplier(text_config),
            attention_mask=attention_masks(text_config, seen, inputs.dtype),
            position_ids=times[None],
            use_cache=False,
        )
        return outputs.last_hidden_state

    return run


class _Row:
    """One row as far as it was read: what its tokens' steps were given, and their z_final."""

    def __init__(self, inputs: Tensor):
        self.inputs, self.grid = inputs, Grid()
        self.finals: list[Tensor] = []

    def shared_with(self, inputs: Tensor) -> "_Row":
        """The beginning that this row and `inputs` have in common, as a beginning of `inputs`."""
        size = min(self.inputs.shape[1], inputs.shape[1])
        same = (self.inputs[0, :size] == inputs[0, :size]).all(-1)
        num_tokens = int(same.long().cumprod(0).sum())
        num_entries = sum(time < num_tokens for time in self.grid.times)
        row = _Row(inputs)
        row.finals = self.finals[:num_tokens]
        grid = self.grid
        row.grid = Grid(grid.inputs[:num_entries], grid.times[:num_entries], grid.steps[:num_entries])
        return row
