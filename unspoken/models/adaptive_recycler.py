"""Recycler and adaptive latent CoT in one: each token takes latent steps, and z_final is what is recycled.

Every pass of the Recycler, and every token of its recurrence, is a whole forward of adaptive latent CoT. Nothing else
is new: the passes are `recycler.py`'s, the steps `latent_steps.py`'s, and a cache carries both slots and state.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from unspoken.config import AdaptiveRecyclerConfig
from unspoken.latent.halting import Router
from unspoken.models.adaptive import AdaptiveHead
from unspoken.models.inputs import refuse_unknown
from unspoken.models.latent_steps import TakesLatentSteps
from unspoken.models.recycler import RecyclerForCausalLM, RecyclerModel

KNOBS = ("max_latent_steps", "exit_threshold", "exit_at_step")


class AdaptiveRecyclerModel(TakesLatentSteps, RecyclerModel):
    """`forward` takes the arguments of both models' forwards."""

    config_class = AdaptiveRecyclerConfig
    _can_compile_fullgraph = False

    def __init__(self, config: AdaptiveRecyclerConfig):
        super().__init__(config)
        self.router = Router(config.hidden_size, config.max_latent_steps, config.router, config.router_bias)
        self.post_init()

    def _run_options(self, kwargs: dict) -> dict:
        knobs = self.knobs(*(kwargs.pop(name, None) for name in KNOBS))
        keeps_steps = kwargs.pop("keeps_steps", None)
        refuse_unknown(kwargs)
        return {
            "knobs": knobs,
            "keeps_steps": torch.is_grad_enabled() if keeps_steps is None else keeps_steps,
            **kwargs,
        }

    def _document_mask(self, embeds: Tensor, attention_mask, position_ids: Tensor | None):
        return attention_mask  # the steps keep documents apart themselves

    def _run_inputs(self, inputs: Tensor, tokens, cache: Cache | None):
        return self.think(inputs, tokens.attention_mask, tokens.position_ids, tokens.real, cache, **tokens.options)


class AdaptiveRecyclerForCausalLM(AdaptiveHead, RecyclerForCausalLM):
    """With its head. See `RecyclerForCausalLM` for the passes, `AdaptiveLatentForCausalLM` for the steps."""

    config_class = AdaptiveRecyclerConfig
    base_model_class = AdaptiveRecyclerModel
