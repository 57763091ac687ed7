"""The models that ours are compared with, tiny and random, and their oracles."""

from typing import Any

import torch
from torch import Tensor

from tests.families import _use_plain_experts, randomise, text_config
from tests.oracle import grid_body
from unspoken import LoopedConfig, PauseConfig, PonderConfig
from unspoken.latent import reference
from unspoken.models.backbone import final_norm, input_multiplier
from unspoken.models.convert import METHODS
from unspoken.models.latent_lm import LatentForCausalLM

CONFIGS = {
    "looped": lambda **fields: LoopedConfig(num_loops=3, **fields),
    "looped with norms": lambda **fields: LoopedConfig(num_loops=3, norm_between_loops=True, **fields),
    "looped with inputs": lambda **fields: LoopedConfig(num_loops=3, inject_input=True, **fields),
    "pause": lambda **fields: PauseConfig(num_pauses=2, **fields),
    "ponder": lambda **fields: PonderConfig(num_ponder_steps=2, **fields),
    "ponder that accumulates": lambda **fields: PonderConfig(num_ponder_steps=2, accumulate=True, **fields),
}


def baseline(kind: str, name: str = "llama", dtype: torch.dtype = torch.float64, **text: Any) -> LatentForCausalLM:
    """In evaluation mode; `text` goes to the backbone's configuration."""
    config = CONFIGS[kind](text_config=text_config(name, **text), embedding_scale=1.5)
    _use_plain_experts(config, dtype)
    return randomise(METHODS[kind.split()[0]](config)).to(dtype).eval()  # type: ignore[return-value]


def oracle(model: Any, input_ids: Tensor) -> Tensor:
    """Logits [B, T, V] of the slow reference."""
    config, base = model.config, model.model
    scale = input_multiplier(config.text_config)
    embeds = base.embed(input_ids, None)

    def head(states: Tensor) -> Tensor:
        return model.transform(model.lm_head(states))

    def body(inputs: Tensor) -> Tensor:
        return base.backbone(inputs_embeds=inputs, use_cache=False).last_hidden_state

    if isinstance(config, LoopedConfig):
        norm, entered = final_norm(base.backbone), []
        hook = norm.register_forward_pre_hook(lambda module, arguments: entered.append(arguments[0]))

        def stack(inputs: Tensor) -> Tensor:
            body(inputs / scale)
            return entered.pop()

        # What a body multiplies its inputs by belongs to embeddings alone.
        states = reference.looped(
            stack, norm, embeds * scale, config.num_loops, config.norm_between_loops, config.inject_input
        )
        hook.remove()
    elif isinstance(config, PonderConfig):
        table = base.get_input_embeddings().weight * config.embedding_scale
        states = reference.pondering(body, head, table, embeds, config.num_ponder_steps, config.accumulate)
    else:
        pause = base.pause.weight[0] * config.embedding_scale
        rows = [
            reference.paused(grid_body(model), row * scale, pause * scale, config.num_pauses) for row in embeds.split(1)
        ]
        states = torch.cat(rows)
    return head(states)
