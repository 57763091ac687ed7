"""What k passes cost a training step: forward and backward of a Recycler against the plain models, same weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.arms import Arms, random_ids, shared_arms, short, smollm2
from benchmarks.ceiling import counted_flops, matmul_flops_per_second
from benchmarks.measure import Quantities, check, cpu_seconds, interleave, progress, ratio
from benchmarks.record import Result, Row, Spread, Target

UNIT = "CPU-seconds per step"
BASELINE = "vanilla"
TARGETS = {"recycler k=2": Target(at_most=2.05)}
# The plain model's loss takes its logits through bfloat16 under autocast, ours does not; sums go in another order.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-3}


def run(quick: bool) -> Result:
    shapes = [(1, 64)] if quick else [(1, 256), (8, 64)]
    settings = {"model": "SmolLM2-135M", "shapes": shapes, "rounds": 2 if quick else 5, "warmup_rounds": 1}
    result = Result(
        name="train_step",
        question="What does a training step with k passes cost, beside one of the plain model?",
        method="Forward and backward, no optimizer; gradients are cleared outside the timed part. `plain` is the "
        "transformers model with its own loss, `vanilla` the same weights with ours; bf16 is autocast over fp32.",
        ceiling="a step's counted FLOPs at the measured matrix rate of that dtype",
        settings=settings,
        checks=[],
        rows=[],
    )
    arms = shared_arms(smollm2(torch.float32))
    for dtype in (torch.float32,) if quick else (torch.float32, torch.bfloat16):
        for batch, tokens in shapes:
            result.rows += measure(arms, dtype, (batch, tokens), settings, result.checks)
    return result


def measure(
    arms: Arms, dtype: torch.dtype, shape: tuple[int, int], settings: dict[str, Any], checks: list[str]
) -> list[Row]:
    """Rows of one case. Raises RedCheckError when the arms' losses differ."""
    progress({"dtype": short(dtype), "batch": shape[0], "tokens": shape[1]})
    input_ids = random_ids(arms.plain.config.vocab_size, *shape)
    for model in arms:
        model.train()
    steps: dict[str, Callable[[], Tensor]] = {
        "plain": partial(forward_backward, arms.plain, input_ids, dtype),
        "vanilla": partial(forward_backward, arms.vanilla, input_ids, dtype),
    }
    for k in (1, 2, 3):
        steps[f"recycler k={k}"] = partial(forward_backward, arms.recycler, input_ids, dtype, num_passes=k)
    check_losses(arms, input_ids, dtype, checks)
    rate = matmul_flops_per_second(dtype)
    ceilings = {name: counted_flops(step) / rate for name, step in steps.items()}
    rounds = interleave(
        {name: partial(_timed, arms, step) for name, step in steps.items()},
        settings["rounds"],
        settings["warmup_rounds"],
    )
    return [
        Row(
            case={"dtype": short(dtype), "batch": shape[0], "tokens": shape[1]},
            arm=name,
            unit=UNIT,
            value=Spread.of(rounds[name]["seconds"]),
            baseline=None if name == BASELINE else BASELINE,
            ratio=None if name == BASELINE else ratio(rounds, name, BASELINE, "seconds"),
            target=TARGETS.get(name),
            ceiling=ceilings[name],
        )
        for name in steps
    ]


def forward_backward(model: PreTrainedModel, input_ids: Tensor, dtype: torch.dtype, **options: Any) -> Tensor:
    """Add the gradients of one batch; its loss."""
    with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(input_ids, labels=input_ids, use_cache=False, **options).loss
    loss.backward()
    return loss.detach()


def _timed(arms: Arms, step: Callable[[], Tensor]) -> Quantities:
    arms.recycler.zero_grad()
    return {"seconds": cpu_seconds(step)}


@torch.no_grad()
def check_losses(arms: Arms, input_ids: Tensor, dtype: torch.dtype, checks: list[str]) -> None:
    """With a zero adapter every pass has the plain model's loss."""
    with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        plain = arms.plain(input_ids, labels=input_ids, use_cache=False).loss
        vanilla = arms.vanilla(input_ids, labels=input_ids).pass_losses
        passes = arms.recycler(input_ids, labels=input_ids, num_passes=3).pass_losses
    tolerance = TOLERANCE[dtype]
    for what, losses in (("vanilla's loss", vanilla), ("each pass's loss", passes)):
        close = bool(((losses - plain).abs() <= tolerance * plain).all())
        check(close, f"{short(dtype)}: {what} is the plain model's to {tolerance:g}", checks)
