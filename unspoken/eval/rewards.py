"""Rewards with a right answer: reasoning-gym's problems, texts, numbers, mathematics, or any function of the user's.

    reasoning_gym             1 where the problem's own scorer gives it in full (`partial: true`: what it gives)
    exact                     1 where the completion is the row's `answer`, white space around them aside
    last_number               1 where the last number in the completion is the row's `answer`: steps may stand before it
    math                      1 where math-verify finds the completion's last answer equal to the row's `answer`
    package.module:function   function(prompts=, completions=, **columns) -> a number for each completion

Whatever they return is checked: a reward that is no number, not finite, or one too many or too few, ends the run with
the function's name and the row. A scorer of reasoning-gym that raises on what a model wrote gives 0.
"""

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

from unspoken.data.reasoning import Scorers
from unspoken.errors import UnspokenError, UsageError, first_line, nearest

RewardFunction = Callable[..., Sequence[float]]
Row = Mapping[str, Any]
LARGEST = 3.4e38  # of float32, in which TRL keeps rewards
ANSWER, ENTRY = "answer", "entry"  # columns of the rows
NAMES = ("reasoning_gym", "exact", "last_number", "math")
# A minus behind a digit or a bracket takes something away: the last number of 9-5 is 5.
_NUMBER = re.compile(
    r"(?:(?<![0-9)\]])[-−])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)


def _nothing(row: Row) -> str | None:
    return None


@dataclass
class Checked:
    """A reward function whose answers are checked. `__name__` is what TRL calls it in the log.

    fault: what a row lacks that the function reads, or None; to ask before anything is generated.
    """

    name: str
    function: RewardFunction
    fault: Callable[[Row], str | None] = _nothing

    @property
    def __name__(self) -> str:
        return self.name.rpartition(":")[2]

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Raises UnspokenError for what is no reward, naming function and row, and for a function that fails."""
        try:
            rewards = self.function(prompts=prompts, completions=completions, **columns)
        except UnspokenError:
            raise
        except Exception as error:
            raise UnspokenError(f"reward {self.name} failed: {type(error).__name__}: {first_line(error)}") from error
        if not isinstance(rewards, Sequence) or isinstance(rewards, str):
            raise UnspokenError(f"reward {self.name} returned {type(rewards).__name__}, not a list of numbers")
        if len(rewards) != len(completions):
            count = len(completions)
            raise UnspokenError(f"reward {self.name} returned {len(rewards)} rewards for {count} completions")
        for row, reward in enumerate(rewards):
            if not isinstance(reward, Real) or not abs(reward) <= LARGEST:
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
        return _reasoning_gym(partial)
    if name == "exact":
        return Checked(name, _exact, _no_answer)
    if name == "last_number":
        return Checked(name, _last_number, _no_number)
    if name == "math":
        return Checked(name, _math(), _no_answer)
    if ":" not in name:
        raise UsageError(
            f"no reward {name!r}{nearest(name, NAMES)}; there are {', '.join(NAMES)}, and your own as "
            "package.module:function"
        )
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # where a script of one's own lies; the command itself starts elsewhere
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"reward {name}: {error}") from error
    if not callable(function):
        raise UsageError(f"reward {name} is {type(function).__name__}, not a function")
    return Checked(name, function)


def last_number(text: str) -> Decimal | None:
    """The last number that is written in a text; 1,234 is one."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("−", "-")) if found else None


def _no_answer(row: Row) -> str | None:
    return None if row.get(ANSWER) is not None else f"the row has no {ANSWER!r}"


def _no_number(row: Row) -> str | None:
    if fault := _no_answer(row):
        return fault
    return None if _NUMBER.fullmatch(str(row[ANSWER]).strip()) else f"{ANSWER!r} is not a number"


def _exact(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    pairs = zip(completions, answer, strict=True)
    return [float(text_of(completion).strip() == str(right).strip()) for completion, right in pairs]


def _last_number(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **columns: Any
) -> list[float]:
    pairs = zip(completions, answer, strict=True)
    found = [(last_number(text_of(completion)), last_number(str(right))) for completion, right in pairs]
    return [float(written is not None and written == right) for written, right in found]


def _reasoning_gym(partial: bool) -> Checked:
    scorers = Scorers("reward reasoning_gym")

    def score(prompts: Sequence[Any], completions: Sequence[Any], entry: Sequence[Any], **columns: Any) -> list[float]:
        pairs = zip(completions, entry, strict=True)
        found = [scorers.score(text_of(completion), _entry(own)) for completion, own in pairs]
        return found if partial else [float(one >= 1.0) for one in found]

    def fault(row: Row) -> str | None:
        if row.get(ENTRY) is None:
            return f"the row has no {ENTRY!r}"
        try:
            scorers.of(_entry(row[ENTRY]))
        except Exception as error:  # whatever the library makes of it
            return f"{ENTRY!r} is no problem of reasoning-gym ({type(error).__name__}: {first_line(error)})"
        return None

    return Checked("reasoning_gym", score, fault)


def _entry(value: Any) -> dict[str, Any]:
    return json.loads(value) if isinstance(value, str) else value


def _math() -> RewardFunction:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise UsageError(f"reward math: {error}; run `pip install 'math-verify[antlr4_13_2]'`") from error

    def score(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [float(verify(parse(f"${right}$"), parse(text_of(completion)))) for completion, right in pairs]

    return score
