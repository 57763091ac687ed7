"""Runs of `unspoken rl` as a page: reward and held-out accuracy, the gap to the rollout, lengths, samples, settings."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from unspoken.analysis.figures import Frame, Series, line_plot
from unspoken.analysis.numbers import number
from unspoken.analysis.page import Block, Cell, Code, Figures, Folded, Section, Table, Text, page
from unspoken.errors import UnspokenError
from unspoken.train.folder import RESOLVED, SUMMARY
from unspoken.train.metrics import JSONL, Row, read_metrics

SAMPLES = "samples.jsonl"
NUM_SAMPLES = 16
GAP_CAPTION = (
    "How far a sampled token's log-probability is, as scored by the policy's passes, from what it was sampled with: "
    "nats, in the mean over tokens. GSPO compares two such scores with each other, so a gap does not move its ratio; "
    "it says how far the policy that is trained is from the one that is decoded."
)


@dataclass(frozen=True)
class PolicyRun:
    """What a run's folder holds; `summary` is empty until it has ended or was stopped."""

    name: str
    recipe: dict[str, Any]
    rows: list[Row]
    summary: dict[str, Any]
    samples: list[dict[str, Any]]

    def curve(self, name: str, kind: str = "train") -> tuple[list[float], list[float]]:
        """Rollouts, and what was measured at them."""
        rows = [row for row in self.rows if row["kind"] == kind and row.get(name) is not None]
        return [row["step"] for row in rows], [row[name] for row in rows]


def is_policy_run(folder: Path) -> bool:
    return _recipe(folder) is not None


def _recipe(folder: Path) -> dict[str, Any] | None:
    """What the run was asked, None where it is no run of `unspoken rl`."""
    try:
        recipe = yaml.safe_load((folder / RESOLVED).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return recipe if isinstance(recipe, dict) and "rollout" in recipe else None


def read_policy_run(folder: Path) -> PolicyRun:
    """Raises UnspokenError for a folder that is no such run, or one whose records are damaged."""
    recipe = _recipe(folder)
    if recipe is None:
        raise UnspokenError(f"{folder} is no run of `unspoken rl`: its {RESOLVED} has no rollouts")
    try:
        rows = read_metrics(folder) if (folder / JSONL).is_file() else []
        has_summary = (folder / SUMMARY).is_file()
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8")) if has_summary else {}
        return PolicyRun(folder.name, recipe, rows, summary, read_samples(folder / SAMPLES))
    except ValueError as error:
        raise UnspokenError(f"{folder}: its records cannot be read: {error}") from error


def sample_line(sample: dict[str, Any]) -> str:
    return json.dumps(sample, ensure_ascii=False) + "\n"


def read_samples(path: Path) -> list[dict[str, Any]]:
    """A run's samples; a last line cut short by a kill is left out. Lines end at line feeds alone: what was sampled may
    hold other line ends."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def policy_report(folders: Sequence[Path], title: str) -> str:
    """The page of run folders, as HTML.

    Raises:
        UnspokenError: a folder is no run of `unspoken rl`.
    """
    runs = [read_policy_run(folder) for folder in folders]
    sections = [
        Section("Reward and accuracy", [Figures(outcomes(runs)), _results(runs)]),
        Section("Rollout and scoring", [Text(GAP_CAPTION, "soft"), Figures(_gaps(runs))]),
        Section("Answers", [Figures(_shapes(runs))]),
        *(Section(f"Samples of {run.name}", _samples(run)) for run in runs if run.samples),
        Section("Settings", [Folded(run.name, [Code(yaml.safe_dump(run.recipe, sort_keys=False))]) for run in runs]),
    ]
    return page(title, f"Reinforcement learning: {', '.join(run.name for run in runs)}", sections)


def _plot(
    runs: Sequence[PolicyRun], names: Sequence[tuple[str, str]], title: str, unit: str, span: float = 0.0
) -> list[tuple[str, str]]:
    """One plot of some columns (column, what it is called), each run in its colour; none where nothing is there."""
    series = []
    for own, run in enumerate(runs):
        for place, (column, label) in enumerate(names):
            is_held_out = column.startswith("accuracy")
            xs, ys = run.curve(column, "eval" if is_held_out else "train")
            if not xs:
                continue
            if len(runs) > 1:
                name, colour, dashed = f"{run.name} {label}".strip(), own, place > 0
            else:
                name, colour, dashed = label or run.name, place, False
            series.append(Series(name, xs, ys, colour, dashed=dashed, markers=is_held_out))
    if not series:
        return []
    return [(line_plot(series, Frame(title, "rollouts", unit, whole_x=True, min_y_span=span)), "")]


def outcomes(runs: Sequence[PolicyRun]) -> list[tuple[str, str]]:
    """Plots of reward and of held-out accuracy, over rollouts."""
    tasks = list(
        dict.fromkeys(name for run in runs for row in run.rows for name in row if name.startswith("accuracy/"))
    )
    figures = _plot(runs, [("reward", "")], "Reward of what is sampled", "mean reward")
    figures += _plot(runs, [("accuracy", "")], "Held-out problems, answered greedily", "share right", span=0.05)
    if len(tasks) > 1:
        figures += _plot(runs, [(task, task.removeprefix("accuracy/")) for task in tasks], "By task", "share right")
    return figures


def _gaps(runs: Sequence[PolicyRun]) -> list[tuple[str, str]]:
    return [
        *_plot(runs, [("gap/mean_abs", "mean size"), ("gap/mean", "mean")], "Gap to the rollout", "nats per token"),
        *_plot(runs, [("gap/max_abs", "")], "Largest gap of a token", "nats"),
        *_plot(runs, [("gap/ratio_spread", "")], "Largest gap of a completion", "|log ratio|"),
    ]


def _shapes(runs: Sequence[PolicyRun]) -> list[tuple[str, str]]:
    shares = [
        ("completions/clipped_ratio", "cut off"),
        ("completions/empty_ratio", "empty"),
        ("frac_reward_zero_std", "groups of equal reward"),
        ("groups/all_truncated", "groups all cut off"),
    ]
    return [
        *_plot(runs, [("completions/mean_length", "")], "Length", "tokens"),
        *_plot(runs, [("entropy", "")], "Entropy", "nats"),
        *_plot(runs, [("grad_norm", "")], "Gradient norm", ""),
        *_plot(runs, shares, "What teaches nothing", "share"),
        *_plot(runs, [("clip_ratio/region_mean", "")], "Completions whose ratio was clipped", "share"),
        *_plot(runs, [("tokens_per_second", "")], "Rollout speed", "tokens per second"),
    ]


def _results(runs: Sequence[PolicyRun]) -> Block:
    rows: list[list[str | Cell]] = []
    for run in runs:
        evaluations = [row for row in run.rows if row["kind"] == "eval"]
        accuracy = [f"{100 * row['accuracy']:.1f} %" for row in (evaluations[:1] + evaluations[-1:])] or ["", ""]
        rewards = run.curve("reward")[1]
        rows.append([
            run.name,
            str(run.rows[-1]["step"]) if run.rows else "0",
            f"{run.summary.get('completions', 0):,}",
            *(number(value) for value in (rewards[:1] + rewards[-1:] if rewards else [])),
            *([""] * (0 if rewards else 2)),
            *accuracy,
            f"{run.summary.get('cpu_seconds', 0):,.0f}",
        ])  # fmt: skip
    headers = [
        "run", "rollouts", "completions", "reward, first", "last", "held out, first", "last", "CPU seconds",
    ]  # fmt: skip
    return Table(headers, rows, "Held out: greedy answers that the first reward function calls right.")


def _samples(run: PolicyRun) -> list[Block]:
    """The last ones, and the first."""
    steps = sorted({sample["step"] for sample in run.samples})
    blocks: list[Block] = []
    for step in dict.fromkeys([steps[-1], steps[0]]):
        found = [sample for sample in run.samples if sample["step"] == step][:NUM_SAMPLES]
        rows = [
            [
                _text(sample["completion"]),
                ", ".join(map(number, sample["rewards"].values())),
                number(sample["advantage"]),
            ]
            for sample in found
        ]
        caption = f"Rollout {step}, asked: {_text(found[0]['prompt'])}"
        blocks.append(Table(["completion", "reward", "advantage"], rows, caption))
    return blocks


def _text(words: Any) -> str:
    """A text, or messages, in one line."""
    if isinstance(words, list):
        words = " ".join(str(message["content"]) for message in words)
    return " ".join(str(words).split())
