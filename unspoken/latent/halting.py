"""Who takes another latent step, and how a token's steps are mixed into one state.

    gate      g^(k) = sigmoid(router(z^(k)))             goes on, having reached step k
    reach     r^(1) = 1,  r^(k+1) = r^(k) g^(k)          gets to step k
    cut       K* = the last k <= K_max with r^(k) >= tau
    weight    r^(k) (1 - g^(k)) for k < K*,  r^(K*) at K*     all that is left falls to the last step: they sum to one
    final     z_final = sum over k <= K* of weight^(k) z^(k)

The reach never grows, so the cut is a decision at each step: go on while the next reach is at least tau. The last
step is a forced exit; its gate is never asked for. Oracle: `latent/reference.py` `latent_steps`.

Source: Adaptive latent CoT sections 3.3 and 3.4.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unspoken.latent.recycle import ZeroLinear

RouterKind = Literal["linear", "mlp", "multi_linear", "multi_mlp", "none"]
LossForm = Literal["A", "B", "C", "D"]


class RouterOutput(ZeroLinear):
    """The last map of a gate. A class of its own: `_init_weights` zeroes its weight and sets its bias to `start`."""

    def __init__(self, hidden_size: int, start: float):
        super().__init__(hidden_size, 1)
        self.start = start


class Router(nn.Module):
    """Latent state z^(k) [..., d] -> the logit of going on [...], at least float32.

        linear          w z + b                      one for all steps (the paper's default)
        mlp             w2 silu(W1 z + b1) + b       one for all steps
        multi_linear    as linear                    one for each step that has a next
        multi_mlp       as mlp                       one for each step that has a next
        none            nobody is asked: every token takes every step, and the last state alone counts

    It starts blind: its last weights are zero, so that every gate is sigmoid(bias) until training tells tokens apart.
    """

    def __init__(self, hidden_size: int, max_latent_steps: int, kind: RouterKind = "linear", bias: float = 0.0):
        super().__init__()
        count = {"none": 0, "linear": 1, "mlp": 1}.get(kind, max(1, max_latent_steps))
        self.gates = nn.ModuleList(_gate(hidden_size, kind.endswith("mlp"), bias) for _ in range(count))

    def forward(self, hidden_states: Tensor, step: int) -> Tensor:
        """step: k, counted from 1. Steps beyond those that it was made for are asked the last gate."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            gate = self.gates[min(step, len(self.gates)) - 1]
            logits = gate(hidden_states.to(next(gate.parameters()).dtype)).squeeze(-1)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def zero(self) -> Tensor | float:
        """Zero, with every parameter in its graph: where all tokens are cut, the loss reads no gate."""
        return sum(parameter.sum() * 0.0 for parameter in self.parameters())


def _gate(hidden_size: int, is_mlp: bool, bias: float) -> nn.Module:
    output = RouterOutput(hidden_size, bias)
    return nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.SiLU(), output) if is_mlp else output


@dataclass
class Halting:
    """What one step decides for tokens that reached it. weight [...]: its state's in the mixture. next_reach [...]:
    r^(k+1), zero for those that exit here. goes_on [...]: bool."""

    weight: Tensor
    next_reach: Tensor
    goes_on: Tensor


def halt(reach: Tensor, gate: Tensor | None, threshold: float) -> Halting:
    """The decision of a step. reach [...]: r^(k). gate [...]: g^(k); None at a last step, where everybody exits.

    A gradient reaches the gate through the weights of the steps that run; the cut itself has none.
    """
    if gate is None:
        return Halting(reach, torch.zeros_like(reach), torch.zeros_like(reach, dtype=torch.bool))
    next_reach = reach * gate
    goes_on = (next_reach >= threshold) & (next_reach > 0)
    weight = torch.where(goes_on, reach - next_reach, reach)
    return Halting(weight, next_reach.masked_fill(~goes_on, 0), goes_on)


def adaptive_penalty(form: LossForm, reach: Tensor, gate: Tensor, correctness: Tensor, max_latent_steps: int) -> Tensor:
    """What going on costs at one step, for each of its tokens [...]; lambda and the mean over tokens come later.

    reach, gate [...]: r^(k) and g^(k), with gradients. correctness [...]: p_target^beta, without.

        A   p^beta g               the gate alone: earlier gates are not blamed
        B   p^beta r g             the expected number of further steps, each weighed by how right the token is already
        C   p^beta r g / l_max     B, averaged over steps
        D   -p^beta sg[r] log(1 - g)

    The paper's Eq. 10 is not in its text; B is the reading that its description and its figures fit best.
    """
    match form:
        case "A":
            return correctness * gate
        case "B":
            return correctness * reach * gate
        case "C":
            return correctness * reach * gate / max_latent_steps
        case "D":
            return -correctness * reach.detach() * torch.log1p(-gate.clamp(max=1 - 1e-6))
    raise ValueError(f"adaptive_loss must be A, B, C or D, got {form!r}")
