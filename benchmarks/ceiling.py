"""What the machine could do at best: its measured matrix-product and memory rates, and the FLOPs of a computation."""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from benchmarks.measure import cpu_seconds
from unspoken.models import loss  # noqa: F401  # defines the operator that is counted below

MATMUL_SIZE = 1024
READ_BYTES = 2**29
BEST_OF = 5

Timer = Callable[[Callable[[], object]], float]


def matmul_flops_per_second(
    dtype: torch.dtype, size: int = MATMUL_SIZE, timed: Timer = cpu_seconds, device: str | torch.device = "cpu"
) -> float:
    """FLOPs per second in a square product: one thread's, of a size that stays in the cache, unless told otherwise."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    repeats = 10
    return repeats * 2 * size**3 / _best(lambda: [torch.mm(a, b, out=out) for _ in range(repeats)], timed)


def read_bytes_per_second(
    num_bytes: int = READ_BYTES, timed: Timer = cpu_seconds, device: str | torch.device = "cpu"
) -> float:
    """Bytes per second of a sum over memory larger than the caches: one thread's, unless told otherwise."""
    data = torch.ones(num_bytes // 4, device=device)
    return num_bytes / _best(data.sum, timed)


def counted_flops(function: Callable[[], object]) -> int:
    """FLOPs of the matrix products in `function`, forward and backward, as torch's counter sees them."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters, tied ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


@register_flop_formula(torch.ops.unspoken.chunked_cross_entropy)
def _chunked_cross_entropy(
    hidden, weight, targets, pass_weights, multiplier, divisor, cap, wants_hidden, wants_weight, **_
) -> int:
    """Three products of the head: logits, and the gradients of hidden states and weight. Shapes, not tensors, come."""
    num_passes, num_tokens, hidden_size = hidden
    return 2 * num_passes * num_tokens * hidden_size * weight[0] * (1 + wants_hidden + wants_weight)


def _best(function: Callable[[], object], timed: Timer) -> float:
    function()
    return min(timed(function) for _ in range(BEST_OF))
