"""What stands in a model's place for the oracles: a plain function from inputs to states, slow and without a cache.

    body(inputs [B, T, d]) -> states [B, T, d]      inputs are what enters the first layer

A method that runs its backbone several times becomes one such function, so that every check of a plain model is one of
it. The body shares the model's weights, and nothing of its passes, masks and caches.
"""

from typing import Any

import torch
from torch import Tensor

from unspoken.eval.thinking import ThinkingBody, grid_backbone
from unspoken.latent import reference
from unspoken.latent.routing import ExpertChoice, TokenChoice
from unspoken.models.backbone import body_of_layers, final_norm, input_multiplier
from unspoken.models.knobs import takes_latent_steps
from unspoken.models.looped import LoopedModel
from unspoken.models.pause import PauseModel
from unspoken.models.ponder import PonderModel
from unspoken.models.recursions import RecursionsModel


def reference_body(model: Any) -> reference.Backbone:
    """The body of a head model, in evaluation mode."""
    base, config = model.model, model.config
    if takes_latent_steps(model) and base.knobs(None, None, None).last_step > 1:
        return ThinkingBody(model)
    scale = input_multiplier(config.text_config)

    def backbone(inputs: Tensor) -> Tensor:
        return base.backbone(inputs_embeds=inputs / scale, use_cache=False).last_hidden_state

    if isinstance(base, LoopedModel):
        return lambda inputs: reference.looped(
            lambda entering: _without_norm(base, backbone, entering),
            final_norm(base.backbone),
            inputs,
            config.num_loops,
            config.norm_between_loops,
            config.inject_input,
        )
    if isinstance(base, PonderModel):
        embeddings: Any = base.get_input_embeddings().weight * config.embedding_scale * scale
        return lambda inputs: reference.pondering(
            backbone,
            lambda states: model.transform(model.lm_head(states)),
            embeddings,
            inputs,
            config.num_ponder_steps,
            config.accumulate,
        )
    if isinstance(base, PauseModel):
        grid, pause = grid_backbone(base), base.pause.weight[0] * config.embedding_scale * scale
        return lambda inputs: torch.cat(
            [reference.paused(grid, row, pause, config.num_pauses) for row in inputs.split(1)]
        )
    if isinstance(base, RecursionsModel):
        return lambda inputs: torch.cat([recursions(base, row)[0] for row in inputs.split(1)])
    return backbone


def recursions(base: RecursionsModel, inputs: Tensor) -> tuple[Tensor, list[int]]:
    """The oracle of a model with recursions: inputs [1, T, d] -> states [1, T, d], and each token's depth."""
    config, scale = base.config, input_multiplier(base.config.text_config)
    count, router = config.num_hidden_layers, base.router

    def choose(state: Tensor) -> tuple[int, Tensor]:
        assert isinstance(router, TokenChoice)
        probabilities = router.depth(state).softmax(-1).squeeze()
        depth = int(probabilities.argmax()) + 1
        return depth, config.scale * probabilities[depth - 1]

    def gate(state: Tensor, recursion: int) -> Tensor:
        assert isinstance(router, ExpertChoice)
        return torch.sigmoid(router.logits(recursion, state)).squeeze()

    def layers(which: range, has_norm: bool) -> reference.Backbone:
        body: Any = body_of_layers(base.backbone, which, has_norm)
        return lambda entering: body(inputs_embeds=entering / scale, use_cache=False).last_hidden_state

    by_depth = isinstance(router, TokenChoice)
    return reference.recursions(
        layers(range(1), has_norm=False),
        grid_backbone(base, body_of_layers(base.backbone, range(1, count - 1), has_norm=False)),
        layers(range(count - 1, count), has_norm=True),
        inputs,
        config.num_recursions,
        choose if by_depth else None,
        None if by_depth else gate,
        config.scale,
        config.kv_mode == "shared",
    )


def _without_norm(base: Any, backbone: reference.Backbone, inputs: Tensor) -> Tensor:
    """The state that enters the final norm."""
    entered: list[Tensor] = []
    hook = final_norm(base.backbone).register_forward_pre_hook(lambda module, given: entered.append(given[0]))
    try:
        backbone(inputs)
    finally:
        hook.remove()
    return entered[0]
