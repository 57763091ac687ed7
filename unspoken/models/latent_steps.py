"""Adaptive latent CoT: a token's state goes through the backbone again until a router lets the token go.

    step 1        all tokens, as in a plain model
    step k + 1    the tokens that go on, gathered; their inputs are their own states z^(k), after the final norm
    z_final       the mixture of each token's states; it meets the head, once

Steps of a token share its position id. A query reads keys and values of its own step and below (`latent/
visibility.py`), which earlier runs have made and nothing makes again. So a forward over many tokens computes what
decoding computes, at every k, and a batch's row costs nothing once its tokens have exited. The models that take them
are in `adaptive.py` and `adaptive_recycler.py`.

Source: Adaptive latent CoT section 3; oracle: `latent/reference.py` `latent_steps`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from unspoken.config import check_latent_steps
from unspoken.latent.active import Active, Tokens, run_layers, shown_part
from unspoken.latent.halting import Halting, Router, halt
from unspoken.latent.recycle import document_starts
from unspoken.latent.slots import Part, slot_table, store
from unspoken.latent.visibility import Entries, grid_masks, joined, mask_function
from unspoken.models.inputs import document_mask
from unspoken.models.latent_lm import LatentModelOutput


@dataclass
class Knobs:
    """How deep a forward may go; the configuration's values unless the call says otherwise."""

    max_latent_steps: int
    exit_threshold: float
    exit_at_step: int | None

    @property
    def last_step(self) -> int:
        return self.exit_at_step or self.max_latent_steps + 1


@dataclass
class LatentStep:
    """One step of a forward, for the n tokens that took it, [n] each: `token` is b * T + t. gate: None at a last step.
    hidden [n, d], weight: what the step adds to the mixture."""

    token: Tensor
    hidden: Tensor
    reach: Tensor
    gate: Tensor | None
    weight: Tensor
    goes_on: Tensor

    def at_columns(self, num_columns: int, first: int, width: int) -> "LatentStep":
        """The same tokens in rows of `width`, of which theirs begin at `first`."""
        rows, columns = self.token // num_columns, self.token % num_columns
        return replace(self, token=rows * width + first + columns)

    def with_tokens(self, other: "LatentStep") -> "LatentStep":
        pairs: dict[str, Any] = {name: (getattr(self, name), getattr(other, name)) for name in vars(self)}
        joined_pairs: dict[str, Any] = {n: None if pair[0] is None else torch.cat(pair) for n, pair in pairs.items()}
        return LatentStep(**joined_pairs)


def _flat(parts: tuple[Tensor | None, ...]) -> Tensor:
    """The entries of one step of several forwards, [1, n]."""
    return torch.cat([part.flatten() for part in parts if part is not None]).unsqueeze(0)


@dataclass
class Latents:
    """What a forward's latent steps were. lengths int64 [B, T]: latent steps of each token, 0 at pads. taken: for each
    run of the backbone, which of its entries [b, Q] are tokens. max_latent_steps: that a token could take. penalty:
    what the loss counts for going on."""

    lengths: Tensor
    steps: list[LatentStep]
    taken: list[Tensor]
    max_latent_steps: int
    penalty: Tensor | None = None

    def followed_by(self, other: "Latents") -> "Latents":
        """Of the tokens of two forwards, one's after the other's: each step of both is one."""
        num_first, num_second = self.lengths.shape[1], other.lengths.shape[1]
        width = num_first + num_second
        first = [step.at_columns(num_first, 0, width) for step in self.steps]
        second = [step.at_columns(num_second, num_first, width) for step in other.steps]
        return Latents(
            torch.cat([self.lengths, other.lengths], dim=1),
            [a.with_tokens(b) if a and b else a or b for a, b in zip_longest(first, second)],  # type: ignore[misc]
            [_flat(pair) for pair in zip_longest(self.taken, other.taken)],
            self.max_latent_steps,
        )

    def sums(self, num_targets: int) -> dict[str, tuple[Tensor, Tensor]]:
        """For the log, each with what it is a mean over: latent steps (tokens), the penalty (targets), gates that a
        cut overruled (cuts): should they fall for good, tokens will not go on again."""
        device = self.lengths.device
        num_tokens = self.taken[0].sum() if self.taken else torch.tensor(self.lengths.numel(), device=device)
        found = {"latent_length": (self.lengths.sum(), num_tokens)}
        if self.penalty is not None:
            found["adaptive_loss"] = self.penalty * num_targets, torch.tensor(num_targets, device=device)
        asked = [step for step in self.steps if step.gate is not None]
        if asked:
            gates = torch.cat([step.gate[~step.goes_on] for step in asked if step.gate is not None]).detach()
            found["gate_at_cut"] = gates.sum(), torch.tensor(len(gates), device=device)
        return found


class TakesLatentSteps:
    """The steps, for a `LatentModel` with a backbone, a router and a configuration. Mixed in by the models below."""

    backbone: Any
    router: Router
    config: Any
    training: bool
    as_inputs: Callable[[Tensor], Tensor]
    gradient_checkpointing: bool = False
    goes_on_anywhere: Callable[[bool], bool] = staticmethod(bool)
    """Whether tokens go on in any process. Shards of a step must be gathered by all of them, or by none."""

    def knobs(self, max_latent_steps: int | None, exit_threshold: float | None, exit_at_step: int | None) -> Knobs:
        """The configuration's, but for what the call says. A call's `max_latent_steps` overrules an `exit_at_step` of
        the configuration."""
        config = self.config
        if exit_at_step is None and max_latent_steps is None:
            exit_at_step = config.exit_at_step
        if max_latent_steps is None:
            max_latent_steps = config.max_latent_steps
        if exit_threshold is None:
            exit_threshold = config.exit_threshold
        check_latent_steps(max_latent_steps, exit_threshold, exit_at_step)
        if exit_at_step is None and config.router == "none":
            exit_at_step = max_latent_steps + 1
        return Knobs(max_latent_steps, exit_threshold, exit_at_step)

    def think(
        self,
        embeds: Tensor,
        attention_mask: Tensor | dict | None,
        position_ids: Tensor | None,
        real: Tensor | None,
        cache: Cache | None,
        knobs: Knobs,
        keeps_steps: bool = False,
        **options,
    ) -> LatentModelOutput:
        """All steps of tokens that follow the cache's. embeds [B, T, d]; real bool [B, T] or None."""
        documents = None
        if position_ids is not None and cache is None:
            documents = document_starts(position_ids, real).cumsum(-1).expand(len(embeds), -1)
            documents = documents if documents.any() else None
        if knobs.last_step > 1:
            mask_function(self.config.text_config)  # refuses what takes no mask, before anything is computed
            if options.get("output_attentions"):
                raise ValueError(
                    "output_attentions: the maps of latent steps have a width each and are not returned; "
                    "max_latent_steps=0 gives those of the first run"
                )
        elif cache is None:
            if documents is not None:
                attention_mask = document_mask(self.config, embeds, attention_mask, position_ids)
            return self._plain(embeds, attention_mask, position_ids, options)
        table = None if cache is None else slot_table(cache, self.config.num_hidden_layers)
        stored = shown_part(cache, table, attention_mask, embeds.shape[1])
        tokens = Tokens.of_forward(embeds, real, position_ids, documents, table)
        active, inputs, mixture = tokens.all(), embeds, _Mixture(embeds.shape, knobs)
        parts: list[Part] = [] if stored is None else [stored]
        mask: Tensor | dict | None = attention_mask
        if documents is not None:
            mask = document_mask(self.config, embeds, attention_mask, position_ids)
        elif table is not None and not (table.is_flat and (attention_mask is not None or not table.has_pads)):
            mask = self._mask(parts, tokens.entries(active, 1), active, 1, embeds.dtype)
        # Slots are no positions: a body that counts them itself would be wrong behind deeper steps.
        positions = position_ids if stored is None else tokens.positions
        lengths = torch.zeros_like(tokens.columns).flatten()
        layers = range(self.config.num_hidden_layers)
        is_checkpointed = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        steps, taken, router_logits, hidden_states = [], [], [], None
        for step in range(1, knobs.last_step + 1):
            run = run_layers(
                self.backbone, layers, inputs, mask, positions, parts, active.rows, options, is_checkpointed
            )
            parts.append(Part(active.rows, tokens.entries(active, step), run.keys))
            router_logits += run.router_logits
            taken.append(active.taken)
            hidden_states = hidden_states or run.hidden_states
            gate = self._gate(run.hidden, active, step, knobs)
            halting = self._halt(active, gate, step, knobs)
            indices = active.indices(tokens.columns.shape[1])
            mixture.add(run.hidden, halting.weight, indices, active.taken)
            if keeps_steps:
                steps.append(_kept(run.hidden, active, gate, halting, indices))
            if step == knobs.last_step or not self.goes_on_anywhere(bool(halting.goes_on.any())):
                break
            going = indices[halting.goes_on]
            lengths = lengths.index_add(0, going, torch.ones_like(going))
            active, inputs = active.gathered(halting.goes_on, halting.next_reach, run.hidden)
            inputs = self.as_inputs(inputs)
            positions = active.of(tokens.positions)
            mask = self._mask(parts, tokens.entries(active, step + 1), active, step + 1, inputs.dtype)
        if cache is not None and table is not None:
            store(cache, table, parts[0 if stored is None else 1 :], tokens.columns.shape[1])
        final = mixture.state()
        if torch.is_grad_enabled():
            final = final + self.router.zero()
        return LatentModelOutput(
            last_hidden_state=final,
            cache=cache,
            hidden_states=None if hidden_states is None else (*hidden_states[:-1], final),
            router_logits=tuple(router_logits) or None,
            pass_hidden_states=(final,),
            pass_latents=(Latents(lengths.view_as(tokens.columns), steps, taken, knobs.last_step - 1),),
        )

    def checkpoint_whole_steps(self) -> None:
        """After transformers has flagged every module: a layer that checkpoints drops its cache, and with it the keys
        of earlier steps. `run_layers` checkpoints instead. A plain model's layers may."""
        if self.knobs(None, None, None).last_step > 1:
            for module in self.backbone.modules():
                if hasattr(module, "gradient_checkpointing"):
                    module.gradient_checkpointing = False

    def _set_gradient_checkpointing(self, *args, **kwargs) -> None:
        super()._set_gradient_checkpointing(*args, **kwargs)  # type: ignore[misc]
        self.checkpoint_whole_steps()

    def _plain(self, embeds: Tensor, attention_mask, position_ids: Tensor | None, options: dict) -> LatentModelOutput:
        """One run and no latent step: the plain model, bit for bit."""
        output = self.backbone(
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
            **options,
        )
        final = output.last_hidden_state
        if torch.is_grad_enabled():
            final = final + self.router.zero()
        return LatentModelOutput(
            last_hidden_state=final,
            hidden_states=output.get("hidden_states"),
            attentions=output.get("attentions"),
            router_logits=output.get("router_logits"),
            pass_hidden_states=(final,),
            pass_latents=(Latents(torch.zeros(embeds.shape[:2], dtype=torch.long, device=embeds.device), [], [], 0),),
        )

    def _mask(self, parts: list[Part], entries: Entries, active: Active, step: int, dtype: torch.dtype):
        seen = joined([*(part.entries_of(active.rows) for part in parts), entries])
        return grid_masks(self.config.text_config, seen, len(entries), step, dtype)

    def _gate(self, hidden: Tensor, active: Active, step: int, knobs: Knobs) -> Tensor | None:
        if knobs.exit_at_step is not None or step == knobs.last_step:
            return None
        # What a backend returns at pads may be NaN, and zero times NaN would reach the router's gradient.
        logits = self.router(hidden.masked_fill(~active.taken.unsqueeze(-1), 0), step)
        return torch.sigmoid(logits).masked_fill(~active.taken, 0)

    def _halt(self, active: Active, gate: Tensor | None, step: int, knobs: Knobs) -> Halting:
        if knobs.exit_at_step is None or step == knobs.last_step:
            return halt(active.carried, gate, knobs.exit_threshold)
        goes_on = active.taken
        return Halting(active.carried.masked_fill(goes_on, 0), active.carried.masked_fill(~goes_on, 0), goes_on)


class _Mixture:
    """z_final of all tokens, summed up step by step in at least float32."""

    def __init__(self, shape: torch.Size, knobs: Knobs):
        self.shape = shape
        self.is_single = knobs.last_step == 1
        self.total: Tensor | None = None
        self.dtype: torch.dtype | None = None

    def add(self, hidden: Tensor, weight: Tensor, indices: Tensor, taken: Tensor) -> None:
        """hidden [b, Q, d] with weight [b, Q], to the tokens [b, Q] where `taken`; first of all of them."""
        if self.is_single:
            self.total, self.dtype = hidden, hidden.dtype
            return
        precise = torch.promote_types(hidden.dtype, torch.float32)
        part = hidden.to(precise) * weight.to(precise).unsqueeze(-1)
        if self.total is None:
            self.total, self.dtype = part.flatten(0, 1), hidden.dtype
            return
        # In the graph also where nothing is taken, in a step that only another process's tokens need.
        self.total = self.total.index_add(0, indices[taken], part[taken])

    def state(self) -> Tensor:
        assert self.total is not None and self.dtype is not None
        return self.total.view(*self.shape[:2], -1).to(self.dtype)


def _kept(hidden: Tensor, active: Active, gate: Tensor | None, halting: Halting, indices: Tensor) -> LatentStep:
    taken = active.taken
    return LatentStep(
        indices[taken],
        hidden[taken],
        active.carried[taken],
        None if gate is None else gate[taken],
        halting.weight[taken],
        halting.goes_on[taken],
    )
