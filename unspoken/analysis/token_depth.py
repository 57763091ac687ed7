"""What each token of a text went through before it was emitted: latent steps, reach, and how right each step was.

Token i is emitted from position i - 1, so what is said of a token here is what that position did: its latent steps,
and the probability that each step's state gave the token. Source: Adaptive latent CoT section 4.4 and Figure 2.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.loss import target_probabilities

LOSS_EDGES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, np.inf)  # nats, evenly spaced in their logarithm
NUM_BINS = 10


@dataclass
class TokenDepth:
    """N emitted tokens. ids, lengths int64 [N]; loss [N] in nats, of the mixture; reach and right [N, K]: r^(k) and
    p_target^(k), NaN at steps that a token did not take."""

    ids: np.ndarray
    lengths: np.ndarray
    loss: np.ndarray
    reach: np.ndarray
    right: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_steps(self) -> int:
        """K, the runs of the backbone of the token that took most."""
        return self.reach.shape[1]


@dataclass(frozen=True)
class Bucket:
    """Some tokens: what they have in common, how many they are, and a mean over them (None for no token)."""

    name: str
    count: int
    mean: float | None


@torch.no_grad()
def token_depth(model: LatentForCausalLM, ids: list[int], start_id: int, window: int, **knobs: Any) -> TokenDepth:
    """Read `ids` in windows of so many tokens, each after a `start_id` as a document would be. knobs: the forward's."""
    parts = []
    for first in range(0, len(ids), window):
        piece = torch.tensor([[start_id, *ids[first : first + window]]], device=model.device)
        output = model.model(piece[:, :-1], use_cache=False, keeps_steps=True, **knobs)
        targets = piece[0, 1:]
        final = target_probabilities(output.last_hidden_state[0], model.lm_head, targets, model.transform)
        reach = np.full((len(targets), len(output.latents.steps)), np.nan)
        right = reach.copy()
        for k, step in enumerate(output.latents.steps):
            chosen = target_probabilities(step.hidden, model.lm_head, targets[step.token], model.transform)
            places = step.token.cpu().numpy()
            reach[places, k], right[places, k] = step.reach.cpu().numpy(), chosen.cpu().numpy()
        lengths = output.latents.lengths[0].cpu().numpy()
        parts.append(TokenDepth(targets.cpu().numpy(), lengths, -np.log(final.cpu().numpy()), reach, right))
    return _joined(parts)


def _joined(parts: list[TokenDepth]) -> TokenDepth:
    width = max(part.num_steps for part in parts)

    def padded(steps: np.ndarray) -> np.ndarray:
        return np.pad(steps, ((0, 0), (0, width - steps.shape[1])), constant_values=np.nan)

    return TokenDepth(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.loss for part in parts]),
        np.concatenate([padded(part.reach) for part in parts]),
        np.concatenate([padded(part.right) for part in parts]),
    )


def right_by_length(depth: TokenDepth) -> list[Bucket]:
    """The probability of the token that was right, by the latent steps taken (Figure 8, left)."""
    probability = np.exp(-depth.loss)
    return [_bucket(str(n), probability[depth.lengths == n]) for n in range(int(depth.lengths.max()) + 1)]


def length_by_loss(depth: TokenDepth) -> list[Bucket]:
    """Latent steps taken, by the token's cross-entropy (Figure 8, right)."""
    return [
        _bucket(f"{low:g} to {high:g}", depth.lengths[(depth.loss >= low) & (depth.loss < high)])
        for low, high in itertools.pairwise(LOSS_EDGES)
    ]


def gain_by_right(depth: TokenDepth) -> Iterator[tuple[int, list[Bucket]]]:
    """For each step k: how much the next one adds to the right token's probability, by that probability (Figure 2).

    Means over the tokens that took the next step; ask for `exit_threshold=0` to have all of them take all.
    """
    for k in range(depth.num_steps - 1):
        took = ~np.isnan(depth.right[:, k + 1])
        before = depth.right[took, k]
        gain = depth.right[took, k + 1] - before
        place = np.minimum((before * NUM_BINS).astype(int), NUM_BINS - 1)
        yield (
            k + 1,
            [_bucket(f"{b / NUM_BINS:g} to {(b + 1) / NUM_BINS:g}", gain[place == b]) for b in range(NUM_BINS)],
        )


def _bucket(name: str, values: np.ndarray) -> Bucket:
    return Bucket(name, len(values), float(values.mean()) if len(values) else None)
