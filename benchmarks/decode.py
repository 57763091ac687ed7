"""What recycling costs a decoded token: `generate` of a Recycler against the plain model with the same weights."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from benchmarks.arms import Arms, random_ids, shared_arms, short, smollm2
from benchmarks.ceiling import counted_flops, matmul_flops_per_second, read_bytes_per_second, weight_bytes
from benchmarks.measure import Quantities, check, interleave, progress, ratio
from benchmarks.record import Result, Row, Spread, Target

PREFILL_PASSES = (1, 2)
UNIT = "decoded tokens per CPU-second"
TARGET = Target(at_least=0.97)


def run(quick: bool) -> Result:
    settings = {
        "model": "SmolLM2-135M",
        "prompt_tokens": 32,
        "new_tokens": 6 if quick else 33,
        "rounds": 2 if quick else 9,
        "warmup_rounds": 1,
    }
    result = Result(
        name="decode",
        question="How many tokens does a Recycler decode per CPU-second, beside the same weights as a plain model?",
        method="`generate`, greedy, unmodified; the time from the first new token to the last, so without prefill. "
        "Prefill is a row of its own. Every arm emits the same tokens (the adapter is zero but is computed).",
        ceiling="the slower of: reading every weight once a step at the measured memory rate, and a step's counted "
        "FLOPs at the measured matrix rate",
        settings=settings,
        checks=[],
        rows=[],
    )
    for dtype in (torch.float32,) if quick else (torch.float32, torch.bfloat16):
        arms = shared_arms(smollm2(dtype).eval())
        for batch in (1,) if quick else (1, 8):
            result.rows += measure(arms, dtype, batch, settings, result.checks)
    return result


def measure(arms: Arms, dtype: torch.dtype, batch: int, settings: dict[str, Any], checks: list[str]) -> list[Row]:
    """Rows of one case. Raises RedCheckError when the arms' logits or tokens differ."""
    progress({"dtype": short(dtype), "batch": batch})
    prompt = random_ids(arms.plain.config.vocab_size, batch, settings["prompt_tokens"])
    num_new = settings["new_tokens"]
    tokens = generate(arms.plain, prompt, num_new)[0]
    _check_logits(arms, prompt, checks)
    timed = {"plain": partial(_timed, arms.plain, prompt, num_new, tokens, checks)}
    for k in PREFILL_PASSES:
        timed[f"recycler k_prefill={k}"] = partial(_timed, arms.recycler, prompt, num_new, tokens, checks, num_passes=k)
    rounds = interleave(timed, settings["rounds"], settings["warmup_rounds"])
    ceilings = _ceilings(arms.plain, dtype, prompt)
    rows = []
    for quantity, unit, target in (("decode", UNIT, TARGET), ("prefill", "prompt tokens per CPU-second", None)):
        for arm in timed:
            compared = arm != "plain"
            rows.append(
                Row(
                    case={"phase": quantity, "dtype": short(dtype), "batch": batch},
                    arm=arm,
                    unit=unit,
                    value=Spread.of(rounds[arm][quantity]),
                    baseline="plain" if compared else None,
                    ratio=ratio(rounds, arm, "plain", quantity) if compared else None,
                    target=target if compared else None,
                    ceiling=ceilings[quantity] / (PREFILL_PASSES[-1] if "=2" in arm and quantity == "prefill" else 1),
                )
            )
    return rows


def generate(
    model: PreTrainedModel, prompt: Tensor, num_new: int, now: Callable[[], float] = time.process_time, **options: Any
) -> tuple[Tensor, list[float]]:
    """Greedy tokens, and the time at the start and after each new token."""
    clock = _Clock(now)
    tokens = model.generate(  # type: ignore[operator]  # PreTrainedModel does not promise it
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=num_new,
        max_new_tokens=num_new,
        stopping_criteria=StoppingCriteriaList([clock]),
        **options,
    )
    return tokens, clock.stamps


class _Clock(StoppingCriteria):
    """Called after each new token; never stops."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.stamps = [now()]

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.stamps.append(self.now())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _timed(
    model: PreTrainedModel, prompt: Tensor, num_new: int, expected: Tensor, checks: list[str], **options: Any
) -> Quantities:
    tokens, stamps = generate(model, prompt, num_new, **options)
    check(torch.equal(tokens, expected), "every arm generated the same tokens in every round", checks)
    decode = len(prompt) * (num_new - 1) / (stamps[-1] - stamps[1])
    return {"decode": decode, "prefill": prompt.numel() / (stamps[1] - stamps[0])}


@torch.no_grad()
def _check_logits(arms: Arms, prompt: Tensor, checks: list[str]) -> None:
    expected = arms.plain(prompt, use_cache=True).logits
    for k in PREFILL_PASSES:
        actual = arms.recycler(prompt, use_cache=True, num_passes=k).logits
        check(torch.equal(actual, expected), "prompt logits of every arm are equal bit for bit", checks)


@torch.no_grad()
def _ceilings(plain: PreTrainedModel, dtype: torch.dtype, prompt: Tensor) -> dict[str, float]:
    """Tokens per second, of one pass."""
    matmul, read = matmul_flops_per_second(dtype), weight_bytes(plain) / read_bytes_per_second()
    limits = {}
    for phase, tokens in (("decode", prompt[:, :1]), ("prefill", prompt)):
        flops = counted_flops(partial(plain, tokens, use_cache=False, logits_to_keep=1))
        limits[phase] = tokens.numel() / max(read, flops / matmul)
    return limits
