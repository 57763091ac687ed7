"""`unspoken launch -- train RECIPE ...`: the same command in several processes, started and watched by torchrun.

A process that dies ends the others; all are started again and go on from the newest whole checkpoint, up to
`--max-restarts` times. What torchrun needs for that, and does not set itself:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE   restarted processes would read the dead ones' addresses in the shared store
    the c10d rendezvous                  the one that can be joined anew
    a patient shutdown                   a checkpoint may be on its way to the disk
"""

import argparse
import logging
import os
import re
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from unspoken.errors import UnspokenError, UsageError
from unspoken.train.folder import check_place
from unspoken.train.recipe_file import load_recipe
from unspoken.train.run import GAVE_UP, INTERRUPTED, resume_command

SHUTDOWN_SECONDS = 300
_ADDRESS = re.compile(r"\[?[^\s/]+:\d{1,5}")


def main(args: argparse.Namespace) -> int:
    """Run the command; its exit status. 130 after SIGINT or SIGTERM, with a checkpoint saved."""
    command = [word for i, word in enumerate(args.command) if i or word != "--"]
    folder = _check(command, args)
    num_processes = args.processes or _num_devices()
    with tempfile.TemporaryDirectory() as notes:
        return _launch(args, command, num_processes, folder, Path(notes) / "gave-up")


def _launch(args: argparse.Namespace, command: list[str], num_processes: int, folder: Path, note: Path) -> int:
    note.touch()
    _set_environment(num_processes, note)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    logging.disable(logging.ERROR)  # torchrun's own; what matters is said below
    config = LaunchConfig(
        min_nodes=args.nodes,
        max_nodes=args.nodes,
        nproc_per_node=num_processes,
        run_id=args.run_id or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=args.rendezvous or "localhost:0",
        max_restarts=args.max_restarts,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    try:
        launch_agent(config, sys.executable, ["-m", "unspoken.cli", *command])
    except ChildFailedError as error:
        given_up = note.read_text(encoding="utf-8")
        return int(given_up) if given_up else _report(error, num_processes, folder)
    except SignalException as error:
        print(
            f"unspoken: {signal.Signals(error.sigval).name}: the processes were told to save and stop", file=sys.stderr
        )
        return INTERRUPTED
    return 0


def _check(command: list[str], args: argparse.Namespace) -> Path:
    """Refuse here, once, what every process would refuse; the run's folder."""
    from unspoken.cli import build_parser

    for name in ("processes", "nodes"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"--{name} is {value}; it must be at least 1")
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts is {args.max_restarts}; it must be at least 0")
    if args.nodes > 1 and args.rendezvous is None:
        raise UsageError("--nodes needs --rendezvous HOST:PORT, the same on every node")
    if args.rendezvous is not None and not _ADDRESS.fullmatch(args.rendezvous):
        raise UsageError(f"--rendezvous is {args.rendezvous!r}; it must be HOST:PORT, the same on every node")
    if not command or command[0] not in ("train", "sft"):
        raise UsageError("launch runs `train` and `sft`: unspoken launch [--processes N] -- train RECIPE.yaml ...")
    trained, overrides = build_parser().parse_known_args(command)
    recipe = load_recipe(Path(trained.recipe), overrides)
    if args.processes is not None:
        recipe.check_processes(args.processes * args.nodes)
    check_place(recipe.run.out, trained.resume)
    return recipe.run.out


def _num_devices() -> int:
    """One process for each GPU."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError("there is no GPU here to count; say how many processes to run: --processes N")
    return count


def _set_environment(num_processes: int, note: Path) -> None:
    os.environ[GAVE_UP] = str(note)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _report(error: Any, num_processes: int, folder: Path) -> int:
    """Say which process failed first; its exit status is the command's."""
    rank, failure = error.get_first_failure()
    if failure.exitcode == INTERRUPTED:
        return INTERRUPTED
    how = f"with exit status {failure.exitcode}; its message stands above"
    if failure.exitcode < 0:
        how = f"by {failure.signal_name()}"
    if failure.exitcode == -signal.SIGKILL:
        how += " (the system kills a process for want of memory)"
    raise UnspokenError(
        f"process {rank} of {num_processes} ended {how}. No restart is left; from the newest checkpoint it goes on "
        f"with\n  {resume_command(folder, num_processes)}"
    )
