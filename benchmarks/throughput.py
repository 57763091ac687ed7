"""How many tokens the training loop takes through a CPU second, eager and compiled, and what compiling costs."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

from benchmarks.ceiling import matmul_flops_per_second
from benchmarks.loop_overhead import BACKBONE, recipe_for
from benchmarks.measure import Quantities, check, cpu_seconds, interleave, progress, ratio
from benchmarks.record import Result, Row, Spread
from unspoken.analysis.flops import model_flops
from unspoken.data.prepare import PrepareOptions, prepare
from unspoken.models.loss import IGNORE_INDEX
from unspoken.train.build import build_model, open_data
from unspoken.train.loop import TrainingLoop
from unspoken.train.step import forward_backward

UNIT = "tokens per CPU-second"
EAGER, COMPILED = "eager", "compiled"
# bfloat16 rounds at other places in fused code; 0.7 % of the gradient was seen.
TOLERANCE = {"loss": 1e-3, "gradient": 3e-2}


def run(quick: bool) -> Result:
    settings: dict[str, Any] = {
        "backbone": {**BACKBONE, "num_hidden_layers": 1} if quick else BACKBONE,
        "tokenizer": "bpe:4096",
        "sequence_length": 256,
        "batch_size": 2 if quick else 8,
        "steps": 1000,
        "steps_per_round": 2 if quick else 10,
        "rounds": 2 if quick else 7,
        "warmup_rounds": 1,
    }
    result = Result(
        name="throughput",
        question="How many tokens does the training loop take through a CPU-second, eager and with `train.compile`?",
        method="Steps of `unspoken train` (batch, passes, backward, clipping, AdamW, counts and norms) on the standard "
        "library's text, bf16 autocast; no evaluation, no checkpoints. A token counts once, whatever the passes. The "
        "compiler's own cost, with an empty cache and all its processes, is a row of its own.",
        ceiling="the FLOPs of the model and its passes (`unspoken.analysis.flops`) at the measured bf16 matrix rate",
        settings=settings,
        checks=[],
        rows=[],
    )
    with tempfile.TemporaryDirectory() as folder, inductor.patch(compile_threads=1):
        prepare(PrepareOptions(("stdlib",), tokenizer=settings["tokenizer"]), Path(folder) / "data")
        rate = matmul_flops_per_second(torch.bfloat16)
        for method in ("vanilla", "recycler"):
            result.rows += measure(method, Path(folder), settings, rate, result.checks)
    return result


def measure(method: str, folder: Path, settings: dict[str, Any], rate: float, checks: list[str]) -> list[Row]:
    """Rows of one case, over the data in `folder/data`; `rate` is the machine's, in FLOPs per CPU-second.

    Raises:
        RedCheckError: compiled code trains differently.
    """
    progress({"model": method})
    torch._dynamo.reset()
    with fresh_cache():
        loops = {arm: _loop(method, folder, settings, arm) for arm in (EAGER, COMPILED)}
        seconds = {arm: _all_cpu_seconds(partial(_two_batches, loop)) for arm, loop in loops.items()}
        _check_gradients(loops, checks)
        for loop in loops.values():
            loop._step()
        num_graphs = counters["stats"]["unique_graphs"]
        rounds = interleave(
            {arm: partial(_timed, loop, settings["steps_per_round"]) for arm, loop in loops.items()},
            settings["rounds"],
            settings["warmup_rounds"],
        )
        check(counters["stats"]["unique_graphs"] == num_graphs, "nothing was compiled in the timed steps", checks)
    model, k = loops[EAGER].model, loops[EAGER].num_passes
    flops = model_flops(model).training(settings["sequence_length"], k)
    ceiling = rate / flops
    case = {"model": method, "passes": k, "batch": settings["batch_size"]}
    value = {arm: Spread.of(rounds[arm]["tokens"]) for arm in loops}
    return [
        Row(case, EAGER, UNIT, value[EAGER], ceiling=ceiling),
        Row(case, COMPILED, UNIT, value[COMPILED], EAGER, ratio(rounds, COMPILED, EAGER, "tokens"), None, ceiling),
        Row(case, COMPILED, "CPU-seconds to compile", Spread.of([seconds[COMPILED] - seconds[EAGER]])),
    ]


def _loop(method: str, folder: Path, settings: dict[str, Any], arm: str) -> TrainingLoop:
    recipe = recipe_for(method, folder, settings, folder / f"{method}-{arm}", compile=arm == COMPILED)
    data = open_data(recipe)
    torch.manual_seed(0)
    recipe.run.out.mkdir(parents=True)
    return TrainingLoop(recipe, build_model(recipe, data), data)


def _timed(loop: TrainingLoop, num_steps: int) -> Quantities:
    seconds = cpu_seconds(lambda: [loop._step() for _ in range(num_steps)])
    return {"tokens": num_steps * loop.recipe.step_tokens / seconds}


def _two_batches(loop: TrainingLoop) -> None:
    """The second has another number of targets, for which torch may compile once more."""
    _gradients(loop)
    _gradients(loop, num_dropped=1)


def _gradients(loop: TrainingLoop, num_dropped: int = 0) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the first batch, less some targets, at the weights as they are."""
    batch = loop.data.train.global_batch(0, loop.recipe.train.batch_size)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 1 : 1 + num_dropped] = IGNORE_INDEX
    loss = forward_backward(loop.engine, batch, loop.rows_at_once, loop.num_passes, loop._autocast())[0]
    gradient = torch.cat([p.grad.flatten() for p in loop.engine.parameters.values() if p.grad is not None])
    loop.optimizer.zero_grad()
    return loss, gradient


def _check_gradients(loops: dict[str, TrainingLoop], checks: list[str]) -> None:
    eager, compiled = (_gradients(loop) for loop in loops.values())
    for name, one, other in zip(TOLERANCE, eager, compiled, strict=True):
        close = bool((one - other).norm() <= TOLERANCE[name] * one.norm())
        check(close, f"the compiled {name} is the eager one to {TOLERANCE[name]:g}", checks)


def _all_cpu_seconds(function: Callable[[], object]) -> float:
    """Of this process and of those that it started and that have ended: a compiler's."""
    before = os.times()
    function()
    return sum(os.times()[:4]) - sum(before[:4])
