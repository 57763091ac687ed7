"""Some tokens of a forward, gathered close together, and a run of layers over them and the keys of earlier runs.

What latent steps and recursions have in common: tokens drop out, those that go on are computed and no others, and a
run adds its keys to those that earlier runs have made.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from unspoken.latent.slots import Part, SlotTable, run_cache, stored_part, written
from unspoken.latent.visibility import Entries


@dataclass
class Active:
    """The tokens of one run: `rows` [b] of the batch (None: all), `columns` [b, Q], `taken` bool [b, Q] (False: what
    fills a short row), and a number that each carries [b, Q]: its reach, or a router's score."""

    rows: Tensor | None
    columns: Tensor
    taken: Tensor
    carried: Tensor

    def indices(self, num_columns: int) -> Tensor:
        """b * T + t of each entry [b, Q]."""
        rows = torch.arange(len(self.columns), device=self.columns.device) if self.rows is None else self.rows
        return rows.unsqueeze(-1) * num_columns + self.columns

    def of(self, tensor: Tensor) -> Tensor:
        """The entries of a tensor [B, T]."""
        return (tensor if self.rows is None else tensor[self.rows]).gather(1, self.columns)

    def gathered(self, goes_on: Tensor, carried: Tensor, hidden: Tensor) -> tuple["Active", Tensor]:
        """Those of them that go on, with what they carry then [b, Q], close together; and their states [b, Q, d].

        Without gradients, rows that have none are left out; with them every row stays, so that its keys need no copy.
        """
        rows, columns = self.rows, self.columns
        if not torch.is_grad_enabled() and not (has_some := goes_on.any(-1)).all() and has_some.any():
            chosen = has_some.nonzero().squeeze(-1)
            rows = chosen if rows is None else rows[chosen]
            goes_on, columns, carried, hidden = goes_on[chosen], columns[chosen], carried[chosen], hidden[chosen]
        count = max(1, int(goes_on.sum(-1).max()))
        order = (~goes_on).long().argsort(dim=-1, stable=True)[:, :count]
        taken = goes_on.gather(1, order)
        states = hidden.gather(1, order.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        states = states.masked_fill(~taken.unsqueeze(-1), 0)
        return Active(rows, columns.gather(1, order), taken, carried.gather(1, order)), states


@dataclass
class Tokens:
    """The tokens of a forward, all [B, T]: which of them are `real`, their `positions` and `documents` (None: one a
    row). `first`: how many tokens the cache holds before them."""

    columns: Tensor
    real: Tensor
    positions: Tensor
    documents: Tensor | None
    first: int

    @classmethod
    def of_forward(
        cls,
        embeds: Tensor,
        real: Tensor | None,
        position_ids: Tensor | None,
        documents: Tensor | None,
        table: SlotTable | None,
    ) -> "Tokens":
        batch, num_columns = embeds.shape[:2]
        first = 0 if table is None else table.num_tokens
        columns = torch.arange(num_columns, device=embeds.device).expand(batch, -1)
        real = torch.ones_like(columns, dtype=torch.bool) if real is None else real
        positions = columns + first if position_ids is None else position_ids.expand(batch, -1)
        return cls(columns, real, positions, documents, first)

    def all(self) -> Active:
        """Those of the first run; its pads are not taken."""
        return Active(None, self.columns, self.real, torch.ones_like(self.columns, dtype=torch.float32))

    def entries(self, active: Active, step: int) -> Entries:
        """What a run of some of them writes."""
        documents = None if self.documents is None else active.of(self.documents)
        return Entries(active.columns + self.first, active.taken * step, documents)


@dataclass
class Run:
    """What a run of layers gave: hidden [b, Q, d], and the keys and values that it wrote, by layer."""

    hidden: Tensor
    router_logits: list[Tensor]
    hidden_states: tuple[Tensor, ...] | None
    keys: list[tuple[Tensor, Tensor]]


def run_layers(
    body: Any,
    layers: range,
    inputs: Tensor,
    mask: Tensor | dict | None,
    positions: Tensor | None,
    earlier: Iterable[Part],
    rows: Tensor | None,
    options: dict,
    is_checkpointed: bool,
    shows_own: bool = True,
) -> Run:
    """Run a body, which has these `layers` of the backbone, on some rows of the batch [b, Q, d].

    earlier: the parts whose keys it reads. shows_own: it reads its own keys too. is_checkpointed: compute the run anew
    in the backward (its layers must not do so themselves: one that checkpoints drops its cache).
    """
    num_layers, kept = len(layers), list(earlier)

    def run(inputs: Tensor, *flat: Tensor):
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        parts = [replace(part, keys=pairs[i * num_layers : (i + 1) * num_layers]) for i, part in enumerate(kept)]
        cache = run_cache(parts, rows, layers, shows_own)
        output = body(
            inputs_embeds=inputs,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            **options,
        )
        new = [tensor for pair in written(cache) for tensor in pair]
        router_logits = output.get("router_logits") or ()
        return output.last_hidden_state, router_logits, output.get("hidden_states"), *new

    flat = [tensor for part in kept for pair in part.keys for tensor in pair]
    if is_checkpointed:
        hidden, router_logits, hidden_states, *new = checkpoint(run, inputs, *flat, use_reentrant=False)
    else:
        hidden, router_logits, hidden_states, *new = run(inputs, *flat)
    return Run(hidden, list(router_logits), hidden_states, list(zip(new[::2], new[1::2], strict=True)))


def shown_part(cache: Cache | None, table: SlotTable | None, attention_mask: Any, num_new: int) -> Part | None:
    """What a cache holds, as a forward of `num_new` tokens may read it; None where there is nothing.

    Raises:
        ValueError: an attention mask that says nothing of entries, or not of all tokens.
    """
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2):
        raise ValueError(
            "a 4D attention_mask says nothing of tokens' further runs; give a 2D one, or position_ids that restart "
            "with each document"
        )
    if cache is None or table is None or (stored := stored_part(cache, table)) is None:
        return None
    if attention_mask is None:
        return stored
    if attention_mask.shape[1] < table.num_tokens + num_new:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[1]} columns; the cache's {table.num_tokens} tokens and "
            f"the {num_new} new ones need one each"
        )
    return stored.hiding(attention_mask)
