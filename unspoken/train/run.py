"""`unspoken train`: a recipe's run folder, from claiming it to the summary.

RUN/resolved.yaml          the recipe with every default, and what it ran with; a recipe itself
RUN/metrics.jsonl .csv     the curves
RUN/checkpoints/           for --resume, and for `unspoken export`
RUN/tokenizer/             what the data's ids mean
RUN/model/                 the trained model with its tokenizer, once the run is finished
RUN/summary.json           counts, compute and final losses
"""

import argparse
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import unspoken
from unspoken.errors import UnspokenError, UsageError
from unspoken.train.folder import (
    MODEL,
    RESOLVED,
    RUN_ID,
    SUMMARY,
    TOKENIZER,
    claimed,
    is_finished,
    newest_checkpoint,
    same_run,
    say_where_it_begins,
)
from unspoken.train.recipe import METHOD_FIELDS, Recipe
from unspoken.train.recipe_file import compact, dotted, load_recipe

if TYPE_CHECKING:
    import torch

    from unspoken.train.build import Data
    from unspoken.train.loop import TrainingLoop
    from unspoken.train.parallel import Ranks

INTERRUPTED = 130
GAVE_UP = "UNSPOKEN_GAVE_UP"  # of `unspoken launch`: a file for the exit status of an error that would come back
PACKAGES = ("unspoken", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def main(args: argparse.Namespace) -> int:
    """Train as the recipe says. Exit status 130 if a signal stopped it; its checkpoint is saved."""
    recipe = load_recipe(Path(args.recipe), args.overrides)
    return train(recipe, resume=args.resume, source=args.recipe)


def sft(args: argparse.Namespace) -> int:
    """`unspoken sft`: the same loop over rows to answer."""
    recipe = load_recipe(Path(args.recipe), args.overrides)
    if recipe.data.conversations is None:
        raise UsageError(f"{args.recipe}: data.conversations: required for sft; `unspoken train` reads other data")
    return train(recipe, resume=args.resume, source=args.recipe)


def train(recipe: Recipe, resume: bool = False, source: str = "the recipe") -> int:
    """Run a recipe; `source` names it in errors. Under torchrun every process calls it."""
    folder = recipe.run.out
    resume = resume or is_restart()
    if resume and is_finished(folder):
        print(f"{folder} is finished; its model is in {folder / MODEL}")
        return 0
    from unspoken.train.build import pick_device
    from unspoken.train.parallel import joined_ranks, local_device

    recipe.check_processes(int(os.environ.get("WORLD_SIZE", "1")))
    device = pick_device(local_device(recipe.run.device))
    with joined_ranks(device) as ranks, _giving_up(ranks), claimed(folder, resume, ranks):
        try:
            loop = _start(recipe, resume, device, ranks)
        except UsageError as error:
            raise UsageError(f"{source}: {error}", said_by_main=error.said_by_main) from error
        is_at_end = loop.run()
        for tracker in loop.trackers:
            tracker.finish()
        if is_at_end:
            _write_model(loop)
        _write_summary(loop, is_at_end)
    if ranks.is_main and is_at_end:
        print(f"{folder / MODEL}: {loop.progress.tokens:,} tokens in {loop.progress.wall_seconds:,.0f} s")
    if is_at_end:
        return 0
    if ranks.is_main:
        print(f"stopped at step {loop.progress.step}; go on with\n  {resume_command(folder, ranks.size)}")
    return INTERRUPTED


@contextmanager
def _giving_up(ranks: "Ranks") -> Iterator[None]:
    """An error that all processes meet would meet them again after a restart: note it, and do not try again.

    Raises:
        UnspokenError: after a restart, if such an error ended the processes before it.
    """
    note = os.environ.get(GAVE_UP)

    def look() -> None:
        if is_restart() and note and Path(note).read_text(encoding="utf-8"):
            raise UnspokenError("not tried again: the same error would come back")

    ranks.on_main(look)
    try:
        yield
    except UnspokenError as error:
        if note and ranks.is_main and (error.said_by_main or isinstance(error, UsageError)):
            Path(note).write_text(str(error.exit_code), encoding="utf-8")
        raise


def is_restart() -> bool:
    """Whether torchrun started this process again after a failure: the run then goes on by itself."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _start(recipe: Recipe, resume: bool, device: "torch.device", ranks: "Ranks") -> "TrainingLoop":
    """Everything before the first step: checks, model, data, the resolved recipe."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from unspoken.train.build import end_answers, open_data, show_prompts
    from unspoken.train.loop import TrainingLoop
    from unspoken.train.metrics import check_trackers, open_trackers

    disable_progress_bar()  # a bar for each checkpoint would break ours
    ranks.together(lambda: check_trackers(recipe.run.report_to))
    data = ranks.together(lambda: open_data(recipe))
    recipe, folder = recipe.with_steps(len(data.train)), recipe.run.out
    newest, cut = newest_checkpoint(folder, ranks) if resume else (None, [])
    model, values = ranks.together(lambda: _model(recipe, data, newest))
    show_prompts(data, model.config)
    if recipe.data.conversations is not None:
        end_answers(model, data.tokenizer)
    model.to(device)
    ranks.on_main(lambda: _begin_folder(folder, values, data))
    trackers = open_trackers(recipe.run.report_to, folder, dict(dotted(values))) if ranks.is_main else []
    torch.manual_seed(_dropout_seed(recipe.run.seed, ranks))
    loop = TrainingLoop(recipe, model, data, trackers, newest, ranks, run_id=values["made_with"][RUN_ID])
    if ranks.is_main:
        _say_what_begins(loop, resume, newest, cut)
    return loop


def _model(recipe: Recipe, data: "Data", newest: Path | None) -> tuple[Any, dict[str, Any]]:
    """A new model, or one for the checkpoint's weights to be read into; and the resolved recipe."""
    import torch

    from unspoken.train.build import build_model, model_like
    from unspoken.train.checkpoint import check_belongs

    torch.manual_seed(recipe.run.seed)
    model: Any = build_model(recipe, data) if newest is None else model_like(newest)
    values = _resolved(recipe, model.config, data)
    if newest is not None:
        values["made_with"][RUN_ID] = same_run(values, recipe.run.out)
        check_belongs(newest, values["made_with"][RUN_ID])
    return model, values


def _dropout_seed(seed: int, ranks: "Ranks") -> int:
    """The weights are drawn alike by all processes; what is drawn from here on is each one's own."""
    return seed + ranks.rank


def _begin_folder(folder: Path, values: dict[str, Any], data: "Data") -> None:
    (folder / RESOLVED).write_text(compact(values) + "\n", encoding="utf-8")
    data.tokenizer.save_pretrained(folder / TOKENIZER)


def _say_what_begins(loop: "TrainingLoop", resume: bool, newest: Path | None, cut: list[Path]) -> None:
    recipe, folder, model = loop.recipe, loop.recipe.run.out, loop.model
    say_where_it_begins(folder, resume, newest, cut, "the first step")
    method = model.config.model_type.removeprefix("unspoken_")
    num_parameters = sum(p.numel() for p in model.parameters())
    where = f"{loop.ranks.size} processes" if loop.ranks.size > 1 else str(model.device)
    print(
        f"{folder}: {method}, {num_parameters:,} parameters, {recipe.num_steps:,} steps of {recipe.step_tokens:,} "
        f"tokens on {where}; the whole recipe is in {folder / RESOLVED}",
        flush=True,
    )


def _write_model(loop: "TrainingLoop") -> None:
    from unspoken.models.convert import save

    model = loop.engine.whole_model()
    folder = loop.recipe.run.out

    def write() -> None:
        assert model is not None
        save(model, loop.data.tokenizer, folder / MODEL, overwrite=True)

    loop.ranks.on_main(write)


def _write_summary(loop: "TrainingLoop", is_finished: bool) -> None:
    loop.progress = loop.progress.over(loop.ranks)
    if loop.ranks.is_main:
        text = json.dumps(_summary(loop, is_finished), indent=1)
        (loop.recipe.run.out / SUMMARY).write_text(text + "\n", encoding="utf-8")


def _resolved(recipe: Recipe, config: Any, data: "Data") -> dict[str, Any]:
    """The recipe with the method's defaults filled in, and what it is run with."""
    values = recipe.plain()
    given = values["model"]  # of a run that goes on, what it says now is held against what it was
    given.update({f: getattr(config, f) for f in METHOD_FIELDS if hasattr(config, f) and given.get(f) is None})
    values["made_with"] = made_with(data.fingerprint)
    return values


def made_with(data_fingerprint: str) -> dict[str, Any]:
    """What a run is made with, a new id among it."""
    return {
        "data_fingerprint": data_fingerprint,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        RUN_ID: uuid.uuid4().hex,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }


def _summary(loop: "TrainingLoop", is_finished: bool) -> dict[str, Any]:
    """Counts and compute of the whole run, resumes included."""
    from dataclasses import asdict

    from unspoken.train.build import compute_parameters

    progress = loop.progress
    num_parameters = compute_parameters(loop.model)
    return {
        "status": "finished" if is_finished else "interrupted",
        **asdict(progress),
        "processes": loop.ranks.size,
        "best": loop.best,
        "peak_memory_bytes": peak_memory(loop.model.device),
        "num_parameters": sum(p.numel() for p in loop.model.parameters()),
        "compute_parameters": num_parameters,
        "train_flops": 6 * num_parameters * progress.pass_tokens,
        "flops_convention": "6 * compute_parameters * pass_tokens; attention scores and evaluation not counted",
        "final": loop.last_rows,
    }


def peak_memory(device: Any) -> int:
    """Of the CUDA device, by tensors; or else of this process, all that it held."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resume_command(folder: Path, num_processes: int) -> str:
    command = f"train {shlex.quote(str(folder / RESOLVED))} --resume"
    return f"unspoken {command}" if num_processes == 1 else f"unspoken launch --processes {num_processes} -- {command}"


def _git_commit() -> str | None:
    """The commit of the code, `-dirty` if it was changed; None for an installed package."""
    where = Path(unspoken.__file__).parent
    command = ["git", "-C", str(where), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
