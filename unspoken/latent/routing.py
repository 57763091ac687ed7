"""Who takes another recursion of the middle layers, and with what weight its output counts.

    token choice    p = softmax(W x_1) over depths,  depth = argmax p,  g = scale p_depth
                    x_(r+1) = f(x_r),  and at the token's depth  x_1 + g f(x_r)
    expert choice   g_r = sigmoid(w_r x_r);  x_(r+1) = x_r + scale g_r f(x_r)
                    recursion 1 takes all tokens, r + 1 some of those that r took: in training the share of the row
                    that has the highest gates, otherwise those with g > 1/2

x_1 is what enters the middle layers, and f runs them. Whom the highest gates belong to depends on tokens to come:
training by expert choice is not causal, and a loss teaches the gates to say by themselves who was taken.

Source: Mixture-of-Recursions (arXiv 2507.10524); oracle: `latent/reference.py` `recursions`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unspoken.config import RecursionsConfig
from unspoken.latent.active import Active


class TokenChoice(nn.Module):
    """One router for all recursions, asked once: [..., d] -> logits of depths 1..N."""

    def __init__(self, config: RecursionsConfig):
        super().__init__()
        self.depth = nn.Linear(config.hidden_size, config.num_recursions, bias=False)
        self.config = config

    def begin(self, states: Tensor, real: Tensor, by_share: bool) -> "DepthChoices":
        """The choices of a forward, from what enters the middle layers [B, T, d]; real bool [B, T]."""
        return DepthChoices(self, states, real)


class DepthChoices:
    """Each token's depth, from 1 [B, T], and its weight [B, T]."""

    def __init__(self, router: TokenChoice, states: Tensor, real: Tensor):
        logits = _precise(router.depth(states))
        self.router, self.first, probabilities = router, states, logits.softmax(-1)
        self.depths = logits.argmax(-1) + 1
        self.weights = router.config.scale * probabilities.gather(-1, self.depths.unsqueeze(-1) - 1).squeeze(-1)
        self._logits, self._probabilities, self._real = logits, probabilities, real

    def asks(self, recursion: int, states: Tensor, active: Active) -> tuple[Tensor, Tensor]:
        """Which of the tokens that took the recursion before, whose states are [b, Q, d], go on to this one; and the
        weight of its output."""
        return active.taken & (active.of(self.depths) >= recursion), active.of(self.weights)

    def combine(self, recursion: int, before: Tensor, output: Tensor, active: Active) -> Tensor:
        """The states [b, Q, d] after the recursion, of those before it and of f's output."""
        first = self.first if active.rows is None else self.first[active.rows]
        first = first.gather(1, active.columns.unsqueeze(-1).expand_as(output))
        weighted = first + active.carried.unsqueeze(-1).to(output.dtype) * output
        is_last = active.of(self.depths) == recursion
        return torch.where(is_last.unsqueeze(-1), weighted, output)

    def unasked(self) -> Tensor | float:
        """Zero: the router is asked about every token."""
        return 0.0

    def loss(self) -> Tensor:
        """How unequally depths are chosen (N sum P_i f_i, 1 where all are equal), and how large the logits are: means
        over the real tokens, each with its weight."""
        if not self._real.any():
            return self._logits.sum() * 0.0
        probabilities, logits = self._probabilities[self._real], self._logits[self._real]
        count = logits.shape[-1]
        chosen = F.one_hot(self.depths[self._real] - 1, count).to(probabilities.dtype)
        balance = count * (probabilities.mean(0) * chosen.mean(0)).sum()
        size = logits.logsumexp(-1).square().mean()
        config = self.router.config
        return config.balance_weight * balance + config.z_loss_weight * size


class ExpertChoice(nn.Module):
    """A gate for each recursion: [..., d] -> its logit."""

    def __init__(self, config: RecursionsConfig):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(config.hidden_size, 1, bias=False) for _ in range(config.num_recursions))
        self.config = config

    def logits(self, recursion: int, states: Tensor) -> Tensor:
        """Of a recursion's gate: [..., d] -> [...], at least float32."""
        return _precise(self.gates[recursion - 1](states).squeeze(-1))

    def begin(self, states: Tensor, real: Tensor, by_share: bool) -> "GateChoices":
        return GateChoices(self, real.sum(-1), by_share)


class GateChoices:
    """Gates asked and answers, recursion by recursion. num_tokens int64 [B]: the real ones of each row."""

    def __init__(self, router: ExpertChoice, num_tokens: Tensor, by_share: bool):
        self.router, self.num_tokens, self.by_share = router, num_tokens, by_share
        self._asked: list[tuple[Tensor, Tensor]] = []  # logits and who was taken, [n], of the recursions that choose

    def asks(self, recursion: int, states: Tensor, active: Active) -> tuple[Tensor, Tensor]:
        states = states.masked_fill(~active.taken.unsqueeze(-1), 0)
        logits = self.router.logits(recursion, states)
        goes = active.taken
        if recursion > 1:
            goes = goes & (self._among_highest(recursion, logits, active) if self.by_share else logits > 0)
            self._asked.append((logits[active.taken], goes[active.taken]))
        return goes, self.router.config.scale * logits.sigmoid()

    def _among_highest(self, recursion: int, logits: Tensor, active: Active) -> Tensor:
        num_tokens = self.num_tokens if active.rows is None else self.num_tokens[active.rows]
        count = (self.router.config.shares[recursion - 1] * num_tokens).long().clamp(min=1)
        order = logits.masked_fill(~active.taken, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        return order.argsort(dim=-1) < count.unsqueeze(-1)

    def combine(self, recursion: int, before: Tensor, output: Tensor, active: Active) -> Tensor:
        return before + active.carried.unsqueeze(-1).to(output.dtype) * output

    def loss(self) -> Tensor:
        """The cross-entropy between gates and who was taken: the mean over recursions of that over tokens asked."""
        asked = [(logits, taken) for logits, taken in self._asked if len(logits)]
        found = [F.binary_cross_entropy_with_logits(logits, taken.to(logits.dtype)) for logits, taken in asked]
        return self.router.config.selection_weight * torch.stack(found).mean() if found else self.num_tokens.sum() * 0.0

    def unasked(self) -> Tensor | float:
        """Zero, with every gate in its graph: where no token goes on, later ones are not asked."""
        return sum(parameter.sum() * 0.0 for parameter in self.router.parameters())


def _precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
