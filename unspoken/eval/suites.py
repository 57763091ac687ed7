"""The tasks of the papers' tables, by the names that lm-eval has for them: `suites.yaml`, read and shown."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml
from rich.console import Console
from rich.table import Table

SHOTS_OF_THE_TASK = "the task's"


@dataclass(frozen=True)
class Row:
    """A row of a paper's table. `metric` is lm-eval's name, with a filter behind a comma where a task has several.

    shots: each is a run of its own; none: the task's own number. missing: why there is no task. note: what else to
    know.
    """

    row: str
    task: str = ""
    metric: str = ""
    shots: tuple[int, ...] = ()
    missing: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if bool(self.task and self.metric) == bool(self.missing):
            raise ValueError(f"row {self.row!r} has a task and its metric, or says why it is missing")


@dataclass(frozen=True)
class Suite:
    """A table of a paper. `paper` says which."""

    name: str
    paper: str
    rows: tuple[Row, ...]

    @property
    def present(self) -> list[Row]:
        return [row for row in self.rows if row.task]

    @property
    def missing(self) -> list[Row]:
        return [row for row in self.rows if row.missing]


@cache
def suites() -> dict[str, Suite]:
    """All of `suites.yaml`, by name."""
    content = yaml.safe_load(files("unspoken.eval").joinpath("suites.yaml").read_text(encoding="utf-8"))
    return {name: Suite(name, suite["paper"], tuple(map(_row, suite["rows"]))) for name, suite in content.items()}


def print_suites(console: Console) -> None:
    for suite in suites().values():
        console.print(f"{suite.name}: {suite.paper}", highlight=False, soft_wrap=True)
        table = Table("row")
        table.add_column("lm-eval task", no_wrap=True)
        for name in ("shots", "metric", "note"):
            table.add_column(name)
        for row in suite.present:
            shots = ", ".join(map(str, row.shots)) or SHOTS_OF_THE_TASK
            table.add_row(row.row, row.task, shots, row.metric, row.note)
        for row in suite.missing:
            table.add_row(row.row, "missing", "", "", row.missing)
        console.print(table)


def _row(fields: dict) -> Row:
    return Row(**{**fields, "shots": tuple(fields.get("shots", ()))})
