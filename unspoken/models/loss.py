"""Next-token cross-entropy from hidden states, without ever holding the logits of a whole sequence.

`chunked_cross_entropy` makes the logits of a few tokens at a time, takes their loss, turns them into their gradient
where they lie, and drops them: peak memory is one chunk of logits and one gradient of the head, whatever the number of
passes. It costs the three matrix products of the plain loss and fewer passes over the logits, so it is the faster of
the two (benchmarks/README.md). Its oracle is `plain_cross_entropy`; results agree to rounding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unspoken.models.backbone import LogitTransform

IGNORE_INDEX = -100
CHUNK_LOGITS = 2**25  # logits held at once: 128 MiB in float32, 682 tokens at a vocabulary of 49152
CPU_BLOCK = 2**19  # elements of a float32 temporary on a CPU: 2 MiB


def shift_labels(labels: Tensor) -> Tensor:
    """labels [B, T] -> targets [B, T]: the next token at each position, none at the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def plain_cross_entropy(passes: list[Tensor], weight: Tensor, targets: Tensor, transform: LogitTransform) -> Tensor:
    """Summed cross-entropy of each pass, [k], from full logits. The oracle."""
    losses = []
    for hidden in passes:
        logits = transform(F.linear(hidden, weight))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(
            F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        )
    return torch.stack(losses)


def chunked_cross_entropy(
    passes: list[Tensor],
    weight: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    pass_weights: list[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy over all passes, weighted, and that of each pass.

    passes: k hidden states [B, T, d]; weight [V, d]; targets [B, T] already shifted, -100 where there is none;
    pass_weights: k numbers, 1 by default. Returns (total, a differentiable scalar; losses [k], detached and not
    weighted), at least float32. Oracle: `plain_cross_entropy`.
    """
    hidden = torch.stack([h.flatten(0, -2) for h in passes])
    targets = targets.flatten()
    if not torch.compiler.is_compiling():  # positions without a target skip the head; a compiled graph keeps its shape
        keep = targets != IGNORE_INDEX
        _check_range(targets[keep], weight.shape[0])
        hidden, targets = hidden[:, keep], targets[keep]
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    grad = torch.is_grad_enabled()
    total, losses, _, _ = _chunked_cross_entropy(
        hidden,
        weight,
        targets,
        pass_weights or [1.0] * len(passes),
        transform.multiplier,
        transform.divisor,
        transform.cap,
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
    )
    return total, losses


def module_cross_entropy(
    passes: list[Tensor],
    head: nn.Module,
    targets: Tensor,
    transform: LogitTransform,
    pass_weights: list[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunked_cross_entropy` for a head that is more than its weight: wrapped by LoRA, biased, sharded.

    A chunk's logits are made again in the backward pass (one matrix product more). Results as there.
    """
    targets = targets.flatten()
    keep = targets != IGNORE_INDEX
    targets = targets[keep]

    def chunk_loss(hidden: Tensor, chosen: Tensor) -> Tensor:
        logits = transform(head(hidden))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, chosen, reduction="sum")

    losses = []
    for hidden in (h.flatten(0, -2)[keep] for h in passes):
        parts = _slices(len(hidden), max(1, CHUNK_LOGITS // getattr(head, "out_features", 2**16)))
        chunks = [checkpoint(chunk_loss, hidden[part], targets[part], use_reentrant=False) for part in parts]
        losses.append(torch.stack(chunks).sum() if chunks else hidden.sum() * 0.0)
    weighted = [loss * w for loss, w in zip(losses, pass_weights or [1.0] * len(losses), strict=True)]
    return torch.stack(weighted).sum(), torch.stack(losses).detach()


def expected_cross_entropy(
    states: list[Tensor], probabilities: Tensor, head: nn.Module, targets: Tensor, transform: LogitTransform
) -> Tensor:
    """Cross-entropy summed over tokens, in expectation over which of several states speaks; gradients reach both.

    states: N of [B, T, d]; probabilities [N, B, T]; targets [B, T], -100 where there is none. A chunk's logits are made
    again in the backward pass.
    """
    targets = targets.flatten()
    keep = targets != IGNORE_INDEX
    targets = targets[keep]
    hidden = torch.stack([state.flatten(0, -2)[keep] for state in states])
    weights = probabilities.flatten(1)[:, keep]

    def chunk_loss(hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        logits = transform(head(hidden))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits.flatten(0, 1), chosen.repeat(len(hidden)), reduction="none")
        return (losses.view_as(weights) * weights).sum()

    at_once = max(1, CHUNK_LOGITS // getattr(head, "out_features", 2**16) // len(states))
    parts = _slices(len(targets), at_once)
    chunks = [
        checkpoint(chunk_loss, hidden[:, part], weights[:, part], targets[part], use_reentrant=False) for part in parts
    ]
    return torch.stack(chunks).sum() if chunks else hidden.sum() * 0.0


@torch.no_grad()
def target_probabilities(hidden: Tensor, head: nn.Module, targets: Tensor, transform: LogitTransform) -> Tensor:
    """The probability of each token's target, without a gradient. hidden [n, d], targets [n] -> [n], at least float32.

    Some tokens' logits at a time are made, and dropped.
    """
    found = []
    hidden = hidden.detach()  # a whole slice keeps requires_grad even here, and torch's FLOP counter trips over it
    for part in _slices(len(hidden), max(1, CHUNK_LOGITS // getattr(head, "out_features", 2**16))):
        logits = transform(head(hidden[part]))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chosen = logits.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1)
        found.append((chosen - logits.logsumexp(-1)).exp())
    return torch.cat(found) if found else hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))


def _check_range(targets: Tensor, vocab_size: int) -> None:
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < vocab_size:
        raise ValueError(
            f"labels must lie in 0..{vocab_size - 1}, or be {IGNORE_INDEX} where there is no target; got values from "
            f"{int(targets.min())} to {int(targets.max())}"
        )


@torch.library.custom_op("unspoken::chunked_cross_entropy", mutates_args=())
def _chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    pass_weights: list[float],
    multiplier: float,
    divisor: float,
    cap: float,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [k, N, d] -> the weighted total, losses [k], and the total's gradients (empty if unwanted).

    Products are made in hidden's dtype. Losses and the weight's gradient are at least float32: a sum over many chunks
    needs more bits than bfloat16 has. One buffer holds every chunk's logits in turn, since fresh memory of that size
    costs as much as the product that fills it.
    """
    transform = LogitTransform(multiplier, divisor, cap)
    precise = torch.promote_types(weight.dtype, torch.float32)
    head = weight.to(hidden.dtype)
    num_passes, num_targets = hidden.shape[:2]
    states, targets = hidden.flatten(0, 1), targets.repeat(num_passes)
    losses = states.new_empty(len(states), dtype=precise)
    weights = torch.tensor(pass_weights, dtype=precise, device=hidden.device)
    row_weights = weights.repeat_interleave(num_targets)
    grad_hidden = hidden.new_empty(hidden.shape if wants_hidden else 0)
    grad_weight = weight.new_zeros(weight.shape if wants_weight else 0, dtype=precise)
    chunks = _slices(len(states), CHUNK_LOGITS // len(weight))
    buffer = states.new_empty(max((part.stop - part.start for part in chunks), default=0), len(weight))
    for part in chunks:
        h = states[part]
        logits = torch.mm(h, head.t(), out=buffer[: len(h)])
        for rows in _blocks(logits):
            row = slice(part.start + rows.start, part.start + rows.stop)
            losses[row] = _loss_then_gradient(logits[rows], targets[row], row_weights[row], transform)
        if wants_hidden:
            torch.mm(logits, head, out=grad_hidden.flatten(0, 1)[part])
        if wants_weight:
            _add_product(grad_weight, logits.t(), h)
    pass_losses = losses.view(num_passes, num_targets).sum(-1)
    return (pass_losses * weights).sum(), pass_losses, grad_hidden, grad_weight


@_chunked_cross_entropy.register_fake
def _(hidden, weight, targets, pass_weights, multiplier, divisor, cap, wants_hidden, wants_weight):
    precise = torch.promote_types(weight.dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=precise),
        hidden.new_empty(hidden.shape[0], dtype=precise),
        hidden.new_empty(hidden.shape if wants_hidden else 0),
        torch.empty_like(weight, dtype=precise) if wants_weight else weight.new_empty(0, dtype=precise),
    )


def _save_gradients(ctx, inputs, output):
    _, losses, grad_hidden, grad_weight = output
    ctx.save_for_backward(grad_hidden, grad_weight)
    ctx.mark_non_differentiable(losses, grad_hidden, grad_weight)
    ctx.weight_dtype = inputs[1].dtype
    ctx.wants_hidden, ctx.wants_weight = inputs[-2:]


def _scale_gradients(ctx, scale, _grad_losses, _grad_hidden, _grad_weight):
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("the chunked loss has no second derivative; take plain_cross_entropy for that")
    grad_hidden, grad_weight = ctx.saved_tensors
    # A graph that is not kept is done with its tensors: no second gradient of the head's size is made.
    multiply = torch.mul if _graph_is_kept() else Tensor.mul_
    grad_hidden = multiply(grad_hidden, scale) if ctx.wants_hidden else None
    grad_weight = multiply(grad_weight, scale).to(ctx.weight_dtype) if ctx.wants_weight else None
    return grad_hidden, grad_weight, None, None, None, None, None, None, None


_chunked_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)


def _graph_is_kept() -> bool:
    """Whether the running backward was asked to keep its graph; yes, where torch no longer tells."""
    return getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)()


def _loss_then_gradient(raw: Tensor, targets: Tensor, weights: Tensor, transform: LogitTransform) -> Tensor:
    """Cross-entropy [n] of raw logits [n, V], which are overwritten with the gradient of its sum weighted by [n]."""
    logits = transform(raw.to(torch.promote_types(raw.dtype, torch.float32)))
    gradient = F.log_softmax(logits, dim=-1)
    counted = targets != IGNORE_INDEX
    chosen = targets.clamp_min(0).unsqueeze(-1)
    loss = -gradient.gather(-1, chosen)
    gradient.exp_().scatter_(-1, chosen, torch.expm1(-loss))
    gradient *= (counted * weights).to(gradient.dtype).unsqueeze(-1)
    raw.copy_(transform.input_gradient(logits, gradient))
    return loss.squeeze(-1).masked_fill(~counted, 0)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, the sum in total's precision."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    for rows in _blocks(total):
        total[rows] += (left[rows] @ right).to(total.dtype)


def _blocks(matrix: Tensor) -> list[slice]:
    """Rows that go through several elementwise passes together: on a CPU, as many as its cache holds."""
    return _slices(len(matrix), CPU_BLOCK // matrix.shape[1] if matrix.device.type == "cpu" else len(matrix))


def _slices(length: int, at_most: int) -> list[slice]:
    """0..length in the fewest slices of at most so many, and of equal size."""
    count = -(-length // max(1, at_most))
    return [slice(length * i // count, length * (i + 1) // count) for i in range(count)]
