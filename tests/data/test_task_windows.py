import pickle

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from unspoken.data.frozen_random import frozen_random
from unspoken.data.task_windows import (
    EVALUATION,
    HELD_OUT,
    TRAINING,
    TaskWindows,
    draw_sample,
    evaluation_samples,
    task_of,
    task_tokenizer,
)
from unspoken.data.tasks import END_ID, NO_TARGET, PAD_ID, TASKS, parse_task
from unspoken.data.windows import IGNORE_LABEL
from unspoken.errors import UsageError

T = 65


def documents(window: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of each document, cut where positions restart."""
    starts = (window["position_ids"] == 0).nonzero()[:, 0].tolist()
    bounds = zip(starts, [*starts[1:], len(window["position_ids"])])
    return [(window["input_ids"][a:b].tolist(), window["labels"][a:b].tolist()) for a, b in bounds]


@pytest.mark.parametrize("name", TASKS)
def test_a_window_is_the_samples_drawn_in_turn(name):
    task = parse_task({"name": name})
    dataset = TaskWindows(task, T, seed=3)
    for index in range(20):
        window = dataset[index]
        assert {value.dtype for value in window.values()} == {torch.int64}
        assert {tuple(value.shape) for value in window.values()} == {(T,)}
        random = frozen_random(3, index, TRAINING)
        found = documents(window)
        pads = found.pop() if found[-1][0][0] == PAD_ID else ([], [])
        for tokens, labels in found:
            sample = draw_sample(task, random)
            assert tokens == [*sample.tokens, END_ID]
            assert [NO_TARGET if label == IGNORE_LABEL else label for label in labels[1:]] == sample.targets.tolist()
            assert labels[0] == IGNORE_LABEL
        assert pads[0] == [PAD_ID] * len(pads[0]) and set(pads[1]) <= {IGNORE_LABEL}
        assert len(draw_sample(task, random).tokens) + 1 > len(pads[0])  # the next one did not fit


def test_lengths_are_mixed_evenly():
    task = parse_task({"name": "running_sum", "min_length": 2, "max_length": 5})
    dataset = TaskWindows(task, 256)
    lengths = [len(tokens) - 1 for i in range(100) for tokens, _ in documents(dataset[i]) if tokens[0] != PAD_ID]
    counts = np.bincount(lengths, minlength=6)
    assert counts[:2].sum() == 0 and len(counts) == 6
    assert counts[2:].min() > 0.9 * counts[2:].mean()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_the_ranks_together_see_the_batch_of_one_process(num_ranks):
    dataset = TaskWindows(parse_task({"name": "running_sum"}), T, seed=1)
    whole = dataset.global_batch(5, 6)
    parts = [dataset.global_batch(5, 6, rank, num_ranks) for rank in range(num_ranks)]
    for key, value in whole.items():
        assert torch.equal(torch.cat([part[key] for part in parts]), value)


def test_b74_b78_windows_know_nothing_of_those_before_them():
    task = parse_task({"name": "permutation_state"})
    straight = TaskWindows(task, T, seed=1)
    wanted = [straight[i]["input_ids"] for i in range(12)]
    for i in (11, 3, 7):
        assert torch.equal(TaskWindows(task, T, seed=1)[i]["input_ids"], wanted[i])
    copy = pickle.loads(pickle.dumps(straight))
    assert torch.equal(copy[5]["labels"], straight[5]["labels"])


def test_streams_seeds_and_windows_draw_different_samples():
    task = parse_task({"name": "running_sum"})
    windows = [
        TaskWindows(task, T, seed, stream)[index]["input_ids"].tolist()
        for seed in (0, 1)
        for stream in (TRAINING, HELD_OUT)
        for index in (0, 1)
    ]
    assert len({tuple(window) for window in windows}) == 8
    assert len({TRAINING, HELD_OUT, EVALUATION}) == 3


def test_evaluation_samples_are_of_one_length_and_keep_their_beginning():
    task = parse_task({"name": "running_sum"})
    few, many = evaluation_samples(task, 40, 3), evaluation_samples(task, 40, 10)
    assert [len(sample.tokens) for sample in many] == [40] * 10
    assert all((a.tokens == b.tokens).all() for a, b in zip(few, many))
    assert len({tuple(sample.tokens) for sample in many}) == 10


def test_bad_settings_are_named():
    task = parse_task({"name": "running_sum"})
    TaskWindows(task, 17)
    with pytest.raises(UsageError, match="sequence_length is 16, but running_sum's samples need up to 17"):
        TaskWindows(task, 16)
    with pytest.raises(UsageError, match="seed is -1"):
        TaskWindows(task, T, seed=-1)
    with pytest.raises(IndexError, match="numbered from 0"):
        TaskWindows(task, T)[-1]


@pytest.mark.parametrize("name", TASKS)
def test_the_saved_tokenizer_reads_the_samples_and_knows_its_task(name, tmp_path):
    task = parse_task({"name": name, "max_length": 5})
    task_tokenizer(task).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = TaskWindows(task, T)[0]["input_ids"]
    assert tokenizer(tokenizer.decode(ids)).input_ids == ids.tolist()
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (END_ID, PAD_ID)
    assert tokenizer.get_vocab() == task_tokenizer(task).get_vocab()
    assert task_of(tokenizer) == task
    assert task_of(None) is None
