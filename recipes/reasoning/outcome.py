"""What a study of answers and rewards found: accuracy by task, against the plain model and against what it began as.

`table.md` and `report.html`, of all that is finished. Differences are paired: the same problems, answered by both.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from settings import Arm, Size

from unspoken.analysis.page import Block, Figures, Section, Table, Text, page
from unspoken.analysis.policy_report import outcomes, read_policy_run

CAPTION = (
    "Right answers to held-out problems, in %, greedily; averaged over seeds, each seed's in brackets. majority: the "
    "most frequent answer of each task. FLOPs: 6 x parameters x tokens x passes of all training but the rewards'."
)
Z95 = 1.96
Answers = dict[str, float]  # by the problem's line, 1 if right


def write_outcome(out: Path, size: Size, seeds: Sequence[int], console: Console) -> None:
    """Print and write the tables."""
    tables = [_accuracies(out, size, seeds), *_differences(out, size, seeds)]
    tables = [table for table in tables if table.rows]
    if not tables:
        return
    notes = [f"- {arm.name}: {arm.note}" for arm in size.arms if arm.note]
    text = "\n\n".join([*map(_markdown, tables), "\n".join(notes)]) + "\n"
    (out / "table.md").write_text(text, encoding="utf-8")
    runs = [
        read_policy_run(folder)
        for arm in size.arms
        if arm.is_rewarded and (folder := out / f"rl-{arm.name}-s{seeds[0]}").is_dir() and _has_rows(folder)
    ]
    blocks: list[Block] = [*tables, *(Text(note, "soft") for note in notes)]
    sections = [Section("Right answers", blocks)]
    if runs:
        sections.append(Section(f"While it is rewarded, seed {seeds[0]}", [Figures(outcomes(runs))]))
    (out / "report.html").write_text(page("Answers and rewards", CAPTION, sections), encoding="utf-8")
    console.print()
    console.print(Markdown(text))
    console.print(f"written: {out / 'table.md'}, {out / 'report.html'}", highlight=False)


def _accuracies(out: Path, size: Size, seeds: Sequence[int]) -> Table:
    labels = [spec.partition("=")[0] for spec in size.specs]
    rows: list[list[Any]] = []
    majorities: dict[str, float] = {}
    for stage in ("sft", "rl"):
        for arm in size.arms:
            found = [scores for seed in seeds if (scores := _scores(out, f"{stage}-{arm.name}-s{seed}"))]
            if not found:
                continue
            for scores in found:
                majorities |= {task: score["majority"] for task, score in scores["tasks"].items()}
                majorities["all"] = scores["all"]["majority"]
            cells = [_each([scores["tasks"][label]["accuracy"] for scores in found]) for label in labels]
            whole = _each([scores["all"]["accuracy"] for scores in found])
            rows.append([_title(stage, arm), *cells, whole, _flops(out, arm, seeds), str(len(found))])
    if rows:
        shares = [f"{100 * majorities[label]:.1f}" for label in [*labels, "all"]]
        rows.insert(0, ["majority", *shares, "", ""])
    return Table(["model", *labels, "all", "FLOPs", "seeds"], rows, CAPTION)


def _differences(out: Path, size: Size, seeds: Sequence[int]) -> list[Table]:
    """Each arm less the plain one, taught and rewarded; and each rewarded arm less itself before."""
    rows = []
    names = [arm.name for arm in size.arms if arm.name != "plain"]
    for stage in ("sft", "rl"):
        for base in ("plain", "plain-2x"):
            pairs = [(name, f"{stage}-{name}", f"{stage}-{base}") for name in names if name != base]
            rows += [
                _difference(out, f"{'rewarded: ' if stage == 'rl' else ''}{name} - {base}", one, other, seeds)
                for name, one, other in pairs
            ]
    for arm in size.arms:
        rows.append(_difference(out, f"rewarded - taught: {arm.name}", f"rl-{arm.name}", f"sft-{arm.name}", seeds))
    caption = "Differences of right answers in percentage points, paired over problems (95 %, all seeds' together)."
    return [Table(["comparison", "difference", "by seed"], [row for row in rows if row], caption)]


def _difference(out: Path, label: str, one: str, other: str, seeds: Sequence[int]) -> list[str]:
    pairs = [(_answers(out, f"{one}-s{seed}"), _answers(out, f"{other}-s{seed}")) for seed in seeds]
    found = [[a[key] - b[key] for key in a] for a, b in pairs if a and b and a.keys() == b.keys()]
    if not found:
        return []
    values = [value for seed in found for value in seed]
    half = Z95 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    centre = mean(values)
    interval = f"{100 * centre:+.1f} [{100 * (centre - half):+.1f}, {100 * (centre + half):+.1f}]"
    return [label, interval, ", ".join(f"{100 * mean(seed):+.1f}" for seed in found)]


def _scores(out: Path, name: str) -> dict[str, Any] | None:
    path = out / "evals" / name / "eval_problems.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _answers(out: Path, name: str) -> Answers:
    path = out / "evals" / name / "eval_problems.jsonl"
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["place"].rpartition(":")[2]: float(row["reward"] >= 1) for row in rows}


def _flops(out: Path, arm: Arm, seeds: Sequence[int]) -> str:
    """Of its continued pretraining and its lessons, the first seed's."""
    folders = [
        f"sft-{arm.asks or arm.name}-s{seeds[0]}",
        *([f"ct-{arm.continued}-s{seeds[0]}"] if arm.continued else []),
    ]
    paths = [out / folder / "summary.json" for folder in folders]
    flops = sum(json.loads(path.read_text(encoding="utf-8"))["train_flops"] for path in paths if path.is_file())
    return f"{flops:.2e}"


def _title(stage: str, arm: Arm) -> str:
    return f"{arm.name}, rewarded" if stage == "rl" else arm.name


def _each(shares: Sequence[float]) -> str:
    each = ", ".join(f"{100 * share:.1f}" for share in shares)
    return f"{100 * mean(shares):.1f}" + (f" ({each})" if len(shares) > 1 else "")


def _has_rows(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() and (folder / "resolved.yaml").is_file()


def _markdown(table: Table) -> str:
    lines = [table.headers, ["---"] * len(table.headers), *table.rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + f"\n\n{table.caption}"
