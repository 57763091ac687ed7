"""Tiny seeded random models of every family: two layers, width 32, 64 tokens, and nothing left at its default.

Every weight is drawn anew, wider than the families' own initialisation, so that norms, biases, attention sinks and the
adapter all take part and greedy text is not one token repeated. Windows are shorter than the sequences of the tests,
scales and caps are not 1 and not out of reach.
"""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from unspoken import (
    AdaptiveLatentConfig,
    AdaptiveLatentForCausalLM,
    AdaptiveRecyclerConfig,
    AdaptiveRecyclerForCausalLM,
    RecyclerConfig,
    RecyclerForCausalLM,
)

VOCAB_SIZE = 64
PAD, BOS, EOS = 0, 1, 2
WINDOW = 5  # of sliding attention

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,  # text ends at its length, unless a test says otherwise
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0, **_MIXED}
_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}

# name -> (model type, what differs from _COMMON)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "mistral": ("mistral", {"head_dim": 8, "sliding_window": WINDOW}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 3.0, **_GEMMA}),
    "gemma3_text": ("gemma3_text", {"tie_word_embeddings": False, **_GEMMA}),
    "olmo2": ("olmo2", {}),
    "gpt_neox": ("gpt_neox", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "gpt_neox_tied": ("gpt_neox", {"tie_word_embeddings": True}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
    ),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, **_EXPERTS}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": None, **_EXPERTS}),
    "gpt_oss": ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "rope_parameters": _YARN, **_MIXED, **_EXPERTS}),
}
ALL = list(CONFIGS)
MOE = ["qwen3_moe", "mixtral", "gpt_oss"]
SLIDING = ["mistral", "gemma2", "gemma3_text", "phi3", "gpt_oss"]
# Tied, window in every layer, windows in some layers, LayerNorm and biases, experts.
REPRESENTATIVE = ["llama_tied", "mistral", "gemma3_text", "gpt_neox", "qwen3_moe"]

_EAGER_ONLY = ["gemma2", "gpt_oss"]  # their attention has caps or sinks that sdpa cannot express


def text_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The backbone's configuration of one entry of `CONFIGS`."""
    model_type, differences = CONFIGS[name]
    config = CONFIG_MAPPING[model_type](**{**_COMMON, **differences, **changes})
    if name in _EAGER_ONLY:
        config._attn_implementation = "eager"
    return config


def tiny_model(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **fields: Any) -> RecyclerForCausalLM:
    """A Recycler in evaluation mode; `fields` go to its configuration, `text` (a dict) to its backbone's."""
    config = RecyclerConfig(text_config=text_config(name, **fields.pop("text", {})), **fields)
    _use_plain_experts(config, dtype)
    return randomise(RecyclerForCausalLM(config), seed).to(dtype).eval()


def adaptive_model(
    name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **fields: Any
) -> AdaptiveLatentForCausalLM:
    """A model with latent steps in evaluation mode, whose tokens take different numbers of them."""
    config = AdaptiveLatentConfig(text_config=text_config(name, **fields.pop("text", {})), **fields)
    _use_plain_experts(config, dtype)
    return randomise(AdaptiveLatentForCausalLM(config), seed).to(dtype).eval()


def adaptive_recycler_model(name: str, seed: int = 0, **fields: Any) -> AdaptiveRecyclerForCausalLM:
    """Both methods in one, in evaluation mode and float64."""
    config = AdaptiveRecyclerConfig(text_config=text_config(name), **fields)
    _use_plain_experts(config, torch.float64)
    return randomise(AdaptiveRecyclerForCausalLM(config), seed).double().eval()


def plain_model(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The family's own causal LM, in evaluation mode."""
    config = text_config(name, **changes)
    _use_plain_experts(config, dtype)
    return randomise(AutoModelForCausalLM.from_config(config), seed).to(dtype).eval()


def _use_plain_experts(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        config._experts_implementation = "eager"  # the default, a grouped product, has no float64


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Redraw every parameter: matrices anew, vectors (norms, biases, sinks) around their initial values."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            # As large as a token's embedding: smaller would hide a lost state, larger would drown the token.
            # A router that does not tell tokens apart would test no decision.
            parameter.copy_(noise * (0.05 if "adapter" in name else 1.0 if "router" in name else 0.2))
        else:
            parameter.add_(noise * 0.1)
    return model


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids [batch, length] without the special ones."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(EOS + 1, VOCAB_SIZE, (batch, length), generator=generator)
