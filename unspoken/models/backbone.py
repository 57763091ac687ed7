"""Any supported transformers body behind one call, and what its family does around it.

Each family's own `ForCausalLM` may scale or soft-cap logits, or scale embeddings inside the body. A latent model
holds the body alone, so the table below says what has to be kept. A family enters the table with the equivalence
tests, not before.
"""

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from unspoken.errors import UnsupportedBackboneError, nearest


@dataclass(frozen=True)
class Family:
    """What a family does outside its layers. Each field names the config attribute that holds the value."""

    multiplies_logits_by: str | None = None
    divides_logits_by: str | None = None
    soft_caps_logits_at: str | None = None
    multiplies_inputs_by: str | None = None  # inside the body, so what is added to an embedding is multiplied too
    experts: str | None = None  # number of experts, for the load-balancing loss


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "mistral": Family(),
    "gemma2": Family(soft_caps_logits_at="final_logit_softcapping"),
    "gemma3_text": Family(soft_caps_logits_at="final_logit_softcapping"),
    "olmo2": Family(),
    "gpt_neox": Family(),
    "phi3": Family(),
    "granite": Family(divides_logits_by="logits_scaling", multiplies_inputs_by="embedding_multiplier"),
    "cohere": Family(multiplies_logits_by="logit_scale"),
    "smollm3": Family(),
    "qwen3_moe": Family(experts="num_experts"),
    "mixtral": Family(experts="num_local_experts"),
    "gpt_oss": Family(experts="num_local_experts"),
}


def family_of(text_config: PreTrainedConfig) -> Family:
    """Look a backbone's family up.

    Raises:
        UnsupportedBackboneError: the family is not in the table; the message names it and the table.
    """
    model_type = text_config.model_type
    if model_type not in FAMILIES:
        raise UnsupportedBackboneError(
            f"backbone family {model_type!r} is not supported{nearest(model_type, list(FAMILIES))}; "
            f"supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def build_backbone(text_config: PreTrainedConfig) -> PreTrainedModel:
    """The family's body (no head), freshly initialised."""
    family_of(text_config)
    return AutoModel.from_config(text_config)


@dataclass(frozen=True)
class LogitTransform:
    """What a family does to `lm_head(h)`: scale, then soft-cap at `cap` (0: none). The identity for most."""

    multiplier: float = 1.0
    divisor: float = 1.0
    cap: float = 0.0

    def __call__(self, logits: Tensor) -> Tensor:
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits

    def input_gradient(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """Gradient with respect to the raw logits, from that of the transformed `logits`."""
        if self.cap:
            gradient = gradient * (1 - (logits / self.cap) ** 2)
        slope = self.multiplier / self.divisor
        return gradient if slope == 1.0 else gradient * slope


def logit_transform(text_config: PreTrainedConfig) -> LogitTransform:
    family = family_of(text_config)
    return LogitTransform(
        multiplier=_value(text_config, family.multiplies_logits_by) or 1.0,
        divisor=_value(text_config, family.divides_logits_by) or 1.0,
        cap=_value(text_config, family.soft_caps_logits_at) or 0.0,
    )


def input_multiplier(text_config: PreTrainedConfig) -> float:
    """By how much the body itself multiplies its `inputs_embeds` (Granite), 1 for the others."""
    return _value(text_config, family_of(text_config).multiplies_inputs_by) or 1.0


def attention_windows(text_config: PreTrainedConfig) -> list[int | None]:
    """How many tokens each layer's attention sees, None for all: those of the family's cache."""
    layers: list[Any] = DynamicCache(config=text_config).layers
    return [layer.sliding_window if layer.is_sliding else None for layer in layers]


def final_norm(backbone: PreTrainedModel) -> nn.Module:
    """What the body's last state goes through: `norm`, or `final_layer_norm` in GPT-NeoX."""
    norm = getattr(backbone, "norm", None) or backbone.final_layer_norm
    assert isinstance(norm, nn.Module)
    return norm


def body_of_layers(backbone: PreTrainedModel, layers: range, has_norm: bool) -> PreTrainedModel:
    """The same body with some of its layers alone, and with its final norm or none. It shares all modules."""
    maybe_install_capturing_hooks(backbone)  # else each such body would hook the layers anew
    part = copy.copy(backbone)
    modules, blocks = dict(backbone._modules), list(cast(nn.ModuleList, backbone.layers))
    modules["layers"] = nn.ModuleList(blocks[layers.start : layers.stop])
    if not has_norm:
        modules = {
            name: nn.Identity() if module is final_norm(backbone) else module for name, module in modules.items()
        }
    part._modules = modules
    part.config = copy.copy(backbone.config)
    part.config.num_hidden_layers = len(layers)
    if (types := getattr(backbone.config, "layer_types", None)) is not None:
        part.config.layer_types = [types[i] for i in layers]
    return part


def embedding_name(backbone: PreTrainedModel) -> str:
    """The body's name for its token embedding: `embed_tokens`, or `embed_in` in GPT-NeoX."""
    embedding = backbone.get_input_embeddings()
    return next(name for name, module in backbone.named_modules() if module is embedding)


def _value(text_config: PreTrainedConfig, name: str | None) -> float | None:
    return getattr(text_config, name, None) if name else None
