"""Adaptive latent CoT: the model, and the head with its loss. The steps themselves are in `latent_steps.py`.

Source: Adaptive latent CoT section 3.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils.generic import can_return_tuple

from unspoken.config import AdaptiveLatentConfig
from unspoken.latent.halting import Router, adaptive_penalty
from unspoken.models.latent_lm import LatentForCausalLM, LatentModel, LatentModelOutput, by_pass
from unspoken.models.latent_steps import Latents, TakesLatentSteps
from unspoken.models.loss import IGNORE_INDEX, shift_labels, target_probabilities


class AdaptiveLatentModel(TakesLatentSteps, LatentModel):
    """The backbone, the router and the steps. Returns z_final; the head comes later."""

    config_class = AdaptiveLatentConfig
    _can_compile_fullgraph = False  # how many tokens go on is data

    def __init__(self, config: AdaptiveLatentConfig):
        super().__init__(config)
        self.router = Router(config.hidden_size, config.max_latent_steps, config.router, config.router_bias)
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
        max_latent_steps: int | None = None,
        exit_threshold: float | None = None,
        exit_at_step: int | None = None,
        keeps_steps: bool | None = None,
        **kwargs,
    ) -> LatentModelOutput:
        """Run the steps.

        max_latent_steps, exit_threshold, exit_at_step: instead of the configuration's, see `AdaptiveLatentConfig`.
        num_passes: 1 or "exact", which is the same here: nothing is recycled. prompt_mask: nothing to stop.
        keeps_steps: return each step's states and gates in `latents.steps` (the default with gradients).
        """
        knobs = self.knobs(max_latent_steps, exit_threshold, exit_at_step)
        if num_passes not in (None, 1, "exact"):
            raise ValueError(f"an adaptive model has one pass; got num_passes={num_passes!r}")
        embeds, real, _, cache = self.read(
            input_ids, inputs_embeds, attention_mask, position_ids, cache, use_cache, kwargs
        )
        if keeps_steps is None:
            keeps_steps = torch.is_grad_enabled()
        return self.think(embeds, attention_mask, position_ids, real, cache, knobs, keeps_steps, **kwargs)


class AdaptiveHead:
    """The knobs and the loss of a head model whose base model `TakesLatentSteps`: mixed in before it."""

    config: Any
    model: Any
    lm_head: Any
    transform: Any
    cross_entropy: Any
    balancing_loss: Any
    _can_compile_fullgraph = False

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
        max_latent_steps: int | None = None,
        exit_threshold: float | None = None,
        exit_at_step: int | None = None,
        **kwargs,
    ):
        """As `LatentForCausalLM.forward`, with the knobs of `AdaptiveLatentModel.forward`."""
        given = {"max_latent_steps": max_latent_steps, "exit_threshold": exit_threshold, "exit_at_step": exit_at_step}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        if labels is not None:
            kwargs["keeps_steps"] = True  # the loss reads them
        if kwargs.get("segmented"):
            raise ValueError("segmented: a graph with latent steps is not cut between passes")
        return super().forward(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            num_passes=num_passes,
            prompt_mask=prompt_mask,
            logits_to_keep=logits_to_keep,
            skip_logits=skip_logits,
            num_items_in_batch=num_items_in_batch,
            **kwargs,
        )

    def _set_gradient_checkpointing(self, *args, **kwargs) -> None:
        super()._set_gradient_checkpointing(*args, **kwargs)  # type: ignore[misc]
        self.model.checkpoint_whole_steps()

    def pass_loss(
        self, outputs: LatentModelOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The mixtures' loss over the passes, each with its penalty on going on; and each mixture's own [k]."""
        total, losses = super().pass_loss(outputs, labels, num_items_in_batch)  # type: ignore[misc]
        passes = outputs.pass_latents or ()
        targets = shift_labels(labels)
        if num_items_in_batch is None:
            num_items_in_batch = (targets != IGNORE_INDEX).sum()
        targets = targets.flatten()
        for pass_weight, latents in zip(self.config.loss_weights(len(passes)), passes, strict=True):
            penalty = self.adaptive_loss(latents, targets) / num_items_in_batch
            latents.penalty = penalty.detach()
            total = total + pass_weight * penalty
            if (weight := self.config.step_loss_weight) > 0 and latents.steps:
                total = total + pass_weight * weight * self._step_loss(latents, targets) / num_items_in_batch
        return total, losses

    def router_loss(self, outputs: LatentModelOutput, real: Tensor | None) -> Tensor:
        """The family's load-balancing loss of each run of the backbone, over the tokens that took part; their mean."""
        taken = [run for latents in outputs.pass_latents or () for run in latents.taken]
        if not taken:
            return super().router_loss(outputs, real)  # type: ignore[misc]
        runs = by_pass(outputs.router_logits or (), len(taken))
        pairs = zip(runs, taken, strict=True)
        losses = [self.balancing_loss(logits, tokens) for logits, tokens in pairs if tokens.any()]
        return torch.stack(losses).mean() if losses else torch.zeros((), device=outputs.last_hidden_state.device)

    def adaptive_loss(self, latents: Latents, targets: Tensor) -> Tensor:
        """lambda times the penalty, summed over steps and tokens that have a target. targets [B * T]."""
        config = self.config
        total: Tensor = torch.zeros((), device=targets.device)
        for step in latents.steps:
            if step.gate is None or config.adaptive_loss_weight == 0:
                continue
            counted = targets[step.token] != IGNORE_INDEX
            if not config.penalize_cuts:
                counted = counted & step.goes_on
            chosen = targets[step.token[counted]]
            right = target_probabilities(step.hidden[counted], self.lm_head, chosen, self.transform)
            correctness = right**config.adaptive_loss_exponent
            penalty = adaptive_penalty(
                config.adaptive_loss, step.reach[counted], step.gate[counted], correctness, latents.max_latent_steps
            )
            total = total + penalty.sum()
        return config.adaptive_loss_weight * total

    def _step_loss(self, latents: Latents, targets: Tensor) -> Tensor:
        """Each step's own cross-entropy, summed over tokens, averaged over the steps that a token may take."""
        losses = [
            self.cross_entropy([step.hidden.unsqueeze(0)], targets[step.token].unsqueeze(0), [1.0])[0]
            for step in latents.steps
        ]
        return torch.stack(losses).sum() / (latents.max_latent_steps + 1)


class AdaptiveLatentForCausalLM(AdaptiveHead, LatentForCausalLM):
    """Adaptive latent CoT with its head and its loss: the mixture's cross-entropy, and the price of going on."""

    config_class = AdaptiveLatentConfig
    base_model_class = AdaptiveLatentModel
