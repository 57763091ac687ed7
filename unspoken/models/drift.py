"""How far latent steps take a model's logits from those of its backbone, and how far they may.

A token's weights w^(k) sum to one and the head is linear, so its logits are those of its first state and

    sum over k > 1 of  w^(k) (head(z^(k)) - head(z^(1)))

more. A cap on logits makes that smaller, never larger. A converted model's router is blind and nearly closed: one
latent step, whose weight is the gate.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unspoken.models.latent_lm import LatentForCausalLM


@dataclass(frozen=True)
class Drift:
    """Over a probe's tokens: the largest difference of logits `measured`, the largest `bound`, what `rounding` may do
    beside, the mean `latent_length`, and the largest `weight` of all latent steps of a token. `excess`: how far a
    token's logits go beyond its own bound and rounding; not above 0 in a sound model."""

    measured: float
    bound: float
    rounding: float
    weight: float
    latent_length: float
    excess: float

    @property
    def holds(self) -> bool:
        return self.excess <= 0  # False for what is not a number

    def __str__(self) -> str:
        return (
            f"{self.measured:.3g}, bound {self.bound:.3g} (at a weight of {self.weight:.3g}) and rounding "
            f"{self.rounding:.1g}"
        )


@torch.no_grad()
def drift(model: LatentForCausalLM, input_ids: Tensor, expected: Tensor) -> Drift:
    """Compare the logits of one pass with `expected` [1, T, V], the backbone's. The model is in evaluation mode."""
    outputs = model(input_ids, use_cache=False, num_passes=1, keeps_steps=True)
    scaled = replace(model.transform, cap=0.0)
    bound = torch.zeros(input_ids.numel(), dtype=torch.float64, device=input_ids.device)
    weight = torch.zeros_like(bound)
    steps = outputs.latents.steps
    for step in steps[1:]:
        first = steps[0].hidden[step.token]  # the first step is all tokens', in order
        change = scaled(model.lm_head(step.hidden)).double() - scaled(model.lm_head(first)).double()
        bound.index_add_(0, step.token, step.weight * change.abs().amax(-1))
        weight.index_add_(0, step.token, step.weight.double())
    measured = (outputs.logits.double() - expected.double()).abs().amax(-1).flatten()
    # z_final and both logits are rounded to the dtype, half an eps each; the head sums d products in float32 at least.
    rounding = 2 * torch.finfo(expected.dtype).eps + model.config.hidden_size**0.5 * torch.finfo(torch.float32).eps
    rounding *= expected.abs().max().item()
    return Drift(
        measured.max().item(),
        bound.max().item(),
        rounding,
        weight.max().item(),
        outputs.latents.lengths.double().mean().item(),
        (measured - bound - rounding).max().item(),
    )
