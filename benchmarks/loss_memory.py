"""What the chunked loss saves in memory, and what it costs or gains in time, beside full logits."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.arms import random_ids
from benchmarks.ceiling import matmul_flops_per_second
from benchmarks.measure import Quantities, check, cpu_seconds, interleave, progress, ratio
from benchmarks.record import Result, Row, Spread, Target
from benchmarks.train_step import forward_backward
from unspoken import RecyclerConfig, RecyclerForCausalLM
from unspoken.models import latent_lm
from unspoken.models.backbone import LogitTransform
from unspoken.models.loss import chunked_cross_entropy, plain_cross_entropy

LOSSES = ("full logits", "chunked")
SMALL = {
    "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 384,
    "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM2 = {
    "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-3}  # of the loss and of the gradients' norm: sums in another order
GIB = 2**30


def run(quick: bool) -> Result:
    settings = {"rounds": 2 if quick else 5, "warmup_rounds": 1, "memory_runs": 1 if quick else 2}
    result = Result(
        name="loss_memory",
        question="How much memory and time does the chunked loss take, beside the loss from full logits?",
        method="Memory: peak resident memory that one forward and backward adds, in a fresh process each (random "
        "weights; the SmolLM2 body with gradient checkpointing). Time: the loss alone, forward and backward, from "
        "random hidden states. bf16 is autocast over fp32.",
        ceiling="time: the head's three matrix products at the measured matrix rate of that dtype",
        settings=settings,
        checks=[],
        rows=[],
    )
    for case in _memory_cases(quick):
        result.rows += memory(case, settings, result.checks)
    for case in _time_cases(quick):
        result.rows += seconds(case, settings, result.checks)
    return result


def _memory_cases(quick: bool) -> list[dict[str, Any]]:
    """What full logits fit in 24 GiB; the deep body in one precision, because it takes minutes."""
    shapes: list[tuple[str, dict[str, Any], tuple[str, ...], int, int, int]] = [
        ("1.4M body", SMALL, ("fp32", "bf16"), 49152, 8, 512),
        ("1.4M body", SMALL, ("fp32", "bf16"), 250_000, 2, 512),
        ("SmolLM2 body", SMOLLM2, ("bf16",), 49152, 8, 512),
    ]
    if quick:
        shapes = [("1.4M body", SMALL, ("fp32",), 49152, 1, 512)]
    return [
        {"model": model, "body": body, "dtype": dtype, "vocabulary": vocabulary}
        | {"batch": batch, "tokens": tokens, "k": k}
        for model, body, dtypes, vocabulary, batch, tokens in shapes
        for dtype in dtypes
        for k in (1, 2)
    ]


def _time_cases(quick: bool) -> list[dict[str, Any]]:
    shapes = [(128, 4096, 2048), (128, 49152, 2048), (576, 49152, 256), (576, 49152, 2048)]
    return [
        {"dtype": dtype, "hidden": hidden, "vocabulary": vocabulary, "tokens": tokens, "k": k}
        for hidden, vocabulary, tokens in (shapes[:1] if quick else shapes)
        for dtype in DTYPES
        for k in (1, 2)
    ]


def memory(case: dict[str, Any], settings: dict[str, Any], checks: list[str]) -> list[Row]:
    """Rows of peak memory. Raises RedCheckError when the two losses or gradients differ."""
    progress(_shown(case))
    runs: dict[str, list[dict[str, float]]] = {loss: [] for loss in LOSSES}
    for _ in range(settings["memory_runs"]):
        for loss in LOSSES:
            runs[loss].append(_in_fresh_process({**case, "loss": loss}))
    full, chunked = runs[LOSSES[0]][0], runs[LOSSES[1]][0]
    for name in ("loss", "gradient_norm"):
        close = abs(full[name] - chunked[name]) <= TOLERANCE[case["dtype"]] * abs(full[name])
        check(close, f"{case['dtype']}: {name.replace('_', ' ')} agrees to {TOLERANCE[case['dtype']]:g}", checks)
    peaks = {loss: {"gib": [run["step_bytes"] / GIB for run in runs[loss]]} for loss in LOSSES}
    return _rows(peaks, "gib", {"what": "memory"} | _shown(case), "GiB added by a step", None, None)


def seconds(case: dict[str, Any], settings: dict[str, Any], checks: list[str]) -> list[Row]:
    """Rows of the loss's own time. Raises RedCheckError when the two losses or gradients differ."""
    progress(case)
    dtype, k, num_tokens = DTYPES[case["dtype"]], case["k"], case["tokens"]
    generator = torch.Generator().manual_seed(0)
    passes = [torch.randn(num_tokens, case["hidden"], generator=generator).requires_grad_() for _ in range(k)]
    weight = (torch.randn(case["vocabulary"], case["hidden"], generator=generator) * 0.03).requires_grad_()
    targets = torch.randint(0, case["vocabulary"], (num_tokens,), generator=generator)
    leaves = [*passes, weight]

    def backward(loss: str) -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            total = FUNCTIONS[loss](passes, weight, targets, LogitTransform())[0]
        total.backward()
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return torch.stack([total.detach(), *(gradient.norm() for gradient in gradients)])

    full, chunked = (backward(loss) for loss in LOSSES)
    close = bool(((full - chunked).abs() <= TOLERANCE[case["dtype"]] * full).all())
    check(close, f"{case['dtype']}: the loss alone and its gradients agree to {TOLERANCE[case['dtype']]:g}", checks)

    def timed(loss: str) -> Quantities:
        return {"seconds": cpu_seconds(lambda: backward(loss))}

    rounds = interleave({loss: partial(timed, loss) for loss in LOSSES}, settings["rounds"], settings["warmup_rounds"])
    flops = 3 * 2 * k * num_tokens * case["hidden"] * case["vocabulary"]
    ceiling = flops / matmul_flops_per_second(dtype)
    return _rows(rounds, "seconds", {"what": "time"} | case, "CPU-seconds of the loss", ceiling, Target(at_most=1.0))


def _shown(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in case.items() if name != "body"}


def _full(
    passes: list[Tensor], weight: Tensor, targets: Tensor, transform: LogitTransform, weights: list[float] | None = None
) -> tuple[Tensor, Tensor]:
    losses = plain_cross_entropy(passes, weight, targets, transform)
    return (losses * losses.new_tensor(weights or [1.0] * len(passes))).sum(), losses.detach()


FUNCTIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"full logits": _full, "chunked": chunked_cross_entropy}


def _rows(
    rounds: dict[str, dict[str, list[float]]],
    quantity: str,
    case: dict[str, Any],
    unit: str,
    ceiling: float | None,
    target: Target | None,
) -> list[Row]:
    full, chunked = LOSSES
    value = {loss: Spread.of(rounds[loss][quantity]) for loss in LOSSES}
    return [
        Row(case, full, unit, value[full], ceiling=ceiling),
        Row(case, chunked, unit, value[chunked], full, ratio(rounds, chunked, full, quantity), target, ceiling),
    ]


def _in_fresh_process(case: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.loss_memory", json.dumps(case)]
    root = Path(__file__).parents[1]
    run = subprocess.run(command, cwd=root, env=os.environ, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{case} ended with status {run.returncode}: {run.stderr.strip()[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def _one_step(case: dict[str, Any]) -> dict[str, float]:
    """One forward and backward, and how far it raised the process's peak resident memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vars(latent_lm)["chunked_cross_entropy"] = FUNCTIONS[case["loss"]]
    body = LlamaConfig(vocab_size=case["vocabulary"], **case["body"])
    model = RecyclerForCausalLM(RecyclerConfig(text_config=body)).train()
    if body.num_hidden_layers > 4:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    dtype = DTYPES[case["dtype"]]
    with torch.no_grad():
        model(random_ids(case["vocabulary"], 1, 8), use_cache=False)  # what is set up once, at the first call
    before = peak_bytes(start_anew=True)
    loss = forward_backward(
        model, random_ids(case["vocabulary"], case["batch"], case["tokens"]), dtype, num_passes=case["k"]
    )
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return {
        "step_bytes": peak_bytes() - before,
        "loss": float(loss),
        "gradient_norm": float(torch.stack(norms).norm()),
    }


def peak_bytes(start_anew: bool = False) -> int:
    """Peak resident memory of this process; `start_anew` first forgets what was the peak before.

    Linux only: what getrusage reports there begins with the parent's peak.
    """
    if start_anew:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


if __name__ == "__main__":
    print(json.dumps(_one_step(json.loads(sys.argv[1]))))
