"""Mixture-of-Recursions: the middle layers run again for the tokens that a router sends on, and for no others.

    first layer       all tokens
    recursion r       the tokens that go on, gathered; the layers between, the same in each recursion
    last layer, norm  all tokens, each with the state that it left the middle with

Queries of recursion r read keys of recursion r, so of the tokens that went as far, or all of recursion 1
(`kv_mode` "shared"). In a cache the outer layers hold one entry a token and the middle ones an entry for each recursion
that it took, or one. Who goes on: `latent/routing.py`.

Source: Mixture-of-Recursions (arXiv 2507.10524), its middle cycle; oracle: `latent/reference.py` `recursions`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils.generic import can_return_tuple

from unspoken.config import RecursionsConfig
from unspoken.latent.active import Active, Tokens, run_layers, shown_part
from unspoken.latent.recycle import document_starts
from unspoken.latent.routing import ExpertChoice, TokenChoice
from unspoken.latent.slots import Part, SlotTable, slot_table, store
from unspoken.latent.visibility import Entries, attention_masks, joined, mask_function, visible, visible_first_steps
from unspoken.models.backbone import body_of_layers
from unspoken.models.inputs import document_mask, without_pads
from unspoken.models.latent_lm import LatentForCausalLM, LatentModel, LatentModelOutput, by_pass
from unspoken.models.loss import IGNORE_INDEX, shift_labels


@dataclass
class Recursions:
    """What a forward's recursions were. lengths int64 [B, T]: those of each token beyond the first, 0 at pads. taken:
    for each recursion that ran, which of its entries [b, Q] are tokens. choices: the router's, for its loss."""

    lengths: Tensor
    taken: list[Tensor]
    choices: Any
    num_outer: tuple[int, int] = (0, 0)  # expert router logits of the first and of the last layer
    loss: Tensor | None = None

    def first_run(self, router_logits: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of a forward's router logits those of each layer's first run, in the layers' order."""
        first, inner, last = self.by_run(router_logits)
        return first + inner[0] + last

    def by_run(self, router_logits: tuple[Tensor, ...]) -> tuple[tuple, list[tuple], tuple]:
        """A forward's router logits: the first layer's, the inner layers' of each recursion, the last layer's."""
        first, end = self.num_outer[0], len(router_logits) - self.num_outer[1]
        return router_logits[:first], by_pass(router_logits[first:end], len(self.taken)), router_logits[end:]

    def sums(self, num_targets: int) -> dict[str, tuple[Tensor, Tensor]]:
        """For the log, each with what it is a mean over."""
        found = {"latent_length": (self.lengths.sum(), self.taken[0].sum())}
        if self.loss is not None:
            found["routing_loss"] = self.loss * num_targets, torch.tensor(num_targets, device=self.lengths.device)
        return found


class RecursionsModel(LatentModel):
    """The outer layers, the router and the recursions between."""

    config_class = RecursionsConfig
    config: RecursionsConfig
    _can_compile_fullgraph = False  # how many tokens go on is data
    gradient_checkpointing = False  # transformers sets it
    goes_on_anywhere: Callable[[bool], bool] = staticmethod(bool)
    """Whether tokens go on in any process. Shards of a recursion must be gathered by all of them, or by none."""

    def __init__(self, config: RecursionsConfig):
        super().__init__(config)
        if config.recursion_router == "token_choice":
            self.router: nn.Module = TokenChoice(config)
        else:
            self.router = ExpertChoice(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        num_passes: int | str | None = None,
        prompt_mask: Tensor | None = None,
        **kwargs,
    ) -> LatentModelOutput:
        """All recursions. `num_passes` must be 1 or "exact", which is the same here."""
        if num_passes not in (None, 1, "exact"):
            raise ValueError(f"a {self.config.model_type} model has one pass; got num_passes={num_passes!r}")
        for name in ("output_attentions", "output_hidden_states"):
            if kwargs.get(name):
                raise ValueError(f"{name}: tokens leave the middle layers at different depths; they are not returned")
        embeds, real, packed, cache = self.read(
            input_ids, inputs_embeds, attention_mask, position_ids, cache, use_cache, kwargs
        )
        mask_function(self.config.text_config)  # refuses what takes no mask, before anything is computed
        by_share = self.config.recursion_router == "expert_choice" and (
            self.training or self.config.selects_by_capacity
        )
        if by_share and cache is not None:
            raise ValueError(
                "expert choice by capacity is not causal: it has no cache. Evaluate with use_cache=False; decoding "
                "takes eval() and selects_by_capacity=False"
            )
        documents = None
        if packed and position_ids is not None:
            documents = document_starts(position_ids, real).cumsum(-1).expand(len(embeds), -1)
        table = None if cache is None else self._table(cache)
        stored = shown_part(cache, table, attention_mask, embeds.shape[1])
        tokens = Tokens.of_forward(embeds, real, position_ids, documents, table)
        mask = document_mask(self.config, embeds, attention_mask, position_ids) if packed else attention_mask
        positions = position_ids if stored is None else tokens.positions
        first, middle, last = self._parts()
        entering = self._outer(first, 0, embeds, mask, positions, cache, kwargs)
        states = without_pads(entering.last_hidden_state, real)
        recursions, parts, states, router_logits = self._recur(
            middle, states, tokens, mask, positions, stored, table, by_share, kwargs
        )
        if cache is not None and table is not None:
            store(cache, table, parts, embeds.shape[1])
        leaving = self._outer(last, -1, self.as_inputs(states), mask, positions, cache, kwargs)
        outer_logits = [tuple(output.get("router_logits") or ()) for output in (entering, leaving)]
        recursions.num_outer = len(outer_logits[0]), len(outer_logits[1])
        return LatentModelOutput(
            last_hidden_state=leaving.last_hidden_state,
            cache=cache,
            router_logits=(*outer_logits[0], *router_logits, *outer_logits[1]) or None,
            pass_hidden_states=(leaving.last_hidden_state,),
            pass_latents=(recursions,),
        )

    def _recur(
        self,
        middle: Any,
        entering: Tensor,
        tokens: Tokens,
        mask: Tensor | dict | None,
        positions: Tensor | None,
        stored: Part | None,
        table: SlotTable | None,
        by_share: bool,
        options: dict,
    ) -> tuple[Recursions, list[Part], Tensor, list[Tensor]]:
        """From the states that enter the middle layers, [B, T, d], to those that leave them."""
        layers = range(1, self.config.num_hidden_layers - 1)
        is_checkpointed = self.training and torch.is_grad_enabled() and self.gradient_checkpointing
        is_shared = self.config.kv_mode == "shared"
        choices: Any = self.router.begin(entering, tokens.real, by_share)  # type: ignore[operator]
        earlier: list[Part] = [] if stored is None else [stored]
        shown = earlier  # a recursion reads no other's keys, but for the first one's where they are shared
        written: list[Part] = []
        state, active, inputs = entering.flatten(0, 1), tokens.all(), entering
        if table is not None and not (table.is_flat and (mask is not None or not table.has_pads)):
            mask = self._mask(earlier, tokens.entries(active, 1), active, 1, entering.dtype)
        lengths = torch.zeros_like(tokens.columns).flatten()
        taken, router_logits = [], []
        num_columns = tokens.columns.shape[1]
        for recursion in range(1, self.config.num_recursions + 1):
            goes, weight = choices.asks(recursion, inputs, active)
            if recursion == 1:
                active = Active(None, active.columns, goes, weight)
            else:
                if not self.goes_on_anywhere(bool(goes.any())):
                    break
                active, inputs = active.gathered(goes, weight, inputs)
                going = active.indices(num_columns)[active.taken]
                lengths = lengths.index_add(0, going, torch.ones_like(going))
                positions = active.of(tokens.positions)
                shown = [*earlier, *written] if is_shared else earlier
                mask = self._mask(shown, tokens.entries(active, recursion), active, recursion, state.dtype)
            run = run_layers(
                middle,
                layers,
                self.as_inputs(inputs),
                mask,
                positions,
                shown,
                active.rows,
                options,
                is_checkpointed,
                shows_own=recursion == 1 or not is_shared,
            )
            if recursion == 1 or not is_shared:
                written.append(Part(active.rows, tokens.entries(active, recursion), run.keys))
            router_logits += run.router_logits
            taken.append(active.taken)
            inputs = choices.combine(recursion, inputs, run.hidden, active)
            indices = active.indices(num_columns)[active.taken]
            state = state.index_copy(0, indices, inputs[active.taken].to(state.dtype))
        if torch.is_grad_enabled():
            state = state + choices.unasked()
        recursions = Recursions(lengths.view_as(tokens.columns), taken, choices)
        return recursions, written, state.view_as(entering), router_logits

    def _mask(self, parts: list[Part], entries: Entries, active: Active, recursion: int, dtype: torch.dtype):
        """What a recursion reads: its own entries and those of earlier forwards at it, or all of recursion 1."""
        before = [part.entries_of(active.rows) for part in parts]
        config = self.config.text_config
        if self.config.kv_mode == "shared" and recursion > 1:
            keys = joined(before)
            return attention_masks(config, lambda window: visible_first_steps(keys, entries, window), dtype)
        seen = joined([*before, entries])
        return attention_masks(
            config, lambda window: visible(seen, len(entries), recursion, window, lowest=recursion), dtype
        )

    def _parts(self) -> tuple[Any, Any, Any]:
        """The first layer, those between, and the last one with the norm, as bodies of their own."""
        count = self.config.num_hidden_layers
        return (
            body_of_layers(self.backbone, range(1), has_norm=False),
            body_of_layers(self.backbone, range(1, count - 1), has_norm=False),
            body_of_layers(self.backbone, range(count - 1, count), has_norm=True),
        )

    def _outer(self, body: Any, index: int, inputs: Tensor, mask, positions, cache: Cache | None, options: dict) -> Any:
        """One of the outer layers over all tokens, as in a plain model; index: 0, the first, or -1, the last."""
        own = None
        if cache is not None:
            layer = cache.layers[0] if index == 0 else cache.layers[-2]
            own = Cache(layers=[layer] * self.config.num_hidden_layers)  # whose length, for the body, is this layer's
        return body(
            inputs_embeds=inputs,
            attention_mask=mask,
            position_ids=positions,
            cache=own,
            use_cache=own is not None,
            **options,
        )

    def _table(self, cache: Cache) -> SlotTable:
        outer: list[Any] = DynamicCache(config=self.config.text_config).layers
        return slot_table(cache, self.config.num_hidden_layers - 2, (outer[0], outer[-1]))

    def checkpoint_whole_recursions(self) -> None:
        """After transformers has flagged every module: a middle layer that checkpoints drops its cache, and with it the
        keys of earlier recursions. `run_layers` checkpoints instead."""
        middle: Any = list(self.blocks())[1:-1]
        for module in (module for layer in middle for module in layer.modules()):
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False

    def _set_gradient_checkpointing(self, *args, **kwargs) -> None:
        super()._set_gradient_checkpointing(*args, **kwargs)
        self.checkpoint_whole_recursions()


class RecursionsForCausalLM(LatentForCausalLM):
    """The model with its head, and its router's loss beside the text's."""

    config_class = RecursionsConfig
    base_model_class = RecursionsModel
    _can_compile_fullgraph = False

    def _set_gradient_checkpointing(self, *args, **kwargs) -> None:
        super()._set_gradient_checkpointing(*args, **kwargs)
        base: Any = self.model
        base.checkpoint_whole_recursions()

    def pass_loss(
        self, outputs: LatentModelOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> tuple[Tensor, Tensor]:
        """In training with the router's loss, a mean over tokens of this forward, shared out by its targets."""
        total, losses = super().pass_loss(outputs, labels, num_items_in_batch)
        if not self.training:
            return total, losses
        recursions: Recursions = outputs.latents
        loss = recursions.choices.loss()
        if num_items_in_batch is not None:
            loss = loss * (shift_labels(labels) != IGNORE_INDEX).sum() / num_items_in_batch
        recursions.loss = loss.detach()
        return total + loss, losses

    def router_loss(self, outputs: LatentModelOutput, real: Tensor | None) -> Tensor:
        """The family's load-balancing loss of each run of experts, over the tokens that took part; their mean."""
        recursions: Recursions = outputs.latents
        first, inner, last = recursions.by_run(outputs.router_logits or ())
        runs = [(first, real), (last, real), *zip(inner, recursions.taken, strict=True)]
        losses = [self.balancing_loss(one, tokens) for one, tokens in runs if one and (tokens is None or tokens.any())]
        return torch.stack(losses).mean() if losses else torch.zeros((), device=outputs.last_hidden_state.device)
