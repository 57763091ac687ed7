"""The depth curve: evaluation loss against recycle depth, as in the Recycler's Figures 3 and 4.

At depth k the state of a position carries what flowed through the k most recent positions, which is what k parallel
passes compute; the exact recurrence, whose depth grows with the sequence, is the limit. A model trained with two
passes may get worse again at depths it never saw (Figure 4): `drift` says by how much.

Source: Recycler sections 2.2.1 and 2.3.1.
"""

from dataclasses import dataclass

from unspoken.eval.perplexity import EXACT, Scores


@dataclass(frozen=True)
class DepthCurve:
    """Losses in nats per target at depths 1, 2, ...; `exact` is None if it was not measured."""

    losses: tuple[float, ...]
    exact: float | None
    num_train_passes: int

    @property
    def depths(self) -> range:
        return range(1, len(self.losses) + 1)

    @property
    def best_depth(self) -> int:
        return min(self.depths, key=lambda depth: self.losses[depth - 1])

    @property
    def drift(self) -> float:
        """Loss at the largest depth minus that at the depth of training (or the largest, if that is less)."""
        return self.losses[-1] - self.losses[min(self.num_train_passes, len(self.losses)) - 1]

    @property
    def gap_to_exact(self) -> float | None:
        """Loss at the largest depth minus that of the exact recurrence."""
        return None if self.exact is None else self.losses[-1] - self.exact

    def as_dict(self) -> dict:
        return {
            "losses": list(self.losses),
            "exact": self.exact,
            "num_train_passes": self.num_train_passes,
            "best_depth": self.best_depth,
            "drift": self.drift,
            "gap_to_exact": self.gap_to_exact,
        }


def depth_curve(scores: Scores, num_train_passes: int, depth: int) -> DepthCurve:
    """The curve up to `depth` (or as far as was measured) on the rows done so far."""
    names = [name for name in scores.names if name != EXACT][:depth]
    exact = scores.loss(EXACT).loss if EXACT in scores.names else None
    return DepthCurve(tuple(scores.loss(name).loss for name in names), exact, num_train_passes)
