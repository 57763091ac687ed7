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

from unspoken.data.tokens import TokenShards
from unspoken.errors import UnspokenError, UsageError

IGNORE_LABEL = -100


class PackedDataset(torch.utils.data.Dataset):
    """Windows over a split, in a fixed order.

    `dataset[i]` is window i of the endless sequence of epochs, so i may exceed `len(dataset)`, the windows of
    one epoch. With `shuffle=False` the windows come in the order of the file, from its start, in every epoch.
    Raises UnspokenError when the split is too small for one window.
    """

    def __init__(self, shards: TokenShards, sequence_length: int, seed: int = 0, shuffle: bool = True) -> None:
        if sequence_length < 2:
            raise UsageError(f"sequence_length is {sequence_length}; it must be at least 2")
        if not 0 <= seed < 1 << 32:
            raise UsageError(f"seed is {seed}; it must lie in 0 .. {(1 << 32) - 1}")
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
        """Return `input_ids`, `position_ids` and `labels`, int64 [sequence_length]."""
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
        if index < 0:
            raise IndexError(f"window {index}: windows are numbered from 0")
        epoch, place = divmod(index, len(self))
        offset, order = self._epoch(epoch)
        return offset + int(order[place]) * self.sequence_length

    def global_batch(self, index: int, batch_size: int, rank: int = 0, num_ranks: int = 1) -> dict[str, torch.Tensor]:
        """Return rank `rank`'s rows of global batch `index`, each tensor [batch_size / num_ranks,
        sequence_length].

        `batch_size` counts the windows of all ranks. The rows of ranks 0, 1, ... in order are the batch that
        one process would see, whatever the number of ranks; a batch may span two epochs.
        """
        if batch_size % num_ranks:
            raise UsageError(f"batch size {batch_size} is not a multiple of the {num_ranks} ranks")
        share = batch_size // num_ranks
        first = index * batch_size + rank * share
        rows = [self[first + row] for row in range(share)]
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

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
        # RandomState's streams are frozen, unlike those of newer generators: a run can be resumed under
        # another numpy.
        if not self.shuffle:
            return 0, np.arange(len(self))
        random = np.random.RandomState(np.array([self.seed, epoch], dtype=np.uint32))
        offset = int(random.randint(self.shards.num_tokens % self.sequence_length + 1))
        return offset, random.permutation(len(self))
