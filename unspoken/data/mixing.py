"""Several sources in one fixed order: which source window i comes from, and which of that source's windows.

Windows come in blocks. A block's share of each source is what cumulative rounding leaves, so that after any number of
blocks no source is a whole window away from its weight; within the block the order is drawn. Weights 3 : 1 and
blocks of 8, of which 1 to 6 and a to b are windows of the two sources, each in the source's own order:

    block 0:  1 2 a 3 4 5 b 6      block 1:  7 c 8 9 10 11 12 d      ...

So each source has epochs of its own, and a window's place follows from its number alone.
"""

import bisect
import hashlib
import json
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch

from unspoken.data.frozen_random import check_seed, frozen_random
from unspoken.data.windows import Windows, check_index
from unspoken.errors import UsageError

BLOCK = 1024
_STREAM = 1  # tells the generator of a block from that of a source's epoch


class MixedDataset(Windows):
    """Windows of several sources in proportion to their weights.

    With `shuffle=False` a block's windows are spread evenly instead of drawn; the sources keep their own order. `len`
    counts the windows before the first source begins its second epoch.

    Raises:
        UsageError: no source, windows of different lengths, a weight that is not positive, or one so small that a
            block would hold none of its source's windows.
    """

    def __init__(
        self, sources: Sequence[Windows], weights: Sequence[float], seed: int = 0, shuffle: bool = True
    ) -> None:
        check_seed(seed)
        lengths = {source.sequence_length for source in sources}
        if len(sources) != len(weights) or len(lengths) != 1:
            raise UsageError(f"{len(sources)} sources of sequence lengths {sorted(lengths)}, {len(weights)} weights")
        self.sources = list(sources)
        self.shares = _shares(weights)
        self.sequence_length = lengths.pop()
        self.seed = seed
        self.shuffle = shuffle
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        limits = np.array([len(source) for source in self.sources])
        numbers = range(sum(limits) + 1)
        return bisect.bisect_right(numbers, False, key=lambda number: bool((self.counts(number) > limits).any())) - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        source, window = self.place(index)
        return self.sources[source][window]

    def place(self, index: int) -> tuple[int, int]:
        """Return which source window `index` comes from, and its number there."""
        check_index(index)
        block, place = divmod(index, BLOCK)
        sources, windows = self._block(block)
        return int(sources[place]), int(windows[place])

    def counts(self, number: int) -> np.ndarray:
        """Return how many of the first `number` windows come from each source, int64 [sources]."""
        block, place = divmod(number, BLOCK)
        within = np.bincount(self._block(block)[0][:place], minlength=len(self.sources))
        return self._block_starts(block) + within

    def _block_starts(self, block: int) -> np.ndarray:
        """How many windows of each source come before a block."""
        total = block * BLOCK
        bounds = [math.floor(total * share + Fraction(1, 2)) for share in self.shares]
        return np.diff(bounds, prepend=0)

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and source's window of each place in a block; the last two blocks asked for are kept."""
        if block not in self._blocks:
            self._blocks = dict([*self._blocks.items()][-1:])
            self._blocks[block] = self._draw_block(block)
        return self._blocks[block]

    def _draw_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        starts = self._block_starts(block)
        counts = self._block_starts(block + 1) - starts
        sources = np.repeat(np.arange(len(counts)), counts)
        if self.shuffle:
            sources = sources[frozen_random(self.seed, block, _STREAM).permutation(BLOCK)]
        else:
            ticks = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
            sources = sources[np.argsort(ticks, kind="stable")]
        windows = np.empty(BLOCK, dtype=np.int64)
        for source, (start, count) in enumerate(zip(starts, counts)):
            windows[sources == source] = np.arange(start, start + count)
        return sources, windows


def mix(sources: Sequence[Windows], weights: Sequence[float], seed: int = 0, shuffle: bool = True) -> Windows:
    """`MixedDataset`, or the source itself where there is one: its windows would come in the same order."""
    return sources[0] if len(sources) == 1 else MixedDataset(sources, weights, seed, shuffle)


def mixture_fingerprint(fingerprints: Sequence[str], weights: Sequence[float]) -> str:
    """Changes with every source, its weight and their order; that of the source itself where there is one."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    state = json.dumps([[name, float(weight)] for name, weight in zip(fingerprints, weights)])
    return hashlib.sha256(state.encode()).hexdigest()


def _shares(weights: Sequence[float]) -> list[Fraction]:
    """Cumulative shares of the weights, the last one 1; exact for the decimals that were written."""
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise UsageError(f"a weight is {weight}; it must be a positive number")
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact, Fraction(0))
    for given in exact:
        if given / total * BLOCK < 1:
            raise UsageError(
                f"the weight {float(given):g} is {float(given / total):.2g} of all; it must be at least 1/{BLOCK}, "
                f"or a block of {BLOCK} windows would hold none of its source. Raise it, or leave the source out"
            )
    return [sum(exact[: i + 1], Fraction(0)) / total for i in range(len(exact))]
