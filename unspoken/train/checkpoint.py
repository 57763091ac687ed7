"""A run's checkpoints: whole or not there, the newest whole one wins, the last n and the best are kept.

    RUN/checkpoints/step-00000300/
        shard-00001-....safetensors    weights, optimizer state and generators, one file for each process
        config.json                    the model's configuration
        checkpoint.json                the record (step, counts, cursor) and every other file's size and checksum

`torch.distributed.checkpoint` writes and reads the tensors, so that another number of processes can go on: each reads
the shares that it needs. They lie in safetensors, and everything else in JSON: nothing is pickled. All processes write
into a hidden folder beside; when the last is done the main process seals it with `checkpoint.json` and renames it.
"""

import itertools
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from transformers import PreTrainedConfig

from unspoken.errors import UnspokenError, first_line
from unspoken.train.parallel import Ranks, new_messages_group

FOLDER, SEAL = "checkpoints", "checkpoint.json"
FORMAT = 4
CHUNK_BYTES = 2**24
Tensors = dict[str, Tensor]

# A process without a group is what a run of one process is; torch warns of it, also from its threads.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class CheckpointWriter:
    """Writes the checkpoints of a run. All processes call each method together.

    keep_last: how many are kept beside the best. in_background: `save` returns when the tensors are copied, and the
    disk is written meanwhile; a failure then shows at the next `save` or `wait`.
    """

    def __init__(self, run: Path, ranks: Ranks, keep_last: int, in_background: bool = False):
        self.folder, self.ranks, self.keep_last = run / FOLDER, ranks, keep_last
        self.in_background = in_background
        self.group = new_messages_group() if in_background and ranks.size > 1 else None
        self.sealing = ThreadPoolExecutor(1) if in_background and ranks.is_main else None
        self.pending: tuple[Future, Path] | None = None

    def save(
        self,
        step: int,
        tensors: Tensors,
        record: dict[str, Any],
        config: PreTrainedConfig,
        best: int | None = None,
        texts: Mapping[str, str] = MappingProxyType({}),
    ) -> Path:
        """Write the checkpoint of `step`, and drop the old ones. `record`: plain values. `best`: a step to be kept.
        `texts`: further files by name.

        Raises:
            UnspokenError: the disk is full or not writable; earlier checkpoints are untouched.
        """
        self.wait()
        made, target = self.folder / f".step-{step:08d}", self._target(step)
        record = {"format": FORMAT, "step": step, "processes": self.ranks.size, **record}
        self.ranks.on_main(lambda: _begin(made, target, config, texts))
        options: Any = {
            "storage_writer": HuggingFaceStorageWriter(str(made), save_distributed=True),
            "no_dist": self.ranks.size == 1,
            "process_group": self.group,
        }
        with _acting(target, made if self.ranks.is_main else None):
            if not self.in_background:
                dcp.save(tensors, **options)
            else:
                written: Any = dcp.async_save(tensors, **options)
                self.pending = (self._seal_later(written, made, record, best), target)
                return target
        self.ranks.on_main(lambda: self._finish(made, record, best))
        return target

    def wait(self) -> None:
        """Until a checkpoint that is being written in the background is whole."""
        if self.pending is None:
            return
        (future, target), self.pending = self.pending, None
        with _acting(target):
            future.result()
        self.ranks.wait()

    def _seal_later(self, written: Future, made: Path, record: dict[str, Any], best: int | None) -> Future:
        """The main process's write ends when every process has written; then it seals."""
        if self.sealing is None:
            return written

        def seal() -> None:
            with _acting(self._target(record["step"]), made):
                written.result()
            self._finish(made, record, best)

        return self.sealing.submit(seal)

    def _finish(self, made: Path, record: dict[str, Any], best: int | None) -> None:
        target = self._target(record["step"])
        with _acting(target, made):
            _seal(made, record)
            if target.exists():
                shutil.rmtree(target)
            made.rename(target)
        self._drop_old(best)

    def _drop_old(self, best: int | None) -> None:
        whole = [path for path in _folders(self.folder) if _has_sizes(path)]
        for old in whole[self.keep_last :]:
            if old != (None if best is None else self._target(best)):
                shutil.rmtree(old)

    def _target(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run folder, newest first."""
    return [path for path in _folders(run / FOLDER) if _has_sizes(path)]


def cut_checkpoints(run: Path) -> list[Path]:
    """Those that are newer than the newest whole one: deleted in part, or copied in part."""
    return list(itertools.takewhile(lambda path: not _has_sizes(path), _folders(run / FOLDER)))


def checkpoint_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def check_files(checkpoint: Path) -> None:
    """Read every file once.

    Raises:
        UnspokenError: one of them is damaged, or the format is another version's.
    """
    record = read_record(checkpoint)
    if record.get("format") != FORMAT:
        raise UnspokenError(f"{checkpoint} has format {record.get('format')}, this version reads format {FORMAT}")
    if record.get("step") != step_of(checkpoint):
        raise UnspokenError(
            f"{checkpoint} holds step {record.get('step')}; give the folder its name back, or delete it"
        )
    for name, (_, checksum) in record["files"].items():
        if _checksum(checkpoint / name) != checksum:
            raise _damaged(checkpoint / name, "its checksum is another", checkpoint)


def check_belongs(checkpoint: Path, run_id: str) -> None:
    """Raise UnspokenError if it is another run's: of the same shapes perhaps, but of another seed or other data."""
    if read_record(checkpoint).get("run_id") != run_id:
        raise UnspokenError(
            f"{checkpoint} was written by another run. Delete it to resume from the checkpoint before it"
        )


def read_record(checkpoint: Path) -> dict[str, Any]:
    """What was given as `record` beside the tensors, with `step` and `processes`."""
    return json.loads((checkpoint / SEAL).read_text(encoding="utf-8"))


def read_tensors(checkpoint: Path, tensors: Tensors, ranks: Ranks | None = None) -> None:
    """Fill `tensors` in place: each process its own shares.

    Raises:
        UnspokenError: the checkpoint is damaged, or of a model with other weights.
    """
    reader = HuggingFaceStorageReader(str(checkpoint))
    try:
        stored = reader.read_metadata().state_dict_metadata
        _check_same_tensors(tensors, stored, checkpoint)
        dcp.load(tensors, storage_reader=reader, no_dist=ranks is None or ranks.size == 1)
    except (SafetensorError, OSError, KeyError, dcp.CheckpointException) as error:  # type: ignore[attr-defined]
        raise _damaged(checkpoint, _first_failure(error), checkpoint) from error


def _check_same_tensors(tensors: Tensors, stored: dict[str, Any], checkpoint: Path) -> None:
    for name, tensor in tensors.items():
        if name not in stored:
            raise UnspokenError(f"{checkpoint} was written for another model: it has no {name}")
        if tuple(stored[name].size) != tuple(tensor.shape):
            raise UnspokenError(
                f"{checkpoint} was written for another model: {name} is {tuple(stored[name].size)} there and "
                f"{tuple(tensor.shape)} here"
            )


def generators(ranks: Ranks) -> Tensors:
    """torch's generators of this process. Nothing else draws in training: data order and passes are functions of the
    step. Under another number of processes they go unused: dropout then draws anew."""
    state = {f"generator.cpu.{ranks.rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"generator.cuda.{ranks.rank}"] = torch.cuda.get_rng_state()
    return state


def set_generators(state: Tensors, ranks: Ranks) -> None:
    torch.set_rng_state(state[f"generator.cpu.{ranks.rank}"])
    if (cuda := state.get(f"generator.cuda.{ranks.rank}")) is not None:
        torch.cuda.set_rng_state(cuda)


def _folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)


def _has_sizes(path: Path) -> bool:
    """Whether the seal is there and every file as long as it says: cheap, and what a copy cut short does not pass."""
    try:
        seal = json.loads((path / SEAL).read_text(encoding="utf-8"))
        return all((path / name).stat().st_size == size for name, (size, _) in seal["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _begin(made: Path, target: Path, config: PreTrainedConfig, texts: Mapping[str, str]) -> None:
    """An empty folder beside the checkpoint's place, and nothing that a kill has left behind."""
    with _acting(target):
        for left in made.parent.glob(".step-*"):
            shutil.rmtree(left)
        made.mkdir(parents=True)
        config.save_pretrained(made)
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8")


def _seal(made: Path, record: dict[str, Any]) -> None:
    files = [path for path in sorted(made.rglob("*")) if path.is_file()]
    record["files"] = {path.name: [_synced_size(path), _checksum(path)] for path in files}
    (made / SEAL).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _synced_size(made / SEAL)


def _synced_size(path: Path) -> int:
    """Flush a file to the disk; a rename may otherwise outlive the bytes after a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


@contextmanager
def _acting(target: Path, made: Path | None = None) -> Iterator[None]:
    """What goes wrong while `target` is written: said in one sentence, and nothing left of it."""
    failures = (OSError, RuntimeError, SafetensorError, dcp.CheckpointException)  # type: ignore[attr-defined]
    try:
        yield
    except failures as error:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        reason = _first_failure(error)
        raise UnspokenError(
            f"cannot write the checkpoint {target}: {reason}. Earlier checkpoints are untouched.",
            said_by_main="Errno" in reason or "os error" in reason,  # and not a process that is gone
        ) from error


def _first_failure(error: BaseException) -> str:
    """A CheckpointException lists the failure of each process; the first says what happened."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return first_line(error)


def _damaged(path: Path, reason: str, checkpoint: Path) -> UnspokenError:
    return UnspokenError(f"{path} is damaged ({reason}). Delete {checkpoint} to resume from the checkpoint before it.")
