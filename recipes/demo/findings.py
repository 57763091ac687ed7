"""What the demo found: the plain model and the recycling one at equal tokens and at equal compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from unspoken.analysis.compare import Difference, deployed, difference, verdict
from unspoken.analysis.figures import short_count
from unspoken.analysis.runs import EVALUATION, Run, read_run
from unspoken.errors import UnspokenError

QUICK_SIZES = "These are the sizes of --quick: they show that all works, not what it is worth."


@dataclass(frozen=True)
class Arm:
    """One way to spend tokens and compute: a run, or the first `share` of it, and the evaluation of what it left."""

    label: str
    run: Run
    evaluation: dict
    share: float = 1.0

    @property
    def tokens(self) -> int:
        return round(self._total("tokens"))

    @property
    def flops(self) -> float:
        return self._total("train_flops")

    @property
    def cpu_seconds(self) -> float:
        return self._total("train_cpu_seconds")

    def loss(self, name: str) -> str:
        result = self.evaluation["results"].get(name)
        return f"{result['loss']:.4f}" if result else ""

    def _total(self, key: str) -> float:
        return (self.run.summary or {}).get(key, 0) * self.share


@dataclass(frozen=True)
class Comparison:
    """`recycler` against `plain` (equal tokens) and `plain_2x` (equal compute); `before`: what both started from."""

    title: str
    plain: Arm
    recycler: Arm
    plain_2x: Arm
    before: dict | None = None

    @staticmethod
    def read(
        out: Path, title: str, plain: str, recycler: str, plain_2x: str, before: str | None = None, share: float = 1.0
    ) -> "Comparison":
        """Runs and evaluations by name. share: of the run `plain` that gave the arm at equal tokens; where it is
        not whole, the whole of it is `plain_2x`.

        Raises:
            UnspokenError: a file that the comparison needs is not there or cannot be read.
        """
        whole = plain if share < 1 else plain_2x
        arms = [
            Arm("plain", _run(out / plain), _evaluation(out, plain), share),
            Arm("recycler", _run(out / recycler), _evaluation(out, recycler)),
            Arm("plain, twice the tokens", _run(out / whole), _evaluation(out, plain_2x)),
        ]
        return Comparison(title, *arms, before=_evaluation(out, before) if before else None)

    @property
    def arms(self) -> list[Arm]:
        return [self.plain, self.recycler, self.plain_2x]

    @property
    def equal_tokens(self) -> Difference:
        return self._difference(self.plain)

    @property
    def equal_compute(self) -> Difference:
        return self._difference(self.plain_2x)

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

    def _difference(self, arm: Arm) -> Difference:
        of, minus = self.recycler.evaluation, arm.evaluation
        return difference(of, deployed(of), minus, deployed(minus))


def closing_table(comparisons: Sequence[Comparison]) -> Table:
    """The demo's last word on the terminal."""
    table = Table(title="Loss on held-out text, in nats per token", title_justify="left", caption_justify="left")
    passes = list(dict.fromkeys(name for comparison in comparisons for name in comparison.passes))
    columns = ["tokens", "FLOPs", "CPU s", *passes, "minus plain at\nequal tokens", "minus plain at\nequal compute"]
    table.add_column("method")
    for name in columns:
        table.add_column(name, justify="right")
    for comparison in comparisons:
        table.add_section()
        table.add_row(f"[bold]{comparison.title}[/]")
        for row in rows(comparison, passes):
            table.add_row(*row)
    unit = comparisons[0].equal_tokens
    table.caption = f"[a, b]: 95 % interval over {unit.unit} of text, paired. FLOPs: 6 x parameters x tokens x passes."
    return table


def rows(comparison: Comparison, passes: Sequence[str]) -> list[list[str]]:
    """The lines of one comparison, as text."""
    lines = []
    if before := comparison.before:
        losses = [f"{before['results'][name]['loss']:.4f}" if name in before["results"] else "" for name in passes]
        lines.append(["before", "0", "", "", *losses, "", ""])
    for arm in comparison.arms:
        line = [arm.label, short_count(arm.tokens), f"{arm.flops:.2g}", f"{arm.cpu_seconds:.0f}"]
        is_recycler = arm is comparison.recycler
        differences = [str(comparison.equal_tokens), str(comparison.equal_compute)] if is_recycler else ["", ""]
        lines.append([*line, *map(arm.loss, passes), *differences])
    return lines


def sentences(comparisons: Sequence[Comparison], is_quick: bool) -> list[str]:
    """What was found, one plain sentence a comparison."""
    found = [f"{c.title}: {verdict(c.equal_tokens, c.equal_compute, 'recycling')}" for c in comparisons]
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
