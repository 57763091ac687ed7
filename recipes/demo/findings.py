"""What the demo found: the plain model and the recycling one at equal tokens and at equal compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from unspoken.analysis.compare import Difference, deployed, difference, verdict
from unspoken.analysis.numbers import number, short_count
from unspoken.analysis.runs import EVALUATION, Run, read_run
from unspoken.errors import UnspokenError

QUICK_SIZES = "These are the sizes of --quick: they show that all works, not what it is worth."


@dataclass(frozen=True)
class Arm:
    """One way to spend tokens and compute: a run, and the evaluation of what it left."""

    label: str
    run: Run
    evaluation: dict

    @property
    def tokens(self) -> int:
        return self._total("tokens")

    @property
    def flops(self) -> float:
        return self._total("train_flops")

    @property
    def cpu_seconds(self) -> float:
        return self._total("train_cpu_seconds")

    def loss(self, name: str) -> str:
        result = self.evaluation["results"].get(name)
        return number(result["loss"], 3) if result else ""

    def _total(self, key: str) -> Any:
        return (self.run.summary or {}).get(key, 0)


@dataclass(frozen=True)
class Comparison:
    """`recycler` against `plain` (equal tokens) and `plain_2x` (equal compute); `before`: what both started from."""

    title: str
    plain: Arm
    recycler: Arm
    plain_2x: Arm
    before: dict | None = None

    @staticmethod
    def read(out: Path, title: str, prefix: str = "", before: str | None = None) -> "Comparison":
        """The runs PREFIXplain, PREFIXrecycler and PREFIXplain-2x of a demo folder, with their evaluations.

        Raises:
            UnspokenError: a file that the comparison needs is not there or cannot be read.
        """
        labels = {"plain": "plain", "recycler": "recycler", "plain-2x": "plain, 2x"}
        arms = [
            Arm(label, _run(out / f"{prefix}{name}"), _evaluation(out, f"{prefix}{name}"))
            for name, label in labels.items()
        ]
        return Comparison(title, *arms, before=_evaluation(out, before) if before else None)

    @property
    def arms(self) -> list[Arm]:
        return [self.plain, self.recycler, self.plain_2x]

    @property
    def equal_tokens(self) -> Difference:
        return self.minus(self.plain.evaluation)

    @property
    def equal_compute(self) -> Difference:
        return self.minus(self.plain_2x.evaluation)

    def minus(self, evaluation: dict) -> Difference:
        """The recycler, as it decodes, minus another model."""
        of = self.recycler.evaluation
        return difference(of, deployed(of), evaluation, deployed(evaluation))

    @property
    def feedback(self) -> Difference:
        """What the recycled state itself is worth: the recycler as it decodes minus its own first pass."""
        of = self.recycler.evaluation
        return difference(of, deployed(of), of, "k=1")

    @property
    def passes(self) -> list[str]:
        """Names of the losses worth a column."""
        names = self.recycler.evaluation["results"]
        return [name for name in ("k=1", "k=2", "exact") if name in names]

    def rows(self) -> list[tuple[list[str], Difference | None]]:
        """Lines of a table: (method, tokens, FLOPs, CPU seconds, the losses of `passes`), recycler minus this."""
        lines: list[tuple[list[str], Difference | None]] = []
        if self.before:
            results = self.before["results"]
            losses = [number(results[name]["loss"], 3) if name in results else "" for name in self.passes]
            lines.append((["before", "", "", "", *losses], self.minus(self.before)))
        for arm in self.arms:
            flops = f"{arm.flops:.1e}".replace("e+", "e")
            line = [arm.label, short_count(arm.tokens), flops, f"{arm.cpu_seconds:.0f}", *map(arm.loss, self.passes)]
            lines.append((line, None if arm is self.recycler else self.minus(arm.evaluation)))
        return lines


def closing_table(comparison: Comparison) -> Table:
    """The demo's last word on the terminal, for one comparison."""
    style = {"title_justify": "left", "title_style": "bold"}
    table = Table(title=comparison.title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False, **style)
    table.add_column("method", no_wrap=True)
    for name in ("tokens", "FLOPs", "CPU s", *comparison.passes):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(" recycler minus this", no_wrap=True)
    for cells, found in comparison.rows():
        table.add_row(*map(Text, [*cells, f" {found or ''}"]))
    return table


def sentences(comparisons: Sequence[Comparison], is_quick: bool) -> list[str]:
    """What was found, one plain sentence a comparison."""
    found = [f"{c.title}: {verdict(c.equal_tokens, c.equal_compute)}" for c in comparisons]
    return [*found, QUICK_SIZES] if is_quick else found


def _run(folder: Path) -> Run:
    run = read_run(folder, wanted=("resolved.yaml", "summary.json", "metrics.jsonl"))
    if run.missing:
        raise UnspokenError("; ".join(run.missing))
    return run


def _evaluation(out: Path, name: str) -> dict:
    run = read_run(out / f"eval-{name}", wanted=(EVALUATION,))
    if run.evaluation is None:
        raise UnspokenError("; ".join(run.missing))
    return run.evaluation
