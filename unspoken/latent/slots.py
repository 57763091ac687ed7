"""Keys and values on the grid of positions and latent steps: while a forward runs, and in a cache between forwards.

A forward collects `Part`s, one for each run of the backbone; nothing is computed twice. A cache keeps for each row of
a batch one slot for each entry, close together, so that a token costs 1 + its latent length, whatever its neighbours in
the batch take:

    cache.layers    SlotLayer ... SlotLayer   SlotTable    (RecycledStateLayer)
                    keys [B, H, S, D]         times, steps [B, S], used [B]

A `Cache` does everything by looping over its layers, so beams reorder the table with the keys, and `crop` removes all
entries of the tokens that it removes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DummyLayer, DynamicLayer

from unspoken.errors import CacheError
from unspoken.latent.cache import give_layers
from unspoken.latent.visibility import Entries

KeysValues = list[tuple[Tensor, Tensor]]  # of each layer: [b, H, Q, D]


@dataclass
class Part:
    """What one run of the backbone wrote. `rows` [b] of the batch took part (None: all); `entries` [b, Q]."""

    rows: Tensor | None
    entries: Entries
    keys: KeysValues

    def hiding(self, attention_mask: Tensor) -> "Part":
        """As a 2D mask [B, tokens] of all tokens so far says: nobody reads entries of tokens that it hides."""
        entries = self.entries
        shown = attention_mask.bool().gather(1, entries.times)
        return replace(self, entries=replace(entries, steps=entries.steps.masked_fill(~shown, 0)))

    def entries_of(self, rows: Tensor | None) -> Entries:
        return self.entries.rows(self.index(rows))

    def index(self, rows: Tensor | None) -> Tensor | None:
        """Where some rows of the batch, all of which took part, are in the part; None for all."""
        return rows if rows is None or self.rows is None else torch.searchsorted(self.rows, rows)


class _PartsLayer(DynamicLayer):
    """A layer's earlier parts, of each some rows (None: all), and what the running forward adds, which it reads too
    where `shows_own`."""

    def __init__(self, earlier: KeysValues, rows: list[Tensor | None], shows_own: bool) -> None:
        super().__init__()
        self.earlier, self.rows, self.shows_own = earlier, rows, shows_own
        self.new: tuple[Tensor, Tensor] | None = None
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.new = key_states, value_states
        if not self.earlier:
            return self.new
        keys, values = zip(*self.earlier, strict=True)
        if not self.shows_own:
            key_states, value_states = key_states[:, :, :0], value_states[:, :, :0]
        return _joined(keys, self.rows, key_states), _joined(values, self.rows, value_states)

    def get_seq_length(self) -> int:
        return sum(key.shape[-2] for key, _ in self.earlier)


def _joined(earlier: Sequence[Tensor], rows: list[Tensor | None], new: Tensor) -> Tensor:
    """One after the other in the slots, [b, H, S, D]. Rows are chosen without gradients alone, in one copy."""
    if all(chosen is None for chosen in rows):
        return torch.cat([*earlier, new], dim=-2)
    sizes = [part.shape[-2] for part in earlier]
    whole = new.new_empty(*new.shape[:-2], sum(sizes) + new.shape[-2], new.shape[-1])
    *places, last = whole.split([*sizes, new.shape[-2]], dim=-2)
    for place, part, chosen in zip(places, earlier, rows, strict=True):
        if chosen is None:
            place.copy_(part)
        else:
            torch.index_select(part, 0, chosen, out=place)
    last.copy_(new)
    return whole


def run_cache(parts: list[Part], rows: Tensor | None, layers: range, shows_own: bool = True) -> Cache:
    """A cache for one run of some of the backbone's layers on some rows of the batch: it shows the parts, and keeps
    what is written apart from them. Parts hold the keys of these layers alone."""
    chosen = [part.index(rows) for part in parts]
    before: list[Any] = [DummyLayer() for _ in range(layers.start)]
    own = [_PartsLayer([part.keys[i] for part in parts], chosen, shows_own) for i in range(len(layers))]
    return Cache(layers=before + own)


def written(cache: Cache) -> KeysValues:
    """What the run wrote.

    Raises:
        CacheError: nothing.
    """
    own = [layer for layer in cache.layers if isinstance(layer, _PartsLayer)]
    if any(layer.new is None for layer in own):
        raise CacheError(
            "the backbone dropped the cache that holds the keys of earlier steps: its layers checkpoint; call "
            "gradient_checkpointing_disable(), or eval()"
        )
    return [layer.new for layer in own]  # type: ignore[misc]


class SlotTable(DummyLayer):
    """Which entry is in which slot: `entries` [B, S], the first `used` [B] of each row; `num_tokens`, pads too.

    A pad keeps its slot at step 1, at latent step 0, where nobody reads it: while no token has gone deeper, slots are
    columns, as in any cache. A `DummyLayer` for transformers: mask sizes and offloading pass it by.
    """

    is_compileable = False

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.entries: Entries | None = None
        self.used: Tensor | None = None
        self.num_tokens = 0

    @property
    def is_flat(self) -> bool:
        """Whether no token has gone beyond step 1."""
        return self.entries is None or bool((self.entries.steps <= 1).all())

    @property
    def has_pads(self) -> bool:
        """Whether some slot is nobody's: a pad's, while slots are columns."""
        return self.entries is not None and bool((self.entries.steps == 0).any())

    @property
    def latent_steps(self) -> Tensor:
        """Latent steps of all tokens, int64 [B]: runs of the backbone beyond the one that each token costs anyway."""
        if self.entries is None:
            raise CacheError("the cache is empty")
        return (self.entries.steps > 1).sum(-1)

    def kept(self, tokens_to_remove: int) -> tuple[Tensor, Tensor]:
        """Slots to keep, in their order, filled up with others [B, S]; and how many of each row's are kept [B]."""
        if not -self.num_tokens <= tokens_to_remove <= 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, of the cache's {self.num_tokens}; got "
                f"{tokens_to_remove}"
            )
        assert self.entries is not None and self.used is not None
        is_used = torch.arange(len(self.entries), device=self.used.device) < self.used.unsqueeze(-1)
        is_kept = is_used & (self.entries.times < self.num_tokens + tokens_to_remove)
        used = is_kept.sum(-1)
        order = (~is_kept).long().argsort(dim=-1, stable=True)
        return order[:, : int(used.max())], used

    def crop(self, tokens_to_remove: int) -> None:
        """tokens_to_remove: minus their number, as transformers has it."""
        if tokens_to_remove == 0 or self.entries is None:
            return
        order, self.used = self.kept(tokens_to_remove)
        times, steps = self.entries.times.gather(1, order), self.entries.steps.gather(1, order)
        is_used = torch.arange(order.shape[1], device=order.device) < self.used.unsqueeze(-1)
        self.entries = Entries(times, steps.masked_fill(~is_used, 0))
        self.num_tokens += tokens_to_remove

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(lambda tensor: tensor[indices])

    def _select(self, select) -> None:
        if self.entries is not None and self.used is not None:
            self.used = select(self.used)
            size = int(self.used.max())  # the longest row may be gone
            self.entries = Entries(select(self.entries.times)[:, :size], select(self.entries.steps)[:, :size])


class SlotLayer(DynamicLayer):
    """A layer's keys and values by slot. Its length, for transformers, is counted in tokens."""

    def __init__(self, table: SlotTable) -> None:
        super().__init__()
        self.table = table

    def update(self, *args, **kwargs):
        raise CacheError("this cache belongs to a model with latent steps; another model cannot write into it")

    def get_seq_length(self) -> int:
        return self.table.num_tokens

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        order, _ = self.table.kept(tokens_to_remove)
        index = order[:, None, :, None]
        assert self.keys is not None and self.values is not None
        self.keys = self.keys.take_along_dim(index, dim=2)
        self.values = self.values.take_along_dim(index, dim=2)

    def append(self, slots: "_NewSlots", parts: list[Part], i: int) -> None:
        """The parts' keys and values of layer i."""
        keys, values = self.content(like=parts[0].keys[i])
        self.keys = slots.filled(keys, [part.keys[i][0] for part in parts])
        self.values = slots.filled(values, [part.keys[i][1] for part in parts])
        self.is_initialized = True

    def content(self, like: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, D]; S is 0 where nothing is written yet."""
        if self.is_initialized:
            assert self.keys is not None and self.values is not None and self.table.entries is not None
            size = len(self.table.entries)
            return self.keys[:, :, :size], self.values[:, :, :size]
        assert like is not None
        return like[0][:, :, :0], like[1][:, :, :0]


class _NewSlots:
    """Where a forward's entries go in the slots of their rows."""

    def __init__(self, table: SlotTable, parts: list[Part]):
        first = parts[0].entries.times
        batch, device = len(first), first.device
        used = table.used if table.used is not None else torch.zeros(batch, dtype=torch.long, device=device)
        self.old_size = 0 if table.entries is None else len(table.entries)
        self.grows_alike = len(parts) == 1 and bool((used == self.old_size).all())
        self.places: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # row in the part, column, row, slot
        for number, part in enumerate(parts):
            rows = torch.arange(batch, device=device) if part.rows is None else part.rows
            # A forward's first run keeps its pads, as columns; what fills short rows of a later one is dropped.
            keep = torch.ones_like(part.entries.steps, dtype=torch.bool) if number == 0 else part.entries.steps > 0
            slot = used[rows].unsqueeze(-1) + keep.cumsum(-1) - 1
            row, column = keep.nonzero(as_tuple=True)
            self.places.append((row, column, rows[row], slot[row, column]))
            used = used.index_add(0, rows, keep.sum(-1))
        self.used = used
        self.size = int(used.max())

    def filled(self, old: Tensor, new: list[Tensor]) -> Tensor:
        """old [B, H, S, D] with the parts' [b, H, Q, D] in their slots."""
        if self.grows_alike:
            return torch.cat([old, new[0]], dim=2)
        room = old.new_zeros(old.shape[0], old.shape[1], self.size - self.old_size, old.shape[3])
        whole = torch.cat([old, room], dim=2)
        for (part_row, column, row, slot), states in zip(self.places, new, strict=True):
            whole[row, :, slot] = states[part_row, :, column].to(whole.dtype)
        return whole

    def table(self, old: Tensor | None, new: list[Tensor]) -> Tensor:
        """The same for times and steps: [B, S]."""
        whole = new[0].new_zeros(len(new[0]), self.size)
        if old is not None:
            whole[:, : self.old_size] = old
        for (part_row, column, row, slot), values in zip(self.places, new, strict=True):
            whole[row, slot] = values[part_row, column]
        return whole


def slot_table(cache: Cache, num_layers: int, around: Sequence[DynamicLayer] = ()) -> SlotTable:
    """The table of a cache. An empty dynamic cache becomes one with slots, in place.

    num_layers: those with slots. around: none, or a layer without them before these and one after.

    Raises:
        CacheError: the cache was filled by another model, or cannot grow by as many slots as a token needs.
    """
    table = next((layer for layer in cache.layers if isinstance(layer, SlotTable)), None)
    if table is not None:
        if (found := sum(isinstance(layer, SlotLayer) for layer in cache.layers)) != num_layers:
            raise CacheError(f"the cache is of a model with {found} layers, this one has {num_layers}")
        return table
    table = SlotTable()
    layers = [*around[:1], *(SlotLayer(table) for _ in range(num_layers)), *around[1:], table]
    give_layers(cache, layers, "one entry a token", "further runs of a token", "a model without them")
    return table


def stored_part(cache: Cache, table: SlotTable) -> Part | None:
    """What the cache holds, as a forward's first part; None where it is empty."""
    if table.entries is None:
        return None
    layers = [layer for layer in cache.layers if isinstance(layer, SlotLayer)]
    return Part(None, table.entries, [layer.content() for layer in layers])


def store(cache: Cache, table: SlotTable, parts: list[Part], num_tokens: int) -> None:
    """Put a forward's parts, the first of which is of all its tokens, into the cache."""
    slots = _NewSlots(table, parts)
    for i, layer in enumerate(layer for layer in cache.layers if isinstance(layer, SlotLayer)):
        layer.append(slots, parts, i)
    old = table.entries
    table.entries = Entries(
        slots.table(None if old is None else old.times, [part.entries.times for part in parts]),
        slots.table(None if old is None else old.steps, [part.entries.steps for part in parts]),
    )
    table.used = slots.used
    table.num_tokens += num_tokens
