"""The models that ours are compared with, tiny and random, and their oracles."""

from typing import Any

import torch
from torch import Tensor

from tests.families import CONFIGS as FAMILIES
from tests.families import _use_plain_experts, randomise, text_config
from unspoken import LoopedConfig, PauseConfig, Ponder2Config, PonderConfig, RecursionsConfig
from unspoken.eval.bodies import reference_body
from unspoken.models.backbone import input_multiplier
from unspoken.models.convert import METHODS
from unspoken.models.latent_lm import LatentForCausalLM

EXPERTS = {"recursion_router": "expert_choice", "router_scale": 0.7}
CONFIGS = {
    "looped": lambda **fields: LoopedConfig(num_loops=3, **fields),
    "looped with norms": lambda **fields: LoopedConfig(num_loops=3, norm_between_loops=True, **fields),
    "looped with inputs": lambda **fields: LoopedConfig(num_loops=3, inject_input=True, **fields),
    "looped with a gate": lambda **fields: LoopedConfig(
        **{"num_loops": 3, "norm_between_loops": True, "exit_gate": True, **fields}
    ),
    "pause": lambda **fields: PauseConfig(num_pauses=2, **fields),
    "ponder": lambda **fields: PonderConfig(num_ponder_steps=2, **fields),
    "ponder that accumulates": lambda **fields: PonderConfig(num_ponder_steps=2, accumulate=True, **fields),
}

MIXTURES = {  # tokens run the middle layers as often as a router says
    "mor": lambda **fields: RecursionsConfig(num_recursions=3, **fields),
    "mor with shared keys": lambda **fields: RecursionsConfig(num_recursions=3, kv_mode="shared", **fields),
    "mor by experts": lambda **fields: RecursionsConfig(num_recursions=3, **EXPERTS, **fields),
    "mor by experts with shared keys": lambda **fields: RecursionsConfig(
        num_recursions=3, kv_mode="shared", **EXPERTS, **fields
    ),
}

RECURRENT = {
    "ponder2": Ponder2Config,
    "ponder2 with two thoughts": lambda **fields: Ponder2Config(num_latent_thoughts=2, **fields),
}


def four_layers(name: str) -> dict[str, Any]:
    """The backbone's configuration with twice the layers."""
    doubled = {
        field: 2 * value
        for field in ("layer_types", "no_rope_layers")
        if (value := FAMILIES[name][1].get(field)) is not None
    }
    return {"num_hidden_layers": 4, **doubled}


def baseline(kind: str, name: str = "llama", dtype: torch.dtype = torch.float64, **text: Any) -> LatentForCausalLM:
    """In evaluation mode; `text` goes to the backbone's configuration."""
    if kind.startswith("mor"):
        text = four_layers(name) | text  # a first, a last, and two between
    config = (CONFIGS | MIXTURES | RECURRENT)[kind](text_config=text_config(name, **text), embedding_scale=1.5)
    _use_plain_experts(config, dtype)
    return randomise(METHODS[kind.split(maxsplit=1)[0]](config)).to(dtype).eval()  # type: ignore[return-value]


def oracle(model: Any, input_ids: Tensor) -> Tensor:
    """Logits [B, T, V] of the slow reference."""
    embeds = model.model.embed(input_ids, None) * input_multiplier(model.config.text_config)
    return model.transform(model.lm_head(reference_body(model)(embeds)))
