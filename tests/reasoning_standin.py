"""A stand-in for reasoning-gym, which need not be installed: data sets with the surprises that the real ones hold."""

import random
import sys
import types
from dataclasses import dataclass

import pytest

from unspoken.data import reasoning


@dataclass
class Config:
    """As the library's: settings, and size and seed."""

    max_number: int = 9
    letters: tuple[str, ...] = ("a",)
    size: int = 500
    seed: int = 0

    def validate(self):
        assert self.max_number > 0, "max_number must be positive"


class Sums:
    """Entry i of seed s is entry 0 of seed s + i."""

    def __init__(self, config: Config):
        self.config = config

    def __getitem__(self, index: int) -> dict:
        draw = random.Random(self.config.seed + index)
        a, b = (draw.randint(0, self.config.max_number) for _ in range(2))
        return self.entry(f"What is {a} + {b}?", str(a + b))

    def entry(self, question, answer, **metadata) -> dict:
        return {"question": question, "answer": answer, "metadata": {"source_dataset": self.name(), **metadata}}

    @classmethod
    def name(cls) -> str:
        return cls.__name__.lower()

    def score_answer(self, answer: str, entry: dict) -> float:
        if "?" in answer:
            raise ValueError("no number")
        gold = entry["answer"]
        return 1.0 if answer == gold else 0.25 if gold in answer else 0.0


class Odd(Sums):
    """What JSON cannot hold, or not without change; every third answer its own scorer does not take from it."""

    def __getitem__(self, index: int) -> dict:
        draw = random.Random(self.config.seed + index).randint(0, 10**6)
        key = (1, 2) if draw % 3 == 0 else "key"
        metadata = {"set": {"b", "a"}, "by": {key: draw}, "complex": 1j}
        return self.entry(f"Odd {draw}?", "Yes" if draw % 4 else "No", **metadata)

    def score_answer(self, answer, entry):
        assert entry["metadata"]["set"] == ["a", "b"] and entry["metadata"]["complex"] == "1j"
        return float(answer == entry["answer"] and "key" in entry["metadata"]["by"])


class Several(Sums):
    """Several right answers: one of them in the metadata."""

    def __getitem__(self, index: int) -> dict:
        return self.entry(f"Name one of {self.config.seed + index}", None, example_answer=" it ")

    def score_answer(self, answer, entry):
        return float(answer == "it" and entry["answer"] is None)


class Silent(Sums):
    def __getitem__(self, index: int) -> dict:
        return self.entry(f"Do {index}", None)


class Wrong(Sums):
    def score_answer(self, answer, entry):
        return 0.05


class Failing(Sums):
    def __getitem__(self, index: int) -> dict:
        if index == 3:
            raise IndexError("none left")
        return super().__getitem__(index)


def install(patch: pytest.MonkeyPatch) -> None:
    """Put it where the library would be, for the length of a test."""
    data_sets = {one.name(): one for one in (Sums, Odd, Several, Silent, Wrong, Failing)}

    def create_dataset(name, **settings):
        config = Config(**settings)
        config.validate()
        return data_sets[name](config)

    library, factory = types.ModuleType("reasoning_gym"), types.ModuleType("reasoning_gym.factory")
    library.create_dataset = create_dataset
    library.get_score_answer_fn = lambda name: create_dataset(name).score_answer
    factory.DATASETS = {name: (one, Config) for name, one in data_sets.items()}
    patch.setitem(sys.modules, "reasoning_gym", library)
    patch.setitem(sys.modules, "reasoning_gym.factory", factory)
    patch.setattr(reasoning, "version", lambda name: f"{name} stand-in")
