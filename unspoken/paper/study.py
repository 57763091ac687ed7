"""What a study is: one base recipe, arms that change it, seeds, and which arms are compared. One YAML file each.

    base: ../../demo/recycler.yaml         # a recipe file (from this file's folder), or a recipe written out here
    arms:
      plain: {model.method: vanilla}       # a recipe's keys; the method's own are left out of a plain model
      plain-2x: {model.method: vanilla, train.total_tokens: x2}        # x2: twice the base's
      recycler: {note: two passes, as in the paper}
      later: {after: plain, train.total_tokens: x0.25}                 # goes on from that arm's trained model
      taught: {after: plain, learns: problems, train.total_tokens: x0.5}   # goes on with answers to problems
    compare: {equal tokens: recycler - plain, feedback: recycler - recycler k=1}

A loss is that of the model as it decodes (the exact recurrence if it was measured) unless `k=1`, `k=2` or `exact`
follows the arm. Keys and defaults are those of the classes below; whatever is wrong is named with its line. What an
arm's recipe becomes stands in `arms.py`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

import unspoken
from unspoken.data.problem_specs import parse
from unspoken.errors import UsageError, nearest
from unspoken.eval.rewards import NAMES
from unspoken.train.recipe import Count, CountOrNone, Section
from unspoken.train.recipe_file import Origins, read_yaml

STUDY = "study.yaml"
LEARNS, PROBLEMS = "learns", "problems"
OF_TEXT = ("data.path", "data.sources", "data.task", "data.conversations")  # keys of what a run reads
FOLDERS = (Path("recipes/paper"), Path(unspoken.__file__).parents[1] / "recipes/paper")
Plot = Literal["differences", "depth", "cost", "curves", "budgets", "answers", "latent", "solved"]
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
_TERM = re.compile(r"(\S+)(?: (k=[1-9]\d*|exact))?")


class TextSection(Section):
    """The text that `unspoken data prepare` is asked for; where a base or an override has a `data.path`, none is."""

    corpus: tuple[str, ...] = ("core",)
    tokenizer: str = "bpe:4096"


class EvalSection(Section):
    """What `unspoken eval` is asked for. `depth`: how far the depth curve goes, 0 for none. `lengths` (its own default
    where there is none) and `samples` are for a task, those after them for text."""

    num_passes: Count = 3
    exact: bool = True
    lengths: tuple[Count, ...] = ()
    samples: Count = 1000
    depth: CountOrNone = 0
    split: Literal["val", "test"] = "val"
    sequence_length: Count = 256
    max_sequences: Count = 288
    batch_size: Count = 32


class ProblemsSection(Section):
    """What `unspoken data problems` is asked for, and with what `unspoken eval` scores the answers."""

    specs: Annotated[tuple[str, ...], Field(min_length=1)]
    num_train: Count = 5000
    num_val: Count = 200
    reward: str = "last_number"
    max_new_tokens: Count = 96
    batch_size: Count = 50

    @model_validator(mode="after")
    def _known(self) -> Self:
        try:
            parse(self.specs)
        except UsageError as error:
            raise ValueError(f"specs: {error}") from error
        if self.reward not in NAMES and ":" not in self.reward:
            raise ValueError(f"reward: no {self.reward!r}{nearest(self.reward, NAMES)}; there are {', '.join(NAMES)}")
        return self


class StudyFile(Section):
    """The keys of study.yaml.

    other_text: corpora of another kind, on which every model is evaluated too. tasks: of lm-eval, of the held-out text
    (`unspoken data questions`). problems: what an arm with `learns: problems` reads instead of text, and is asked.
    baseline: an arm that every other is compared with, beside what `compare` says. budgets: training tokens of the
    base, one set of runs for each. costs: a table of what training and decoding cost. quick_arms: those of `--quick`,
    all unless given. cpu_seconds: what the whole cost where it was tried. paper: the paper's own settings and numbers,
    shown beside ours.
    """

    title: str
    question: str
    figure: str = ""
    base: str | dict[str, Any]
    text: TextSection = TextSection()
    other_text: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    problems: ProblemsSection | None = None
    arms: Annotated[dict[str, dict[str, Any] | None], Field(min_length=1)]
    seeds: Annotated[tuple[CountOrNone, ...], Field(min_length=1)] = (0, 1)
    budgets: tuple[Count, ...] = ()
    baseline: str | None = None
    compare: dict[str, str] = Field(default_factory=dict)
    eval: EvalSection = EvalSection()
    plots: tuple[Plot, ...] = ("differences", "curves")
    costs: bool = False
    quick_arms: list[str] | None = None
    cpu_seconds: Count | None = None
    paper: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names(self) -> Self:
        for name in self.arms:
            if not _NAME.fullmatch(name):
                raise ValueError(f"arm {name!r}: a name is of small letters, digits, dots and hyphens")
            self.ancestors(name)
            self._check_learner(name)
        for name in [*([self.baseline] if self.baseline else []), *(self.quick_arms or [])]:
            self._check_arm(name)
        for name, expression in self.compare.items():
            of, minus = parse_comparison(name, expression)
            for term in (of, minus):
                self._check_arm(term.arm, f"{expression!r}: ")
            if self.learns_problems(of.arm) != self.learns_problems(minus.arm):
                raise ValueError(f"{expression!r}: one arm learns problems, the other reads text")
            if self.learns_problems(of.arm) and (of.loss or minus.loss):
                raise ValueError(f"{expression!r}: right answers are of decoding, with no passes to choose")
        return self

    def learns_problems(self, name: str) -> bool:
        return LEARNS in (self.arms[name] or {})

    def ancestors(self, name: str) -> list[str]:
        """The arms that this one goes on from, the nearest first."""
        found = [name]
        while (before := (self.arms[found[-1]] or {}).get("after")) is not None:
            self._check_arm(before, f"arm {name!r}: after: ")
            if before in found:
                raise ValueError(f"arm {name!r}: after: it would go on from itself")
            found.append(before)
        return found[1:]

    def _check_learner(self, name: str) -> None:
        if not self.learns_problems(name):
            return
        arm = self.arms[name] or {}
        if arm[LEARNS] != PROBLEMS:
            raise ValueError(f"arm {name!r}: learns: {arm[LEARNS]!r}; an arm can learn `problems`, and reads text else")
        if given := next((key for key in arm if key.startswith(OF_TEXT)), None):
            raise ValueError(f"arm {name!r}: {given}: it learns problems, which the study prepares")
        if self.problems is None:
            raise ValueError(f"arm {name!r}: learns: problems, and the study says none; give it `problems.specs`")
        if "after" not in arm:
            raise ValueError(f"arm {name!r}: learns: problems needs `after`, an arm that has read text")
        if self.budgets:
            raise ValueError("budgets: not with arms that learn problems")

    def _check_arm(self, name: str, where: str = "") -> None:
        if name not in self.arms:
            raise ValueError(f"{where}there is no arm {name!r}{nearest_or_all(name, self.arms)}")


@dataclass(frozen=True)
class Term:
    """An arm, and which of its losses: None is that of decoding."""

    arm: str
    loss: str | None = None

    def __str__(self) -> str:
        return f"{self.arm} {self.loss}" if self.loss else self.arm


@dataclass(frozen=True)
class Comparison:
    """`of` minus `minus`; below zero `of` is better."""

    name: str
    of: Term
    minus: Term

    def __iter__(self) -> Iterator[Term]:
        return iter((self.of, self.minus))

    def __str__(self) -> str:
        return f"{self.of} - {self.minus}"


@dataclass(frozen=True)
class Study:
    """A study file, read and checked; `origins` has the line of each key."""

    name: str
    path: Path
    file: StudyFile
    origins: Origins

    @property
    def comparisons(self) -> list[Comparison]:
        """Those of `compare`, then every arm against the baseline."""
        file = self.file
        found = [parse_comparison(name, expression) for name, expression in file.compare.items()]
        if file.baseline:
            baseline = Term(file.baseline)
            others = [arm for arm in file.arms if file.learns_problems(arm) == file.learns_problems(baseline.arm)]
            found += [Comparison("", Term(arm), baseline) for arm in others if arm != baseline.arm]
        return found


def parse_comparison(name: str, expression: str) -> Comparison:
    """Read `recycler - plain`, `recycler k=2 - recycler k=1`, ...

    Raises:
        ValueError: it is not of that form.
    """
    terms = [_TERM.fullmatch(term.strip()) for term in expression.split(" - ")]
    if len(terms) != 2 or None in terms:
        raise ValueError(f"{expression!r}: a comparison is `ARM - ARM`; `k=1`, `k=2`, ... or `exact` may follow an arm")
    return Comparison(name, *(Term(match[1], match[2]) for match in terms if match))


def load_study(name: str) -> Study:
    """The study of that name, or of that file or folder.

    Raises:
        UsageError: there is none, or something in it is wrong.
    """
    path = _find(name)
    values, origins = read_yaml(path, "study")
    try:
        return Study(
            path.parent.name if path.name == STUDY else path.stem, path, StudyFile.model_validate(values), origins
        )
    except ValidationError as error:
        raise UsageError("\n  ".join(_complaint(details, path, origins) for details in error.errors())) from None


def known_studies(comparisons: bool = False) -> dict[str, Path]:
    """The studies of `recipes/paper`, or the comparisons of `recipes/compare`, by name."""
    found: dict[str, Path] = {}
    for folder in FOLDERS:
        paths = (folder.parent / "compare").glob("*.yaml") if comparisons else folder.glob(f"*/{STUDY}")
        for path in sorted(paths):
            found.setdefault(path.stem if comparisons else path.parent.name, path)
    return found


def nearest_or_all(name: str, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or where nothing is near all that there are."""
    return nearest(name, list(valid)) or f"; there are: {', '.join(valid)}"


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    if (path / STUDY).is_file():
        return path / STUDY
    known = known_studies() | known_studies(comparisons=True)
    if name in known:
        return known[name]
    if not known:
        raise UsageError(f"no study {name!r}, and no recipes/paper folder here; give a study's file")
    raise UsageError(f"no study {name!r}{nearest_or_all(name, known)}")


def _complaint(details: ErrorDetails, path: Path, origins: Origins) -> str:
    names = [str(part) for part in details["loc"]]
    parents = (".".join(names[:end]) for end in range(len(names), 0, -1))
    where = next((origins[parent] for parent in parents if parent in origins), str(path))
    key = f"{'.'.join(names)}: " if names else ""
    match details["type"]:
        case "extra_forbidden":
            section = StudyFile.model_fields.get(names[0])
            holders = [section.annotation, *get_args(section.annotation)] if section and len(names) > 1 else [StudyFile]
            known = next((one.model_fields for one in holders if hasattr(one, "model_fields")), {})
            return f"{where}: {key}unknown key{nearest_or_all(names[-1], known)}"
        case "missing":
            return f"{where}: {key}required, but not given"
        case "value_error":
            return f"{where}: {key}{details['ctx']['error']}"
        case _:
            return f"{where}: {key}{details['msg'].replace('Input should be', 'expected')}, got {details['input']!r}"
