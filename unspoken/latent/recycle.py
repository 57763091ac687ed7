"""Recycler's two small objects: the adapter A, and the shift of hidden states by one position.

Source: Recycler Eq. 2 (A(h) = Linear(RMSNorm(h)), zero-initialised) and Eq. 4 (position t reads h_{t-1}).
"""

import torch
from torch import Tensor, nn


class ZeroLinear(nn.Linear):
    """A linear map that starts at zero. A class of its own, so that `_init_weights` can tell it from the others."""


class RecycleAdapter(nn.Module):
    """The paper's A: hidden state [..., d] -> what is added to the next token's embedding [..., d].

    It has no bias, so that A(0) = 0 exactly: a zeroed state contributes nothing, and pads, document starts and
    prompt positions need no second mask.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self.proj = ZeroLinear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.proj(self.norm(hidden_states))


def shift(hidden_states: Tensor, receives: Tensor | None, previous: Tensor | None = None) -> Tensor:
    """Move states one position to the right: out[:, t] = h[:, t-1], zero where position t receives nothing.

        position    0      1     2     3     4        receives = [*, 1, 1, 0, 1]   (a document starts at 3)
        reads     prev    h_0   h_1    0    h_3

    hidden_states [B, T, d]; receives bool [B, T] or None (all); previous [B, 1, d] is the state before position 0
    (carried by a cache), None at the start of a sequence. States that are not received are never read: a NaN there
    reaches neither the output nor a gradient.
    """
    if previous is None:
        previous = torch.zeros_like(hidden_states[:, :1])
    shifted = torch.cat([previous, hidden_states[:, :-1]], dim=1)
    return shifted if receives is None else shifted.masked_fill(~receives.unsqueeze(-1), 0)


def receiving_positions(
    real: Tensor | None,
    position_ids: Tensor | None,
    prompt_mask: Tensor | None = None,
) -> Tensor | None:
    """Which positions read the previous one's state: bool [B, T], or None when all do.

    Position t reads t-1 if t-1 is a real token of the same document (positions within a document count up by one)
    and t is not a prompt position of a model trained for one-pass prefill. Position 0 has its predecessor, if any,
    in the cache, where states of pads are stored as zero; it always reads.

    real: bool [B, T], False at pads. position_ids [B or 1, T]. prompt_mask: bool or int [B, T], true on the prompt.
    """
    receives = None
    if real is not None:
        receives = torch.cat([torch.ones_like(real[:, :1]), real[:, :-1]], dim=1)
    if position_ids is not None and position_ids.shape[-1] > 1:
        same_document = torch.ones_like(position_ids, dtype=torch.bool)
        same_document[:, 1:] = position_ids[:, 1:] - position_ids[:, :-1] == 1
        receives = same_document if receives is None else receives & same_document
    if prompt_mask is not None:
        receives = ~prompt_mask.bool() if receives is None else receives & ~prompt_mask.bool()
    return receives
