"""Problems with one right answer, from reasoning-gym: those that come with this package, and others where it is
installed."""

import importlib
import json
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from importlib.resources import files
from itertools import islice
from typing import Any

from unspoken.errors import UnspokenError, UsageError, first_line, nearest

SHIPPED = "problems.jsonl"  # of reasoning-gym 0.1.25, as `fresh_problems(NAMES, NUM_SHIPPED, seed=0)` gives them
NAMES = ("chain_sum", "letter_counting", "spell_backward")
NUM_SHIPPED = 120
INSTALL = "pip install reasoning-gym"
NUM_DRAWS = 4  # for each question that is wanted: data sets repeat themselves
OURS = ("size", "seed")  # fields of every data set's configuration, which are not the user's

Problems = dict[str, list[dict[str, str]]]
Entry = dict[str, Any]


def shipped_problems() -> Problems:
    """Rows of `question` and `answer` by data set."""
    lines = files("unspoken.data").joinpath("question_files", SHIPPED).read_text(encoding="utf-8").splitlines()
    problems: Problems = {name: [] for name in NAMES}
    for line in lines:
        row = json.loads(line)
        problems[row.pop("name")].append(row)
    return problems


def fresh_problems(names: Sequence[str], num: int, seed: int) -> Problems:
    """Newly made ones, no question twice. Their answers are compared as text, not with the data set's own scoring.
    Other seeds give other problems; 0 those that are shipped.

    Raises UsageError without reasoning-gym, or for a data set that it has not.
    """
    problems: Problems = {}
    for name in names:
        drawn = random.Random(f"{seed} {name}").getrandbits(31) if seed else 0  # neighbouring ones share problems
        entries = islice(distinct(DataSet(name, NUM_DRAWS * num, drawn)), num)
        problems[name] = [{"question": entry["question"], "answer": str(entry["answer"])} for entry in entries]
    return problems


def distinct(entries: Iterable[Entry], seen: set[str] | None = None) -> Iterator[Entry]:
    """The entries whose question is not among those seen; theirs are added."""
    seen = set() if seen is None else seen
    for entry in entries:
        if entry["question"] not in seen:
            seen.add(entry["question"])
            yield entry


class DataSet:
    """A data set of reasoning-gym: `size` entries of `question`, `answer` and `metadata`, made as they are asked for.

    settings: fields of its configuration. asked_by: whose mistake it is, in messages. Entry i of seed s is entry 0 of
    seed s + i in most data sets: neighbouring seeds give nearly the same problems.

    Raises:
        UsageError: no reasoning-gym; no such data set or setting, with the nearest; a value that it refuses.
    """

    def __init__(
        self,
        name: str,
        size: int,
        seed: int,
        settings: Mapping[str, Any] | None = None,
        asked_by: str = "--reasoning",
        more_names: Sequence[str] = (),
    ):
        self.name, self.size, settings = name, size, settings or {}
        reasoning_gym = library(asked_by)
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        if name not in known:
            close = nearest(name, sorted([*known, *more_names]))
            raise UsageError(f"{asked_by}: reasoning-gym has no data set {name!r}{close}")
        names = sorted({field.name for field in fields(known[name][1])} - set(OURS))
        if unknown := next((setting for setting in settings if setting not in names), None):
            close = nearest(unknown, names) or f"; there are {', '.join(names) or 'none'}"
            raise UsageError(f"{asked_by}: {name} has no setting {unknown!r}{close}")
        try:
            self.data = reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
        except Exception as error:  # of many kinds, most of them assertions
            raise UsageError(f"{asked_by}: {name} refuses its settings: {first_line(error)}") from error

    def __iter__(self) -> Iterator[Entry]:
        """Raises UnspokenError where the data set fails at an entry."""
        for index in range(self.size):
            try:
                entry = self.data[index]
            except Exception as error:
                fault = f"{type(error).__name__}: {first_line(error)}"
                raise UnspokenError(f"{self.name} fails at its problem {index}: {fault}") from error
            yield entry


class Scorers:
    """The data sets' own scoring of entries, which say what data set they are of.

    Raises:
        UsageError: no reasoning-gym.
    """

    def __init__(self, asked_by: str):
        self.library = library(asked_by)
        self.found: dict[str, Callable[[str, Entry], float]] = {}

    def of(self, entry: Entry) -> Callable[[str, Entry], float]:
        """Raises what the library raises for an entry of no data set."""
        name = entry["metadata"]["source_dataset"]
        if name not in self.found:
            self.found[name] = self.library.get_score_answer_fn(name)
        return self.found[name]

    def score(self, answer: str, entry: Entry) -> float:
        """From 0 to 1; 0 where the scorer raises, as some do on what is no answer."""
        scorer = self.of(entry)
        try:
            return float(scorer(answer.strip(), entry))
        except Exception:
            return 0.0


def library(asked_by: str) -> Any:
    """The module reasoning_gym. Raises UsageError where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it uses
            return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise UsageError(f"{asked_by}: reasoning-gym is not installed ({error}); run `{INSTALL}`") from error


def library_version() -> str:
    """As it was installed: its `__version__` is an older one."""
    return version("reasoning-gym")


def as_json(entry: Entry) -> str:
    """An entry as text. What JSON has no word for becomes the nearest that it has; see `plain`."""
    return json.dumps({key: plain(entry[key]) for key in ("question", "answer", "metadata")}, ensure_ascii=False)


def plain(value: Any) -> Any:
    """Tuples and sets (in order) as lists, arrays and their numbers as Python's, keys and all else as text."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [plain(item) for item in sorted(value, key=repr)]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)
