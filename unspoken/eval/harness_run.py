"""`unspoken eval --tasks`: tasks of lm-eval and the papers' suites, at one depth that every line tells.

OUT/eval_tasks.json                    what was found, and the command that finds it again
OUT/eval_samples_TASK_SHOTS.jsonl      every question and answer, with --log-samples
"""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lm_eval.evaluator import evaluate as lm_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import handle_non_serializable
from rich.console import Console

from unspoken.decode.sampling import require_tokenizer
from unspoken.errors import UsageError
from unspoken.eval.harness import UnspokenLM
from unspoken.eval.harness_report import Score, TaskEvaluation, as_dict, print_table, scores_of
from unspoken.eval.harness_tasks import Loaded, check, find, load, seeded, wanted_tasks
from unspoken.eval.report import TASK_SCORES, finite
from unspoken.eval.settings import knobs_of
from unspoken.models.load import load_model

NUM_RESAMPLES = 1000  # for the standard error of what is no mean: a perplexity


def evaluate(args: argparse.Namespace, out: Path) -> int:
    """Evaluate as the command's options say, and write into `out`."""
    names = _names(args)
    wanted = wanted_tasks(names, args.num_fewshot)
    manager = find([one.name for one in wanted], args.include_path)
    lm = load_lm(args)
    loaded = load(wanted, manager)
    check(loaded, lm, args.max_new_tokens, args.confirm_run_unsafe_code)
    start = time.perf_counter()
    scores: list[Score] = []
    num_cut: dict[str, int] = {}
    for one in loaded:
        before = lm.num_cut
        scores += _run(one, lm, args, out)
        if lm.num_cut > before:
            num_cut[str(one.wanted)] = lm.num_cut - before
    evaluation = TaskEvaluation(args, names, lm, scores, num_cut, time.perf_counter() - start)
    print_table(evaluation, Console())
    path = out / TASK_SCORES
    path.write_text(_json(finite(as_dict(evaluation)), indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")
    return 0


def load_lm(args: argparse.Namespace) -> UnspokenLM:
    model, tokenizer = load_model(args.model, args.device, args.dtype)
    if args.batch_size == "auto" and model.device.type == "cpu":
        raise UsageError("--batch-size auto: on a CPU, memory that runs out ends the process; give a number")
    if not getattr(require_tokenizer(tokenizer, args.model), "chat_template", None) and args.chat:
        raise UsageError(f"--chat: the tokenizer of {args.model} has no chat template")
    knobs = knobs_of(args)[-1]  # the model's own threshold, or the one that was given
    with _quiet_lm_eval():
        return UnspokenLM(model, args.num_passes, **asdict(knobs), tokenizer=tokenizer, batch_size=args.batch_size)


def _names(args: argparse.Namespace) -> list[str]:
    """Of --tasks; whatever can be refused without reading a file is."""
    names = [name for name in args.tasks.split(",") if name]
    if not names:
        raise UsageError("--tasks: give names, separated by commas")
    if len(args.exit_threshold or []) > 1:
        raise UsageError("--exit-threshold: with --tasks it is one; run the command again for another")
    if args.no_exact:
        raise UsageError("--no-exact is for evaluations without --tasks; with them, --num-passes is the one depth")
    if args.batch_size != "auto" and args.batch_size < 1:
        raise UsageError(f"--batch-size is {args.batch_size}; it must be at least 1, or `auto`")
    for name in ("num_fewshot", "max_new_tokens"):
        if (value := getattr(args, name)) is not None and value < (least := int(name == "max_new_tokens")):
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if args.limit is not None and not (0 < args.limit < 1 or (args.limit >= 1 and args.limit == int(args.limit))):
        raise UsageError(f"--limit is {args.limit}; it is a number of documents, or a share below 1")
    if args.limit is not None and args.limit >= 1:
        args.limit = int(args.limit)
    if args.include_path and not Path(args.include_path).is_dir():
        raise UsageError(f"--include-path: no such folder: {args.include_path}")
    return list(dict.fromkeys(names))


def _run(loaded: Loaded, lm: UnspokenLM, args: argparse.Namespace, out: Path) -> list[Score]:
    with seeded(), _quiet_lm_eval(), redirect_stdout(sys.stderr):
        results: Any = lm_evaluate(
            lm,
            loaded.tasks,
            limit=args.limit,
            log_samples=args.log_samples,
            bootstrap_iters=NUM_RESAMPLES,
            apply_chat_template=args.chat,
            fewshot_as_multiturn=args.chat,
            confirm_run_unsafe_code=args.confirm_run_unsafe_code,
        )
    for task, samples in results.get("samples", {}).items():
        path = out / f"eval_samples_{task}_{results['n-shot'].get(task, 0)}.jsonl"
        path.write_text("".join(_json(row) + "\n" for row in samples), encoding="utf-8")
    depths = {
        task.task_name: lm.generating_depth if task.OUTPUT_TYPE == "generate_until" else lm.scoring_depth
        for task in loaded
    }
    return scores_of(results, loaded.tasks, depths)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False, default=handle_non_serializable)


@contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """Without a warning that the model is loaded already, and one for each text that is cut: those are counted. And its
    resampling stays in this process, where it would start one for each core."""
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    logger = logging.getLogger(HFLM.__module__)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
