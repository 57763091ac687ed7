"""What `gpu.py` runs in processes of their own: the checks, and training and decoding of one shape.

python -m benchmarks.gpu_cases '[{"kind": "train", "shape": "135M", "device": "cuda", ...}, ...]'
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import gpu_checks
from benchmarks.arms import Arms, random_ids, shared_arms
from benchmarks.ceiling import matmul_flops_per_second, read_bytes_per_second
from benchmarks.decode import generate
from benchmarks.isolated import DONE, SKIPPED, attempt, plan, say, succeeds
from benchmarks.measure import Quantities, Rounds, device_seconds, interleave, ratio, wall_clock
from benchmarks.record import Row, Spread
from benchmarks.train_step import check_losses, forward_backward
from unspoken.analysis.flops import model_flops
from unspoken.models.latent_lm import LatentForCausalLM

PLAIN, RECYCLER = "plain", "recycler k=2"
GIB = 2**30
CPU = torch.device("cpu")  # what a run returns, the device has done
SETTLING_TOKENS = 8  # of a decoding; a CUDA graph of a new cache is recorded in them
STATES_BYTES = 16  # of a trained parameter: fp32 weight, gradient and AdamW's two moments


def _llama(hidden: int, layers: int, intermediate: int, heads: int, key_heads: int, vocab: int, is_tied: bool) -> dict:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": key_heads, "vocab_size": vocab,
        "tie_word_embeddings": is_tied, "max_position_embeddings": 4096, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip


# 135M and 360M are SmolLM2's shapes; rows of a training step, by 2048 tokens.
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "tiny": (_llama(64, 2, 128, 4, 2, 256, True), 2),
    "135M": (_llama(576, 30, 1536, 9, 3, 49152, True), 8),
    "360M": (_llama(960, 32, 2560, 15, 5, 49152, True), 8),
    "1.4B": (_llama(2048, 24, 5632, 32, 32, 50304, False), 4),
}


def arms_of(shape: str, device: torch.device, dtype: torch.dtype) -> Arms:
    """Random weights of a shape, shared by the arms. The adapter is zero, but it is computed."""
    torch.manual_seed(0)
    with device:
        plain = LlamaForCausalLM(LlamaConfig(**SHAPES[shape][0]))
    arms = shared_arms(nn.Module.to(plain, dtype))  # type: ignore[arg-type]  # PreTrainedModel.to has lost its types
    nn.Module.to(arms.recycler, device)  # its adapter was made on the CPU
    return arms


def check(case: dict[str, Any]) -> None:
    """The numerics, and the device's own rates."""
    device = torch.device(case["device"])
    checks = gpu_checks.cases(device, case["backend"])
    matmul, read = "matrix rate", "memory rate"
    plan([*checks, matmul, read])
    for what, function in checks.items():
        attempt(what, partial(_held, what, function))
    attempt(matmul, lambda: [_row({}, matmul, "bf16 TFLOP per second", [_matmul_rate(case) / 1e12])])
    attempt(read, lambda: [_row({}, read, "GB per second", [_read_rate(case) / 1e9])])


def _held(what: str, function: Callable[[], str]) -> str:
    return f"{what}, {function()}"


def train(case: dict[str, Any]) -> None:
    """Forward, backward and a step of fused AdamW, in bf16 autocast over fp32 weights: eager, then compiled blocks."""
    shape, device = case["shape"], torch.device(case["device"])
    names = {
        (mode, arm): f"train {shape}, {mode}, {arm}" for mode in ("eager", "compiled") for arm in (PLAIN, RECYCLER)
    }
    plan(list(names.values()))
    arms = arms_of(shape, device, torch.float32)
    needed = STATES_BYTES * sum(p.numel() for p in arms.recycler.parameters())
    if device.type == "cuda" and needed > 0.8 * torch.cuda.mem_get_info(device)[1]:
        for name in names.values():
            say(SKIPPED, name, f"weights, gradients and AdamW's states alone are {needed / GIB:.0f} GiB")
        return
    ids = random_ids(arms.recycler.config.vocab_size, SHAPES[shape][1], case["train_tokens"]).to(device)
    held = f"train {shape}: each pass's loss is the plain model's, from a zero adapter"
    attempt(held, lambda: check_losses(arms, ids[:1], torch.bfloat16, []) or held)
    for model in arms:
        model.train()
    optimizer = torch.optim.AdamW(arms.recycler.parameters(), lr=1e-5, fused=True)
    models: dict[str, tuple[LatentForCausalLM, int]] = {PLAIN: (arms.vanilla, 1), RECYCLER: (arms.recycler, 2)}
    ceilings = {
        arm: _matmul_rate(case) / model_flops(model).training(case["train_tokens"], k)
        for arm, (model, k) in models.items()
    }
    for mode in ("eager", "compiled"):
        if mode == "compiled":
            for block in arms.recycler.model.blocks():
                block.compile(backend=case["backend"])
        steps = {arm: partial(_train_step, model, ids, k, optimizer) for arm, (model, k) in models.items()}
        runs = {arm: partial(_timed_step, step, device) for arm, step in steps.items()}
        shown = {"shape": shape, "blocks": mode, "tokens": ids.numel()}
        rows = partial(_train_rows, shown, ceilings)
        _measure({arm: names[mode, arm] for arm in runs}, runs, case["train_rounds"], rows)


def _train_rows(shown: dict[str, Any], ceilings: dict[str, float], rounds: Rounds, arm: str) -> list[dict[str, Any]]:
    rows = _rates(shown, rounds, arm, "training tokens per second", shown["tokens"], ceilings[arm])
    if any(rounds[arm]["gib"]):
        rows.append(_row(shown, arm, "GiB at the peak of a step", rounds[arm]["gib"]))
    return rows


def _train_step(model: LatentForCausalLM, ids: Tensor, k: int, optimizer: torch.optim.Optimizer) -> None:
    forward_backward(model, ids, torch.bfloat16, num_passes=k)
    optimizer.step()
    optimizer.zero_grad()


def _timed_step(step: Callable[[], None], device: torch.device) -> Quantities:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = device_seconds(step, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"seconds": seconds, "gib": peak / GIB}


def decode(case: dict[str, Any]) -> None:
    """Greedy `generate` in bf16 weights: a growing cache, then a static one whose step is compiled."""
    shape, device = case["shape"], torch.device(case["device"])
    ways = [(cache, batch) for cache in ("growing", "static, compiled") for batch in case["batches"]]
    names = {
        (cache, batch, arm): f"decode {shape}, {cache} cache, batch {batch}, {arm}"
        for cache, batch in ways
        for arm in (PLAIN, RECYCLER)
    }
    plan(list(names.values()))
    arms = arms_of(shape, device, torch.bfloat16)
    models: dict[str, Any] = {PLAIN: arms.plain.eval(), RECYCLER: arms.recycler.eval()}
    ceilings = {
        arm: _decode_ceiling(case, latent) for arm, latent in ((PLAIN, arms.vanilla), (RECYCLER, arms.recycler))
    }
    for cache, batch in ways:
        torch._dynamo.reset()
        prompt = random_ids(arms.recycler.config.vocab_size, batch, case["prompt_tokens"]).to(device)
        options: dict[str, Any] = {}
        if cache != "growing":
            options = {"cache_implementation": "static", **gpu_checks.compile_options(device, case["backend"])}
        runs = {
            arm: partial(_timed_decode, model, prompt, case["new_tokens"], options) for arm, model in models.items()
        }
        shown = {"shape": shape, "cache": cache, "batch": batch}
        rows = partial(_decode_rows, shown, ceilings)
        _measure({arm: names[cache, batch, arm] for arm in runs}, runs, case["decode_rounds"], rows)


def _decode_rows(shown: dict[str, Any], ceilings: dict[str, Any], rounds: Rounds, arm: str) -> list[dict[str, Any]]:
    batch = shown["batch"]
    return _rates(shown, rounds, arm, "decoded tokens per second", batch, ceilings[arm](batch))


def _timed_decode(model: Any, prompt: Tensor, num_new: int, options: dict[str, Any]) -> Quantities:
    """Seconds of one token of every row, the prompt and the first few apart."""
    _, stamps = generate(model, prompt, num_new, partial(wall_clock, prompt.device), **options)
    return {"seconds": (stamps[-1] - stamps[SETTLING_TOKENS]) / (num_new - SETTLING_TOKENS)}


def _decode_ceiling(case: dict[str, Any], model: LatentForCausalLM) -> Callable[[int], float]:
    """Tokens per second: reading every matrix once a step, or the FLOPs, whichever takes longer. Keys are few."""
    flops, matmul, read = model_flops(model), _matmul_rate(case), _read_rate(case)
    num_keys = case["prompt_tokens"] + case["new_tokens"] // 2
    return lambda batch: batch / max(2 * flops.compute_parameters / read, batch * flops.decode(num_keys) / matmul)


def _matmul_rate(case: dict[str, Any]) -> float:
    device = torch.device(case["device"])
    timed = partial(device_seconds, device=device)
    return matmul_flops_per_second(torch.bfloat16, case["matmul_size"], timed, device)


def _read_rate(case: dict[str, Any]) -> float:
    device = torch.device(case["device"])
    return read_bytes_per_second(case["read_bytes"], partial(device_seconds, device=device), device)


def _row(case: dict[str, Any], arm: str, unit: str, values: list[float], **fields: Any) -> dict[str, Any]:
    return asdict(Row(case, arm, unit, Spread.of(values), **fields))


def _measure(
    names: dict[str, str],
    runs: Mapping[str, Callable[[], Quantities]],
    repeats: int,
    rows: Callable[[Rounds, str], list[dict[str, Any]]],
) -> None:
    """Report the arms whose first run succeeds: each at once, from a single run, then all interleaved.

    The first run compiles, and the time may be over before the other arm has.
    """
    ready, first = {}, {}
    for arm, run in runs.items():
        found: list[Quantities] = []

        def two_runs(run=run, found=found) -> None:
            found += [{"first": device_seconds(run, CPU)}, run()]

        if succeeds(names[arm], two_runs):
            ready[arm], first[arm] = run, [found[0]["first"]]
            early = {quantity: [value] for quantity, value in found[1].items()}
            say(DONE, names[arm], rows({arm: early | {"first": first[arm]}}, arm))
    rounds = interleave(ready, repeats, warmup=0) if ready else {}
    for arm in rounds:
        rounds[arm]["first"] = first[arm]
        say(DONE, names[arm], rows(rounds, arm))


def _rates(
    case: dict[str, Any], rounds: Rounds, arm: str, unit: str, per_run: int, ceiling: float
) -> list[dict[str, Any]]:
    """An arm's rate, beside the plain model's where that one ran, and what its first run took."""
    value = [per_run / seconds for seconds in rounds[arm]["seconds"]]
    fields: dict[str, Any] = {"ceiling": ceiling}
    if arm != PLAIN and PLAIN in rounds:
        fields |= {"baseline": PLAIN, "ratio": ratio(rounds, PLAIN, arm, "seconds")}
    return [_row(case, arm, unit, value, **fields), _row(case, arm, "seconds of the first run", rounds[arm]["first"])]


KINDS = {"check": check, "train": train, "decode": decode}

if __name__ == "__main__":
    for one in json.loads(sys.argv[1]):
        KINDS[one["kind"]](one)
