"""How deep a call lets tokens think, as users give it: the same names in configuration, `generate()` and options."""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch

from unspoken.config import check_latent_steps
from unspoken.errors import UsageError
from unspoken.models.adaptive import AdaptiveHead
from unspoken.models.latent_lm import LatentForCausalLM


def takes_latent_steps(model: Any) -> bool:
    """Whether it is a model with latent steps, be they none in its configuration."""
    return isinstance(model, AdaptiveHead)


def closed_gate(config: Any, bias: float) -> float | None:
    """The gate of a new router with that bias, where it is below the threshold: no token would take a latent step, and
    a step that is not taken gives the router no gradient. None where tokens go on, or no router is asked."""
    if getattr(config, "router", "none") == "none" or config.exit_at_step is not None or config.max_latent_steps == 0:
        return None
    gate = torch.sigmoid(torch.tensor(bias, dtype=torch.float64)).item()
    return gate if gate < config.exit_threshold else None


@dataclass(frozen=True)
class LatentKnobs:
    """What a call says; None leaves it to the model's configuration. See `AdaptiveLatentConfig` for the meaning.

    Raises UsageError for values that cannot be, or of which one would have no effect.
    """

    exit_threshold: float | None = None
    max_latent_steps: int | None = None
    exit_at_step: int | None = None

    def __post_init__(self) -> None:
        given = self.given
        try:
            check_latent_steps(given.get("max_latent_steps", 0), given.get("exit_threshold", 0), self.exit_at_step)
        except ValueError as error:
            name, _, rest = str(error).partition(" ")
            raise UsageError(f"{option(name)} {rest}") from error
        if "exit_at_step" in given and len(given) > 1:
            other = option(min(given.keys() - {"exit_at_step"}))
            raise UsageError(f"--exit-at-step is the depth of all tokens; {other} would have no effect")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "LatentKnobs":
        return cls(args.exit_threshold, args.max_latent_steps, args.exit_at_step)

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def options(self, model: LatentForCausalLM) -> dict[str, Any]:
        """Arguments of the model's forward and of `generate`.

        Raises UsageError for a model that takes no latent steps, or takes a fixed number where a threshold is given.
        """
        given = self.given
        if not given:
            return {}
        if not takes_latent_steps(model):
            raise UsageError(f"{option(min(given))}: a model of type {model.config.model_type} takes no latent steps")
        if "exit_threshold" in given:
            if model.config.router == "none":
                raise UsageError("--exit-threshold would have no effect: the model has no router")
            if model.config.exit_at_step is not None and self.max_latent_steps is None:
                raise UsageError(
                    "--exit-threshold would have no effect: the model's configuration has exit_at_step "
                    f"{model.config.exit_at_step}; give --max-latent-steps, which overrules it"
                )
        return given


def option(field: str) -> str:
    """A field as the command line spells it."""
    return f"--{field.replace('_', '-')}"
