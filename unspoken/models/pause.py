"""Pause tokens: after every token come `num_pauses` slots with one learned input, and the last slot's state speaks.

    token        x_1               x_2               ...
    slots        E(x_1) P P P      E(x_2) P P P      ...      ordinary causal attention over all of them
    position     1      1 1 1      2      2 2 2                a token's slots share its position
    state                   ^                 ^                what the head sees, and the loss

As the authors of the second paper run it, in training and in decoding alike. A slot never waits for a later one, so a
forward over many tokens computes what decoding computes. A cache holds 1 + num_pauses entries a token. Oracle:
`latent/reference.py` `paused`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils.generic import can_return_tuple

from unspoken.config import PauseConfig
from unspoken.latent.recycle import document_starts
from unspoken.models.backbone import attention_windows
from unspoken.models.inputs import is_packed, real_positions, refuse_unknown, without_pads
from unspoken.models.latent_lm import LatentForCausalLM, LatentModel, LatentModelOutput
from unspoken.models.slotted import slot_masks, stretch


class PauseModel(LatentModel):
    """The backbone over tokens and their pauses."""

    config_class = PauseConfig
    config: Any
    _can_compile_fullgraph = False

    def __init__(self, config: PauseConfig):
        super().__init__(config)
        self.pause = nn.Embedding(1, config.hidden_size)
        self.post_init()

    @property
    def num_slots(self) -> int:
        """Of a token."""
        return 1 + self.config.num_pauses

    def runs_of_pass(self, **options: Any) -> list[int]:
        return [self.num_slots]

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
        """One run over all slots. `num_passes` must be 1 or "exact", which is the same here."""
        if num_passes not in (None, 1, "exact"):
            raise ValueError(f"a {self.config.model_type} model has one pass; got num_passes={num_passes!r}")
        if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2):
            raise ValueError("a 4D attention_mask says nothing of pauses; give a 2D one")
        embeds = self.embed(input_ids, inputs_embeds)
        batch, num_tokens, size = embeds.shape
        real = real_positions(attention_mask, num_tokens)
        packed = is_packed(position_ids, real)
        cache, _ = self.resolve_cache(cache, kwargs, use_cache, packed)
        refuse_unknown(kwargs)
        pauses = self.pause.weight * self.config.embedding_scale
        pauses = pauses.expand(batch, num_tokens, self.config.num_pauses, size)
        slots = torch.cat([embeds.unsqueeze(2), pauses.to(embeds.dtype)], dim=2)
        first = 0 if cache is None else stretch(cache, self.num_slots, self.config.num_hidden_layers)
        if position_ids is None:
            position_ids = torch.arange(first, first + num_tokens, device=embeds.device).unsqueeze(0)
        documents = document_starts(position_ids, real).cumsum(-1).expand(batch, -1) if packed else None
        outputs = self.backbone(
            inputs_embeds=without_pads(slots.flatten(1, 2), self._each(real)),
            attention_mask=self._mask(attention_mask, embeds, first, documents, cache),
            position_ids=self._each(position_ids),
            cache=cache,
            use_cache=cache is not None,
            **kwargs,
        )
        hidden = outputs.last_hidden_state[:, self.num_slots - 1 :: self.num_slots]
        return LatentModelOutput(
            last_hidden_state=hidden,
            cache=cache,
            hidden_states=outputs.get("hidden_states"),
            attentions=outputs.get("attentions"),
            router_logits=outputs.get("router_logits"),
            pass_hidden_states=(hidden,),
        )

    def _each(self, of_tokens: Tensor | None) -> Tensor | None:
        """[B, T] -> the same for each slot, [B, T * num_slots]."""
        return None if of_tokens is None else of_tokens.repeat_interleave(self.num_slots, dim=-1)

    def _mask(
        self,
        attention_mask: Tensor | None,
        embeds: Tensor,
        first: int,
        documents: Tensor | None,
        cache: Cache | None,
    ) -> Tensor | dict:
        """Causal over the slots. Windows count tokens; documents do not see each other."""
        batch, num_tokens = embeds.shape[:2]
        if attention_mask is None:
            attention_mask = torch.ones(batch, first + num_tokens, dtype=torch.long, device=embeds.device)
        real = self._each(attention_mask.bool())
        assert real is not None
        if cache is None and documents is None and not any(attention_windows(self.config.text_config)):
            # What the body makes of it is causal. Without a mask it would take repeated positions for documents.
            return real.long()
        times = torch.arange(first + num_tokens, device=embeds.device).repeat_interleave(self.num_slots)
        num_queries = num_tokens * self.num_slots
        return slot_masks(self.config.text_config, times, real, num_queries, self._each(documents), embeds.dtype)


class PauseForCausalLM(LatentForCausalLM):
    config_class = PauseConfig
    base_model_class = PauseModel
    _can_compile_fullgraph = False

    def router_loss(self, outputs: LatentModelOutput, real: Tensor | None) -> Tensor:
        """Over all slots of the real tokens."""
        return super().router_loss(outputs, self.model._each(real))
