"""What the machine could do at best: its measured matrix-product and memory rates, and the FLOPs of a computation."""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from benchmarks.measure import cpu_seconds
from unspoken.models import loss  # noqa: F401  # defines the operator that is counted below

MATMUL_SIZE = 1024
READ_BYTES = 2**29
BEST_OF = 5


def matmul_flops_per_second(dtype: torch.dtype) -> float:
    """FLOPs per CPU second of one thread in a square product that stays in the cache."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    repeats = 10
    return repeats * 2 * MATMUL_SIZE**3 / _best(lambda: [torch.mm(a, b, out=out) for _ in range(repeats)])


def read_bytes_per_second() -> float:
    """Bytes per CPU second of one thread that reads memory larger than the caches of a core."""
    data = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _best(data.sum)


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


def _best(function: Callable[[], object]) -> float:
    function()
    return min(cpu_seconds(function) for _ in range(BEST_OF))
