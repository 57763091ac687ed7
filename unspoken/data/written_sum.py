"""Chains of additions and subtractions whose every running result is written out: answers that take steps.

    question      3+8-5+9=
    completion    3+8=11;11-5=6;6+9=15            modulus 10:  3+8=1;1-5=6;6+9=5
    answer        15                                           5

No result is negative: without a modulus nothing larger than the running result is taken away (from 0, nothing), and
with one results run from 0 to modulus - 1. Numbers run from 1 to `max_number`, lengths, signs and numbers are drawn
evenly within that.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from unspoken.errors import UsageError


@dataclass(frozen=True)
class WrittenSum:
    """The chains' sizes. modulus: results are taken modulo it; 0 for none.

    Raises:
        UsageError: a setting that is no whole number, or out of its range.
    """

    min_terms: int = 2
    max_terms: int = 4
    max_number: int = 9
    modulus: int = 0

    name: ClassVar[str] = "written_sum"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise UsageError(f"{self.name}: {field.name} is {value!r}; it must be a whole number")
        if not 2 <= self.min_terms <= self.max_terms:
            raise UsageError(
                f"{self.name}: min_terms {self.min_terms} and max_terms {self.max_terms} must be at least 2 and in "
                "this order"
            )
        if self.max_number < 1:
            raise UsageError(f"{self.name}: max_number is {self.max_number}; it must be at least 1")
        if self.modulus and self.modulus <= self.max_number:
            raise UsageError(
                f"{self.name}: modulus is {self.modulus}; it must be above max_number {self.max_number}, or 0 for none"
            )

    def draw(self, num: int, seed: int) -> Iterator[dict[str, str]]:
        """So many of `question`, `completion` and `answer`; some may be equal."""
        draw = random.Random(seed)
        return (self.chain(draw) for _ in range(num))

    def chain(self, draw: random.Random) -> dict[str, str]:
        result = draw.randint(1, self.max_number)
        question, steps = str(result), []
        for _ in range(draw.randint(self.min_terms, self.max_terms) - 1):
            most = self.max_number if self.modulus else min(self.max_number, result)
            is_less = draw.random() < 0.5 and most > 0
            term = draw.randint(1, most if is_less else self.max_number)
            sign = "-" if is_less else "+"
            question += f"{sign}{term}"
            before, result = result, result - term if is_less else result + term
            result = result % self.modulus if self.modulus else result
            steps.append(f"{before}{sign}{term}={result}")
        return {"question": f"{question}=", "completion": ";".join(steps), "answer": str(result)}
