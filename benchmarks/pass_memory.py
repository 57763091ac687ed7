"""What a second and a third pass add to a step's peak memory under FSDP, with and without the segmented backward."""

import gc
import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from benchmarks.arms import random_ids
from benchmarks.loss_memory import peak_bytes
from benchmarks.measure import check, progress
from benchmarks.record import Result, Row, Spread, Target
from unspoken import RecyclerConfig, RecyclerForCausalLM
from unspoken.train.parallel import Engine, joined_ranks, share_of, whole_number
from unspoken.train.recipe import TrainSection
from unspoken.train.step import forward_backward

MIB = 2**20
PASSES = (1, 2, 3)
BACKWARDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "segmented": {"segmented_backward": True},
    "whole, kept gathered": {"keep_gathered": True},
}
ARMS = [(2, backward) for backward in BACKWARDS] + [(1, "whole"), (1, "segmented")]
TARGETS = {(2, "segmented"): Target(at_most=1.15)}
TOLERANCE = 1e-4  # float32, sums in another order: 1e-6 of a gradient was seen
MODEL = {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072, "num_attention_heads": 12}
TINY = {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128, "num_attention_heads": 4}
# glibc keeps what is freed, unless every large tensor is mapped by itself.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "0"}


def run(quick: bool) -> Result:
    settings = {"model": {"vocab_size": 1024, **(TINY if quick else MODEL)}, "dtype": "fp32", "rows": 2, "tokens": 4}
    result = Result(
        name="pass_memory",
        question="How much memory does a step of 1, 2 and 3 passes add, in each of two FSDP processes and in one?",
        method="Peak resident memory during a process's first step (forward and backward), over what was resident "
        "before it: gradients, gathered weights and little else, because a row has few tokens. CPU, gloo; fresh "
        "processes for every number, the larger of the two; freed memory goes back to the system.",
        ceiling="memory: the gradients that a process holds after the step; exchanges: one for each unit of FSDP",
        settings=settings,
        checks=[],
        rows=[],
    )
    found = {}
    for num_processes, backward in ARMS:
        for k in PASSES:
            case = {"processes": num_processes, "backward": backward, "k": k}
            progress(case)
            found[num_processes, backward, k] = in_fresh_processes(case | settings)
    for (_, _, k), step in found.items():
        _check_gradients(step, found[1, "whole", k], result.checks)
    for arm in ARMS:
        result.rows += _memory_rows(arm, [found[*arm, k] for k in PASSES])
    for kind, what in (("gathers", "all-gathers a step"), ("reductions", "reduce-scatters a step")):
        result.rows += [
            Row({"backward": arm[1]}, f"k={k}", what, Spread.of([step[kind]]), ceiling=step["units"])
            for arm in ARMS
            for k in PASSES
            if (step := found[*arm, k]) and arm[0] > 1
        ]
    return result


def _memory_rows(arm: tuple[int, str], steps: list[dict[str, Any]]) -> list[Row]:
    one_pass = steps[0]["step_bytes"]
    return [
        Row(
            case={"processes": arm[0], "backward": arm[1]},
            arm=f"k={k}",
            unit="MiB added by a step",
            value=Spread.of([step["step_bytes"] / MIB]),
            baseline=None if k == 1 else "k=1",
            ratio=None if k == 1 else Spread.of([step["step_bytes"] / one_pass]),
            target=None if k == 1 else TARGETS.get(arm),
            ceiling=step["gradient_bytes"] / MIB,
        )
        for k, step in zip(PASSES, steps, strict=True)
    ]


def _check_gradients(step: dict[str, Any], alone: dict[str, Any], checks: list[str]) -> None:
    same = step["gradients"].keys() == alone["gradients"].keys()
    for name, (norm, shadow) in alone["gradients"].items() if same else ():
        others = step["gradients"][name]
        same = same and max(abs(norm - others[0]), abs(shadow - others[1])) <= TOLERANCE * norm
    check(same, f"norm and a random projection of every gradient are those of one process to {TOLERANCE:g}", checks)


def in_fresh_processes(case: dict[str, Any]) -> dict[str, Any]:
    """What the processes of one case found; of their memory the larger."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = case["processes"]
    environment = {**os.environ, **ALLOCATOR, "WORLD_SIZE": str(size)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.pass_memory", json.dumps(case)],
            env={**environment, "RANK": str(rank)},
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    output = [process.communicate() for process in processes]
    for process, (_, error) in zip(processes, output, strict=True):
        if process.returncode:
            raise RuntimeError(f"{case} ended with status {process.returncode}: {error.strip()[-2000:]}")
    steps = [json.loads(out.splitlines()[-1]) for out, _ in output]
    return {**steps[0], "step_bytes": max(step["step_bytes"] for step in steps)}


def _one_step(case: dict[str, Any]) -> dict[str, Any]:
    """A step of this process: how far it raised its peak resident memory, its gradients, its exchanges."""
    torch.set_num_threads(1)
    with joined_ranks(torch.device("cpu")) as ranks:
        torch.manual_seed(0)
        text_config = LlamaConfig(**case["model"], tie_word_embeddings=True)
        model = RecyclerForCausalLM(RecyclerConfig(text_config=text_config)).train()
        nn.init.normal_(model.model.adapter.proj.weight, std=0.02)  # at zero, no state would get a gradient
        options = BACKWARDS[case["backward"]] | ({"parallel": "fsdp"} if ranks.size > 1 else {})
        engine = Engine(model, TrainSection(max_steps=1, **options), ranks)
        rows = random_ids(case["model"]["vocab_size"], case["rows"], case["tokens"])[ranks.rank :: ranks.size]
        batch = {"input_ids": rows, "labels": rows}
        with torch.no_grad():
            engine.forward(rows[:, :2], num_passes=1, use_cache=False)  # what is set up once, at the first call
        engine.settle()
        gc.collect()
        before = peak_bytes(start_anew=True)
        with _Operators() as operators:
            forward_backward(engine, batch, len(rows), case["k"], nullcontext())
        step_bytes = peak_bytes() - before
        gradients = {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
        found = {
            "step_bytes": step_bytes,
            "gradient_bytes": sum(share_of(gradient).nbytes for gradient in gradients.values()),
            "gradients": {name: _shadow(whole_number(gradient)) for name, gradient in gradients.items()},
            "units": len(model.model.blocks()) + 1,
        }
    for name, operator in (("gathers", "_allgather"), ("reductions", "_reduce_scatter")):
        found[name] = sum(operator in run for run in operators.names)
    return found


class _Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def _shadow(gradient: torch.Tensor) -> tuple[float, float]:
    """Its norm, and its projection on a direction that is the same in every process."""
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0))
    return float(gradient.norm()), float((gradient * direction).sum())


if __name__ == "__main__":
    print(json.dumps(_one_step(json.loads(sys.argv[1]))))
