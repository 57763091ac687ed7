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
- Latent steps and recursions: every run of every token counts, with its gate; a query counts the keys of the runs
  that it may see (`latent/counts.py`). In training the penalty's p_target is one more product of the head, forward
  alone, for each step that it prices; a loss of each step's own is one more head. `is_dense` fills each run's rows up
  to its longest and counts all keys that the run's mask is over, as is computed today.
- PonderLM's mean embedding is two products with the vocabulary, between runs; recomputing it is not looked at.
- Backward is twice forward, so training is 3 times forward; with gradient checkpointing the layers run once more: 4
  (torch stops that run before a layer's last product, 5 % of it, which is not looked at).
- Detaching between passes, or a weight of zero for a pass's loss, saves part of a backward and is not looked at.

`six_nd` is the usual figure beside it: 6 x parameters x tokens x passes (runs and slots of a token too), which knows
neither attention nor inactive experts nor which parts a pass leaves out.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn
from transformers import AutoConfig

from unspoken.analysis.cache_bytes import cache_bytes_per_token
from unspoken.config import AdaptiveLatentConfig, LatentConfig, PonderConfig, RecursionsConfig
from unspoken.errors import UnspokenError
from unspoken.latent.counts import COUNTS, StepRule, step_counts, step_rule
from unspoken.models.backbone import attention_windows, family_of
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

    def at(self, num_tokens: int, slots: int = 1) -> int:
        """FLOPs of one token that is the last of so many, each in so many slots."""
        earlier = min(num_tokens, self.window or num_tokens) - 1
        return self.flops_per_key * _keys(earlier, 1, slots)

    def over(self, num_tokens: int, slots: int = 1) -> int:
        """FLOPs of a whole causal sequence."""
        window = min(self.window or num_tokens, num_tokens)
        earlier = window * (window - 1) // 2 + (num_tokens - window) * (window - 1)
        return self.flops_per_key * _keys(earlier, num_tokens, slots)


@dataclass(frozen=True)
class LatentFlops:
    """What further runs of a token add: `layers`, their FLOPs in one more run, and `gate`, those of one gate.

    `prices`: whose p_target training asks for, steps taken or gates asked; `has_step_loss`: each step has a loss.
    """

    rule: StepRule
    layers: int
    gate: int
    prices: Literal["steps", "gates"] | None = None
    has_step_loss: bool = False

    def gates_at(self, step: int) -> int:
        """Gates that a token is asked when it has taken its run `step`, counted from 0."""
        first, last = self.rule.first_gates, self.rule.num_gates
        return min(first, last) if step == 0 else int(step + first <= last)


@dataclass(frozen=True)
class ModelFlops:
    """Forward FLOPs of a model's parts: `layers`, `adapter` and `head` are of one token, `attention` is by layer.

    `adapter` is 0 for a plain model, `latent` None for one without latent steps, and `compute_parameters` the N of
    6 N D. `runs`: those of the backbone over all tokens in a pass, for each the slots of a token; `between` two of them
    stands PonderLM's mean embedding, or a gate. `decode_runs`: those of a token in decoding, over the last run's slots.
    `train_heads`: losses that a pass has in training.
    """

    layers: int
    attention: tuple[Attention, ...]
    adapter: int
    head: int
    compute_parameters: int
    latent: LatentFlops | None = None
    runs: tuple[int, ...] = (1,)
    decode_runs: int = 1
    between: int = 0
    train_heads: int = 1

    def run(self, num_tokens: int, slots: int = 1, is_dense: bool = False) -> int:
        """The backbone over one sequence, without head and adapter."""
        num_slots = num_tokens * slots
        if is_dense:
            attention = sum(layer.flops_per_key for layer in self.attention) * num_slots**2
        else:
            attention = sum(layer.over(num_tokens, slots) for layer in self.attention)
        return self.layers * num_slots + attention

    def passes(self, num_tokens: int, num_passes: int = 1, is_dense: bool = False) -> int:
        """A forward of so many parallel passes over one sequence, without the head."""
        runs = sum(self.run(num_tokens, slots, is_dense) for slots in self.runs)
        between = self.between * num_tokens * (len(self.runs) - 1)
        return num_passes * (runs + between) + self.adapter * num_tokens * (num_passes - 1)

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

    def decode(self, num_keys: int, latent_length: float = 0.0) -> int:
        """One token of the recurrence, so many tokens with itself: one run, whatever the training passes.

        latent_length: latent steps of every token; a mean that is no whole number estimates what `decode_steps` counts.
        """
        slots = self.runs[-1]
        attention = sum(layer.at(num_keys, slots) for layer in self.attention)
        total, entries = float(self.adapter + self.head), 0.0
        if self.latent is None:
            between = self.between * (len(self.runs) - 1)
            return round(total) + self.decode_runs * (self.layers * slots + attention) + between
        inner = sum(layer.at(num_keys, slots) for layer in self.inner)
        for step in range(math.ceil(latent_length) + 1):
            share = min(1.0, 1.0 + latent_length - step)  # of tokens that run once more
            entries += share
            read = {"below": entries, "own": share, "first": 1.0}[self.latent.rule.reads]
            total += share * (self.latent.layers + inner * read if step else self.layers + attention)
            total += share * self.latent.gate * self.latent.gates_at(step)
        return round(total)

    def steps(self, lengths: Tensor, is_dense: bool = False, keeps_rows: bool = False) -> int:
        """A pass, without the head, over rows of tokens that take so many latent steps, [B, T].

        is_dense: as it is computed, see above. keeps_rows: with gradients, rows whose tokens have all exited stay.
        """
        if is_dense:
            return self._as_run(lengths, keeps_rows)
        counts = self._counts(lengths)
        runs = self.layers * lengths.numel() + self._latent.layers * counts["latent_steps"]
        return runs + self.keys(counts["attention_keys"]) + self._latent.gate * counts["gates"]

    def decode_steps(self, lengths: Tensor) -> int:
        """One more token of each row, the last of those that took so many latent steps, [B, T]."""
        new = self.steps(lengths) - self.steps(lengths[:, :-1])
        return new + len(lengths) * (self.adapter + self.head)

    def cache_entries(self, latent_length: float = 0.0) -> float:
        """Keys and values that a token leaves in each layer, in the mean over layers."""
        if self.latent is None:
            return self.decode_runs * self.runs[-1]
        if self.latent.rule.reads == "first":
            return 1
        return 1 + latent_length * len(self.inner) / len(self.attention)

    @property
    def inner(self) -> tuple[Attention, ...]:
        """The layers that run again."""
        outer = self.latent.rule.num_outer if self.latent else 0
        return self.attention[outer : len(self.attention) - outer]

    @property
    def _latent(self) -> LatentFlops:
        assert self.latent is not None
        return self.latent

    def keys(self, number: int) -> int:
        """Attention to so many keys, summed over layers, which are equally wide."""
        return self.attention[0].flops_per_key * number

    def _counts(self, lengths: Tensor) -> dict[str, int]:
        windows = [layer.window for layer in self.attention]
        return dict(zip(COUNTS, step_counts(lengths, windows, self._latent.rule).tolist(), strict=True))

    def _as_run(self, lengths: Tensor, keeps_rows: bool) -> int:
        latent, num_columns = self._latent, lengths.shape[1]
        total, num_keys = 0, 0
        for step in range(int(lengths.max()) + 1):
            active = (lengths >= step).sum(-1)
            num_rows = len(active) if keeps_rows else int((active > 0).sum())
            num_own = int(active.max())
            num_queries = num_rows * num_own
            num_keys += num_own
            read = {"below": num_keys, "own": num_own, "first": num_columns}[latent.rule.reads]
            layers = self.attention if step == 0 else self.inner
            total += num_queries * (latent.layers if step else self.layers) + self.keys(
                num_queries * read * len(layers)
            )
            total += num_queries * latent.gate * latent.gates_at(step)
        return total


@dataclass(frozen=True)
class RunFlops:
    """Training FLOPs of a finished run: `counted` from its modules, and `six_nd`."""

    counted: float
    six_nd: float
    decode_per_token: int  # in the middle of a training sequence, at the trained model's mean latent length
    cache_bytes_per_token: float  # in bfloat16, at that length


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
        latent=_latent(model),
        runs=tuple(model.model.runs_of_pass()),
        decode_runs=getattr(model.model, "num_runs", 1),
        between=_between(model),
        train_heads=len(model.model.runs_of_pass()) if getattr(model.config, "exit_gate", False) else 1,
    )


def training_flops(
    flops: ModelFlops, summary: Mapping[str, Any], sequence_length: int, has_checkpointing: bool
) -> float:
    """Training FLOPs of a run with these counts in summary.json: `tokens`, `pass_tokens`, `target_tokens`, and for a
    model with latent steps `COUNTS`."""
    tokens, pass_tokens, latent = summary["tokens"], summary["pass_tokens"], flops.latent
    targets = summary.get("target_tokens", tokens) / max(1, tokens)
    parallel_tokens = pass_tokens - (summary["latent_steps"] if latent else 0)  # over all passes
    if flops.runs != (1,):
        parallel_tokens = tokens  # a pass of several runs, or slots
    heads = targets * parallel_tokens * flops.train_heads
    others, forward_only = flops.adapter * (parallel_tokens - tokens), 0.0
    if latent is None:
        # Passes, and refinements of PonderLM-2, beyond one pass as configured are runs like its last one.
        more = (pass_tokens / tokens - sum(flops.runs)) / flops.runs[-1]
        whole = flops.passes(sequence_length) + more * flops.run(sequence_length, flops.runs[-1])
        layers = whole / sequence_length * tokens
    else:
        steps = summary["latent_steps"]
        layers = flops.layers * (pass_tokens - steps) + latent.layers * steps + flops.keys(summary["attention_keys"])
        others += latent.gate * summary["gates"]
        priced = {None: 0, "steps": summary["latent_targets"], "gates": summary["gates"] * targets}
        forward_only = flops.head * priced[latent.prices]
        heads += (heads + summary["latent_targets"]) * latent.has_step_loss
    times = FORWARD_AND_BACKWARD + RECOMPUTED * has_checkpointing
    return times * layers + FORWARD_AND_BACKWARD * (others + flops.head * heads) + forward_only


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
    latent_length = _latent_length(summary)
    cache_bytes = cache_bytes_per_token(config, flops.cache_entries(latent_length))
    return RunFlops(counted, six_nd, flops.decode(length // 2, latent_length), cache_bytes)


def _latent_length(summary: Mapping[str, Any]) -> float:
    """Of the trained model, where it was evaluated at the end, or else of all its training."""
    steps = summary.get("latent_steps", 0)
    last = (summary.get("final") or {}).get("eval") or {}
    return last.get("latent_length", steps / max(1, summary["pass_tokens"] - steps))


def _latent(model: Any) -> LatentFlops | None:
    config = model.config
    if (rule := step_rule(config)) is None:
        return None
    layers = _layer_flops(model.model.backbone, config.text_config)
    if isinstance(config, RecursionsConfig):
        layers -= sum(_layer_flops(model.model.blocks()[i], config.text_config) for i in (0, -1))
    gate = next(iter(model.model.router.children()), None)  # all gates of a router are alike
    if isinstance(gate, nn.ModuleList):
        gate = gate[0] if len(gate) else None
    matrices = [] if gate is None else [shape for part in gate.modules() for shape in _matrices(part)]
    flops = LatentFlops(rule, layers, 2 * sum(math.prod(shape) for shape in matrices))
    if not isinstance(config, AdaptiveLatentConfig):
        return flops
    prices: Literal["steps", "gates"] = "gates" if config.penalize_cuts else "steps"
    has_prices = rule.num_gates > 0 and config.adaptive_loss_weight > 0
    return replace(flops, prices=prices if has_prices else None, has_step_loss=config.step_loss_weight > 0)


def _between(model: LatentForCausalLM) -> int:
    if isinstance(model.config, PonderConfig):
        return 4 * model.lm_head.weight.numel()  # logits, and the mean over the vocabulary
    return 2 * model.config.hidden_size * getattr(model.config, "exit_gate", False)


def _model_class(config: LatentConfig) -> type[LatentForCausalLM]:
    for model_class in METHODS.values():
        if type(config) is model_class.config_class:  # one may derive from another
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


def _keys(earlier: int, num_tokens: int, slots: int) -> int:
    """Keys that tokens see: all slots of `earlier` tokens in sum, from each slot; and of its own those up to it."""
    return slots * slots * earlier + num_tokens * slots * (slots + 1) // 2


def _attention(text_config: Any) -> tuple[Attention, ...]:
    """Scores and values: 4 x heads x head size for a query and a key. Windows are those of the family's cache."""
    heads = text_config.num_attention_heads
    head_size = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    return tuple(Attention(4 * heads * head_size, window) for window in attention_windows(text_config))
