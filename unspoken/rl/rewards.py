"""Rewards with a right answer: reasoning-gym's problems, mathematics, or any function of the user's.

    reasoning_gym             1 where the problem's own scorer gives it in full (`partial: true`: what it gives)
    math                      1 where math-verify finds the completion's last answer equal to the row's `answer`
    package.module:function   function(prompts=, completions=, **columns) -> a number for each completion

Whatever they return is checked: a reward that is no number, not finite, or one too many or too few, ends the run with
the function's name and the row. A scorer of reasoning-gym that raises on what a model wrote gives 0.
"""

import importlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from unspoken.errors import UnspokenError, UsageError

RewardFunction = Callable[..., Sequence[float]]
ANSWER, ENTRY = "answer", "entry"  # columns of the rows


@dataclass
class Checked:
    """A reward function whose answers are checked. `__name__` is what TRL calls it in the log."""

    name: str
    function: RewardFunction

    @property
    def __name__(self) -> str:
        return self.name.rpartition(":")[2]

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Raises UnspokenError for what is no reward, naming function and row."""
        rewards = self.function(prompts=prompts, completions=completions, **columns)
        if not isinstance(rewards, Sequence) or isinstance(rewards, str):
            raise UnspokenError(f"reward {self.name} returned {type(rewards).__name__}, not a list of numbers")
        if len(rewards) != len(completions):
            count = len(completions)
            raise UnspokenError(f"reward {self.name} returned {len(rewards)} rewards for {count} completions")
        for row, reward in enumerate(rewards):
            if not isinstance(reward, Real) or not math.isfinite(reward):
                raise UnspokenError(f"reward {self.name} returned {reward!r} for row {row}, not a finite number")
        return [float(reward) for reward in rewards]


def text_of(completion: Any) -> str:
    """A completion as text: TRL gives a text, or messages."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def find(name: str, partial: bool = False) -> Checked:
    """The reward of that name.

    Raises:
        UsageError: no such reward, or a package that it needs is not installed.
    """
    if name == "reasoning_gym":
        return Checked(name, _reasoning_gym(partial))
    if name == "math":
        return Checked(name, _math())
    if ":" not in name:
        raise UsageError(f"no reward {name!r}; there are reasoning_gym, math, and your own as package.module:function")
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"reward {name}: {error}") from error
    if not callable(function):
        raise UsageError(f"reward {name} is {type(function).__name__}, not a function")
    return Checked(name, function)


def _reasoning_gym(partial: bool) -> RewardFunction:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UsageError(f"reward reasoning_gym: {error}; run `pip install reasoning-gym`") from error
    scorers: dict[str, Any] = {}

    def score(prompts: Sequence[Any], completions: Sequence[Any], entry: Sequence[Any], **columns: Any) -> list[float]:
        rewards = []
        for completion, own in zip(completions, entry, strict=True):
            row = json.loads(own) if isinstance(own, str) else own
            name = row["metadata"]["source_dataset"]
            if name not in scorers:
                scorers[name] = reasoning_gym.get_score_answer_fn(name)
            try:
                found = float(scorers[name](text_of(completion).strip(), row))
            except Exception:  # scorers of some data sets raise on what is no answer
                found = 0.0
            rewards.append(found if partial else float(found >= 1.0))
        return rewards

    return score


def _math() -> RewardFunction:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise UsageError(f"reward math: {error}; run `pip install 'math-verify[antlr4_13_2]'`") from error

    def score(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [float(verify(parse(f"${right}$"), parse(text_of(completion)))) for completion, right in pairs]

    return score
