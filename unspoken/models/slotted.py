"""Several entries a token in one causal sequence: one run over them, the mask, and the cache that holds them.

slots        x_1 . .   x_2 . .   x_3 . .        each slot sees all slots before it
position     1   1 1   2   2 2   3   3 3        a token's slots share its position; windows count tokens
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from unspoken.errors import CacheError
from unspoken.latent.cache import give_layers
from unspoken.latent.recycle import document_starts
from unspoken.latent.visibility import attention_masks
from unspoken.models.backbone import attention_windows
from unspoken.models.latent_lm import LatentModel, LatentModelOutput


@dataclass
class SlottedTokens:
    """The tokens of a forward. mask bool [B, first + T]: which of them, and of the `first` ones that the cache holds
    before, are real. documents [B, T] (None: one a row)."""

    embeds: Tensor
    mask: Tensor
    position_ids: Tensor
    documents: Tensor | None
    first: int
    options: dict

    def __len__(self) -> int:
        return self.embeds.shape[1]

    @property
    def real(self) -> Tensor:
        return self.mask[:, self.first :]

    def part(self, start: int, stop: int) -> "SlottedTokens":
        """Tokens start..stop behind those before them."""
        return replace(
            self,
            embeds=self.embeds[:, start:stop],
            mask=self.mask[:, : self.first + stop],
            position_ids=self.position_ids[..., start:stop],
            first=self.first + start,
        )


class SlottedModel(LatentModel):
    """What models with several slots a token share: how a forward's inputs are read, and one run over slots."""

    config: Any
    _can_compile_fullgraph = False
    extra_slots = "slots"  # what they are called in messages

    @property
    def num_slots(self) -> int:
        """Of a token."""
        raise NotImplementedError

    def _read(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | dict | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        use_cache: bool | None,
        kwargs: dict,
    ) -> tuple[SlottedTokens, Cache | None]:
        """The tokens of a forward, and the cache to fill, with room for all slots."""
        if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2):
            raise ValueError(f"a 4D attention_mask says nothing of {self.extra_slots}; give a 2D one")
        embeds, real, packed, cache = self.read(
            input_ids, inputs_embeds, attention_mask, position_ids, cache, use_cache, kwargs
        )
        batch, num_tokens = embeds.shape[:2]
        first = 0 if cache is None else stretch(cache, self.num_slots, self.config.num_hidden_layers)
        if attention_mask is None:
            attention_mask = torch.ones(batch, first + num_tokens, dtype=torch.long, device=embeds.device)
        if position_ids is None:
            position_ids = torch.arange(first, first + num_tokens, device=embeds.device).unsqueeze(0)
        documents = document_starts(position_ids, real).cumsum(-1).expand(batch, -1) if packed else None
        return SlottedTokens(embeds, attention_mask.bool(), position_ids, documents, first, kwargs), cache

    def _run(self, stages: list[Tensor], tokens: SlottedTokens, cache: Cache | None, num_written: int = 0):
        """One run over the given slots of each token, [B, T, d] each; `num_written` slots of it are in the cache."""
        num_slots, num_queries = len(stages), len(stages) * len(tokens)
        mask, times = tokens.mask, torch.arange(tokens.mask.shape[1], device=tokens.mask.device)
        counts = torch.full_like(times, num_slots + num_written)
        counts[: tokens.first] = self.num_slots if cache is not None else 0
        real = mask.repeat_interleave(counts, dim=1)
        documents = None
        if tokens.documents is not None:
            documents = tokens.documents.repeat_interleave(num_slots, dim=1)
        if cache is None and documents is None and not any(attention_windows(self.config.text_config)):
            # What the body makes of it is causal. Without a mask it would take repeated positions for documents.
            masks: Tensor | dict = real.long()
        else:
            masks = slot_masks(
                self.config.text_config,
                times.repeat_interleave(counts),
                real,
                num_queries,
                documents,
                tokens.embeds.dtype,
            )
        output = self.backbone(
            inputs_embeds=torch.stack(stages, dim=2).flatten(1, 2),
            attention_mask=masks,
            position_ids=tokens.position_ids.repeat_interleave(num_slots, dim=-1),
            cache=cache,
            use_cache=cache is not None,
            **tokens.options,
        )
        states = output.last_hidden_state.unflatten(1, (len(tokens), num_slots))
        return output, states.unbind(2)

    def _collected(self, outputs: list, hidden: Tensor, cache: Cache | None) -> LatentModelOutput:
        router_logits = [logits for output in outputs for logits in output.get("router_logits") or ()]
        return LatentModelOutput(
            last_hidden_state=hidden,
            cache=cache,
            hidden_states=outputs[-1].get("hidden_states"),
            attentions=outputs[-1].get("attentions"),
            router_logits=tuple(router_logits) or None,
            pass_hidden_states=(hidden,),
        )


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
    give_layers(cache, [StretchedLayer(num_slots) for _ in range(num_layers)], "one entry a token", str(num_slots))
    return 0
