"""One command for one GPU: does it compute what the CPU does, and how near to its own rates do we train and decode?

    python benchmarks/gpu.py --out DIR                 under eight minutes; DIR/gpu.json and a table
    python benchmarks/gpu.py --device cpu --quick      the same code at tiny shapes, in a minute

Every case runs in a process of its own within its share of the time; what fails or does not fit is named in the result.
Exit status 1 if there is no GPU, or something failed.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SECONDS = 450  # of all cases; a start of Python and the record come on top
# Of the time that is left, a case may take its weight over those of the cases that are left.
WEIGHTS = {"check": 2.0, "train": 1.5, "decode": 3.5}
SHAPES = ("135M", "360M", "1.4B")
FULL = {
    "backend": "inductor", "train_tokens": 2048, "prompt_tokens": 128, "new_tokens": 40, "batches": [1, 32],
    "train_rounds": 8, "decode_rounds": 3, "matmul_size": 8192, "read_bytes": 2**32,
}  # fmt: skip
QUICK = {
    "backend": "eager", "train_tokens": 32, "prompt_tokens": 8, "new_tokens": 12, "batches": [2],
    "train_rounds": 1, "decode_rounds": 1, "matmul_size": 256, "read_bytes": 2**24,
}  # fmt: skip
NOT_ON_GPU = "It has not run on a GPU yet: this record is of a CPU at tiny shapes, and shows that the command works. "


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if (root := str(Path(__file__).parents[1])) not in sys.path:
        sys.path.insert(0, root)  # run as a file, Python puts this folder there instead
    if args.device == "cpu":
        os.environ.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
    import torch

    from benchmarks.record import RESULTS, environment
    from benchmarks.table import README, section, write_readme

    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu: no CUDA device is to be seen here, so nothing was measured. `--device cpu --quick` shows on a CPU "
            "that the command works.",
            file=sys.stderr,
        )
        return 1
    load, out = os.getloadavg()[0], Path(args.out) if args.out else None
    if out is None and args.device == "cuda" and not args.quick:
        out = RESULTS
    for result in run(args.device, args.quick, args.seconds):
        result.environment = environment(load, "python benchmarks/gpu.py") | {"device": _device(args.device)}
        if out is not None:  # after every case: the machine may be lent for less time than was thought
            result.save(out)
    print(section(result), flush=True)
    if out == RESULTS:
        write_readme(out, README)
    return 1 if result.failed else 0


def run(device: str, quick: bool, seconds: float) -> Iterator[Any]:
    """Run all cases within so many seconds. After each yields the Result so far."""
    from benchmarks.isolated import Findings, run_isolated

    found, end = Findings(), time.monotonic() + seconds
    groups = plan(device, quick)
    for number, group in enumerate(groups):
        name = ", ".join(f"{case['kind']} {case['shape']}".strip() for case in group)
        print(f"{name} ...", file=sys.stderr, flush=True)
        share = _weight(group) / sum(map(_weight, groups[number:]))
        arguments = ["-m", "benchmarks.gpu_cases", json.dumps(group)]
        found += run_isolated(name, arguments, share * (end - time.monotonic()))
        yield _result(device, quick, seconds, found)


def _result(device: str, quick: bool, seconds: float, found: Any) -> Any:
    from benchmarks.record import Result, read_row

    return Result(
        name="gpu",
        question="Does a GPU compute what the CPU does, and how fast do a plain model and a Recycler train and decode "
        "there?",
        method=(NOT_ON_GPU if device == "cpu" else "")
        + "Random weights, shared by the arms; the Recycler's adapter is zero but computed. Training: bf16 autocast "
        "over fp32 weights, chunked loss, fused AdamW, rows of `train_tokens`; the blocks eager, then compiled. "
        "Decoding: greedy `generate` in bf16, every row's tokens counted, without the first few. Seconds by the wall; "
        "arms alternate. A first run includes what it compiles.",
        ceiling="training: the FLOPs of the model and its passes (`unspoken.analysis.flops`) at the measured bf16 "
        "matrix rate, so that the percentage is the MFU; decoding: reading every matrix once a step at the measured "
        "memory rate, or the step's FLOPs, whichever takes longer",
        settings={"shapes": ["tiny"] if quick else SHAPES, **(QUICK if quick else FULL), "seconds": seconds},
        checks=[value for value in found.values if isinstance(value, str)],
        rows=[read_row(row) for value in found.values if not isinstance(value, str) for row in value],
        failed=found.failed,
        skipped=found.skipped,
    )


def plan(device: str, quick: bool) -> list[list[dict[str, Any]]]:
    """Cases by process: all in one if quick, since starts take the longest then."""
    common = {"device": device, **(QUICK if quick else FULL)}
    kinds = [
        ("check", ""),
        *((kind, shape) for shape in (["tiny"] if quick else SHAPES) for kind in ("train", "decode")),
    ]
    cases = [{"kind": kind, "shape": shape, **common} for kind, shape in kinds]
    return [cases] if quick else [[case] for case in cases]


def _weight(group: list[dict[str, Any]]) -> float:
    return sum(WEIGHTS[case["kind"]] for case in group)


def _device(name: str) -> str:
    import torch

    if name == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu.py", description=__doc__.split("\n")[0])
    parser.add_argument("--out", metavar="DIR", help="where to record (default: benchmarks/results, of a whole run)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny shape")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all cases together (default: {SECONDS})")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
