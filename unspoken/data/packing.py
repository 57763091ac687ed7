"""From token shards to training windows: which tokens batch number g holds, as a pure function of (seed, g).

The flat stream is cut into windows of `sequence_length` and the windows are shuffled anew each epoch. The cut
starts at a place drawn per epoch from the tokens left over (num_tokens % sequence_length), so that window
edges and the dropped tail differ between epochs. Shuffling windows, not documents, keeps a novel from filling
consecutive batches.

A window that holds the end of document A, all of B and the start of C (the model shifts the labels):

    input_ids     a7  a8  end | b0  b1  end | c0  c1
    position_ids   0   1   2  |  0   1   2  |  0   1
    labels       -100 a8  end |-100 b1  end |-100 c1      targets = tokens - documents in the window
"""

import numpy as np
import torch

from unspoken.data.frozen_random import check_seed, frozen_random
from unspoken.data.tokens import TokenShards
from unspoken.data.windows import IGNORE_LABEL, Windows, check_index
from unspoken.errors import UnspokenError, UsageError


class PackedDataset(Windows):
    """Windows over a split, in a fixed order.

    `dataset[i]` is window i of the endless sequence of epochs, so i may exceed `len(dataset)`, the windows of
    one epoch. With `shuffle=False` the windows come in the order of the file, from its start, in every epoch.
    Raises UnspokenError when the split is too small for one window.
    """

    def __init__(self, shards: TokenShards, sequence_length: int, seed: int = 0, shuffle: bool = True) -> None:
        if sequence_length < 2:
            raise UsageError(f"sequence_length is {sequence_length}; it must be at least 2")
        check_seed(seed)
        if shards.num_tokens < sequence_length:
            raise UnspokenError(
                f"{shards.folder} has {shards.num_tokens} tokens in split {shards.split!r}, but one window "
                f"needs {sequence_length}; add text or lower the sequence length"
            )
        self.shards = shards
        self.sequence_length = sequence_length
        self.seed = seed
        self.shuffle = shuffle
        self._epochs: dict[int, tuple[int, np.ndarray]] = {}

    def __len__(self) -> int:
        return self.shards.num_tokens // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.window_start(index)
        tokens = self.shards.tokens[start : start + self.sequence_length].astype(np.int64)
        starts = self._document_starts(start)
        lengths = np.diff(starts, append=self.sequence_length)
        labels = tokens.copy()
        labels[starts] = IGNORE_LABEL
        positions = np.arange(self.sequence_length) - np.repeat(starts, lengths)
        return {
            "input_ids": torch.from_numpy(tokens),
            "position_ids": torch.from_numpy(positions),
            "labels": torch.from_numpy(labels),
        }

    def window_start(self, index: int) -> int:
        """Return where window `index` starts in the token stream."""
        check_index(index)
        epoch, place = divmod(index, len(self))
        offset, order = self._epoch(epoch)
        return offset + int(order[place]) * self.sequence_length

    def _document_starts(self, start: int) -> np.ndarray:
        """Return where documents start inside the window at `start`; the window's own start counts as one."""
        offsets = self.shards.offsets
        first = np.searchsorted(offsets, start, side="right")
        last = np.searchsorted(offsets, start + self.sequence_length, side="left")
        return np.unique(np.concatenate([[0], offsets[first:last] - start]))

    def _epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        """Return an epoch's cut offset and window order; the last two epochs asked for are kept."""
        if epoch not in self._epochs:
            self._epochs = dict([*self._epochs.items()][-1:])
            self._epochs[epoch] = self._draw_epoch(epoch)
        return self._epochs[epoch]

    def _draw_epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        if not self.shuffle:
            return 0, np.arange(len(self))
        random = frozen_random(self.seed, epoch)
        offset = int(random.randint(self.shards.num_tokens % self.sequence_length + 1))
        return offset, random.permutation(len(self))
