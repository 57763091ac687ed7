"""The recycled state inside a transformers cache: one more layer at the end of `cache.layers`.

A `Cache` does everything by looping over its layers, so beams reorder the state, `crop` rolls it back, `reset`
forgets it and a returned cache carries it to the next turn, with no code of ours in `generate`.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DummyLayer, DynamicCache, DynamicLayer, StaticCache

from unspoken.errors import CacheError

KEPT_STATES = 128  # before the latest forward: a draft model is rolled back over all the tokens that it proposed


class RecycledStateLayer(DummyLayer):
    """Holds the hidden states that may be recycled next; keeps no keys or values.

    `states` [B, W, d]: the last of the states before the latest forward, then one for each of its tokens, zero at
    pads; the last one is recycled into the next token. W states are kept so that `crop` can undo the latest forward,
    and a number of tokens before it. A static cache keeps the last one alone, at a fixed address, and has no `crop`.

    While a prompt is prefilled in chunks, `chunk_caches[i]` and `chunk_states[i]` hold pass i+1's keys and values,
    and its last state, of the chunks so far.

    A `DummyLayer` for transformers: mask sizes, offloading and early initialisation pass it by.
    """

    def __init__(self, static: bool = False):
        super().__init__()
        self.static = static
        self.is_croppable = not static
        self.states: Tensor = None  # type: ignore[assignment]  # until the first write
        self.is_empty = True
        self.chunk_caches: list[Cache] = []
        self.chunk_states: list[Tensor | None] = []

    def read(self) -> Tensor | None:
        """The state to recycle into the next position, [B, 1, d]; None before anything was written."""
        return None if self.is_empty else self.states[:, -1:]

    def write(self, hidden_states: Tensor, in_same_forward: bool = False) -> None:
        """Append states [B, T, d], already zero at pads. `in_same_forward` keeps those written before in this one."""
        if self.static:
            if self.states is None:
                self.states = hidden_states[:, -1:].clone()
                if not torch.compiler.is_compiling():
                    torch._dynamo.mark_static_address(self.states)
            else:
                self.states.copy_(hidden_states[:, -1:])
        elif self.is_empty:
            self.states = hidden_states
        else:
            kept = self.states if in_same_forward else self.states[:, -KEPT_STATES:]
            self.states = torch.cat([kept, hidden_states], dim=1)
        self.is_empty = False

    def crop(self, tokens_to_remove: int) -> None:
        tokens_to_remove = abs(tokens_to_remove)
        if tokens_to_remove == 0 or self.is_empty:
            return
        if self.states.shape[1] <= tokens_to_remove:
            raise CacheError(
                f"cannot remove {tokens_to_remove} tokens from a recycling cache: it keeps the last "
                f"{self.states.shape[1]} states, no more. Keep a copy of the cache from before instead "
                "(copy.deepcopy(cache)), or start again from the tokens."
            )
        self.states = self.states[:, :-tokens_to_remove]

    def reset(self) -> None:
        self.is_empty = True
        self.end_chunks()
        if self.static and self.states is not None:
            self.states.zero_()
        else:
            self.states = None  # type: ignore[assignment]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._replace(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._replace(lambda states: states[indices])

    def _replace(self, select) -> None:
        if self.is_empty:
            return
        states = select(self.states)
        if self.static and states.shape == self.states.shape:
            self.states.copy_(states)
        else:
            self.states = states

    def end_chunks(self) -> None:
        """Forget what chunked prefill kept of the earlier passes."""
        self.chunk_caches, self.chunk_states = [], []


def recycled_state(cache: Cache) -> RecycledStateLayer | None:
    """The state layer of a cache, or None if it has none yet.

    Raises:
        CacheError: the cache holds tokens but no state, so it comes from another model.
    """
    if cache.layers and isinstance(cache.layers[-1], RecycledStateLayer):
        return cache.layers[-1]
    if len(cache.layers) > 0 and (length := int(cache.get_seq_length())) > 0:
        raise CacheError(
            f"the cache holds {length} tokens but no recycled state: it was filled by a model that does not recycle. "
            "Pass a cache that this model returned, or an empty one."
        )
    return None


def attach_state(cache: Cache) -> RecycledStateLayer:
    """Append the state layer. Only after the backbone ran: an empty DynamicCache makes its layers by index."""
    layer = RecycledStateLayer(static=isinstance(cache, StaticCache))
    cache.layers.append(layer)
    return layer


def give_layers(cache: Cache, layers: list[Any], has: str, need: str, others: str = "another model") -> None:
    """Give an empty dynamic cache these layers in place of its own.

    has, need, others: what a cache of another kind has room for, what needs more, and whose tokens it may hold.

    Raises:
        CacheError: it is of another kind, or holds tokens.
    """
    if not isinstance(cache, DynamicCache):
        raise CacheError(f"a {type(cache).__name__} has {has}; {need} need a DynamicCache (no cache_implementation)")
    if (length := int(cache.get_seq_length())) > 0:
        raise CacheError(
            f"the cache holds {length} tokens of {others}. Pass a cache that this model returned, or an empty one."
        )
    if any(getattr(layer, "record_past", False) for layer in cache.layers):  # assisted decoding will roll it back
        for layer in layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
    cache.layers = layers
    cache.layer_class_to_replicate = None


def fork(cache: Cache) -> Cache:
    """A copy whose keys and values may be extended without touching the original's.

    Dynamic layers make new tensors when they grow, so theirs are shared; others are cloned.
    """
    twin = copy.copy(cache)
    copies: dict[int, Any] = {
        id(layer): copy.copy(layer) if isinstance(layer, DynamicLayer | DummyLayer) else copy.deepcopy(layer)
        for layer in cache.layers
    }
    for layer in copies.values():
        if (table := getattr(layer, "table", None)) is not None:  # of a layer with slots, which the layers share
            layer.table = copies[id(table)]
    twin.layers = list(copies.values())
    return twin
