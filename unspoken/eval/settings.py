"""How deep a model thinks in an evaluation: as its configuration says, and with each threshold asked for."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unspoken.config import RecursionsConfig
from unspoken.models.knobs import LatentKnobs, option, takes_latent_steps
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.ponder2 import Ponder2ForCausalLM

EXACT = "exact"


@dataclass(frozen=True)
class Setting:
    """Some lines of a table. `suffix` ends their names, `options` go to the forward; `knobs` are all that then hold,
    None for a model without latent steps."""

    suffix: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    knobs: Any = None

    def prune_ratio(self, latent_length: float) -> float | None:
        """The share of latent steps that were not taken; None where none may be."""
        deepest = self.knobs.last_step - 1
        return 1 - latent_length / deepest if deepest else None


def knobs_of(args: argparse.Namespace) -> list[LatentKnobs]:
    """The model's own threshold, then those that the command was given."""
    thresholds = [None, *dict.fromkeys(args.exit_threshold or [])]
    return [LatentKnobs(threshold, args.max_latent_steps, args.exit_at_step) for threshold in thresholds]


def settings_of(model: LatentForCausalLM, knobs: Sequence[LatentKnobs] = (LatentKnobs(),)) -> list[Setting]:
    """Raises UsageError where the model cannot do what is asked."""
    settings = []
    for one in knobs:
        options = one.options(model)
        in_all = {"max_latent_steps": None, "exit_threshold": None, "exit_at_step": None, **options}
        resolved = model.model.knobs(**in_all) if takes_latent_steps(model) else _recursions(model.config)
        suffix = "" if one.exit_threshold is None else f" tau={one.exit_threshold}"
        settings.append(Setting(suffix, options, resolved))
    return settings


def parallel_depth(model: LatentForCausalLM, num_passes: int | str | None) -> str:
    """As what one forward computes a text, in words; None: the model knows only one way."""
    if num_passes is None or num_passes == EXACT:
        return EXACT
    if isinstance(model, Ponder2ForCausalLM):
        return f"refined {model.config.num_refinements} times"
    return f"k={num_passes}"


def decoding_depth(model: LatentForCausalLM, num_passes: int | str | None) -> str:
    """As what a prompt is read by so many passes, and what follows it."""
    depth = parallel_depth(model, num_passes)
    return EXACT if depth == EXACT else f"{depth}, then {EXACT}"


@dataclass(frozen=True)
class RecursionDepth:
    """What holds for a model with recursions: its configuration's."""

    num_recursions: int
    recursion_router: str
    selects_by_capacity: bool

    @property
    def last_step(self) -> int:
        return self.num_recursions


def _recursions(config: Any) -> RecursionDepth | None:
    if not isinstance(config, RecursionsConfig):
        return None
    return RecursionDepth(config.num_recursions, config.recursion_router, config.selects_by_capacity)


def spelled_out(args: argparse.Namespace) -> list[str]:
    """The options of the command line that were given."""
    words = [word for threshold in args.exit_threshold or [] for word in ("--exit-threshold", str(threshold))]
    for name in ("max_latent_steps", "exit_at_step"):
        if (value := getattr(args, name)) is not None:
            words += [option(name), str(value)]
    return words
