"""`make bench`: run the benchmarks, record what held, and write README.md from the records.

Exit status 1 if the arms of one gave different results; nothing of it is recorded then. A missed target is reported,
not an error: it is a number like the others.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

NAMES = ("decode", "train_step", "loss_memory", "loop_overhead", "throughput", "pass_memory", "latent_work")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    os.environ.update(ENVIRONMENT)  # before torch is imported, which reads them
    if (root := str(Path(__file__).parents[1])) not in sys.path:
        sys.path.insert(0, root)  # run as a file, Python puts this folder there instead
    from benchmarks.record import RESULTS
    from benchmarks.table import README, write_readme

    if args.table:
        write_readme()
        return 0
    names = args.only or NAMES
    folder = None if args.quick and args.out is None else Path(args.out or RESULTS)
    red = [name for name in names if not run_one(name, args.quick, folder)]
    if folder is not None:
        write_readme(folder, README if folder == RESULTS else folder / "README.md")
    return 1 if red else 0


def run_one(name: str, quick: bool, folder: Path | None) -> bool:
    """Run a benchmark, print it, and record it in `folder` if given; False if its arms disagree."""
    import torch
    from transformers.utils import logging

    from benchmarks.measure import RedCheckError
    from benchmarks.record import environment
    from benchmarks.table import section

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"{name} ...", flush=True)
    try:
        result = importlib.import_module(f"benchmarks.{name}").run(quick)
    except RedCheckError as error:
        print(f"{name}: red, nothing is reported: it does not hold that {error}", file=sys.stderr)
        return False
    result.environment = environment(load)
    print(section(result), flush=True)
    if folder is not None:
        result.save(folder)
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=NAMES, help="one benchmark; may be repeated")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, two rounds; recorded only with --out")
    parser.add_argument("--out", metavar="DIR", help="where to record (default: benchmarks/results)")
    parser.add_argument("--table", action="store_true", help="only write README.md from what is recorded")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
