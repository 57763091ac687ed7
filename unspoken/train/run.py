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
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import unspoken
from unspoken.errors import UnspokenError, UsageError
from unspoken.train.recipe import METHOD_FIELDS, Recipe
from unspoken.train.recipe_file import compact, dotted, load_recipe

if TYPE_CHECKING:
    import torch

    from unspoken.train.build import Data
    from unspoken.train.loop import TrainingLoop
    from unspoken.train.parallel import Ranks

INTERRUPTED = 130
RESOLVED, SUMMARY, MODEL, TOKENIZER = "resolved.yaml", "summary.json", "model", "tokenizer"
GAVE_UP = "gave-up.txt"
PACKAGES = ("unspoken", "torch", "transformers", "tokenizers", "safetensors", "numpy")
MAY_CHANGE = {  # between a run and its resumption: they touch neither weights nor curves
    "run.out", "run.device", "run.report_to", "data.path", "train.log_every", "train.eval_sequences",
    "train.eval_every", "train.save_every", "train.keep_last",
    "train.keep_best", "train.save_in_background", "train.micro_batch_size", "train.parallel", "train.keep_gathered",
    "train.segmented_backward",
}  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Train as the recipe says. Exit status 130 if a signal stopped it; its checkpoint is saved."""
    recipe = load_recipe(Path(args.recipe), args.overrides)
    return train(recipe, resume=args.resume, source=args.recipe)


def train(recipe: Recipe, resume: bool = False, source: str = "the recipe") -> int:
    """Run a recipe; `source` names it in errors. Under torchrun every process calls it."""
    folder = recipe.run.out
    resume = resume or is_restart()
    if resume and _is_finished(folder):
        print(f"{folder} is finished; its model is in {folder / MODEL}")
        return 0
    from unspoken.train.build import pick_device
    from unspoken.train.parallel import joined_ranks, local_device

    device = pick_device(local_device(recipe.run.device))
    with joined_ranks(device) as ranks:
        ranks.on_main(lambda: claim(folder, resume))
        with _giving_up(folder, ranks):
            try:
                loop = _start(recipe, resume, device, ranks)
            except UsageError as error:
                raise UsageError(f"{source}: {error}", said_by_main=True) from error
            is_finished = loop.run()
        for tracker in loop.trackers:
            tracker.finish()
        if is_finished:
            _write_model(loop)
        _write_summary(loop, is_finished)
    if ranks.is_main and is_finished:
        print(f"{folder / MODEL}: {loop.progress.tokens:,} tokens in {loop.progress.wall_seconds:,.0f} s")
    if is_finished:
        return 0
    if ranks.is_main:
        print(f"stopped at step {loop.progress.step}; go on with\n  {_resume_command(folder, ranks.size)}")
    return INTERRUPTED


@contextmanager
def _giving_up(folder: Path, ranks: "Ranks") -> Iterator[None]:
    """An error that all processes meet would meet them again after a restart: say so, and do not try.

    Raises:
        UnspokenError: after a restart, what ended the run before it.
    """
    note = folder / GAVE_UP

    def look() -> None:
        if is_restart() and note.is_file():
            raise UnspokenError(note.read_text(encoding="utf-8"))
        note.unlink(missing_ok=True)

    ranks.on_main(look)
    try:
        yield
    except UnspokenError as error:
        if error.said_by_main and ranks.is_main and ranks.size > 1 and folder.is_dir():
            note.write_text(str(error), encoding="utf-8")
        raise


def is_restart() -> bool:
    """Whether torchrun started this process again after a failure: the run then goes on by itself."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _start(recipe: Recipe, resume: bool, device: "torch.device", ranks: "Ranks") -> "TrainingLoop":
    """Everything before the first step: checks, model, data, the resolved recipe."""
    from unspoken.train.metrics import check_trackers, open_trackers

    check_trackers(recipe.run.report_to)
    import torch
    from transformers.utils.logging import disable_progress_bar

    from unspoken.train.build import build_model, model_like, open_data
    from unspoken.train.loop import TrainingLoop

    disable_progress_bar()  # a bar for each checkpoint would break ours
    data = open_data(recipe)
    folder = recipe.run.out
    newest = _newest(folder, ranks) if resume else None
    torch.manual_seed(recipe.run.seed)
    model: Any = build_model(recipe, data) if newest is None else model_like(newest)
    model.to(device)
    values = _resolved(recipe, model.config, data)
    if newest is not None:
        _check_same(values, folder)
        _check_backbone(recipe, model.config, newest)
    ranks.wait()  # until all have read what is written anew now
    ranks.on_main(lambda: _begin_folder(folder, values, data, resume, newest))
    trackers = open_trackers(recipe.run.report_to, folder, dict(dotted(values))) if ranks.is_main else []
    torch.manual_seed(_dropout_seed(recipe.run.seed, ranks))
    return TrainingLoop(recipe, model, data, trackers, newest, ranks)


def _dropout_seed(seed: int, ranks: "Ranks") -> int:
    """The weights are drawn alike by all processes; what is drawn from here on is each one's own."""
    return seed + ranks.rank


def _newest(folder: Path, ranks: "Ranks") -> Path | None:
    """The newest whole checkpoint, as the main process sees it, all its files read once."""
    from unspoken.train.checkpoint import check_files, checkpoint_of, checkpoints, step_of

    found = checkpoints(folder)[:1] if ranks.is_main else []

    def check() -> None:
        for checkpoint in found:
            check_files(checkpoint)

    ranks.on_main(check)
    step = int(ranks.from_main(step_of(found[0]) if found else -1))
    return None if step < 0 else checkpoint_of(folder, step)


def _begin_folder(folder: Path, values: dict[str, Any], data: "Data", resume: bool, newest: Path | None) -> None:
    if newest is not None:
        print(f"resuming from {newest}")
    elif resume:
        print(f"{folder} has no checkpoint yet: starting from the first step")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESOLVED).write_text(compact(values) + "\n", encoding="utf-8")
    data.tokenizer.save_pretrained(folder / TOKENIZER)
    print(compact(values), flush=True)


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


def claim(folder: Path, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"run.out: {folder} is a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"run.out: cannot make {folder}: {error.strerror}") from error
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
        "data_fingerprint": data.fingerprint,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
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
        began_with = yaml.safe_load((folder / RESOLVED).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UnspokenError(f"cannot read {folder / RESOLVED}, so the run cannot be resumed: {error}") from error
    if not isinstance(began_with, dict):
        raise UnspokenError(f"{folder / RESOLVED} holds no recipe, so the run cannot be resumed")
    before = dict(dotted(began_with))
    for key, value in dotted(values):
        is_fixed = key == "made_with.data_fingerprint" or not (key in MAY_CHANGE or key.startswith("made_with."))
        if is_fixed and before.get(key) != value:
            raise UsageError(
                f"{key} is {value!r}, but {folder} began with {before.get(key)!r}; a resumed run cannot change it. "
                "Put it back, or start another run (--run.out DIR)"
            )


def _check_backbone(recipe: Recipe, config: Any, checkpoint: Path) -> None:
    """The weights are read into a model like the checkpoint's; it must be the recipe's too.

    Raises:
        UnspokenError: the checkpoint is another run's.
    """
    for key, value in (recipe.model.backbone or {}).items():
        found = getattr(config.text_config, key, None)
        if isinstance(value, int) and found != value:  # sizes; transformers rewrites other values
            raise UnspokenError(
                f"{checkpoint} was written for another model: its {key} is {found!r}, the recipe's {value!r}. Delete "
                "it to resume from the checkpoint before it",
                said_by_main=True,
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
        "processes": loop.ranks.size,
        "best": loop.best,
        "num_parameters": sum(p.numel() for p in loop.model.parameters()),
        "compute_parameters": num_parameters,
        "train_flops": 6 * num_parameters * progress.pass_tokens,
        "flops_convention": "6 * compute_parameters * pass_tokens; attention scores and evaluation not counted",
        "final": loop.last_rows,
    }


def _resume_command(folder: Path, num_processes: int) -> str:
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
