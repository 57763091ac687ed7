"""How tokens are chosen and when text ends: the command line's options as arguments of `model.generate`."""

import argparse
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from unspoken.errors import UnspokenError, UsageError
from unspoken.models.knobs import LatentKnobs, takes_latent_steps
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.recycler import RecyclerForCausalLM


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 is greedy; `top_p` 1 and `top_k` 0 cut nothing; `num_prefill_passes` None is the model's own.

    Raises UsageError for values that cannot be.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    num_prefill_passes: int | None = None
    knobs: LatentKnobs = field(default_factory=LatentKnobs)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens is {self.max_new_tokens}; it must be at least 1")
        if not self.temperature >= 0:
            raise UsageError(f"--temperature is {self.temperature}; it must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise UsageError(f"--top-k is {self.top_k}; it must be 0 (all tokens) or more")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "Sampling":
        knobs = LatentKnobs.from_args(args)
        return cls(args.max_new_tokens, args.temperature, args.top_p, args.top_k, args.num_prefill_passes, knobs)

    def options(self, model: LatentForCausalLM) -> dict[str, Any]:
        """Arguments of `generate`. Sampling settings saved with the model are overridden, its penalties are not."""
        greedy = self.temperature == 0
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": not greedy,
            "temperature": 1.0 if greedy else self.temperature,
            "top_p": 1.0 if greedy else self.top_p,
            "top_k": 50 if greedy else self.top_k,  # 50 is transformers' default; another value draws a warning
            **self.knobs.options(model),
        }
        if isinstance(model, RecyclerForCausalLM) and self.num_prefill_passes is not None:
            options["num_passes"] = self.num_prefill_passes
        elif self.num_prefill_passes not in (None, 1):
            kind = "an adaptive" if takes_latent_steps(model) else "a plain"
            raise UsageError(f"--num-prefill-passes {self.num_prefill_passes}: {kind} model has one pass")
        return options


def end_tokens(model: LatentForCausalLM, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a text: the model's generation settings, else the tokenizer's end token, else none."""
    assert model.generation_config is not None
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    return [ids] if isinstance(ids, int) else list(ids or [])


def pad_token(tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> int:
    """An id to fill rows up with; never read, since the attention mask hides it."""
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    return ends[0] if ends else 0


def context_length(model: LatentForCausalLM) -> int | None:
    """Tokens that the model was made for, prompt and answer together."""
    return getattr(model.config.text_config, "max_position_embeddings", None)


def require_tokenizer(tokenizer: PreTrainedTokenizerBase | None, model: str) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise UnspokenError(f"{model} has no tokenizer; copy the tokenizer files of its source into the folder")
    return tokenizer
