"""A run's folder: who writes into it, what the run began with, and which of its checkpoints it goes on from.

RUN/.lock    held by the process that trains into the folder; the system releases it however the process ends
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from filelock import FileLock, Timeout

from unspoken.errors import UnspokenError, UsageError
from unspoken.train.recipe_file import dotted

if TYPE_CHECKING:
    from unspoken.train.parallel import Ranks

RESOLVED, SUMMARY, MODEL, TOKENIZER, LOCK = "resolved.yaml", "summary.json", "model", "tokenizer", ".lock"
FINGERPRINT, RUN_ID = "made_with.data_fingerprint", "run_id"
MAY_CHANGE = {  # between a run and its resumption: they touch neither weights nor curves
    "run.out", "run.device", "run.report_to", "data.path", "train.log_every", "train.eval_sequences",
    "train.eval_every", "train.save_every", "train.keep_last",
    "train.keep_best", "train.save_in_background", "train.micro_batch_size", "train.parallel", "train.keep_gathered",
    "train.segmented_backward", "train.eval_problems", "policy.gap_limit", "policy.on_gap", "policy.correction_limit",
}  # fmt: skip


def check_place(folder: Path, resume: bool) -> None:
    """Raise UsageError where a run cannot have its folder."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"run.out: {folder} is a file")
    if not resume and _holds(folder):
        raise UsageError(
            f"run.out: {folder} is not empty; go on with it (--resume), or give another folder (--run.out DIR)"
        )


@contextmanager
def claimed(folder: Path, resume: bool, ranks: "Ranks") -> Iterator[None]:
    """The folder, made and locked by the main process. One that is still empty after an error is taken away again.

    Raises:
        UsageError: it holds something already, it cannot be made, or another process trains into it.
    """
    lock = FileLock(folder / LOCK, blocking=False, thread_local=False)
    is_new = not folder.exists()
    ranks.on_main(lambda: _take(folder, resume, lock))
    try:
        yield
    finally:
        if ranks.is_main:
            lock.release()
            if is_new and not _holds(folder):
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()


def _take(folder: Path, resume: bool, lock: FileLock) -> None:
    check_place(folder, resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UsageError(
            f"run.out: another process is training into {folder}; wait for it, stop it, or give another folder "
            "(--run.out DIR)"
        ) from None
    except OSError as error:
        raise UsageError(f"run.out: cannot write into {folder}: {error.strerror}") from error


def _holds(folder: Path) -> bool:
    """Whether there is anything in it. A killed process leaves its lock's file, which nobody holds."""
    return folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())


def is_finished(folder: Path) -> bool:
    try:
        return json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["status"] == "finished"
    except (OSError, ValueError, KeyError):
        return False


def same_run(values: dict[str, Any], folder: Path) -> str:
    """The id of the run in the folder, which `values` must go on with: a run is what it began with, or another one.

    Raises:
        UsageError: naming the key that changed.
        UnspokenError: what it began with cannot be read.
    """
    try:
        began_with = yaml.safe_load((folder / RESOLVED).read_text(encoding="utf-8"))
        run_id = str(began_with["made_with"][RUN_ID])
    except (OSError, yaml.YAMLError) as error:
        raise UnspokenError(f"cannot read {folder / RESOLVED}, so the run cannot be resumed: {error}") from error
    except (KeyError, TypeError):
        raise UnspokenError(f"{folder / RESOLVED} does not say which run it is of, so it cannot be resumed") from None
    before = dict(dotted(began_with))
    for key, value in dotted(values):
        is_fixed = key == FINGERPRINT or not (key in MAY_CHANGE or key.startswith("made_with."))
        if is_fixed and before.get(key) != value:
            what = f"{key} is {value!r}, but {folder} began with {before.get(key)!r}"
            if key == FINGERPRINT:
                what = f"the data are no longer those that {folder} began with (another fingerprint)"
            raise UsageError(
                f"{what}; a resumed run cannot change that. Put it back, or start another run (--run.out DIR)"
            )
    return run_id


def say_where_it_begins(folder: Path, resume: bool, newest: Path | None, cut: list[Path], first: str) -> None:
    """From a checkpoint or from the `first` step, and which checkpoints are left alone."""
    for path in cut:
        print(f"{path} is not whole, so it is left alone")
    if newest is not None:
        print(f"resuming from {newest}")
    elif resume:
        print(f"{folder} has no whole checkpoint: starting from {first}")


def newest_checkpoint(folder: Path, ranks: "Ranks") -> tuple[Path | None, list[Path]]:
    """The newest whole checkpoint, all its files read once, and those after it that are not whole.

    The main process looks; the others learn what it saw (of those that are not whole nothing).
    """
    from unspoken.train.checkpoint import check_files, checkpoint_of, checkpoints, cut_checkpoints, step_of

    newest, cut = (checkpoints(folder)[:1], cut_checkpoints(folder)) if ranks.is_main else ([], [])

    def check() -> None:
        for checkpoint in newest:
            check_files(checkpoint)

    ranks.on_main(check)
    step = int(ranks.from_main(step_of(newest[0]) if newest else -1))
    return None if step < 0 else checkpoint_of(folder, step), cut
