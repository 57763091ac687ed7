"""A run's checkpoints: whole or not there, the newest whole one wins, the last n are kept.

    RUN/checkpoints/step-00000300/
        config.json model.safetensors ...   loads like any model folder
        training_state.pt                   optimizer, random state, cursor, loss window: tensors and plain values
        checkpoint.json                     the step, and every other file's size

A checkpoint is written beside its place and renamed into it when all is on disk; `checkpoint.json` tells a folder
that was copied or cut short. No pickled object is ever loaded (`weights_only=True`).
"""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from unspoken.data.cache import whole_folder
from unspoken.errors import UnspokenError

FOLDER = "checkpoints"
STATE, SEAL = "training_state.pt", "checkpoint.json"
FORMAT = 1


def save_checkpoint(run: Path, step: int, model: PreTrainedModel, state: dict[str, Any], keep_last: int) -> Path:
    """Write the checkpoint of `step` and drop all but the newest `keep_last`.

    state: nested dicts and lists of tensors and plain values.

    Raises:
        UnspokenError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    target = run / FOLDER / f"step-{step:08d}"
    for left_by_a_kill in (run / FOLDER).glob(".step-*"):
        shutil.rmtree(left_by_a_kill)
    try:
        with whole_folder(target, replace=True) as made:
            model.save_pretrained(made)
            torch.save(state, made / STATE)
            sizes = {str(file.relative_to(made)): _synced_size(file) for file in _files(made)}
            (made / SEAL).write_text(json.dumps({"format": FORMAT, "step": step, "files": sizes}, indent=1))
            _synced_size(made / SEAL)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a failed write as RuntimeError
        raise UnspokenError(
            f"cannot write the checkpoint {target}: {error}. Earlier checkpoints are untouched."
        ) from error
    for old in checkpoints(run)[keep_last:]:
        shutil.rmtree(old)
    return target


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run folder, newest first."""
    return [path for path in sorted((run / FOLDER).glob("step-*"), reverse=True) if _is_whole(path)]


def load_state(checkpoint: Path) -> dict[str, Any]:
    """What `save_checkpoint` was given as `state`, on the CPU.

    Raises:
        UnspokenError: the file is damaged, or holds anything but tensors and plain values.
    """
    try:
        return torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnspokenError(
            f"{checkpoint / STATE} is damaged ({reason}). Delete {checkpoint} to resume from the checkpoint before it."
        ) from error


def random_state() -> dict[str, Any]:
    """torch's generators. Nothing else draws in training: data order and passes are functions of the step."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _is_whole(path: Path) -> bool:
    try:
        seal = json.loads((path / SEAL).read_text())
        return all((path / name).stat().st_size == size for name, size in seal["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _synced_size(path: Path) -> int:
    """Flush a file to the disk; a rename may otherwise outlive the bytes after a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size
