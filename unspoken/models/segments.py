"""The backward pass of k passes, pass by pass: the graph is cut between passes.

    embedding -> e | e' -> pass 1 -> h1 | h1' -> pass 2 -> h2 | h2' -> ...      | is a cut: h' is h, as the start of
                   e' read by all         h1' -> loss 1         h2' -> loss 2      a new graph

The losses and the next pass read h'. Backward runs the losses first, then pass k, k-1, ..., 1 and the embedding, each
from the gradient that has gathered at its h'. The sum is the whole graph's: what is cut has no other readers.

Why: autograd gives a parameter its gradient when all passes have contributed. Under FSDP every layer's whole gradient
is therefore alive between the passes, the full model's on every device. Pass by pass it is reduced and freed layer by
layer, as in a plain model, at the price of one reduction a pass.
"""

import torch
from torch import Tensor

Segment = tuple[tuple[Tensor, Tensor], ...]  # (end of the pass's graph, start of what reads it)


def cut(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor, and itself as the start of a new graph."""
    return tensor, tensor.detach().requires_grad_(tensor.requires_grad)


def backward_by_pass(loss: Tensor, segments: tuple[Segment, ...]) -> None:
    """`loss.backward()` for a forward that was `segmented`: adds the same gradients, the last pass's first."""
    loss.backward()
    for segment in reversed(segments):
        reached = [(end, start) for end, start in segment if end.requires_grad and start.grad is not None]
        if reached:
            torch.autograd.backward([end for end, _ in reached], [start.grad for _, start in reached])
        for _, start in segment:
            start.grad = None
