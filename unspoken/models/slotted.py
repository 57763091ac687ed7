"""Several entries a token in one causal sequence: the mask over them, and the cache that holds them.

slots        x_1 . .   x_2 . .   x_3 . .        each slot sees all slots before it
position     1   1 1   2   2 2   3   3 3        a token's slots share its position; windows count tokens
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from unspoken.errors import CacheError
from unspoken.latent.visibility import attention_masks


def slot_masks(
    text_config: PreTrainedConfig,
    times: Tensor,
    real: Tensor,
    num_queries: int,
    documents: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:
    """Who sees whom, as the backbone's attention takes it.

    times int64 [N]: each slot's token; real bool [B, N]: whether that is one; the last `num_queries` slots ask.
    documents [B, N]: which document a slot is of (None: one a row).
    """
    keys = torch.arange(len(times), device=times.device)
    queries = keys[len(times) - num_queries :]

    def seen(window: int | None) -> Tensor:
        visible = (keys <= queries.unsqueeze(-1)) & real.unsqueeze(1)
        if window is not None:
            visible = visible & (times > times[queries].unsqueeze(-1) - window)
        if documents is not None:
            visible = visible & (documents.unsqueeze(1) == documents[:, queries].unsqueeze(-1))
        return visible | (keys == queries.unsqueeze(-1))  # no query is without a key

    return attention_masks(text_config, seen, dtype)


class StretchedLayer(DynamicLayer):
    """A layer's keys and values, several entries a token. Its length, for transformers, is counted in tokens."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.num_slots = num_slots

    def get_seq_length(self) -> int:
        return super().get_seq_length() // self.num_slots

    def crop(self, tokens_to_remove: int) -> None:
        """tokens_to_remove: minus their number, as transformers has it."""
        if tokens_to_remove < 0 and self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys = self.keys[:, :, : tokens_to_remove * self.num_slots]
            self.values = self.values[:, :, : tokens_to_remove * self.num_slots]


def stretch(cache: Cache, num_slots: int, num_layers: int) -> int:
    """Give an empty dynamic cache layers for so many entries a token, in place; return the tokens that it holds.

    Raises:
        CacheError: the cache was filled by another model, or has room for one entry a token alone.
    """
    layers: list[Any] = cache.layers
    if layers and all(isinstance(layer, StretchedLayer) and layer.num_slots == num_slots for layer in layers):
        if len(layers) != num_layers:
            raise CacheError(f"the cache is of a model with {len(layers)} layers, this one has {num_layers}")
        return int(cache.get_seq_length())
    if not isinstance(cache, DynamicCache):
        raise CacheError(
            f"a {type(cache).__name__} has one entry a token; {num_slots} need a DynamicCache (no cache_implementation)"
        )
    if layers and (length := int(cache.get_seq_length())) > 0:
        raise CacheError(
            f"the cache holds {length} tokens of another model. Pass a cache that this model returned, or an empty one."
        )
    cache.layers = [StretchedLayer(num_slots) for _ in range(num_layers)]
    cache.layer_class_to_replicate = None
    return 0
