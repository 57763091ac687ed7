"""From tokens to loss: what every latent language model shares, read top to bottom.

A latent model is a backbone (any supported body) and a rule for what the backbone's next input is. The rule lives in
the base model (`RecyclerModel.forward` runs the passes); here are the embedding in front of it, the head and the
losses behind it, and what `generate` needs. TRL and sharding engines call the base model alone, so nothing that the
recurrence needs may live in the head model.
"""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerateOutput
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import ModelOutput
from transformers.utils.generic import can_return_tuple

from unspoken.config import LatentConfig
from unspoken.latent.halting import RouterOutput
from unspoken.latent.recycle import ZeroLinear, ZeroRMSNorm, predicted_positions
from unspoken.models.backbone import build_backbone, embedding_name, family_of, input_multiplier, logit_transform
from unspoken.models.inputs import is_packed, real_positions, refuse_unknown, without_pads
from unspoken.models.loss import IGNORE_INDEX, chunked_cross_entropy, module_cross_entropy, shift_labels
from unspoken.models.segments import Segment


@dataclass
class LatentModelOutput(ModelOutput):
    """`last_hidden_state` [B, T, d] is the last pass's; `pass_hidden_states` holds all k passes' when they ran in
    parallel (None in decoding); `router_logits` concatenates the passes'. `segments` are the cuts of a forward that was
    `segmented`, see `models/segments.py`; `pass_latents` are each pass's latent steps, `latents` the last pass's: see
    `models/latent_steps.py`; `exits` those of a looped model, see `models/looped.py`."""

    last_hidden_state: Tensor = None  # type: ignore[assignment]  # ModelOutput wants defaults
    cache: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    pass_hidden_states: tuple[Tensor, ...] | None = None
    segments: tuple[Segment, ...] | None = None
    pass_latents: tuple[Any, ...] | None = None
    exits: Any = None

    @property
    def latents(self) -> Any:
        return self.pass_latents[-1] if self.pass_latents else None


@dataclass
class LatentCausalLMOutput(ModelOutput):
    """`loss` is over all passes (sum or mean, as configured) and not a perplexity's logarithm; `pass_losses` [k] are
    each pass's own next-token losses, detached, with `loss`'s normalisation. `logits` are the last pass's."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    aux_loss: Tensor | None = None
    pass_losses: Tensor | None = None
    pass_hidden_states: tuple[Tensor, ...] | None = None
    segments: tuple[Segment, ...] | None = None
    pass_latents: tuple[Any, ...] | None = None
    exits: Any = None

    @property
    def latents(self) -> Any:
        return self.pass_latents[-1] if self.pass_latents else None


class LatentPreTrainedModel(PreTrainedModel):
    """Flags and initialisation shared by base and head models. The backbone initialises itself."""

    config_class = LatentConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = {"cache", "past_key_values"}  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ZeroLinear | ZeroRMSNorm):
            nn.init.zeros_(module.weight)
            if isinstance(module, RouterOutput):
                nn.init.constant_(module.bias, module.start)
        else:
            super()._init_weights(module)


class LatentModel(LatentPreTrainedModel):
    """A backbone and its embedding; a subclass's `forward` says what goes through it."""

    def __init__(self, config: LatentConfig):
        super().__init__(config)
        config.check_fields()
        family_of(config.text_config)
        self.backbone = build_backbone(config.text_config)

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def blocks(self) -> nn.ModuleList:
        """The backbone's decoder layers: the units that are sharded and compiled one by one."""
        layers = self.backbone.layers
        assert isinstance(layers, nn.ModuleList)
        return layers

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Backbone inputs [B, T, d]. `inputs_embeds` are rows of the embedding, so they are scaled like tokens."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        scale = self.config.embedding_scale
        return inputs_embeds if scale == 1.0 else inputs_embeds * scale

    def runs_of_pass(self, **options: Any) -> list[int]:
        """The runs of the backbone over all tokens in one pass, latent steps apart: for each, the slots of a token.
        options: of the forward."""
        return [1]

    def as_inputs(self, states: Tensor) -> Tensor:
        """States as inputs: a body that multiplies its inputs (Granite) would multiply them, and they are none."""
        multiplier = input_multiplier(self.config.text_config)
        return states if multiplier == 1.0 else states / multiplier

    def read(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | dict | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        use_cache: bool | None,
        kwargs: dict,
    ) -> tuple[Tensor, Tensor | None, bool | None, Cache | None]:
        """What a forward begins with: its embeddings [B, T, d], zero at pads; which tokens are real; whether rows hold
        several documents; and the cache to fill. Takes the cache's older name out of `kwargs`.

        Raises:
            TypeError: an argument that nothing reads.
        """
        embeds = self.embed(input_ids, inputs_embeds)
        real = real_positions(attention_mask, embeds.shape[1])
        packed = is_packed(position_ids, real)
        cache, _ = self.resolve_cache(cache, kwargs, use_cache, packed)
        refuse_unknown(kwargs)
        return without_pads(embeds, real), real, packed, cache

    def resolve_cache(
        self, cache: Cache | None, kwargs: dict, use_cache: bool | None, is_packed: bool | None
    ) -> tuple[Cache | None, bool]:
        """The cache to fill, or None, and whether the caller asked for one by name.

        Accepts the older name `past_key_values`. Without a word from the caller a cache is made in evaluation as the
        backbone's config says, never in training and never for packed documents, which a cache would mix.
        """
        if (older := kwargs.pop("past_key_values", None)) is not None:
            if cache is not None:
                raise ValueError("give `cache` or its older name `past_key_values`, not both")
            cache = older
        asked = use_cache is True or cache is not None
        if asked and is_packed:
            raise ValueError(
                "position_ids restart within a row (packed documents) and a cache was asked for: a cache cannot keep "
                "documents apart. Pass use_cache=False, or one document a row."
            )
        if cache is not None and use_cache is False:
            raise ValueError("a cache was given together with use_cache=False; leave one of them out")
        if cache is not None and not isinstance(cache, Cache):
            raise TypeError(f"cache must be a transformers Cache, got {type(cache).__name__}")
        if use_cache is None:
            use_cache = asked or (self._config_wants_cache() and not self.training and is_packed is False)
        if not use_cache:
            return None, False
        return cache if cache is not None else DynamicCache(config=self.config), asked

    def _config_wants_cache(self) -> bool:
        return bool(getattr(self.config.text_config, "use_cache", True))


class LatentForCausalLM(LatentPreTrainedModel, GenerationMixin):
    """Head, loss and generation over a `LatentModel`. A subclass names its base model's class."""

    base_model_class: type[LatentModel]
    decodes_by_recurrence = False  # else a forward over many tokens computes what decoding computes
    accepts_loss_kwargs = True  # Trainer: our loss is normalised by num_items_in_batch

    def __init__(self, config: LatentConfig):
        super().__init__(config)
        self.model = self.base_model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.transform = logit_transform(config.text_config)
        embedding = f"model.backbone.{embedding_name(self.model.backbone)}.weight"
        self._tied_weights_keys = {"lm_head.weight": embedding}
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_passes: int | str | None = None,
        prompt_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_router_logits: bool | None = None,
        segmented: bool = False,
        **kwargs,
    ) -> LatentCausalLMOutput:
        """Run the base model and, given `labels` [B, T] (-100: no target; not shifted), the loss of every pass.

        num_passes: parallel passes k, or "exact" for the sequential recurrence; see the base model.
        num_items_in_batch: target tokens of the whole batch, over accumulation steps and processes, that the loss is
            divided by; the targets seen here by default.
        logits_to_keep: logits of the last n positions alone (0: all), or of the given positions.
        skip_logits: return none; the default in training with labels, where the chunked loss needs none.
        segmented: cut the graph between passes; then call `backward_by_pass(output.loss, output.segments)`.
        """
        if labels is not None:
            expected = (inputs_embeds if input_ids is None else input_ids).shape[:2]  # type: ignore[union-attr]
            if labels.shape != expected:
                raise ValueError(f"labels must be [batch, tokens] = {tuple(expected)}, got {tuple(labels.shape)}")
        if labels is not None and use_cache is None and cache is None and kwargs.get("past_key_values") is None:
            use_cache = False
        if output_router_logits is not None:  # otherwise as the backbone's configuration says
            kwargs["output_router_logits"] = output_router_logits
        if segmented:
            kwargs["segmented"] = True
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_passes=num_passes,
            prompt_mask=prompt_mask,
            return_dict=True,
            **self._decoding_options(logits_to_keep),
            **kwargs,
        )
        loss = pass_losses = aux_loss = logits = None
        if labels is not None:
            follows = predicted_positions(real_positions(attention_mask, labels.shape[1]), position_ids)
            if follows is not None:  # a document's first token is not to be predicted from what lies before it
                labels = labels.masked_fill(~follows, IGNORE_INDEX)
            loss, pass_losses = self.pass_loss(outputs, labels, num_items_in_batch)
            if outputs.router_logits is not None:
                aux_loss = self.router_loss(outputs, real_positions(attention_mask, labels.shape[1]))
                loss = loss + self._router_loss_weight(labels, num_items_in_batch) * aux_loss
        if skip_logits is None:
            skip_logits = labels is not None and self.training
        if not skip_logits:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            hidden = outputs.last_hidden_state
            logits = self.transform(self.lm_head(hidden if keep == slice(0, None) else hidden[:, keep]))
        return LatentCausalLMOutput(
            loss=loss, logits=logits, aux_loss=aux_loss, pass_losses=pass_losses, **_carried(outputs)
        )

    def pass_loss(
        self, outputs: LatentModelOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss over all passes and each pass's own [k], each divided by the number of target tokens."""
        passes = list(outputs.pass_hidden_states or [outputs.last_hidden_state])
        targets = shift_labels(labels)
        total, losses = self.cross_entropy(passes, targets, self.config.loss_weights(len(passes)))
        if num_items_in_batch is None:
            num_items_in_batch = (targets != -100).sum()
        return total / num_items_in_batch, losses / num_items_in_batch

    def cross_entropy(self, passes: list[Tensor], targets: Tensor, weights: list[float]) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy of states [B, T, d], weighted over the passes, and each pass's own [k], detached."""
        if type(self.lm_head) is nn.Linear and self.lm_head.bias is None:
            return chunked_cross_entropy(passes, self.lm_head.weight, targets, self.transform, weights)
        # A head that LoRA wraps, or that was replaced: what it computes is more than its weight.
        return module_cross_entropy(passes, self.lm_head, targets, self.transform, weights)

    def router_loss(self, outputs: LatentModelOutput, real: Tensor | None) -> Tensor:
        """The family's load-balancing loss of each pass, reduced as the passes' own losses are. real bool [B, T].

        Each pass must be balanced for itself: over all passes at once, experts that serve one pass alone would pass
        for balanced. Only the real tokens count. It is the loss of the tokens that this forward sees (as in
        transformers), so unlike the cross-entropy it depends on how a batch is split.
        """
        num_passes = len(outputs.pass_hidden_states or (0,))
        weights = self.config.loss_weights(num_passes)
        pairs = zip(weights, by_pass(outputs.router_logits or (), num_passes), strict=True)
        return torch.stack([weight * self.balancing_loss(logits, real) for weight, logits in pairs]).sum()

    def balancing_loss(self, router_logits: tuple[Tensor, ...], real: Tensor | None) -> Tensor:
        """The family's load-balancing loss of one run of the backbone. real: bool, shaped as the run's tokens."""
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        text_config = self.config.text_config
        num_experts = getattr(text_config, str(family_of(text_config).experts))
        top_k = text_config.num_experts_per_tok
        loss = load_balancing_loss_func(router_logits, num_experts, top_k, real)  # type: ignore[arg-type]
        assert isinstance(loss, Tensor)
        return loss

    def _router_loss_weight(self, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor | float:
        """The family's coefficient, shared out by targets over the micro-batches of one optimizer step."""
        coefficient = self.config.text_config.router_aux_loss_coef
        if num_items_in_batch is None:
            return coefficient
        return coefficient * (shift_labels(labels) != IGNORE_INDEX).sum() / num_items_in_batch

    def _decoding_options(self, logits_to_keep: int | Tensor) -> dict:
        """What a subclass's base model needs to know of the step that `generate` is in."""
        return {}

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, cache, **kwargs):
        """Called by `generate` for static caches. A prefill keeps its 2D mask: passes without a cache need another
        4D mask than the one that fills it. A decoding step gets the 4D mask that compiled graphs want."""
        if inputs_embeds.shape[1] > 1:
            return attention_mask
        return create_masks_for_generate(config, inputs_embeds, attention_mask, cache, **kwargs)

    def generate_batch(self, *args, **kwargs) -> GenerateOutput:
        raise NotImplementedError(
            "continuous batching (generate_batch) keeps a paged cache without layers, where the recycled state has no "
            "place; use generate() with a left-padded batch"
        )


def without_peft(model: Any) -> Any:
    """The model itself, where peft wraps it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def by_pass(router_logits: tuple[Tensor, ...], num_passes: int) -> list[tuple[Tensor, ...]]:
    """The layers' router logits of each pass."""
    num_layers = len(router_logits) // num_passes
    return [router_logits[i * num_layers : (i + 1) * num_layers] for i in range(num_passes)]


def joined(first: LatentModelOutput, second: LatentModelOutput) -> LatentModelOutput:
    """Two outputs one after the other. Attention maps have different widths and are left out."""

    def both(name: str):
        pair = first.get(name), second.get(name)
        return None if None in pair else tuple(torch.cat(states, dim=1) for states in zip(*pair, strict=True))

    batch = len(first.last_hidden_state)
    # Each layer's, of all tokens; with latent steps the first one's, then the second's, of as many tokens as took it.
    pairs = zip_longest(first.router_logits or (), second.router_logits or ())
    router_logits: list[Tensor] = []
    for pair in pairs:
        parts = [part for part in pair if part is not None]
        if first.latents is None:
            parts = [part.view(batch, -1, part.shape[-1]) for part in parts]
        router_logits.append(torch.cat(parts, dim=parts[0].ndim - 2))
    return LatentModelOutput(
        last_hidden_state=torch.cat([first.last_hidden_state, second.last_hidden_state], dim=1),
        cache=second.cache,
        hidden_states=both("hidden_states"),
        router_logits=tuple(logits.flatten(0, -2) for logits in router_logits) or None,
        pass_latents=None if first.latents is None else (first.latents.followed_by(second.latents),),
    )


def _carried(outputs: LatentModelOutput) -> dict:
    return {name: outputs.get(name) for name in LatentModelOutput.__dataclass_fields__ if name != "last_hidden_state"}
