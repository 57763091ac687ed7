"""benchmarks/README.md, made from the recorded JSON: no number in it is typed by hand."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, Result, Row, Spread

README = Path(__file__).parent / "README.md"
INTRODUCTION = """# Benchmarks

Made by `make bench` from `results/*.json`; do not edit. `python -m benchmarks.run --only NAME` runs one,
`--quick` shows in about a minute that all of them work and records nothing.

CPU seconds of one thread. The arms alternate within a round; a ratio is taken within each round, against the arm
that the column names. A cell is the median with the quartiles of the rounds. Nothing is reported where the arms'
results differ: "Held" lists what was compared. The ceiling is what the machine's rates, measured in the same run,
would allow; the percentage is how near to it an arm comes.
"""
NO_GPU = """## gpu

`python benchmarks/gpu.py` has not run on a GPU yet: there is no number of one here.
"""


def write_readme(results: Path = RESULTS, readme: Path = README) -> None:
    readme.write_text(render([Result.load(path) for path in sorted(results.glob("*.json"))]), encoding="utf-8")


def render(results: Iterable[Result]) -> str:
    sections = {result.name: section(result) for result in results}
    return "\n".join([INTRODUCTION, *sections.values(), *([] if "gpu" in sections else [NO_GPU])])


def section(result: Result) -> str:
    """One benchmark: its question, its tables, and where it ran."""
    parts = [f"## {result.name}", f"{result.question}\n\n{result.method} Ceiling: {result.ceiling}."]
    parts += [_table(rows) for rows in _of_equal_columns(result.rows)]
    if result.checks:
        parts.append("Held: " + "; ".join(result.checks) + ".")
    parts += [
        f"{title}:\n\n" + "\n".join(f"- {line}" for line in lines)
        for title, lines in (("**FAILED**", result.failed), ("Skipped", result.skipped))
        if lines
    ]
    parts.append("Settings: " + ", ".join(f"{name} {_plain(value)}" for name, value in result.settings.items()) + ".")
    if result.environment:
        parts.append(_environment(result.environment))
    return "\n\n".join(parts) + "\n"


def _of_equal_columns(rows: list[Row]) -> list[list[Row]]:
    """Rows whose cases have the same keys and units share a table."""
    tables: dict[tuple, list[Row]] = {}
    for row in rows:
        tables.setdefault((*_shown(row.case), row.unit), []).append(row)
    return list(tables.values())


def _shown(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in case.items() if not isinstance(value, dict)}


def _table(rows: list[Row]) -> str:
    baseline = next((row.baseline for row in rows if row.baseline), None)
    lines = [[*_shown(rows[0].case), "arm", rows[0].unit, f"ratio to {baseline}", "target", "ceiling"]]
    for row in rows:
        ratio = _spread(row.ratio) if row.ratio else ""
        lines.append(
            [*map(str, _shown(row.case).values()), row.arm, _spread(row.value), ratio, _target(row), _ceiling(row)]
        )
    lines = [list(cells) for cells in zip(*(column for column in zip(*lines) if any(column[1:])))]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _spread(spread: Spread) -> str:
    if spread.repeats == 1:
        return _number(spread.median)
    return f"{_number(spread.median)} [{_number(spread.low)}, {_number(spread.high)}]"


def _target(row: Row) -> str:
    if row.target is None or row.ratio is None:
        return ""
    return f"{row.target}: {'met' if row.target.is_met(row.ratio.median) else 'MISSED'}"


def _ceiling(row: Row) -> str:
    if row.ceiling is None:
        return ""
    is_rate = re.search(r"per (CPU-)?second", row.unit) is not None
    share = row.value.median / row.ceiling if is_rate else row.ceiling / row.value.median
    return f"{_number(row.ceiling)} ({share:.0%})"


def _number(value: float) -> str:
    """Three significant digits from 0.001 up, and a ratio's two decimals at least."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 0.1 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items()) + ")"
    if isinstance(value, list | tuple):
        return " and ".join("x".join(map(str, item)) if isinstance(item, list | tuple) else str(item) for item in value)
    return str(value)


def _environment(values: dict[str, Any]) -> str:
    before, after = values["load_average"]
    amx = ", AMX bf16" if values["amx_bf16"] else ""
    device = f"{values['device']}; " if values.get("device", "cpu") != "cpu" else ""
    return (
        f"Ran on {values['date']} at commit {values['commit']} with `{values['command']}`: {device}{values['cpu']} "
        f"({values['cpu_capability']}{amx}), {values['threads_used']} of {values['cores']} cores, "
        f"{values['memory_gib']} GiB, load average {before} before and {after} after; Python {values['python']}, "
        f"torch {values['torch']}, transformers {values['transformers']}."
    )
