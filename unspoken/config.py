"""Configurations of the latent models, known to `AutoConfig`. Imports nothing but transformers' configuration base."""

import copy
import difflib
from typing import ClassVar, Literal

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

_IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")


class LatentConfig(PreTrainedConfig):
    """What every latent model holds: the backbone's configuration, whole, and how inputs are scaled.

    `text_config` is the backbone's own configuration (Llama, Qwen3, ...); generate, TRL and the caches find it
    through `get_text_config()`. `embedding_scale` multiplies token embeddings before they enter the backbone;
    1 for a converted model, sqrt(2.5 d) with `initializer_range` sqrt(2 / (5 d)) for one trained from scratch,
    so that an embedding's RMS is 1, like a normed hidden state's (see `scaled_init`).

    `tie_word_embeddings` and the special token ids default to the backbone's.
    """

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

    Source: Recycler section 2, Eq. 2-4.
    """

    model_type = "unspoken_recycler"

    num_train_passes: int = 2
    num_prefill_passes: int = 2
    detach_between_passes: bool = False
    pass_loss_reduction: Literal["sum", "mean"] = "sum"
    pass_loss_weights: list[float] | None = None
    adapter_norm: Literal["input", "output", "none"] = "input"

    def check_fields(self) -> None:
        super().check_fields()
        for name in ("num_train_passes", "num_prefill_passes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not isinstance(self.detach_between_passes, bool):
            raise ValueError(f"detach_between_passes must be true or false, got {self.detach_between_passes!r}")
        if self.pass_loss_reduction not in ("sum", "mean"):
            raise ValueError(f"pass_loss_reduction must be 'sum' or 'mean', got {self.pass_loss_reduction!r}")
        if self.adapter_norm not in ("input", "output", "none"):
            raise ValueError(f"adapter_norm must be 'input', 'output' or 'none', got {self.adapter_norm!r}")
        weights = self.pass_loss_weights
        if weights is not None and not (weights and all(w >= 0 for w in weights) and weights[-1] > 0):
            raise ValueError(f"pass_loss_weights must be numbers of at least 0, the last above 0; got {weights!r}")

    def loss_weights(self, num_passes: int) -> list[float]:
        given = self.pass_loss_weights or [1.0]
        weights = [float(given[min(i, len(given) - 1)]) for i in range(num_passes)]
        total = sum(weights) if self.pass_loss_reduction == "mean" else 1.0
        return [weight / total for weight in weights]


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


for _config_class in (VanillaConfig, RecyclerConfig):
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
