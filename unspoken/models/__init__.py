"""Latent language models over any supported transformers backbone."""

import importlib
from typing import Any


def register() -> None:
    """Enter the latent models into transformers' Auto classes. Called when those are imported."""
    from transformers import AutoModel, AutoModelForCausalLM

    from unspoken.models.adaptive import AdaptiveLatentForCausalLM, AdaptiveLatentModel
    from unspoken.models.adaptive_recycler import AdaptiveRecyclerForCausalLM, AdaptiveRecyclerModel
    from unspoken.models.looped import LoopedForCausalLM, LoopedModel
    from unspoken.models.pause import PauseForCausalLM, PauseModel
    from unspoken.models.ponder import PonderForCausalLM, PonderModel
    from unspoken.models.ponder2 import Ponder2ForCausalLM, Ponder2Model
    from unspoken.models.recursions import RecursionsForCausalLM, RecursionsModel
    from unspoken.models.recycler import RecyclerForCausalLM, RecyclerModel
    from unspoken.models.vanilla import VanillaForCausalLM, VanillaModel

    models: tuple[tuple[Any, Any], ...] = (
        (VanillaModel, VanillaForCausalLM),
        (RecyclerModel, RecyclerForCausalLM),
        (AdaptiveLatentModel, AdaptiveLatentForCausalLM),
        (AdaptiveRecyclerModel, AdaptiveRecyclerForCausalLM),
        (LoopedModel, LoopedForCausalLM),
        (PauseModel, PauseForCausalLM),
        (PonderModel, PonderForCausalLM),
        (Ponder2Model, Ponder2ForCausalLM),
        (RecursionsModel, RecursionsForCausalLM),
    )
    for base, head in models:
        AutoModel.register(base.config_class, base, exist_ok=True)
        AutoModelForCausalLM.register(head.config_class, head, exist_ok=True)


# Now, while none of our modules is half imported: the first of them to import transformers' Auto classes would
# otherwise be entered again by the hook in `unspoken/__init__.py`.
importlib.import_module("transformers.models.auto.modeling_auto")
