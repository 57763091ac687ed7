"""Slow, sequential, obviously right: the oracle each fast path is tested against.

A backbone here is a plain function `inputs [B, t, d] -> top hidden states [B, t, d]` over a prefix, causal, without
a cache and without padding. Batches with pads or packed documents are compared by running each document alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Backbone = Callable[[Tensor], Tensor]
Adapter = Callable[[Tensor], Tensor]


def exact_recurrence(backbone: Backbone, adapter: Adapter, embeddings: Tensor) -> Tensor:
    """Recycler's true recurrence, one position at a time: h_t = T(Emb(x_t) + A(h_{t-1})), h before the first = none.

    embeddings [B, T, d] -> hidden states [B, T, d]. Source: Recycler Eq. 3.
    """
    inputs = embeddings[:, :1]
    hidden = [backbone(inputs)[:, -1:]]
    for t in range(1, embeddings.shape[1]):
        inputs = torch.cat([inputs, embeddings[:, t : t + 1] + adapter(hidden[-1])], dim=1)
        hidden.append(backbone(inputs)[:, -1:])
    return torch.cat(hidden, dim=1)


def parallel_passes(backbone: Backbone, adapter: Adapter, embeddings: Tensor, num_passes: int) -> list[Tensor]:
    """The k-pass approximation: pass i adds A of pass i-1's state of the position before.

    embeddings [B, T, d] -> k hidden states [B, T, d]. Pass k is exact at the first k positions. Source: Recycler Eq. 4.
    """
    passes = [backbone(embeddings)]
    for _ in range(num_passes - 1):
        recycled = [torch.zeros_like(embeddings[:, :1])]
        recycled += [adapter(passes[-1][:, t : t + 1]) for t in range(embeddings.shape[1] - 1)]
        passes.append(backbone(embeddings + torch.cat(recycled, dim=1)))
    return passes


def prefill_then_decode(
    backbone: Backbone, adapter: Adapter, embeddings: Tensor, prompt_length: int, num_prefill_passes: int
) -> Tensor:
    """What decoding computes: k passes over the prompt, then the recurrence, without any cache.

    The prompt's inputs are those of its last pass, so later positions attend to what that pass made of them.
    embeddings [B, T, d] -> hidden states [B, T, d]. Source: Recycler section 2.2.3.
    """
    inputs = embeddings[:, :prompt_length]
    hidden = backbone(inputs)
    for _ in range(num_prefill_passes - 1):
        first = embeddings[:, :1]
        rest = embeddings[:, 1:prompt_length] + adapter(hidden[:, :-1])
        inputs = torch.cat([first, rest], dim=1)
        hidden = backbone(inputs)
    for t in range(prompt_length, embeddings.shape[1]):
        inputs = torch.cat([inputs, embeddings[:, t : t + 1] + adapter(hidden[:, -1:])], dim=1)
        hidden = torch.cat([hidden, backbone(inputs)[:, -1:]], dim=1)
    return hidden
