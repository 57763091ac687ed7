"""What stands in for parts of a model while it is checked, so that a fault can show, and is taken back afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from unspoken.latent.halting import RouterOutput
from unspoken.models.backbone import input_multiplier
from unspoken.models.knobs import takes_latent_steps
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.recycler import RecyclerForCausalLM

AWAKE = 0.5  # size of what a random adapter adds, relative to a token's embedding
SPREAD = 4.0  # of a random router's logits: gates of all sizes, some below any threshold


@contextmanager
def neutral_generation(model: PreTrainedModel) -> Iterator[None]:
    """Generation without the settings saved with the model: no end token, no penalties, no sampling."""
    saved, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    try:
        yield
    finally:
        model.generation_config = saved


@contextmanager
def awake_adapter(model: LatentForCausalLM, seed: int) -> Iterator[bool]:
    """Give an all-zero adapter random weights meanwhile, without which no check could see a lost or misplaced state.

    Yields whether that was done.
    """
    weight = model.model.adapter.proj.weight if isinstance(model, RecyclerForCausalLM) else None
    if weight is None or weight.any():
        yield False
        return
    embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    size = embedding.float().pow(2).mean().sqrt().item() * model.config.embedding_scale
    size *= input_multiplier(model.config.text_config)
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * AWAKE * size
    with torch.no_grad():
        weight.copy_(noise / weight.shape[1] ** 0.5)
    try:
        yield True
    finally:
        torch.nn.init.zeros_(weight)


@contextmanager
def awake_router(model: Any, input_ids: Tensor, seed: int) -> Iterator[bool]:
    """Give a router that tells none of these tokens apart random weights meanwhile: where all take the same number of
    latent steps, or one of no weight, no check could see a wrong decision or a wrong state.

    Yields whether that was done.
    """
    knobs = model.model.knobs(None, None, None) if takes_latent_steps(model) else None
    is_asked = knobs is not None and knobs.exit_at_step is None and knobs.last_step > 1
    options = {"num_passes": 1, "use_cache": False}
    if not is_asked or len(model.model(input_ids, **options).latents.lengths.unique()) > 1:
        yield False
        return
    states = model.model(input_ids, max_latent_steps=0, **options).last_hidden_state.flatten(0, 1)
    router: nn.Module = model.model.router
    saved = [parameter.detach().clone() for parameter in router.parameters()]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for gate in model.model.router.gates:
            _spread(gate, states, generator)
    try:
        yield True
    finally:
        with torch.no_grad():
            for parameter, value in zip(router.parameters(), saved, strict=True):
                parameter.copy_(value)


def _spread(gate: nn.Module, states: Tensor, generator: torch.Generator) -> None:
    """Random weights, then a scale and a bias that give these states logits around zero, `SPREAD` apart."""
    output = next(module for module in gate.modules() if isinstance(module, RouterOutput))
    output.weight.copy_(torch.randn(output.weight.shape, generator=generator))
    output.bias.zero_()
    logits = gate(states).float()
    scale = SPREAD / logits.std()
    output.weight.mul_(scale)
    output.bias.copy_(-scale * logits.mean())
