"""Looped language model: the whole stack of layers, several times over.

    h^(0) = embeddings,  h^(i) = stack(h^(i-1)),  state = norm(h^(N))

As the authors of the second paper run it. Options: the norm between loops, the embeddings added to each loop's input,
and Ouro's gate:

    g^(i) = sigmoid(gate(h^(i))),  p^(i) = g^(i) prod over j < i of (1 - g^(j)),  p^(N) the rest
    loss = sum over i of p^(i) CE(h^(i)) - beta H(p)

Sources: *Adaptive latent CoT* section 4; Ouro (arXiv 2510.25741). Oracles: `latent/reference.py` `looped`, `exits`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unspoken.config import LoopedConfig
from unspoken.models.latent_lm import LatentForCausalLM, LatentModelOutput
from unspoken.models.loss import IGNORE_INDEX, expected_cross_entropy, shift_labels
from unspoken.models.repeated import RepeatedHead, RepeatedModel


@dataclass
class Exits:
    """states: of the N loops, [B, T, d] each. probabilities [N, B, T]: of exiting after each; they sum to one."""

    states: list[Tensor]
    probabilities: Tensor


class LoopedModel(RepeatedModel):
    config_class = LoopedConfig

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        if config.exit_gate:
            self.exit_gate = nn.Linear(config.hidden_size, 1)
            self.post_init()

    @property
    def num_runs(self) -> int:
        return self.config.num_loops

    @property
    def norms_between(self) -> bool:  # type: ignore[override]
        return self.config.norm_between_loops

    def next_inputs(self, embeds: Tensor, inputs: Tensor, hidden: Tensor, head: Any) -> Tensor:
        states = self.as_inputs(hidden)
        return states + embeds if self.config.inject_input else states

    def chosen(self, states: list[Tensor]) -> tuple[Tensor, Exits | None]:
        """In training the last loop's, and all exits for the loss; in evaluation that of the exit quantile."""
        if not self.config.exit_gate:
            return states[-1], None
        exits = Exits(states, self._probabilities(states))
        if self.training or self.config.exit_quantile == 1:
            return states[-1], exits
        has_exited = exits.probabilities.cumsum(0) >= self.config.exit_quantile
        has_exited[-1] = True
        first = has_exited.int().argmax(0)  # the first of equal ones
        return torch.stack(states).take_along_dim(first[None, :, :, None], dim=0)[0], exits

    def _probabilities(self, states: list[Tensor]) -> Tensor:
        left: Tensor | float = 1.0
        found = []
        for state in states[:-1]:
            logits = self.exit_gate(state).squeeze(-1)
            gate = torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
            found.append(left * gate)
            left = left * (1 - gate)
        found.append(left * torch.ones_like(states[-1][..., 0], dtype=found[0].dtype if found else None))
        return torch.stack(found)


class LoopedForCausalLM(RepeatedHead, LatentForCausalLM):
    config_class = LoopedConfig
    base_model_class = LoopedModel

    def pass_loss(
        self, outputs: LatentModelOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> tuple[Tensor, Tensor]:
        """With a gate, in training: the expected loss over exits minus their entropy; and the expected loss alone [1].
        In evaluation the loss of the state that speaks."""
        exits: Exits | None = outputs.exits
        if exits is None or not self.training:
            return super().pass_loss(outputs, labels, num_items_in_batch)
        targets = shift_labels(labels)
        counted = targets != IGNORE_INDEX
        if num_items_in_batch is None:
            num_items_in_batch = counted.sum()
        expected = expected_cross_entropy(exits.states, exits.probabilities, self.lm_head, targets, self.transform)
        entropy = torch.special.entr(exits.probabilities).sum(0)[counted].sum()
        total = expected - self.config.exit_entropy_weight * entropy
        return total / num_items_in_batch, (expected.detach() / num_items_in_batch).unsqueeze(0)
