"""Tasks whose answer takes as many dependent steps as the sample is long, drawn without end and without files.

A sample is a row of tokens and, at each of them, what is to be said there (`.`: nothing). What is to be said is not
among the tokens before it, so a model has to carry it:

    running_sum         tokens   3   4   1   2   0        modulo 5
                        targets  3   2   3   0   0
    permutation_state   tokens   102 021 210              three elements
                        targets  102 120 021              the product so far: s_t[i] = s_(t-1)[p_t[i]]
    arithmetic          tokens   4 + 6 * 2 - 5 =   1      left to right, modulo 7
                        targets  . . . . . . . 1   end

Nothing here needs torch; `task_windows.py` makes training windows of it, `eval/tasks.py` measures it. Ids 0 and 1 are
the tokenizer's `<|endoftext|>` and `<|pad|>`.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from unspoken.errors import UsageError, nearest

NO_TARGET = -1
END_ID, PAD_ID, FIRST_WORD_ID = 0, 1, 2
VERSION = 1  # of how samples are drawn; part of the fingerprint


@dataclass(frozen=True)
class Sample:
    """`tokens` and `targets`, int64 [n] ids; `NO_TARGET` where nothing is to be said."""

    tokens: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class Task:
    """Samples of `min_length` to `max_length` steps, each length equally often."""

    min_length: int = 4
    max_length: int = 16

    name: ClassVar[str]
    answer: ClassVar[str] = "last"  # which of a sample's targets are its answer: the last, or all

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise UsageError(f"{self.name}: {field.name} is {value!r}; it must be a whole number")
        if not 1 <= self.min_length <= self.max_length:
            raise UsageError(
                f"{self.name}: min_length {self.min_length} and max_length {self.max_length} must be at least 1 and in "
                "this order"
            )

    def words(self) -> list[str]:
        """The vocabulary in the order of ids, from `FIRST_WORD_ID` on."""
        raise NotImplementedError

    def draw(self, random: np.random.RandomState, length: int) -> Sample:
        """A sample of so many steps."""
        raise NotImplementedError

    def num_tokens(self, length: int) -> int:
        """Tokens of the longest sample of so many steps, and one that ends it."""
        return length + 1

    def settings(self) -> dict[str, Any]:
        """What `parse_task` makes this task of."""
        return {"name": self.name, **asdict(self)}

    def fingerprint(self) -> str:
        """Changes with anything that changes the samples."""
        state = json.dumps([VERSION, self.settings(), self.words()], sort_keys=True)
        return hashlib.sha256(state.encode()).hexdigest()


@dataclass(frozen=True)
class RunningSum(Task):
    """Random digits; at each one the sum so far, modulo `modulus`."""

    modulus: int = 5

    name = "running_sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "modulus", 2, 1000)

    def words(self) -> list[str]:
        return [str(number) for number in range(self.modulus)]

    def draw(self, random: np.random.RandomState, length: int) -> Sample:
        digits = random.randint(self.modulus, size=length, dtype=np.int64)
        return Sample(FIRST_WORD_ID + digits, FIRST_WORD_ID + digits.cumsum() % self.modulus)


@dataclass(frozen=True)
class PermutationState(Task):
    """Random permutations of `num_elements` things; at each one the product so far.

    From five elements on no model of fixed depth can do it for every length (the group is not solvable).
    """

    num_elements: int = 5

    name = "permutation_state"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "num_elements", 2, 6)

    def words(self) -> list[str]:
        return ["".join(map(str, permutation)) for permutation in self._permutations]

    def draw(self, random: np.random.RandomState, length: int) -> Sample:
        chosen = random.randint(len(self._permutations), size=length, dtype=np.int64)
        states = list(itertools.accumulate(chosen, lambda state, next: self._products[state, next]))
        return Sample(FIRST_WORD_ID + chosen, FIRST_WORD_ID + np.array(states))

    @cached_property
    def _permutations(self) -> list[tuple[int, ...]]:
        return list(itertools.permutations(range(self.num_elements)))

    @cached_property
    def _products(self) -> np.ndarray:
        """[n!, n!]: the number of `first` after `second`, product[i] = first[second[i]]."""
        number = {permutation: i for i, permutation in enumerate(self._permutations)}
        rows = [
            [number[tuple(first[i] for i in second)] for second in self._permutations] for first in self._permutations
        ]
        return np.array(rows, dtype=np.int64)


@dataclass(frozen=True)
class Arithmetic(Task):
    """A chain of sums, differences and products, worked from left to right modulo `modulus`; `length` is its number
    of operands. No factor is 0, so that (for a prime modulus) every step counts. Only the result is a target."""

    min_length: int = 2
    max_length: int = 6
    modulus: int = 7

    name = "arithmetic"
    answer = "all"

    _WORDS: ClassVar = [*"0123456789", "+", "-", "*", "="]
    _OPERATORS: ClassVar = "+-*"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "modulus", 2, 10**6)

    def words(self) -> list[str]:
        return self._WORDS

    def draw(self, random: np.random.RandomState, length: int) -> Sample:
        operands = random.randint(self.modulus, size=length, dtype=np.int64).tolist()
        factors = random.randint(1, self.modulus, size=length, dtype=np.int64).tolist()
        operators = random.randint(len(self._OPERATORS), size=length, dtype=np.int64).tolist()
        value, text = operands[0], str(operands[0])
        for operand, factor, operator in zip(operands[1:], factors[1:], operators[1:]):
            match self._OPERATORS[operator]:
                case "+":
                    value, text = value + operand, f"{text}+{operand}"
                case "-":
                    value, text = value - operand, f"{text}-{operand}"
                case "*":
                    value, text = value * factor, f"{text}*{factor}"
            value %= self.modulus
        question, result = self._ids(f"{text}="), self._ids(str(value))
        nothing = np.full(len(question) - 1, NO_TARGET)
        return Sample(np.concatenate([question, result]), np.concatenate([nothing, result, [END_ID]]))

    def num_tokens(self, length: int) -> int:
        digits = len(str(self.modulus - 1))
        return length * (digits + 1) + digits + 1

    def _ids(self, text: str) -> np.ndarray:
        return np.array([FIRST_WORD_ID + self._WORDS.index(character) for character in text])


TASKS: dict[str, type[Task]] = {task.name: task for task in (RunningSum, PermutationState, Arithmetic)}


def parse_task(values: Mapping[str, Any]) -> Task:
    """The task of settings `{name: running_sum, modulus: 5, ...}`; what is not given has its default.

    Raises:
        UsageError: an unknown name or setting, a value that cannot be.
    """
    settings = dict(values)
    name = settings.pop("name", None)
    if not isinstance(name, str) or name not in TASKS:
        asked = "no `name` is given" if name is None else f"unknown task {name!r}{nearest(str(name), list(TASKS))}"
        raise UsageError(f"{asked}; the tasks are {', '.join(TASKS)}")
    known = [field.name for field in fields(TASKS[name])]
    for key in settings:
        if key not in known:
            raise UsageError(f"{name} has no setting {key!r}{nearest(str(key), known)}; it has {', '.join(known)}")
    return TASKS[name](**settings)


def _check_range(task: Task, field: str, low: int, high: int) -> None:
    if not low <= (value := getattr(task, field)) <= high:
        raise UsageError(f"{task.name}: {field} is {value}; it must lie in {low} .. {high}")
