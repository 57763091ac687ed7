"""`unspoken eval --problems`: how many problems of a file the model solves, task by task.

OUT/eval_problems.json       what was found, and the command that finds it again
OUT/eval_problems.jsonl      every row with the model's answer and its reward, with --log-samples
"""

import argparse
import hashlib
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from unspoken.data.reasoning import library_version
from unspoken.decode.sampling import Sampling, require_tokenizer
from unspoken.errors import UsageError
from unspoken.eval import rewards
from unspoken.eval.problems import (
    Answer,
    Problem,
    Score,
    answer_problems,
    by_task,
    check_rows,
    first_of_each_task,
    read_problems,
)
from unspoken.eval.report import finite, model_facts, versions
from unspoken.eval.settings import decoding_depth, knobs_of, settings_of, spelled_out
from unspoken.models.knobs import option
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.load import load_model
from unspoken.models.recycler import RecyclerForCausalLM

SCORES, SAMPLES = "eval_problems.json", "eval_problems.jsonl"
REASONING_GYM, EXACT_TEXT = "reasoning_gym", "exact"
_OPTIONS = (
    "problems", "reward", "num_prefill_passes", "limit", "batch_size", "max_new_tokens", "device", "dtype",
)  # fmt: skip
_FLAGS = ("partial", "log_samples")


@dataclass(frozen=True)
class ProblemEvaluation:
    """A run of the command; `args` are its options."""

    args: argparse.Namespace
    model: LatentForCausalLM
    answers: list[Answer]
    seconds: float

    @property
    def num_passes(self) -> int | None:
        """That read the prompts; None for a model that knows only one way."""
        if isinstance(self.model, RecyclerForCausalLM):
            return self.args.num_prefill_passes or self.model.num_prefill_passes
        return 1 if self.model.decodes_by_recurrence else None

    @property
    def depth(self) -> str:
        return decoding_depth(self.model, self.num_passes)


def evaluate(args: argparse.Namespace, out: Path) -> int:
    """Evaluate as the command's options say, and write into `out`."""
    problems = _problems(args)
    args.reward = args.reward or _reward_of(problems)
    if args.partial and args.reward != REASONING_GYM:
        raise UsageError(f"--partial is for the reward {REASONING_GYM}, not for {args.reward}")
    reward = rewards.find(args.reward, args.partial)
    check_rows(problems, reward)
    model, tokenizer = load_model(args.model, args.device, args.dtype)
    start = time.perf_counter()
    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(problems))
        answers = answer_problems(
            model,
            require_tokenizer(tokenizer, args.model),
            problems,
            reward,
            max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size,
            num_prefill_passes=args.num_prefill_passes,
            knobs=knobs_of(args)[-1],
            progress=lambda num: progress.advance(task, num),
        )
    evaluation = ProblemEvaluation(args, model, answers, time.perf_counter() - start)
    print_table(evaluation, Console())
    path = out / SCORES
    path.write_text(json.dumps(finite(as_dict(evaluation)), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    written = [path]
    if args.log_samples:
        written.append(out / SAMPLES)
        written[-1].write_text("".join(map(_sample, answers)), encoding="utf-8")
    print(f"written: {', '.join(map(str, written))}")
    return 0


def _problems(args: argparse.Namespace) -> list[Problem]:
    """Whatever can be refused without loading the model is."""
    if args.no_exact:
        raise UsageError("--no-exact is for losses; answers are written by decoding, which is exact")
    if len(args.exit_threshold or []) > 1:
        raise UsageError("--exit-threshold: with --problems it is one; run the command again for another")
    Sampling(args.max_new_tokens)
    if args.batch_size < 1:
        raise UsageError(f"--batch-size is {args.batch_size}; it must be at least 1")
    if args.limit is not None and (args.limit < 1 or args.limit != int(args.limit)):
        raise UsageError(f"--limit is {args.limit:g}; with --problems it is a whole number of at least 1")
    if Path(args.problems).is_dir():
        raise UsageError(f"--problems: {args.problems} is a folder; give one of its files")
    problems = read_problems([args.problems])
    if args.limit is None:
        return problems
    args.limit = int(args.limit)
    return first_of_each_task(problems, args.limit)


def _reward_of(problems: Sequence[Problem]) -> str:
    """reasoning-gym's where the rows have what it needs, else the right text."""
    has_entry = {problem.row.get(rewards.ENTRY) is not None for problem in problems}
    if len(has_entry) > 1:
        raise UsageError(
            f"some rows have {rewards.ENTRY!r}, which reasoning-gym scores, and some have not; say with --reward how "
            "all are scored"
        )
    return REASONING_GYM if has_entry.pop() else EXACT_TEXT


def print_table(evaluation: ProblemEvaluation, console: Console) -> None:
    args, answers = evaluation.args, evaluation.answers
    partial = " (partial)" if args.partial else ""
    console.print(
        f"{args.model}: {args.problems}, reward {args.reward}{partial}, {evaluation.depth}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    has_shares = any(answer.reward not in (0, 1) for answer in answers)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    rewarded = ["reward"] * has_shares
    for name in ("task", "n", "right", "95 %", *rewarded, "majority", "tokens", "cut"):
        table.add_column(name, justify="left" if name == "task" else "right", overflow="fold", no_wrap=name != "task")
    for task, score in by_task(answers).items():
        table.add_row(escape(task), *_cells(score, has_shares))
    table.add_row("all", *_cells(Score.of(answers), has_shares))
    table.caption = "%; Wilson's interval; majority: a task's most frequent answer; cut: by the limit"
    console.print(table)


def _cells(score: Score, has_shares: bool) -> list[str]:
    low, high = score.right.interval
    return [
        f"{score.right.num:,}",
        f"{100 * score.right.share:.1f}",
        f"{100 * low:.1f} - {100 * high:.1f}",
        *([f"{score.reward:.4f}"] if has_shares else []),
        "" if score.majority is None else f"{100 * score.majority.share:.1f}",
        f"{score.mean_tokens:.1f}",
        f"{100 * score.cut:.1f}",
    ]


def as_dict(evaluation: ProblemEvaluation) -> dict[str, Any]:
    """Everything about a run: how to repeat it, on what it ran and what it found."""
    args, model, answers = evaluation.args, evaluation.model, evaluation.answers
    (setting,) = settings_of(model, knobs_of(args)[-1:])
    of_library = {"reasoning-gym": library_version()} if args.reward == REASONING_GYM else {}
    return {
        "command": shlex.join(rebuilt_command(evaluation)),
        "tasks": {task: _described(score) for task, score in by_task(answers).items()},
        "all": _described(Score.of(answers)),
        "reward": {"name": args.reward, "partial": args.partial},
        "depth": {
            "num_passes": evaluation.num_passes,
            "generating": evaluation.depth,
            "knobs": None if setting.knobs is None else vars(setting.knobs),
        },
        "max_new_tokens": args.max_new_tokens,
        "limit": args.limit,
        "data": {
            "file": str(args.problems),
            "sha256": hashlib.sha256(Path(args.problems).read_bytes()).hexdigest(),
            "num_problems": len(answers),
        },
        "seconds": round(evaluation.seconds, 3),
        "model": model_facts(model, args.model),
        "versions": versions() | of_library,
    }


def rebuilt_command(evaluation: ProblemEvaluation) -> list[str]:
    """The command with every setting spelled out, the model's passes too."""
    args = evaluation.args
    values = {name: getattr(args, name) for name in _OPTIONS}
    if isinstance(evaluation.model, RecyclerForCausalLM):
        values["num_prefill_passes"] = evaluation.num_passes
    command = ["unspoken", "eval", str(args.model)]
    for name, value in values.items():
        if value is not None:
            command += [option(name), str(value)]
    command += [option(name) for name in _FLAGS if getattr(args, name)]
    return command + spelled_out(args) + (["--out", str(args.out)] if args.out else [])


def _described(score: Score) -> dict[str, Any]:
    low, high = score.right.interval
    return {
        **asdict(score.right),
        "accuracy": score.right.share,
        "low": low,
        "high": high,
        "reward": score.reward,
        "majority": None if score.majority is None else score.majority.share,
        "mean_tokens": score.mean_tokens,
        "cut": score.cut,
    }


def _sample(answer: Answer) -> str:
    problem = answer.problem
    row = {
        "place": problem.place,
        "row": problem.row,
        "text": answer.text,
        "num_tokens": answer.num_tokens,
        "finish_reason": "length" if answer.is_cut else "stop",
        "reward": answer.reward,
    }
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"
