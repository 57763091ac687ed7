"""Next-token cross-entropy from hidden states, without ever holding the logits of a whole sequence.

`chunked_cross_entropy` makes the logits of a few tokens at a time, takes their loss and, when gradients are wanted,
their gradient at once, and drops them: peak memory is one chunk of logits and one gradient of the head, whatever the
number of passes. It costs the three matrix products of the plain loss and no more. Its oracle is
`plain_cross_entropy`; results agree to rounding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from unspoken.models.backbone import LogitTransform

IGNORE_INDEX = -100
CHUNK_LOGITS = 2**25  # logits held at once: 128 MiB in float32, 682 tokens at a vocabulary of 49152


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
    passes: list[Tensor], weight: Tensor, targets: Tensor, transform: LogitTransform
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy over all passes, and that of each pass.

    passes: k hidden states [B, T, d]; weight [V, d]; targets [B, T] already shifted, -100 where there is none.
    Returns (total, a differentiable scalar; losses [k], detached), at least
    float32. Oracle: `plain_cross_entropy`.
    """
    hidden = torch.stack([h.flatten(0, -2) for h in passes])
    targets = targets.flatten()
    if not torch.compiler.is_compiling():  # positions without a target skip the head; a compiled graph keeps its shape
        keep = targets != IGNORE_INDEX
        hidden, targets = hidden[:, keep], targets[keep]
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    grad = torch.is_grad_enabled()
    losses, _, _ = _chunked_cross_entropy(
        hidden,
        weight,
        targets,
        transform.multiplier,
        transform.divisor,
        transform.cap,
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
    )
    return losses.sum(), losses.detach()


@torch.library.custom_op("unspoken::chunked_cross_entropy", mutates_args=())
def _chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    multiplier: float,
    divisor: float,
    cap: float,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [k, N, d] -> losses [k], and the gradients of their sum for hidden and weight (empty if unwanted)."""
    transform = LogitTransform(multiplier, divisor, cap)
    # The sum over many chunks needs more bits than a bfloat16 chunk has.
    precise = torch.promote_types(weight.dtype, torch.float32)
    losses = hidden.new_zeros(hidden.shape[0], dtype=precise)
    grad_hidden = torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0)
    grad_weight = torch.zeros_like(weight, dtype=precise) if wants_weight else weight.new_empty(0, dtype=precise)
    chunk_tokens = max(1, CHUNK_LOGITS // weight.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        for i in range(hidden.shape[0]):
            for start in range(0, hidden.shape[1], chunk_tokens):
                part = slice(start, start + chunk_tokens)
                h = hidden[i, part]
                loss, grad_logits = _loss_and_gradient(F.linear(h, weight), targets[part], transform)
                losses[i] += loss
                if wants_hidden:
                    grad_hidden[i, part] = grad_logits @ weight
                if wants_weight:
                    grad_weight += grad_logits.t() @ h
    return losses, grad_hidden, grad_weight


@_chunked_cross_entropy.register_fake
def _(hidden, weight, targets, multiplier, divisor, cap, wants_hidden, wants_weight):
    precise = torch.promote_types(weight.dtype, torch.float32)
    return (
        hidden.new_empty(hidden.shape[0], dtype=precise),
        torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0),
        torch.empty_like(weight, dtype=precise) if wants_weight else weight.new_empty(0, dtype=precise),
    )


def _save_gradients(ctx, inputs, output):
    _, grad_hidden, grad_weight = output
    ctx.save_for_backward(grad_hidden, grad_weight)
    ctx.mark_non_differentiable(grad_hidden, grad_weight)
    ctx.weight_dtype = inputs[1].dtype
    ctx.wants_hidden, ctx.wants_weight = inputs[-2:]


def _scale_gradients(ctx, grad_losses, _grad_hidden, _grad_weight):
    """All passes come in with one weight: the caller may only use the losses' sum."""
    grad_hidden, grad_weight = ctx.saved_tensors
    scale = grad_losses[0]
    grad_hidden = grad_hidden * scale.to(grad_hidden.dtype) if ctx.wants_hidden else None
    grad_weight = (grad_weight * scale).to(ctx.weight_dtype) if ctx.wants_weight else None
    return grad_hidden, grad_weight, None, None, None, None, None, None


_chunked_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)


def _loss_and_gradient(raw: Tensor, targets: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of one chunk of raw logits [n, V], and its gradient with respect to them, in their dtype."""
    logits = transform(raw)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = targets != IGNORE_INDEX
    chosen = targets.clamp_min(0).unsqueeze(-1)
    log_normaliser = logits.logsumexp(-1, keepdim=True)
    loss = ((log_normaliser - logits.gather(-1, chosen)).squeeze(-1) * counted).sum()
    gradient = (logits - log_normaliser).exp_()
    gradient.scatter_add_(-1, chosen, gradient.new_full(chosen.shape, -1.0))
    gradient *= counted.unsqueeze(-1)
    return loss, transform.input_gradient(logits, gradient).to(raw.dtype)
