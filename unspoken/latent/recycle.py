"""Recycler's two small objects: the adapter A, and the shift of hidden states by one position.

Source: Recycler Eq. 2 (A(h) = Linear(RMSNorm(h)), zero-initialised) and Eq. 4 (position t reads h_{t-1}).
"""

from typing import Literal

import torch
from torch import Tensor, nn


class ZeroLinear(nn.Linear):
    """A linear map that starts at zero. A class of its own, so that `_init_weights` can tell it from the others."""


class ZeroRMSNorm(nn.RMSNorm):
    """An RMSNorm whose gain starts at zero; see `ZeroLinear`."""


class RecycleAdapter(nn.Module):
    """The paper's A: hidden state [..., d] -> what is added to the next token's embedding [..., d].

        norm      A(h)                          starts at zero because
        input     Linear(RMSNorm(h))            the linear map is zero (the paper's)
        none      Linear(h)                     the linear map is zero
        output    RMSNorm(Linear(h))            the norm's gain is zero; the gain alone sets how large A(h) is

    It has no bias, so that A(0) = 0 exactly: a zeroed state contributes nothing, and pads, document starts and
    prompt positions need no second mask.
    """

    def __init__(self, hidden_size: int, norm: Literal["input", "output", "none"] = "input", eps: float = 1e-6):
        super().__init__()
        norm_class = {"input": nn.RMSNorm, "output": ZeroRMSNorm}.get(norm)
        linear_class = nn.Linear if norm == "output" else ZeroLinear
        self.norm = nn.Identity() if norm_class is None else norm_class(hidden_size, eps=eps)
        self.proj = linear_class(hidden_size, hidden_size, bias=False)
        self.norm_comes_last = norm == "output"

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.norm_comes_last:
            return self.norm(self.proj(hidden_states))
        return self.proj(self.norm(hidden_states))

    def enter(self, embeds: Tensor, recycled: Tensor, scale: float = 1.0) -> Tensor:
        """What enters the backbone [..., d]: the embedding and A(h), multiplied by `scale`."""
        added = self(recycled)
        return embeds + (added if scale == 1.0 else added * scale)


class GatedAdapter(nn.Module):
    """The Full-Bandwidth Transformer's: a recycled state, gated by the token, is the token's whole input.

        u = RMSNorm((U RMSNorm(h)) * sigmoid(G RMSNorm(e)))

    h, e [..., d]: the state, and the token's embedding. No start of it is the plain model. Source: FBT (arXiv
    2608.08888) section 2; where its norms stand is read from a public reproduction.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.norm, self.gate_norm, self.output_norm = (nn.RMSNorm(hidden_size, eps=eps) for _ in range(3))
        self.proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, embeds: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(self.gate_norm(embeds)))
        return self.output_norm(self.proj(self.norm(hidden_states)) * gate)

    def enter(self, embeds: Tensor, recycled: Tensor, scale: float = 1.0) -> Tensor:
        """What enters the backbone: u, and the embedding alone where nothing is recycled, which is a state of zero."""
        product = self(recycled, embeds)
        return torch.where((recycled != 0).any(-1, keepdim=True), product if scale == 1.0 else product * scale, embeds)


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


def carry(hidden_states: Tensor, real: Tensor | None, previous: Tensor | None = None) -> Tensor:
    """Put at every pad the state of the last real token before it: `previous`, or zero, if there is none.

    So a pad, wherever it stands, neither enters the recurrence nor interrupts it. hidden_states [B, T, d]; real bool
    [B, T] or None (no pads); previous [B, 1, d] or None. States at pads are never read.
    """
    if real is None:
        return hidden_states
    if previous is None:
        previous = torch.zeros_like(hidden_states[:, :1])
    if hidden_states.shape[1] == 1:
        return torch.where(real.unsqueeze(-1), hidden_states, previous)
    last_real = _last_real(real)
    index = (last_real + 1).unsqueeze(-1).expand(-1, -1, hidden_states.shape[-1])
    return torch.cat([previous, hidden_states], dim=1).gather(1, index)


def document_starts(position_ids: Tensor, real: Tensor | None = None) -> Tensor:
    """Where a packed row's next document starts: bool [B, T], never at position 0.

    Between neighbours positions count up by one within a document; over pads they only have to grow.

    position_ids [B or 1, T]; real bool [B, T], False at pads, or None.
    """
    starts = torch.zeros_like(position_ids, dtype=torch.bool)
    if real is None:
        starts[:, 1:] = position_ids[:, 1:] - position_ids[:, :-1] != 1
        return starts
    position_ids = position_ids.expand(len(real), -1)
    starts = starts.expand(len(real), -1).clone()
    before = _last_real(real)[:, :-1]  # the last real token before each position from 1 on; -1: none
    grown = position_ids[:, 1:] - position_ids.gather(1, before.clamp_min(0))
    neighbours = real[:, :-1]
    starts[:, 1:] = real[:, 1:] & (before >= 0) & torch.where(neighbours, grown != 1, grown <= 0)
    return starts


def receiving_positions(
    real: Tensor | None,
    position_ids: Tensor | None,
    prompt_mask: Tensor | None = None,
) -> Tensor | None:
    """Which positions read the state before them: bool [B, T], or None when all do.

    Not a document's first token, and not a prompt position of a model trained for one-pass prefill. Position 0 has
    its predecessor, if any, in the cache; it always reads.

    real: bool [B, T], False at pads. position_ids [B or 1, T]. prompt_mask: bool or int [B, T], true on the prompt.
    """
    receives = None
    if position_ids is not None and position_ids.shape[-1] > 1:
        receives = ~document_starts(position_ids, real)
    if prompt_mask is not None:
        receives = ~prompt_mask.bool() if receives is None else receives & ~prompt_mask.bool()
    return receives


def predicted_positions(real: Tensor | None, position_ids: Tensor | None) -> Tensor | None:
    """Which tokens may be targets, predicted from the position before: bool [B, T], or None when all may.

    Not a document's first token, and not a token after a pad.
    """
    follows = receiving_positions(real, position_ids)
    if real is not None:
        after_real = torch.cat([torch.ones_like(real[:, :1]), real[:, :-1]], dim=1)
        follows = after_real if follows is None else follows & after_real
    return follows


def _last_real(real: Tensor) -> Tensor:
    """The index of the last real token up to each position, -1 if there is none: int64 [B, T]."""
    index = torch.arange(real.shape[1], device=real.device).expand(real.shape)
    return index.masked_fill(~real, -1).cummax(dim=1).values
