"""The plain language model in the latent models' clothes: the baseline, with the same loop, loss and init."""

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils.generic import can_return_tuple

from unspoken.config import VanillaConfig
from unspoken.errors import CacheError
from unspoken.latent.cache import RecycledStateLayer
from unspoken.models.inputs import document_mask
from unspoken.models.latent_lm import LatentForCausalLM, LatentModel, LatentModelOutput


class VanillaModel(LatentModel):
    """One run of the backbone over scaled embeddings."""

    config_class = VanillaConfig

    def __init__(self, config: VanillaConfig):
        super().__init__(config)
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
        """One pass. `num_passes` must be 1 or "exact", which is the same here; `prompt_mask` has no state to stop."""
        if num_passes not in (None, 1, "exact"):
            raise ValueError(f"a plain model has one pass; got num_passes={num_passes!r}")
        embeds, _, packed, cache = self.read(
            input_ids, inputs_embeds, attention_mask, position_ids, cache, use_cache, kwargs
        )
        if cache is not None and cache.layers and isinstance(cache.layers[-1], RecycledStateLayer):
            raise CacheError("the cache carries a recycled state, which a plain model would let go stale")
        if packed or (packed is None and cache is None):
            attention_mask = document_mask(self.config, embeds, attention_mask, position_ids)
        outputs = self.backbone(
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=cache is not None,
            **kwargs,
        )
        return LatentModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            cache=cache,
            hidden_states=outputs.get("hidden_states"),
            attentions=outputs.get("attentions"),
            router_logits=outputs.get("router_logits"),
            pass_hidden_states=(outputs.last_hidden_state,),
        )


class VanillaForCausalLM(LatentForCausalLM):
    config_class = VanillaConfig
    base_model_class = VanillaModel
