"""Configurations of the latent models, known to `AutoConfig`. Imports nothing but transformers' configuration base."""

import copy
import difflib
import itertools
import math
from numbers import Integral, Real
from typing import ClassVar, Literal

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

ROUTERS = ("linear", "mlp", "multi_linear", "multi_mlp", "none")
LOSS_FORMS = ("A", "B", "C", "D")
RECURSION_ROUTERS = ("token_choice", "expert_choice")
KV_MODES = ("own", "shared")
_IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")


class LatentConfig(PreTrainedConfig):
    """What every latent model holds: the backbone's configuration, whole, and how inputs are scaled.

    `text_config` is the backbone's own configuration (Llama, Qwen3, ...); generate, TRL and the caches find it
    through `get_text_config()`. `embedding_scale` multiplies token embeddings before they enter the backbone;
    1 for a converted model, sqrt(2.5 d) with `initializer_range` sqrt(2 / (5 d)) for one trained from scratch,
    so that an embedding's RMS is 1, like a normed hidden state's (see `scaled_init`).

    `tie_word_embeddings` and the special token ids default to the backbone's.
    """

    # What transformers' Trainer does not gather: predictions are logits, not every pass's states and latent steps.
    keys_to_ignore_at_inference: ClassVar = [
        "cache",
        "pass_losses",
        "pass_hidden_states",
        "segments",
        "pass_latents",
        "exits",
    ]
    sub_configs_defaults: ClassVar = {"text_config": SubConfigSpec(AutoConfig, model_type="llama")}

    text_config: PreTrainedConfig = None  # type: ignore[assignment]  # a dict is turned into one; None is Llama's
    embedding_scale: float = 1.0
    tie_word_embeddings: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        _refuse_misspelled(
            kwargs, sorted(set(type(self).__dataclass_fields__) - set(PreTrainedConfig.__dataclass_fields__))
        )
        # A copy: transformers sets the attention and expert implementations of the configuration inside, and a live
        # model that shares it would go on without its causal mask.
        self.text_config = copy.deepcopy(self.text_config)
        kept = {name: getattr(self.text_config, name, None) for name in _IMPLEMENTATIONS}
        super().__post_init__(**kwargs)
        for name, value in kept.items():
            if value is not None and getattr(self, name) is None:
                setattr(self.text_config, name, value)
        for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(self.text_config, name, None))
        self.tie_word_embeddings = bool(self.tie_word_embeddings)
        # One truth: a body with its own idea of tying would tie, or not, behind the head model's back.
        self.text_config.tie_word_embeddings = self.tie_word_embeddings
        self.check_fields()

    def to_dict(self) -> dict:
        """Without the `use_cache` that trainers switch off here for their run: the backbone's is the one read."""
        return {name: value for name, value in super().to_dict().items() if name != "use_cache"}

    def check_fields(self) -> None:
        """Refuse values that cannot be meant. Models call it too: `from_pretrained` sets fields after the init."""
        scale = self.embedding_scale
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0:
            raise ValueError(f"embedding_scale must be a number above 0, got {scale!r}")

    def loss_weights(self, num_passes: int) -> list[float]:
        """What each of so many passes' losses is multiplied with in the training loss."""
        return [1.0] * num_passes

    @property
    def vocab_size(self) -> int:
        return self.text_config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.text_config.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.text_config.num_hidden_layers


class VanillaConfig(LatentConfig):
    """The plain model: one pass, no adapter. The baseline of every comparison, on equal footing."""

    model_type = "unspoken_vanilla"


class RecyclerConfig(LatentConfig):
    """Recycler: the previous token's top hidden state enters the next token's input through an adapter.

    - `num_train_passes`: parallel passes in training and in a forward without a cache (the paper's k_train).
    - `num_prefill_passes`: parallel passes over a prompt before decoding (k_prefill, 1 or 2 in the paper).
    - `detach_between_passes`: cut the gradient between passes; the paper lets it flow.
    - `pass_loss_reduction`: `sum` over passes as in Eq. 4, or `mean`, which keeps the gradient's scale (and so the
      effect of clipping) that of a plain model.
    - `pass_loss_weights`: a weight for each pass's loss, the last one for all that follow; equal by default. `mean`
      divides by their sum.
    - `adapter_norm`: where the adapter has its RMSNorm, see `latent.recycle.RecycleAdapter`: `input` as in the paper,
      `output`, or `none`.
    - `feedback`: `added` to the token's embedding, or `gated`, the Full-Bandwidth Transformer's product in its place
      (`latent.recycle.GatedAdapter`), which no pretrained model can start from unchanged.

    Source: Recycler section 2, Eq. 2-4.
    """

    model_type = "unspoken_recycler"

    num_train_passes: int = 2
    num_prefill_passes: int = 2
    detach_between_passes: bool = False
    pass_loss_reduction: Literal["sum", "mean"] = "sum"
    pass_loss_weights: list[float] | None = None
    adapter_norm: Literal["input", "output", "none"] = "input"
    feedback: Literal["added", "gated"] = "added"

    def check_fields(self) -> None:
        super().check_fields()
        for name in ("num_train_passes", "num_prefill_passes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        _check_flag("detach_between_passes", self.detach_between_passes)
        if self.pass_loss_reduction not in ("sum", "mean"):
            raise ValueError(f"pass_loss_reduction must be 'sum' or 'mean', got {self.pass_loss_reduction!r}")
        if self.adapter_norm not in ("input", "output", "none"):
            raise ValueError(f"adapter_norm must be 'input', 'output' or 'none', got {self.adapter_norm!r}")
        if self.feedback not in ("added", "gated"):
            raise ValueError(f"feedback must be 'added' or 'gated', got {self.feedback!r}")
        if self.feedback == "gated" and self.adapter_norm != "input":
            raise ValueError("adapter_norm is for feedback 'added'; the gated product has its own norms")
        weights = self.pass_loss_weights
        if weights is not None and not (weights and all(w >= 0 for w in weights) and weights[-1] > 0):
            raise ValueError(f"pass_loss_weights must be numbers of at least 0, the last above 0; got {weights!r}")

    def loss_weights(self, num_passes: int) -> list[float]:
        given = self.pass_loss_weights or [1.0]
        weights = [float(given[min(i, len(given) - 1)]) for i in range(num_passes)]
        if not any(weights):  # fewer passes than the first that counts, or the recurrence: the last of them speaks
            weights[-1] = float(given[-1])
        total = sum(weights) if self.pass_loss_reduction == "mean" else 1.0
        return [weight / total for weight in weights]


class LoopedConfig(LatentConfig):
    """Looped model: the whole stack of layers `num_loops` times.

    - `norm_between_loops`: states go through the final norm after every loop, as in Ouro, not after the last alone.
    - `inject_input`: the token's embedding is added to every loop's input.
    - `exit_gate`: a gate after every loop but the last says with what probability a token exits there (Ouro); training
      minimises the expected loss over exits minus `exit_entropy_weight` times their entropy. It reads normed states.
    - `exit_quantile`: in evaluation, a token's state is that of the first loop by which it has exited with at least
      this probability; 1 is the last loop's. All loops run, for tokens to come read their keys.
    """

    model_type = "unspoken_looped"

    num_loops: int = 4
    norm_between_loops: bool = False
    inject_input: bool = False
    exit_gate: bool = False
    exit_entropy_weight: float = 0.1
    exit_quantile: float = 1.0

    def check_fields(self) -> None:
        super().check_fields()
        _check_count("num_loops", self.num_loops, at_least=1)
        for name in ("norm_between_loops", "inject_input", "exit_gate"):
            _check_flag(name, getattr(self, name))
        if self.exit_gate and not self.norm_between_loops:
            raise ValueError("exit_gate needs norm_between_loops: it reads states that the head could read")
        if not _is_number(self.exit_entropy_weight) or self.exit_entropy_weight < 0:
            raise ValueError(f"exit_entropy_weight must be a number of at least 0, got {self.exit_entropy_weight!r}")
        if not _is_number(self.exit_quantile) or not 0 <= self.exit_quantile <= 1:
            raise ValueError(f"exit_quantile must be a probability, 0 to 1, got {self.exit_quantile!r}")


class PonderConfig(LatentConfig):
    """PonderLM: the predicted mean embedding is added to the next run's input, `num_ponder_steps` times.

    - `accumulate`: to the input of the run before, as in the first release, instead of to the token's embedding, as in
      the suite that the second paper compares with.
    """

    model_type = "unspoken_ponder"

    num_ponder_steps: int = 3
    accumulate: bool = False

    def check_fields(self) -> None:
        super().check_fields()
        _check_count("num_ponder_steps", self.num_ponder_steps, at_least=0)
        _check_flag("accumulate", self.accumulate)


class PauseConfig(LatentConfig):
    """Pause tokens: `num_pauses` slots with one learned input after every token; the last one's state speaks."""

    model_type = "unspoken_pause"

    num_pauses: int = 3

    def check_fields(self) -> None:
        super().check_fields()
        _check_count("num_pauses", self.num_pauses, at_least=0)


class Ponder2Config(LatentConfig):
    """PonderLM-2: `num_latent_thoughts` slots after every token; the input of each is the state of the slot before it.

    - `train_refinements`: how often a training forward computes all thoughts anew from all of them; one is drawn for
      each step.
    - `num_refinements`: the same in evaluation and over a prompt. Decoding is exact.
    """

    model_type = "unspoken_ponder2"

    num_latent_thoughts: int = 1
    train_refinements: list[int] | None = None
    num_refinements: int = 3

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.train_refinements is None:
            self.train_refinements = [2, 3]

    def check_fields(self) -> None:
        super().check_fields()
        _check_count("num_latent_thoughts", self.num_latent_thoughts, at_least=1)
        choices = [2, 3] if self.train_refinements is None else self.train_refinements
        if not (isinstance(choices, list) and choices and all(_is_count(n, at_least=0) for n in choices)):
            raise ValueError(f"train_refinements must be whole numbers of at least 0, got {choices!r}")
        _check_count("num_refinements", self.num_refinements, at_least=0)


class RecursionsConfig(LatentConfig):
    """Mixture-of-Recursions: the middle layers, all but the first and the last, up to `num_recursions` times, as often
    for each token as a router says.

    - `recursion_router`: `token_choice`, each token's depth is said once, before the first recursion; `expert_choice`,
      each recursion takes the tokens that it scores highest, among those that the one before took.
    - `kv_mode`: `own`, a recursion's queries read keys of the same recursion; `shared`, all read the first one's.
    - `capacities`: for `expert_choice` in training, the share of tokens that each recursion takes; the first is 1. By
      default (N - i) / N for i = 0, 1, ... Whom the highest scores belong to depends on tokens to come: in evaluation
      and decoding, a token is taken where its score says so (the gate is above a half), which training teaches the
      scores (`selection_weight`).
    - `selects_by_capacity`: evaluate as in training, which is not causal: a forward without a cache, nothing decoded.
    - `router_scale`: of the gate that multiplies a recursion's output; by default 0.1 for `expert_choice`, whose
      gate is a sigmoid, and 1 for `token_choice`, a softmax over depths.
    - `balance_weight`, `z_loss_weight`: of `token_choice`'s load-balancing loss and of its logits' size.
    - `selection_weight`: of `expert_choice`'s cross-entropy between gates and who was taken.

    Source: Mixture-of-Recursions (arXiv 2507.10524); weights as its authors' settings have them.
    """

    model_type = "unspoken_mor"

    num_recursions: int = 4
    recursion_router: Literal["token_choice", "expert_choice"] = "token_choice"
    kv_mode: Literal["own", "shared"] = "own"
    capacities: list[float] | None = None
    selects_by_capacity: bool = False
    router_scale: float | None = None
    balance_weight: float = 0.1
    z_loss_weight: float = 1e-5
    selection_weight: float = 0.001

    def check_fields(self) -> None:
        super().check_fields()
        _check_count("num_recursions", self.num_recursions, at_least=1)
        if self.num_hidden_layers < 3:
            raise ValueError(f"recursions need a first, a middle and a last layer; got {self.num_hidden_layers} layers")
        for name, valid in (("recursion_router", RECURSION_ROUTERS), ("kv_mode", KV_MODES)):
            if (value := getattr(self, name)) not in valid:
                raise ValueError(f"{name} must be one of {', '.join(valid)}, got {value!r}")
        _check_flag("selects_by_capacity", self.selects_by_capacity)
        is_choice = self.recursion_router == "expert_choice"
        if not is_choice and (self.capacities is not None or self.selects_by_capacity):
            raise ValueError("capacities and selects_by_capacity are for recursion_router 'expert_choice'")
        given = self.shares
        is_right = len(given) == self.num_recursions and all(_is_number(share) and 0 < share <= 1 for share in given)
        if not is_right or given[0] != 1 or any(a < b for a, b in itertools.pairwise(given)):
            raise ValueError(
                f"capacities must be {self.num_recursions} shares above 0, from 1 falling, got {self.capacities!r}"
            )
        for name in ("balance_weight", "z_loss_weight", "selection_weight"):
            if not _is_number(value := getattr(self, name)) or value < 0:
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
        if not _is_number(self.scale) or self.scale <= 0:
            raise ValueError(f"router_scale must be a number above 0, got {self.router_scale!r}")

    @property
    def shares(self) -> list[float]:
        """The capacities."""
        count = self.num_recursions
        return [(count - i) / count for i in range(count)] if self.capacities is None else self.capacities

    @property
    def scale(self) -> float:
        default = 0.1 if self.recursion_router == "expert_choice" else 1.0
        return default if self.router_scale is None else self.router_scale


class AdaptiveLatentConfig(LatentConfig):
    """Adaptive latent CoT: each token runs the backbone again on its own state until a router lets it go.

    - `max_latent_steps`: runs beyond a token's first (the paper's l_max); 0 is the plain model.
    - `exit_threshold`: tau; a token goes on while the probability of reaching the next step is at least this.
    - `exit_at_step`: no router; every token takes so many runs of the backbone, and the last one's state counts alone.
    - `router`: `linear` (one for all steps, the paper's default), `mlp`, `multi_linear`, `multi_mlp`, or `none`, which
      takes all steps. See `latent.halting.Router`.
    - `router_bias`: of a new router, whose weights are zero: every gate is sigmoid(router_bias) at first.
    - `adaptive_loss`: form of the penalty on going on (A, B, C or D, see `latent.halting.adaptive_penalty`),
      `adaptive_loss_weight` its lambda, `adaptive_loss_exponent` its beta.
    - `penalize_cuts`: count the gate that a cut overrules too. The paper does not say; such a gate would only ever be
      pushed down, as no state that it weighs is in the mixture.
    - `step_loss_weight`: the weight of each step's own next-token loss, their mean beside the mixture's.

    Source: Adaptive latent CoT section 3.
    """

    model_type = "unspoken_adaptive"

    max_latent_steps: int = 3
    exit_threshold: float = 0.01
    exit_at_step: int | None = None
    router: Literal["linear", "mlp", "multi_linear", "multi_mlp", "none"] = "linear"
    router_bias: float = 2.0
    adaptive_loss: Literal["A", "B", "C", "D"] = "B"
    adaptive_loss_weight: float = 0.4
    adaptive_loss_exponent: float = 10.0
    penalize_cuts: bool = False
    step_loss_weight: float = 0.0

    def check_fields(self) -> None:
        super().check_fields()
        check_latent_steps(self.max_latent_steps, self.exit_threshold, self.exit_at_step)
        for name, valid in (("router", ROUTERS), ("adaptive_loss", LOSS_FORMS)):
            if (value := getattr(self, name)) not in valid:
                raise ValueError(f"{name} must be one of {', '.join(valid)}, got {value!r}")
        for name in ("adaptive_loss_weight", "adaptive_loss_exponent", "step_loss_weight"):
            if not _is_number(value := getattr(self, name)) or value < 0:
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
        if not _is_number(self.router_bias):
            raise ValueError(f"router_bias must be a number, got {self.router_bias!r}")
        _check_flag("penalize_cuts", self.penalize_cuts)


class AdaptiveRecyclerConfig(AdaptiveLatentConfig, RecyclerConfig):
    """Both: each token takes latent steps, and its z_final is recycled into the next token's input."""

    model_type = "unspoken_adaptive_recycler"


def check_latent_steps(max_latent_steps: object, exit_threshold: object, exit_at_step: object) -> None:
    """Raise ValueError for what cannot be meant, in a configuration or in a call."""
    _check_count("max_latent_steps", max_latent_steps, at_least=0)
    if not _is_number(exit_threshold) or not 0 <= exit_threshold <= 1:  # type: ignore[operator]
        raise ValueError(f"exit_threshold must be a probability, 0 to 1, got {exit_threshold!r}")
    if exit_at_step is not None and not _is_count(exit_at_step, at_least=1):
        raise ValueError(f"exit_at_step must be a whole number of at least 1, or null, got {exit_at_step!r}")


def _check_count(name: str, value: object, at_least: int) -> None:
    if not _is_count(value, at_least):
        raise ValueError(f"{name} must be a whole number of at least {at_least}, got {value!r}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def _is_count(value: object, at_least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= at_least


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def scaled_init(hidden_size: int) -> dict[str, float]:
    """Return the from-scratch init of this library: std of the weights, and the scale of token embeddings.

    Their product is 1: an embedding enters the backbone at RMS 1, the scale of the normed state that is added to it.
    `initializer_range` belongs in the backbone's configuration, `embedding_scale` in the latent one.
    """
    return {
        "initializer_range": (2 / (5 * hidden_size)) ** 0.5,
        "embedding_scale": (2.5 * hidden_size) ** 0.5,
    }


def _refuse_misspelled(kwargs: dict, fields: list[str]) -> None:
    """transformers stores unknown arguments as attributes; a near miss of a real one is a mistake, not an extra."""
    for key in kwargs:
        if match := difflib.get_close_matches(key, fields, n=1, cutoff=0.85):
            raise TypeError(f"unknown configuration argument {key!r} (did you mean {match[0]!r}?)")


for _config_class in (
    VanillaConfig,
    RecyclerConfig,
    AdaptiveLatentConfig,
    AdaptiveRecyclerConfig,
    LoopedConfig,
    PauseConfig,
    PonderConfig,
    Ponder2Config,
    RecursionsConfig,
):
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
