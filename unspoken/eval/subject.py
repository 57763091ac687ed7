"""The model under test: its logits as it computes them, and as the oracles of `latent/reference.py` do."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unspoken.eval.bodies import reference_body
from unspoken.eval.thinking import grid_backbone
from unspoken.latent import reference
from unspoken.models.backbone import input_multiplier
from unspoken.models.knobs import takes_latent_steps
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.ponder2 import Ponder2ForCausalLM
from unspoken.models.recycler import RecyclerForCausalLM

NUM_NEW_TOKENS = 6
MAX_PASSES = 3


@dataclass(frozen=True)
class Subject:
    """The model under test, with what the checks need of it. Its weights stay as they are while it is one."""

    model: LatentForCausalLM
    seed: int = 0

    @property
    def recycles(self) -> bool:
        return isinstance(self.model, RecyclerForCausalLM)

    @property
    def takes_steps(self) -> bool:
        return takes_latent_steps(self.model) and self.model.model.knobs(None, None, None).last_step > 1

    @property
    def num_passes(self) -> int:
        return MAX_PASSES if self.recycles else 1

    @property
    def prefills(self) -> list[int]:
        """The numbers of prefill passes to try."""
        return sorted({1, 2, self.model.config.num_prefill_passes}) if self.recycles else [1]

    def ids(self, batch: int, length: int, draw: int = 0) -> Tensor:
        """Random token ids [batch, length], the same for equal arguments."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + draw * 100 + length)
        return torch.randint(self.model.config.vocab_size, (batch, length), generator=generator).to(self.model.device)

    def head(self, hidden_states: Tensor) -> Tensor:
        return self.model.transform(self.model.lm_head(hidden_states))

    def pass_logits(self, input_ids: Tensor, num_passes: int | None = None, **inputs: Any) -> Tensor:
        """Logits of every parallel pass, [k, B, T, V]."""
        outputs = self.model.model(input_ids, num_passes=num_passes or self.num_passes, **inputs)
        return self.head(torch.stack(outputs.pass_hidden_states))

    def exact_logits(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        return self.head(self.model.model(input_ids, num_passes="exact", **inputs).last_hidden_state)

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        """Without a mask every token is real: `generate` would take those that look like padding for padding."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        options = {"do_sample": False, "max_new_tokens": NUM_NEW_TOKENS, "return_dict_in_generate": True, **options}
        return self.model.generate(input_ids, attention_mask=mask, **options)  # type: ignore[operator]

    def greedy(self, input_ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Generated ids [B, n] and the logits they were chosen from, [B, n, V]."""
        outputs = self.generate(input_ids, output_logits=True, **inputs)
        return outputs.sequences[:, input_ids.shape[1] :], torch.stack(outputs.logits, dim=1)

    @cached_property
    def body(self) -> reference.Backbone:
        """Kept, as that of latent steps keeps what it has made of the texts that several checks begin with."""
        return reference_body(self.model)

    def reference(self) -> tuple[reference.Backbone, reference.Adapter]:
        """Backbone and adapter as the oracles want them; both see what enters the first layer. Whatever else the method
        runs is run in the backbone's place."""
        return self.body, self.model.model.adapter if self.recycles else torch.zeros_like

    @property
    def has_thoughts(self) -> bool:
        """Slots that a prompt approximates and decoding does not."""
        return isinstance(self.model, Ponder2ForCausalLM)

    def recurrence(self, input_ids: Tensor) -> Tensor:
        """Logits of the sequential recurrence, [B, T, V]."""
        embeds = self.embed(input_ids)
        if not self.has_thoughts:
            return self.head(reference.exact_recurrence(*self.reference(), embeds))
        grid, count = grid_backbone(self.model.model), self.model.config.num_latent_thoughts
        return self.head(torch.cat([reference.thoughts(grid, row, count) for row in embeds.split(1)]))

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.model.model.embed(input_ids, None) * input_multiplier(self.model.config.text_config)

    def decoding_logits(self, input_ids: Tensor, prompt_length: int, num_passes: int) -> Tensor:
        """What decoding must compute from the prompt's last position on, [B, T - prompt_length + 1, V]."""
        if self.has_thoughts:
            return self._thoughts_after(input_ids, prompt_length)
        hidden = reference.prefill_then_decode(*self.reference(), self.embed(input_ids), prompt_length, num_passes)
        return self.head(hidden[:, prompt_length - 1 :])

    def _thoughts_after(self, input_ids: Tensor, prompt_length: int) -> Tensor:
        config, grid = self.model.config, grid_backbone(self.model.model)
        embeds, count, hidden = self.embed(input_ids), config.num_latent_thoughts, []
        for row in embeds.split(1):
            states, stages = reference.refined_thoughts(grid, row[:, :prompt_length], count, config.num_refinements)
            if prompt_length < row.shape[1]:
                states = reference.thoughts(grid, row, count, stages)
            hidden.append(states[:, prompt_length - 1 :])
        return self.head(torch.cat(hidden))


def deviation(actual: Tensor, expected: Tensor) -> float:
    """Infinite when anything is not a finite number."""
    largest = (actual.double() - expected.double()).abs().max().item()
    return largest / max(1.0, expected.abs().max().item()) if math.isfinite(largest) else math.inf
