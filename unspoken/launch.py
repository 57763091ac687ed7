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
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

from unspoken.errors import UnspokenError, UsageError
from unspoken.train.recipe_file import load_recipe
from unspoken.train.run import claim

INTERRUPTED = 130
SHUTDOWN_SECONDS = 300


def main(args: argparse.Namespace) -> int:
    """Run the command; its exit status. 130 after SIGINT or SIGTERM, with a checkpoint saved."""
    command = [word for i, word in enumerate(args.command) if i or word != "--"]
    _check(command)
    for name in ("processes", "nodes"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"--{name} is {value}; it must be at least 1")
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts is {args.max_restarts}; it must be at least 0")
    num_processes = args.processes or _num_devices()
    if args.nodes > 1 and args.rendezvous is None:
        raise UsageError("--nodes needs --rendezvous HOST:PORT, the same on every node")
    _set_environment(num_processes)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what matters is said below
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
        return _report(error, num_processes)
    except SignalException as error:
        print(
            f"unspoken: {signal.Signals(error.sigval).name}: the processes were told to save and stop", file=sys.stderr
        )
        return INTERRUPTED
    return 0


def _check(command: list[str]) -> None:
    """Refuse here, once, what every process would refuse, and be started again to refuse."""
    from unspoken.cli import build_parser

    if not command or command[0] != "train":
        raise UsageError("launch runs `train`: unspoken launch [--processes N] -- train RECIPE.yaml ...")
    args, overrides = build_parser().parse_known_args(command)
    recipe = load_recipe(Path(args.recipe), overrides)
    claim(recipe.run.out, args.resume)


def _num_devices() -> int:
    """One process for each GPU."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError("there is no GPU here to count; say how many processes to run: --processes N")
    return count


def _set_environment(num_processes: int) -> None:
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _report(error: Any, num_processes: int) -> int:
    """Say which process failed first; its exit status is the command's."""
    rank, failure = error.get_first_failure()
    if failure.exitcode == INTERRUPTED:
        return INTERRUPTED
    how = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit status {failure.exitcode}"
    raise UnspokenError(
        f"process {rank} of {num_processes} ended {how}, and no restart is left; its message stands above"
    )
