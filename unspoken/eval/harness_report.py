"""What tasks of lm-eval gave, as a table for people and as eval_tasks.json, from which the run can be repeated."""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from unspoken.eval.harness import UnspokenLM
from unspoken.eval.report import model_facts, versions
from unspoken.eval.settings import spelled_out
from unspoken.eval.suites import Row, suites
from unspoken.models.knobs import option

HALF_INTERVAL = 1.96  # standard errors
LARGE = 1e6  # from here on a value is shown with an exponent
_OPTIONS = ("tasks", "num_fewshot", "limit", "max_new_tokens", "include_path", "batch_size", "device", "dtype")
_FLAGS = ("chat", "log_samples", "confirm_run_unsafe_code")


@dataclass(frozen=True)
class Score:
    """What one task, or group of tasks, gave. `metrics` and their `stderr` by lm-eval's names, `metric,filter`.

    num_scored: documents, of `num_documents` that the task has. subtasks: the scores of a group's tasks.
    """

    task: str
    shots: int | str
    depth: str
    num_scored: int
    num_documents: int
    version: Any
    metrics: dict[str, float]
    stderr: dict[str, float]
    subtasks: tuple["Score", ...] = ()

    def named(self, metric: str) -> list[str]:
        """Full names of a metric, with every filter it was taken with."""
        return [name for name in self.metrics if metric in (name, name.partition(",")[0])]


@dataclass(frozen=True)
class TaskEvaluation:
    """A run of the command; `args` are its options, `names` the tasks and suites that it names. num_cut: by task, how
    many texts lost their beginning to fit into the model's context."""

    args: argparse.Namespace
    names: list[str]
    lm: UnspokenLM
    scores: list[Score]
    num_cut: dict[str, int]
    seconds: float

    @property
    def lines(self) -> Iterator[tuple[str, Score, str]]:
        """What a line is called, its score and the metric's full name: suites row by row, other tasks with all of their
        metrics."""
        in_suites: set[str] = set()
        for row in _rows(self.names):
            in_suites.add(row.task)
            for score in self.scores:
                if score.task == row.task and (not row.shots or score.shots in row.shots):
                    yield from ((row.row, score, metric) for metric in score.named(row.metric))
        for score in self.scores:
            if score.task not in in_suites or score.task in self.names:
                yield from ((score.task, score, metric) for metric in score.metrics)

    @property
    def missing(self) -> list[Row]:
        """Rows of suites that lm-eval has no task for."""
        return [row for row in _rows(self.names) if row.missing]


def scores_of(results: Any, tasks: Any, depths: dict[str, str]) -> list[Score]:
    """Out of what lm-eval's `evaluate` returned: the group's that was asked for, if it has a score, else its tasks'.

    tasks: as `evaluate` took them. depths: of each task, how it was measured.
    """
    singles = [_score(results, name, depths[name]) for name in tasks["tasks"]]
    groups = [name for name in tasks["groups"] if name in results.get("groups", {})]
    if not groups:
        return singles
    return [_score(results, groups[0], " / ".join(dict.fromkeys(depths.values())), tuple(singles))]


def print_table(evaluation: TaskEvaluation, console: Console) -> None:
    lm = evaluation.lm
    knobs = "" if lm.knobs is None else "".join(f", {name} {value}" for name, value in vars(lm.knobs).items())
    title = f"{evaluation.args.model}: lm-eval {version('lm_eval')}{knobs}"
    console.print(title, highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    for name in ("task", "shots", "n", "metric", "value", "±", "depth"):
        is_number = name in ("shots", "n", "value", "±")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for name, score, metric in evaluation.lines:
        of_all = f"/{score.num_documents}" if score.num_scored < score.num_documents else ""
        value, error = _shown(score.metrics[metric]), score.stderr.get(metric)
        spread = "" if error is None else _shown(HALF_INTERVAL * error)
        number = f"{score.num_scored}{of_all}"
        table.add_row(name, str(score.shots), number, metric.removesuffix(",none"), value, spread, score.depth)
    table.caption = "±: half the 95 % interval, of lm-eval's standard error"
    console.print(table)
    for task, num_cut in evaluation.num_cut.items():
        cut = f"{task}: {num_cut} texts lost their beginning, to fit into the model's context of {lm.max_length} tokens"
        console.print(cut, highlight=False, soft_wrap=True)
    for row in evaluation.missing:
        console.print(f"not measured: {row.row}: {row.missing}", highlight=False, soft_wrap=True)


def as_dict(evaluation: TaskEvaluation) -> dict[str, Any]:
    """Everything about a run: how to repeat it, on what it ran and what it found."""
    args, lm = evaluation.args, evaluation.lm
    return {
        "command": shlex.join(rebuilt_command(args, lm.num_passes)),
        "depth": lm.depths(),
        "results": [asdict(score) for score in evaluation.scores],
        "rows": [
            {"row": name, "task": score.task, "shots": score.shots, "metric": metric, "value": score.metrics[metric]}
            for name, score, metric in evaluation.lines
        ],
        "missing": [{"row": row.row, "reason": row.missing} for row in evaluation.missing],
        "limit": args.limit,
        "chat_template": args.chat,
        "max_length": lm.max_length,
        "texts_cut": evaluation.num_cut,
        "seconds": round(evaluation.seconds, 3),
        "model": model_facts(lm.latent_model, args.model),
        "versions": versions() | {name: version(name) for name in ("lm_eval", "datasets")},
    }


def rebuilt_command(args: argparse.Namespace, num_passes: int | str | None) -> list[str]:
    """The command with every setting spelled out, the model's passes too."""
    command = ["unspoken", "eval", str(args.model)]
    if num_passes is not None:
        command += ["--num-passes", str(num_passes)]
    for name in _OPTIONS:
        if (value := getattr(args, name)) is not None:
            command += [option(name), str(value)]
    command += [option(name) for name in _FLAGS if getattr(args, name)]
    return command + spelled_out(args) + (["--out", str(args.out)] if args.out else [])


def _rows(names: Sequence[str]) -> list[Row]:
    return [row for name in names if name in suites() for row in suites()[name].rows]


def _score(results: Any, name: str, depth: str, subtasks: tuple[Score, ...] = ()) -> Score:
    found = results["results"][name]
    numbers = {key: value for key, value in found.items() if "," in key and isinstance(value, int | float)}
    stderr = {key: value for key, value in numbers.items() if key.partition(",")[0].endswith("_stderr")}
    if subtasks:
        scored, documents = (sum(getattr(one, count) for one in subtasks) for count in ("num_scored", "num_documents"))
    else:
        scored, documents = (results["n-samples"][name][count] for count in ("effective", "original"))
    return Score(
        name,
        results["n-shot"].get(name, "mixed"),
        depth,
        scored,
        documents,
        results["versions"].get(name),
        {key: value for key, value in numbers.items() if key not in stderr},
        {key.replace("_stderr,", ","): value for key, value in stderr.items()},
        subtasks,
    )


def _shown(value: float) -> str:
    return f"{value:.4f}" if abs(value) < LARGE else f"{value:.4g}"
