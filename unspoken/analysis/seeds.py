"""The same comparison with several seeds: what the text leaves open, and what the seed does.

Two spreads, told apart: the 95 % interval is over redrawn text, of losses averaged over the seeds; the range is over
the seeds' own differences. Neither contains the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev

import numpy as np

from unspoken.analysis.compare import Difference, Evaluation, Outcome, difference
from unspoken.analysis.numbers import signed


@dataclass(frozen=True)
class SeedDifference:
    """`mean` is of the losses averaged over seeds; `by_seed` each seed's own."""

    mean: Difference
    by_seed: Mapping[int, Difference]

    @property
    def range(self) -> tuple[float, float]:
        means = [found.mean for found in self.by_seed.values()]
        return min(means), max(means)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds; None for one seed."""
        means = [found.mean for found in self.by_seed.values()]
        return stdev(means) if len(means) > 1 else None

    @property
    def outcome(self) -> Outcome:
        """UNCLEAR where the text cannot say, or the seeds do not agree on the sign."""
        low, high = self.range
        return Outcome.UNCLEAR if low <= 0 <= high else self.mean.outcome

    def __str__(self) -> str:
        seeds = ", ".join(signed(found.mean) for found in self.by_seed.values())
        return f"{self.mean} (seeds {seeds})" if len(self.by_seed) > 1 else str(self.mean)


def seed_difference(
    of: Mapping[int, Evaluation],
    name: Mapping[int, str],
    minus: Mapping[int, Evaluation],
    minus_name: Mapping[int, str],
) -> SeedDifference | None:
    """`of` minus `minus` over the seeds that both have, each {seed: evaluation}; None if they share none.

    Raises:
        UnspokenError: they did not score the same text, lack that loss, or a model has diverged.
    """
    seeds = [seed for seed in of if seed in minus]
    if not seeds:
        return None
    by_seed = {seed: difference(of[seed], name[seed], minus[seed], minus_name[seed]) for seed in seeds}
    left = averaged([of[seed] for seed in seeds], [name[seed] for seed in seeds])
    right = averaged([minus[seed] for seed in seeds], [minus_name[seed] for seed in seeds])
    return SeedDifference(difference(left, MEAN, right, MEAN), by_seed)


MEAN = "mean over seeds"


def averaged(evaluations: Sequence[Evaluation], names: Sequence[str]) -> Evaluation:
    """One evaluation whose loss `MEAN` is that of each piece of text averaged over the evaluations' losses `names`."""
    nats = [np.array(one["rows"]["nats"][name], float) for one, name in zip(evaluations, names, strict=True)]
    first = evaluations[0]
    return first | {"rows": first["rows"] | {"nats": {MEAN: np.mean(nats, axis=0).tolist()}}}
