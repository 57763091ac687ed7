"""Training windows of a task's samples, and the tokenizer of its words.

A window is filled with samples until the next one does not fit; each is a document, ended by a token of its own so
that its last target has a place. With samples of two and three steps of `running_sum` modulo 5, s their sums:

    input_ids      3  4  end | 1  2  0  end | pad
    position_ids   0  1   2  | 0  1  2   3  |  0
    labels         .  s   s  | .  s  s   s  |  .       the model reads them one to the left: s stands at its digit

The sample that did not fit is dropped, so long ones are a little rarer than short ones: the longer the window, the
less.
"""

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from unspoken.data.frozen_random import MAX_SEED, check_seed, frozen_random
from unspoken.data.tasks import END_ID, NO_TARGET, PAD_ID, Sample, Task, parse_task
from unspoken.data.tokenizer import DOCUMENT_END, PAD
from unspoken.data.windows import IGNORE_LABEL, Windows, check_index
from unspoken.errors import UsageError

TRAINING, HELD_OUT, EVALUATION = 2, 3, 4  # streams: what is measured is never drawn from what is trained on


class TaskWindows(Windows):
    """Windows of samples, each drawn anew from (seed, index, stream); there are 2**32 of them.

    Raises:
        UsageError: a window that is shorter than the task's longest sample.
    """

    def __init__(self, task: Task, sequence_length: int, seed: int = 0, stream: int = TRAINING) -> None:
        check_seed(seed)
        if (longest := task.num_tokens(task.max_length)) > sequence_length:
            raise UsageError(f"sequence_length is {sequence_length}, but {task.name}'s samples need up to {longest}")
        self.task = task
        self.sequence_length = sequence_length
        self.seed = seed
        self.stream = stream

    def __len__(self) -> int:
        return MAX_SEED + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        check_index(index)
        random = frozen_random(self.seed, index, self.stream)
        input_ids = np.full(self.sequence_length, PAD_ID, dtype=np.int64)
        labels = np.full(self.sequence_length, IGNORE_LABEL, dtype=np.int64)
        position_ids = np.empty(self.sequence_length, dtype=np.int64)
        start = 0
        while True:
            sample = draw_sample(self.task, random)
            end = start + len(sample.tokens) + 1
            if end > self.sequence_length:
                break
            input_ids[start:end] = [*sample.tokens, END_ID]
            labels[start + 1 : end] = np.where(sample.targets == NO_TARGET, IGNORE_LABEL, sample.targets)
            position_ids[start:end] = np.arange(end - start)
            start = end
        position_ids[start:] = np.arange(self.sequence_length - start)
        rows = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
        return {name: torch.from_numpy(row) for name, row in rows.items()}


def draw_sample(task: Task, random: np.random.RandomState) -> Sample:
    """A sample of any of the task's lengths."""
    return task.draw(random, int(random.randint(task.min_length, task.max_length + 1, dtype=np.int64)))


def evaluation_samples(task: Task, length: int, num_samples: int, seed: int = 0) -> list[Sample]:
    """Samples of one length, which may be more than the task's; the first n are the same whatever their number."""
    return [task.draw(frozen_random(seed, number, EVALUATION, length), length) for number in range(num_samples)]


def task_tokenizer(task: Task) -> PreTrainedTokenizerBase:
    """The tokenizer of the task's words, set apart by blanks. Its saved form names the task; see `task_of`."""
    vocabulary = {token: i for i, token in enumerate([DOCUMENT_END, PAD, *task.words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))  # no unknown token: a word of another task is an error
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=DOCUMENT_END,
        eos_token=DOCUMENT_END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        task=task.settings(),
    )


def task_of(tokenizer: PreTrainedTokenizerBase | None) -> Task | None:
    """The task that a model's tokenizer was made for, None for one of text."""
    settings = None if tokenizer is None else tokenizer.init_kwargs.get("task")
    return None if settings is None else parse_task(settings)
