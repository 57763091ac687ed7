"""`unspoken train`: a recipe's run folder, from claiming it to the summary.

RUN/resolved.yaml          the recipe with every default, and what it ran with; a recipe itself
RUN/metrics.jsonl .csv     the curves
RUN/checkpoints/           for --resume
RUN/model/                 the trained model with its tokenizer, once the run is finished
RUN/summary.json           counts, compute and final losses
"""

import argparse
import json
import platform
import shlex
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import unspoken
from unspoken.errors import UnspokenError, UsageError
from unspoken.train.recipe import METHOD_FIELDS, Recipe
from unspoken.train.recipe_file import compact, dotted, load_recipe

if TYPE_CHECKING:
    from unspoken.train.build import Data
    from unspoken.train.loop import TrainingLoop

INTERRUPTED = 130
RESOLVED, SUMMARY, MODEL = "resolved.yaml", "summary.json", "model"
PACKAGES = ("unspoken", "torch", "transformers", "tokenizers", "safetensors", "numpy")
MAY_CHANGE = {  # between a run and its resumption: they touch neither weights nor curves
    "run.out", "run.report_to", "train.eval_every", "train.save_every", "train.keep_last", "train.micro_batch_size",
}  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Train as the recipe says. Exit status 130 if a signal stopped it; its checkpoint is saved."""
    recipe = load_recipe(Path(args.recipe), args.overrides)
    return train(recipe, resume=args.resume, source=args.recipe)


def train(recipe: Recipe, resume: bool = False, source: str = "the recipe") -> int:
    """Run a recipe; `source` names it in errors."""
    folder = recipe.run.out
    _claim(folder, resume)
    if resume and _is_finished(folder):
        print(f"{folder} is finished; its model is in {folder / MODEL}")
        return 0
    try:
        loop = _start(recipe, resume)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error
    is_finished = loop.run()
    for tracker in loop.trackers:
        tracker.finish()
    if is_finished:
        from unspoken.models.convert import save

        save(loop.model, loop.data.tokenizer, folder / MODEL, overwrite=True)
    summary = _summary(loop, is_finished)
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    if is_finished:
        print(f"{folder / MODEL}: {summary['tokens']:,} tokens in {summary['wall_seconds']:,.0f} s")
        return 0
    print(f"stopped at step {loop.progress.step}; go on with\n  {_resume_command(folder)}")
    return INTERRUPTED


def _start(recipe: Recipe, resume: bool) -> "TrainingLoop":
    """Everything before the first step: checks, model, data, the resolved recipe."""
    from unspoken.train.metrics import check_trackers, open_trackers

    check_trackers(recipe.run.report_to)
    import torch
    from transformers.utils.logging import disable_progress_bar

    from unspoken.train.build import build_model, load_checkpoint, open_data, pick_device
    from unspoken.train.checkpoint import checkpoints
    from unspoken.train.loop import TrainingLoop

    disable_progress_bar()  # a bar for each checkpoint would break ours
    device = pick_device(recipe.run.device)
    data = open_data(recipe)
    folder = recipe.run.out
    newest = next(iter(checkpoints(folder)), None) if resume else None
    torch.manual_seed(recipe.run.seed)
    model: Any = build_model(recipe, data) if newest is None else load_checkpoint(newest)
    model.to(device)
    values = _resolved(recipe, model.config, data)
    if newest is not None:
        _check_same(values, folder)
        print(f"resuming from {newest}")
    elif resume:
        print(f"{folder} has no checkpoint yet: starting from the first step")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESOLVED).write_text(compact(values) + "\n", encoding="utf-8")
    print(compact(values), flush=True)
    trackers = open_trackers(recipe.run.report_to, folder, dict(dotted(values)))
    return TrainingLoop(recipe, model, data, trackers, newest)


def _claim(folder: Path, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"run.out: {folder} is a file")
    if not resume and folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            f"run.out: {folder} is not empty; go on with it (--resume), or give another folder (--run.out DIR)"
        )


def _is_finished(folder: Path) -> bool:
    try:
        return json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["status"] == "finished"
    except (OSError, ValueError, KeyError):
        return False


def _resolved(recipe: Recipe, config: Any, data: "Data") -> dict[str, Any]:
    """The recipe with the method's defaults filled in, and what it is run with."""
    values = recipe.plain()
    values["model"].update({field: getattr(config, field) for field in METHOD_FIELDS if hasattr(config, field)})
    values["made_with"] = {
        "data_fingerprint": data.shards.fingerprint,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }
    return values


def _check_same(values: dict[str, Any], folder: Path) -> None:
    """A resumed run goes on with what it began with, or is another run.

    Raises:
        UsageError: naming the key that changed.
    """
    try:
        before = dict(dotted(yaml.safe_load((folder / RESOLVED).read_text(encoding="utf-8"))))
    except (OSError, yaml.YAMLError) as error:
        raise UnspokenError(f"cannot read {folder / RESOLVED}, so the run cannot be resumed: {error}") from error
    for key, value in dotted(values):
        is_fixed = key == "made_with.data_fingerprint" or not (key in MAY_CHANGE or key.startswith("made_with."))
        if is_fixed and before.get(key) != value:
            raise UsageError(
                f"{key} is {value!r}, but {folder} began with {before.get(key)!r}; a resumed run cannot change it. "
                "Put it back, or start another run (--run.out DIR)"
            )


def _summary(loop: "TrainingLoop", is_finished: bool) -> dict[str, Any]:
    """Counts and compute of the whole run, resumes included."""
    from dataclasses import asdict

    from unspoken.train.build import compute_parameters

    progress = loop.progress
    num_parameters = compute_parameters(loop.model)
    return {
        "status": "finished" if is_finished else "interrupted",
        **asdict(progress),
        "num_parameters": sum(p.numel() for p in loop.model.parameters()),
        "compute_parameters": num_parameters,
        "train_flops": 6 * num_parameters * progress.pass_tokens,
        "flops_convention": "6 * compute_parameters * pass_tokens; attention scores and evaluation not counted",
        "final": loop.last_rows,
    }


def _resume_command(folder: Path) -> str:
    return f"unspoken train {shlex.quote(str(folder / RESOLVED))} --resume"


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
