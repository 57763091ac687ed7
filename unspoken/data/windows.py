"""What training reads: windows of tokens numbered without end, and the rows of a batch that each rank gets.

Every source of windows (`packing.py`: text, `mixing.py`: several texts, `task_windows.py`: tasks) is a pure function
of the window's number: nothing is counted or kept, so one number says where a run stands.
"""

import torch

from unspoken.errors import UsageError

IGNORE_LABEL = -100


class Windows(torch.utils.data.Dataset):
    """`dataset[i]` is window i: `input_ids`, `position_ids` and `labels`, int64 [sequence_length].

    Positions restart at each document; labels are the targets, not shifted, `IGNORE_LABEL` where there is none.
    `len(dataset)` counts the windows until the first repeats; i may exceed it.
    """

    sequence_length: int

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        raise NotImplementedError

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


def check_index(index: int) -> None:
    if index < 0:
        raise IndexError(f"window {index}: windows are numbered from 0")
