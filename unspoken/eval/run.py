"""`unspoken eval`: a table of losses by pass and exactly, the depth curve, eval.json and two plots.

An interrupted run prints and writes what it has, as eval.partial.json, and leaves an older eval.json alone. Without
--data, a model that was trained on a task is evaluated on that: `task_run.py`. With --tasks, on tasks of lm-eval:
`harness_run.py`. With --problems, on rows with a right answer: `problem_run.py`.
"""

import argparse
import importlib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from unspoken.data.cache import check_folder
from unspoken.data.pauses import text_vocabulary
from unspoken.data.tokens import TokenShards, check_embedding_rows
from unspoken.errors import UnspokenError, UsageError
from unspoken.eval import problem_run, task_run
from unspoken.eval.lm_eval import missing
from unspoken.eval.perplexity import Scores, prepare_scores, score, work
from unspoken.eval.report import Evaluation, print_table, write
from unspoken.eval.rows import cut_rows
from unspoken.eval.settings import knobs_of, settings_of
from unspoken.eval.suites import print_suites
from unspoken.models.knobs import option
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.load import check_model, load_model

INTERRUPTED = 130
# What is evaluated: how it is asked for, and the options that go with it, each with its default.
TEXT, OWN_TASK, TASKS = "--data FOLDER", "the task that a model was trained on, so without --data", "--tasks NAMES"
PROBLEMS = "--problems FILE"
OPTIONS: dict[str, dict[str, Any]] = {
    TEXT: {
        "num_passes": 4,
        "split": "val",
        "depth": 0,
        "sequence_length": 256,
        "max_sequences": 64,
        "batch_size": 8,
    },
    OWN_TASK: {"num_passes": 4, "length": [], "samples": 1000, "batch_size": 250},
    TASKS: {
        "num_passes": None,
        "num_fewshot": None,
        "limit": None,
        "max_new_tokens": None,
        "include_path": None,
        "chat": False,
        "log_samples": False,
        "confirm_run_unsafe_code": False,
        "batch_size": 8,
    },
    PROBLEMS: {
        "reward": None,
        "partial": False,
        "num_prefill_passes": None,
        "limit": None,
        "max_new_tokens": 64,
        "log_samples": False,
        "batch_size": 8,
    },
}
MODES = {"problems": PROBLEMS, "tasks": TASKS, "data": TEXT}  # by the option that asks for it


def main(args: argparse.Namespace) -> int:
    if args.list_suites:
        print_suites(Console())
        return 0
    if args.model is None:
        args.parser.error("give a model folder")
    knobs_of(args)  # refuses what cannot be meant
    given = [name for name in MODES if getattr(args, name) is not None]
    if len(given) > 1:
        raise UsageError(f"{option(given[0])} and {option(given[1])} are two evaluations; give one of them")
    settle(args, MODES[given[0]] if given else OWN_TASK)
    if args.problems is not None:
        return problem_run.evaluate(args, _output_folder(args))
    if args.tasks is not None:
        return _evaluate_tasks(args)
    if args.data is None:
        return task_run.evaluate(args, _output_folder(args))
    if args.depth < 0:
        raise UsageError(f"--depth is {args.depth}; it must be at least 1, or 0 for no curve")
    if args.depth and args.exit_threshold:
        raise UsageError("--depth draws one curve, of the model's own threshold; leave --exit-threshold out")
    return _evaluate_text(args, _output_folder(args))


def settle(args: argparse.Namespace, mode: str) -> None:
    """Put defaults in place; an option that would have no effect is refused."""
    own = OPTIONS[mode]
    for name in dict.fromkeys(name for options in OPTIONS.values() for name in options):
        if name not in own and getattr(args, name) is not None:
            others = [other for other, options in OPTIONS.items() if name in options]
            raise UsageError(f"{option(name)} is for {', and for '.join(others)}")
    for name, default in own.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    for name, word in (("num_passes", "exact"), ("batch_size", "auto")):
        if mode != TASKS and getattr(args, name) == word:
            raise UsageError(f"{option(name)} {word} is for {TASKS}; here it is a number")


def _evaluate_tasks(args: argparse.Namespace) -> int:
    try:
        harness_run = importlib.import_module("unspoken.eval.harness_run")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("unspoken"):
            raise
        raise UsageError(f"--tasks: {missing(error)}") from error
    return harness_run.evaluate(args, _output_folder(args))


def _evaluate_text(args: argparse.Namespace, out: Path) -> int:
    shards = TokenShards.open(args.data, args.split, verify=True)
    rows = cut_rows(shards, args.sequence_length, args.max_sequences)
    model, tokenizer = load_model(args.model, args.device, args.dtype)
    _check_fit(args, model, tokenizer, shards)
    settings = settings_of(model, knobs_of(args))
    scores = prepare_scores(model, rows, max(args.num_passes, args.depth), not args.no_exact, settings)
    finished = _score_with_progress(model, scores, args.batch_size)
    evaluation = Evaluation(args, model, shards, scores)
    written = ""
    if evaluation.losses:
        print_table(evaluation, Console())
        written = f"written: {write(evaluation, out)}"
    if finished:
        print(written)
        return 0
    Console(stderr=True).print(
        f"interrupted: {int(scores.done.sum())} of {len(rows)} sequences were scored; {written}", soft_wrap=True
    )
    return INTERRUPTED


def _output_folder(args: argparse.Namespace) -> Path:
    if isinstance(args.num_passes, int) and args.num_passes < 1:
        raise UsageError(f"--num-passes is {args.num_passes}; it must be at least 1")
    check_model(args.model)
    out = Path(args.out or args.model)
    if not args.out and not out.is_dir():
        raise UsageError(f"{args.model} is not a local folder, so there is no place for the results; give --out DIR")
    check_folder("--out", out)
    out.mkdir(parents=True, exist_ok=True)
    return out


def _check_fit(
    args: argparse.Namespace,
    model: LatentForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    shards: TokenShards,
) -> None:
    """Refuse data that the model cannot read: another tokenizer's, or sequences longer than its context."""
    check_embedding_rows(shards.vocab_size, model.config.vocab_size)
    if tokenizer is not None and text_vocabulary(tokenizer) != text_vocabulary(shards.load_tokenizer()):
        raise UnspokenError(
            f"{args.data} was tokenised with another tokenizer than that of {args.model}; "
            f"prepare the data again with --tokenizer {args.model}"
        )
    context = getattr(model.config.text_config, "max_position_embeddings", None)
    if context and args.sequence_length > context:
        raise UsageError(f"--sequence-length is {args.sequence_length}, but the model's context is {context} tokens")


def _score_with_progress(model: LatentForCausalLM, scores: Scores, batch_size: int) -> bool:
    """Score all rows; False if the user stopped it."""
    columns = (TextColumn("scoring"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("scoring", total=work(scores))
        try:
            score(model, scores, batch_size, lambda tokens: progress.advance(task, tokens))
        except KeyboardInterrupt:
            return False
    return True
