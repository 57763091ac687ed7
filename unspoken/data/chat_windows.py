"""Training windows of examples: as many in each as fit, none of which sees another.

    input_ids      q  q  a  end | q  a  a  end | pad      q: asked, a: answered
    position_ids   0  1  2   3  | 0  1  2   3  |  0
    labels         .  .  a  end | .  a  a  end |  .
    prompt_mask    1  1  0   0  | 1  0  0   0  |  1       no state is recycled there, with one prefill pass

The longest come first, each into the fullest window that still has room; the windows are shuffled anew each epoch.
"""

import bisect
from collections.abc import Sequence

import numpy as np
import torch

from unspoken.data.conversations import Example
from unspoken.data.frozen_random import check_seed, frozen_random
from unspoken.data.windows import IGNORE_LABEL, Windows, check_index

_STREAM = 4


class ChatWindows(Windows):
    """Windows over examples of at most `sequence_length` tokens.

    `has_prompt_mask`: whether windows say which tokens were asked, for a model that prefills a prompt in one pass.
    """

    def __init__(
        self, examples: Sequence[Example], sequence_length: int, pad_id: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        check_seed(seed)
        self.examples, self.sequence_length, self.pad_id = list(examples), sequence_length, pad_id
        self.seed, self.shuffle = seed, shuffle
        self.has_prompt_mask = False
        self.bins = fitted([len(example) for example in self.examples], sequence_length)
        self._epochs: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.bins)

    @property
    def fill(self) -> float:
        """The share of tokens that are no pads."""
        return sum(map(len, self.examples)) / (len(self) * self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        check_index(index)
        epoch, place = divmod(index, len(self))
        input_ids = np.full(self.sequence_length, self.pad_id, dtype=np.int64)
        labels = np.full(self.sequence_length, IGNORE_LABEL, dtype=np.int64)
        position_ids = np.empty(self.sequence_length, dtype=np.int64)
        prompt_mask = np.ones(self.sequence_length, dtype=bool)
        start = 0
        for number in self.bins[int(self._order(epoch)[place])]:
            example = self.examples[number]
            end = start + len(example)
            input_ids[start:end] = example.ids
            labels[start:end] = np.where(example.is_target, example.ids, IGNORE_LABEL)
            labels[start] = IGNORE_LABEL
            prompt_mask[start:end] = ~example.is_target
            position_ids[start:end] = np.arange(len(example))
            start = end
        position_ids[start:] = np.arange(self.sequence_length - start)
        window = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
        if self.has_prompt_mask:
            window["prompt_mask"] = prompt_mask
        return {name: torch.from_numpy(values) for name, values in window.items()}

    def _order(self, epoch: int) -> np.ndarray:
        """The windows of an epoch; the last two epochs asked for are kept."""
        if epoch not in self._epochs:
            self._epochs = dict([*self._epochs.items()][-1:])
            numbers = np.arange(len(self))
            random = frozen_random(self.seed, epoch, _STREAM)
            self._epochs[epoch] = random.permutation(numbers) if self.shuffle else numbers
        return self._epochs[epoch]


def fitted(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Numbers of the lengths, in bins of a size: best fit, the longest first."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # room left and bin, sorted
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(rooms, (lengths[number], -1))
        room, which = rooms.pop(place) if place < len(rooms) else (size, len(bins))
        if which == len(bins):
            bins.append([])
        bins[which].append(number)
        bisect.insort(rooms, (room - lengths[number], which))
    return bins
