"""FLOPs of a latent model, from its modules and the passes that were really run.

Conventions (the ones under which torch's `FlopCounterMode` agrees, see tests/analysis/test_flops.py):

- A multiplication and an addition are two FLOPs. Matrix products alone are counted: the layers' matrices, routers and
  the active experts, scores and values of attention, the adapter, the head. Norms, activations, softmax, embedding
  look-ups and the optimizer are not.
- Attention is counted for the keys that a position may see: itself and those before it, at most a layer's window of
  them. A packed row counts as one document. `is_dense` counts all T x T instead, as a kernel without causality would
  run, and as `FlopCounterMode` does.
- The adapter runs in every pass but the first of a forward without a cache; in decoding once a token.
- The head runs once for each target of each pass whose loss is taken.
- Backward is twice forward, so training is 3 times forward; with gradient checkpointing the layers run once more: 4
  (torch stops that run before a layer's last product, 5 % of it, which is not looked at).
- Detaching between passes, or a weight of zero for a pass's loss, saves part of a backward and is not looked at.

`six_nd` is the usual figure beside it: 6 x parameters x tokens x passes, which knows neither attention nor inactive
experts nor which parts a pass leaves out.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoConfig
from transformers.cache_utils import DynamicCache

from unspoken.config import LatentConfig
from unspoken.errors import UnspokenError
from unspoken.models.backbone import family_of
from unspoken.models.convert import METHODS
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.train.build import compute_parameters

FORWARD_AND_BACKWARD = 3  # times forward
RECOMPUTED = 1  # times forward once more, of the layers


@dataclass(frozen=True)
class Attention:
    """One layer's attention: FLOPs of one query with one key, and how many keys it may see (None: all)."""

    flops_per_key: int
    window: int | None

    def at(self, num_keys: int) -> int:
        """FLOPs of one position that has so many keys up to itself."""
        return self.flops_per_key * min(num_keys, self.window or num_keys)

    def over(self, num_tokens: int) -> int:
        """FLOPs of a whole causal sequence."""
        window = min(self.window or num_tokens, num_tokens)
        return self.flops_per_key * (window * (window + 1) // 2 + (num_tokens - window) * window)


@dataclass(frozen=True)
class ModelFlops:
    """Forward FLOPs of a model's parts: `layers`, `adapter` and `head` are of one token, `attention` is by layer.

    `adapter` is 0 for a plain model. `compute_parameters` is the N of 6 N D.
    """

    layers: int
    attention: tuple[Attention, ...]
    adapter: int
    head: int
    compute_parameters: int

    def passes(self, num_tokens: int, num_passes: int = 1, is_dense: bool = False) -> int:
        """A forward of so many parallel passes over one sequence, without the head."""
        if is_dense:
            attention = sum(layer.flops_per_key for layer in self.attention) * num_tokens**2
        else:
            attention = sum(layer.over(num_tokens) for layer in self.attention)
        adapter = self.adapter * num_tokens * (num_passes - 1)
        return num_passes * (self.layers * num_tokens + attention) + adapter

    def training(self, sequence_length: int, num_passes: float = 1, has_checkpointing: bool = False) -> float:
        """Forward and backward of one token, in sequences of that length; `num_passes` may be a mean over steps.

        The last token of a sequence has no target; it is counted as if it had one.
        """
        layers = self.passes(sequence_length) / sequence_length
        others = self.adapter * (num_passes - 1) + self.head * num_passes
        times = FORWARD_AND_BACKWARD + RECOMPUTED * has_checkpointing
        return times * num_passes * layers + FORWARD_AND_BACKWARD * others

    def prefill(self, num_tokens: int, num_passes: int = 1) -> int:
        """Passes over a prompt, and the head at its last token."""
        return self.passes(num_tokens, num_passes) + self.head

    def decode(self, num_keys: int) -> int:
        """One token of the recurrence, which has so many keys up to itself: one run, whatever the training passes."""
        return self.layers + sum(layer.at(num_keys) for layer in self.attention) + self.adapter + self.head


@dataclass(frozen=True)
class RunFlops:
    """Training FLOPs of a finished run: `counted` from its modules, and `six_nd`."""

    counted: float
    six_nd: float
    decode_per_token: int  # in the middle of a training sequence


def model_flops(model: LatentForCausalLM | LatentConfig) -> ModelFlops:
    """The FLOPs of a model, or of the model that a configuration describes, which is built without memory.

    Raises:
        UnsupportedBackboneError: the backbone is of no known family.
    """
    if isinstance(model, LatentConfig):
        with torch.device("meta"):
            model = _model_class(model)(model)
    text_config: Any = model.config.text_config
    adapter = getattr(model.model, "adapter", None)
    return ModelFlops(
        layers=_layer_flops(model.model.backbone, text_config),
        attention=_attention(text_config),
        adapter=0 if adapter is None else 2 * sum(math.prod(m) for part in adapter.modules() for m in _matrices(part)),
        head=2 * model.lm_head.weight.numel(),
        compute_parameters=compute_parameters(model),
    )


def training_flops(
    flops: ModelFlops, summary: Mapping[str, Any], sequence_length: int, has_checkpointing: bool
) -> float:
    """Training FLOPs of a run with these counts (`tokens`, `pass_tokens`, `target_tokens`) in summary.json."""
    tokens, pass_tokens = summary["tokens"], summary["pass_tokens"]
    target_passes = summary.get("target_tokens", tokens) * pass_tokens / max(1, tokens)
    layers = flops.passes(sequence_length) / sequence_length * pass_tokens
    others = flops.adapter * (pass_tokens - tokens) + flops.head * target_passes
    return (FORWARD_AND_BACKWARD + RECOMPUTED * has_checkpointing) * layers + FORWARD_AND_BACKWARD * others


def run_flops(folder: Path) -> RunFlops:
    """The FLOPs of a finished run folder, from its summary.json, resolved.yaml and model.

    Raises:
        UnspokenError: one of them is missing or cannot be read.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        recipe = yaml.safe_load((folder / "resolved.yaml").read_text(encoding="utf-8"))
        config = AutoConfig.from_pretrained(folder / "model")
        length, checkpointing = recipe["data"]["sequence_length"], recipe["train"]["gradient_checkpointing"]
        flops = model_flops(config)
        counted = training_flops(flops, summary, length, bool(checkpointing))
        six_nd = 6.0 * flops.compute_parameters * summary["pass_tokens"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UnspokenError(f"{folder}: its FLOPs cannot be counted: {type(error).__name__}: {error}") from error
    return RunFlops(counted, six_nd, flops.decode(length // 2))


def _model_class(config: LatentConfig) -> type[LatentForCausalLM]:
    for model_class in METHODS.values():
        if isinstance(config, model_class.config_class):
            return model_class
    raise UnspokenError(f"no latent model has a {type(config).__name__}")


def _layer_flops(backbone: nn.Module, text_config: Any) -> int:
    """Every matrix once a token; a stack of experts [experts, n, m] by the share of it that a token uses."""
    experts = family_of(text_config).experts
    active = Fraction(text_config.num_experts_per_tok, getattr(text_config, experts)) if experts else Fraction(1)
    matrices = [shape for module in backbone.modules() for shape in _matrices(module)]
    return int(sum(2 * math.prod(shape) * (active if len(shape) == 3 else 1) for shape in matrices))


def _matrices(module: nn.Module) -> list[torch.Size]:
    """Shapes of a module's own weights that are multiplied with: not vectors, biases or look-up tables."""
    if isinstance(module, nn.Embedding):
        return []
    return [p.shape for name, p in module.named_parameters(recurse=False) if p.ndim > 1 and not name.endswith("bias")]


def _attention(text_config: Any) -> tuple[Attention, ...]:
    """Scores and values: 4 x heads x head size for a query and a key. Windows are those of the family's cache."""
    heads = text_config.num_attention_heads
    head_size = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    layers: list[Any] = DynamicCache(config=text_config).layers
    windows = [layer.sliding_window if layer.is_sliding else None for layer in layers]
    return tuple(Attention(4 * heads * head_size, window) for window in windows)
