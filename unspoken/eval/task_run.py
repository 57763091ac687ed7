"""`unspoken eval` of a model that was trained on a task: how often its answer is right, by pass and length.

Its eval.json has the keys that text gives (`results`, `rows`, ...: losses, of the samples of the first length), so that
two models are compared in the same way, and under `task` the rates of right answers.
"""

import argparse
import json
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from unspoken.data.task_windows import task_of
from unspoken.data.tasks import Task
from unspoken.errors import UsageError
from unspoken.eval.perplexity import Loss
from unspoken.eval.plots import plot_task
from unspoken.eval.report import (
    COMPLETE,
    LATENT_COLUMNS,
    finite,
    knobs_by_line,
    latent_cells,
    loss_results,
    model_facts,
    row_sums,
    versions,
)
from unspoken.eval.settings import knobs_of, settings_of, spelled_out
from unspoken.eval.tasks import LengthResult, Rate, default_lengths, evaluate_task
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.load import load_model

PLOT = "eval_task.png"


@dataclass(frozen=True)
class TaskEvaluation:
    """A run of the command; `args` are its options."""

    args: argparse.Namespace
    model: LatentForCausalLM
    task: Task
    results: list[LengthResult]

    @cached_property
    def losses(self) -> list[Loss]:
        """Of the samples of the first length."""
        return self.results[0].scores.losses()


def evaluate(args: argparse.Namespace, out: Path) -> int:
    """Evaluate as the command's options say, and write into `out`."""
    model, tokenizer = load_model(args.model, args.device, args.dtype)
    task = task_of(tokenizer)
    if task is None:
        raise UsageError(f"{args.model} was not trained on a task; give text with --data FOLDER")
    settings = settings_of(model, knobs_of(args))
    args.length = sorted(set(args.length or default_lengths(task)))
    results = []
    with Console(stderr=True).status("") as status:
        for length in args.length:
            status.update(f"{args.samples} samples of length {length}")
            options = (args.samples, args.num_passes, not args.no_exact, args.batch_size, settings)
            results.append(evaluate_task(model, task, length, *options))
    evaluation = TaskEvaluation(args, model, task, results)
    _print_table(evaluation, Console())
    path = out / COMPLETE
    path.write_text(json.dumps(finite(as_dict(evaluation)), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    passes = getattr(model.config, "num_train_passes", 1)
    title = f"{Path(args.model).name}: {task.name}, {passes} pass{'es' * (passes > 1)} in training"
    plot_task(results, task, title, out / PLOT)
    print(f"written: {path}")
    return 0


def as_dict(evaluation: TaskEvaluation) -> dict[str, Any]:
    """Everything about a run: how to repeat it, on what it ran and what it found."""
    args, task, scores = evaluation.args, evaluation.task, evaluation.results[0].scores
    return {
        "complete": True,
        "command": shlex.join(_command(args)),
        "results": loss_results(evaluation.losses),
        "knobs": knobs_by_line(scores),
        "depth_curve": None,
        "task": {
            "settings": task.settings(),
            "answer": "the last target of a sample" if task.answer == "last" else "all targets of a sample",
            "lengths": {str(result.length): _rates(result) for result in evaluation.results},
        },
        "num_sequences": args.samples,
        "data": {
            "folder": f"{task.name}, length {args.length[0]}",
            "split": "samples",
            "fingerprint": f"{task.fingerprint()} {args.length[0]}",
        },
        "model": model_facts(evaluation.model, args.model),
        "versions": versions(),
        "rows": row_sums(scores),
    }


def _rates(result: LengthResult) -> dict[str, Any]:
    latent_lengths = {name: result.scores.loss(name).latent_length for name in result.scores.latent_steps}
    return {
        "majority": _rate(result.majority),
        "answer": {name: _rate(rate) for name, rate in result.answers.items()},
        "positions": {name: [_rate(rate) for rate in rates] for name, rates in result.positions.items()},
        **({"latent_length": latent_lengths} if latent_lengths else {}),
    }


def _rate(rate: Rate) -> dict[str, Any]:
    low, high = rate.interval
    return {"share": rate.share, "low": low, "high": high, "num_right": rate.num_right, "num": rate.num}


def _command(args: argparse.Namespace) -> list[str]:
    """The command with every setting spelled out, defaults too."""
    command = ["unspoken", "eval", str(args.model)]
    for length in args.length:
        command += ["--length", str(length)]
    for name in ("samples", "num_passes", "batch_size", "device", "dtype"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return command + spelled_out(args) + ["--no-exact"] * args.no_exact + (["--out", str(args.out)] if args.out else [])


def _print_table(evaluation: TaskEvaluation, console: Console) -> None:
    args, task, results = evaluation.args, evaluation.task, evaluation.results
    settings = ", ".join(f"{key} {value}" for key, value in task.settings().items() if key != "name")
    console.print(f"{args.model}: {task.name} ({settings})", highlight=False, soft_wrap=True)
    table = Table()
    first = results[0].length
    latent = [f"{name} at {first}" for name in LATENT_COLUMNS] if results[0].scores.latent_steps else []
    for header in ("passes", f"loss at {first}", *latent, *(f"length {result.length}" for result in results)):
        table.add_column(header, justify="left" if header == "passes" else "right")
    for loss in evaluation.losses:
        cells = [f"{loss.loss:.4f}", *latent_cells(loss)]
        table.add_row(loss.name, *cells, *(_cell(result.answers[loss.name]) for result in results))
    table.add_row("majority", "", *("" for _ in latent), *(f"{100 * result.majority.share:.1f}" for result in results))
    which = "last label" if task.answer == "last" else "whole result"
    table.caption = f"{which} right, % of {args.samples:,} samples; ±: half the 95 % interval"
    console.print(table)


def _cell(rate: Rate) -> str:
    low, high = rate.interval
    return f"{100 * rate.share:.1f} ± {50 * (high - low):.1f}"
