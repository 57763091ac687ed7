"""Unspoken: language models that think between tokens.

Importing this package is light: names load when they are first used, and the latent models enter transformers'
Auto classes, and lm-eval's list of models, at the moment those are imported, before or after.
"""

import importlib

import wrapt

_NAMES = {
    "AdaptiveLatentConfig": "config",
    "AdaptiveRecyclerConfig": "config",
    "LatentConfig": "config",
    "RecyclerConfig": "config",
    "LoopedConfig": "config",
    "PauseConfig": "config",
    "PonderConfig": "config",
    "Ponder2Config": "config",
    "RecursionsConfig": "config",
    "VanillaConfig": "config",
    "scaled_init": "config",
    "AdaptiveRecyclerModel": "models.adaptive_recycler",
    "AdaptiveRecyclerForCausalLM": "models.adaptive_recycler",
    "AdaptiveLatentModel": "models.adaptive",
    "AdaptiveLatentForCausalLM": "models.adaptive",
    "RecyclerModel": "models.recycler",
    "RecyclerForCausalLM": "models.recycler",
    "LoopedModel": "models.looped",
    "LoopedForCausalLM": "models.looped",
    "PauseModel": "models.pause",
    "PauseForCausalLM": "models.pause",
    "PonderModel": "models.ponder",
    "PonderForCausalLM": "models.ponder",
    "Ponder2Model": "models.ponder2",
    "Ponder2ForCausalLM": "models.ponder2",
    "RecursionsModel": "models.recursions",
    "RecursionsForCausalLM": "models.recursions",
    "VanillaModel": "models.vanilla",
    "VanillaForCausalLM": "models.vanilla",
    "LatentGRPOTrainer": "rl.trainer",
    "LatentSFTTrainer": "train.sft_trainer",
    "convert": "models.convert",
    "export_backbone": "models.convert",
    "UnspokenError": "errors",
}
__all__ = sorted(_NAMES)  # noqa: PLE0605


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module 'unspoken' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unspoken.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


@wrapt.when_imported("transformers.models.auto.configuration_auto")
def _register_configs(_configuration_auto) -> None:
    importlib.import_module("unspoken.config")


@wrapt.when_imported("transformers.models.auto.modeling_auto")
def _register_models(_modeling_auto) -> None:
    importlib.import_module("unspoken.models").register()


@wrapt.when_imported("lm_eval.models")
def _register_with_lm_eval(_models) -> None:
    registry = importlib.import_module("lm_eval.api.registry").model_registry
    registry.register("unspoken", target="unspoken.eval.harness:UnspokenLM")
