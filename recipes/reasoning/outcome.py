"""What a study of answers and rewards found: accuracy by task, against the plain model and against what it began as.

`table.md` and `report.html`, of all that is finished. Differences are paired: the same problems, answered by both.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from settings import Arm, Size

from unspoken.analysis.numbers import scientific
from unspoken.analysis.page import Block, Figures, Section, Table, Text, page
from unspoken.analysis.policy_report import outcomes, read_policy_run
from unspoken.analysis.solved import Solved, accuracy_rows, gain, read_solved
from unspoken.errors import UnspokenError

CAPTION = (
    "Right answers to held-out problems, in %, greedily; averaged over seeds, each seed's in brackets. majority: the "
    "most frequent answer of each task. FLOPs: 6 x parameters x tokens x passes of all training but the rewards'."
)


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
    models = {
        _title(stage, arm): (arm, solved)
        for stage in ("sft", "rl")
        for arm in size.arms
        if (solved := _solved(out, f"{stage}-{arm.name}", seeds))
    }
    headers, rows = accuracy_rows({title: solved for title, (_, solved) in models.items()})
    costs = [[_flops(out, arm, seeds), str(len(solved))] for arm, solved in models.values()]
    cells = [[*a, *b] for a, b in zip(rows, [["", ""], *costs])]
    return Table([*headers, "FLOPs", "seeds"], cells, CAPTION)


def _differences(out: Path, size: Size, seeds: Sequence[int]) -> list[Table]:
    """Each arm less the plain one, taught and rewarded; and each rewarded arm less itself before."""
    names = [arm.name for arm in size.arms if arm.name != "plain"]
    pairs = [
        (f"{'rewarded: ' if stage == 'rl' else ''}{name} - {base}", f"{stage}-{name}", f"{stage}-{base}")
        for stage in ("sft", "rl")
        for base in ("plain", "plain-2x")
        for name in names
        if name != base
    ]
    pairs += [(f"rewarded - taught: {arm.name}", f"rl-{arm.name}", f"sft-{arm.name}") for arm in size.arms]
    rows = []
    for label, *sides in pairs:
        try:
            found = gain(*(_solved(out, side, seeds) for side in sides))
        except UnspokenError as error:
            rows.append([label, str(error), ""])
            continue
        if found:
            rows.append([label, str(found), ", ".join(f"{one:+.1f}" for one in found.by_seed.values())])
    caption = "Differences of right answers in percentage points, paired over problems; 95 % over redrawn problems."
    return [Table(["comparison", "difference", "by seed"], rows, caption)]


def _solved(out: Path, name: str, seeds: Sequence[int]) -> dict[int, Solved]:
    """A model's answers, by seed, as far as it has been asked."""
    found = {seed: read_solved(out / "evals" / f"{name}-s{seed}") for seed in seeds}
    return {seed: solved for seed, solved in found.items() if solved}


def _flops(out: Path, arm: Arm, seeds: Sequence[int]) -> str:
    """Of its continued pretraining and its lessons, the first seed's."""
    folders = [
        f"sft-{arm.asks or arm.name}-s{seeds[0]}",
        *([f"ct-{arm.continued}-s{seeds[0]}"] if arm.continued else []),
    ]
    paths = [out / folder / "summary.json" for folder in folders]
    flops = sum(json.loads(path.read_text(encoding="utf-8"))["train_flops"] for path in paths if path.is_file())
    return scientific(flops)


def _title(stage: str, arm: Arm) -> str:
    return f"{arm.name}, rewarded" if stage == "rl" else arm.name


def _has_rows(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() and (folder / "resolved.yaml").is_file()


def _markdown(table: Table) -> str:
    lines = [table.headers, ["---"] * len(table.headers), *table.rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + f"\n\n{table.caption}"
