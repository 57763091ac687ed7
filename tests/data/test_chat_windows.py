"""Windows of rows to answer: every row once an epoch, none across an edge, labels and prompts where they belong."""

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspoken.data.chat_windows import ChatWindows, fitted
from unspoken.data.conversations import Example
from unspoken.data.windows import IGNORE_LABEL

PAD = 99


def example(number: int, asked: int, answered: int) -> Example:
    size = asked + answered
    return Example(np.full(size, number), np.arange(size) >= asked, f"row {number}")


def documents(window: dict[str, torch.Tensor]) -> list[dict[str, list[int]]]:
    """The window cut where positions begin anew."""
    starts = [*(window["position_ids"] == 0).nonzero()[:, 0].tolist(), len(window["input_ids"])]
    return [{name: values[a:b].tolist() for name, values in window.items()} for a, b in itertools.pairwise(starts)]


def test_a_window_by_hand():
    windows = ChatWindows([example(1, 2, 2), example(2, 1, 3)], 10, PAD, shuffle=False)
    windows.has_prompt_mask = True
    (window,) = [windows[i] for i in range(len(windows))]
    assert window["input_ids"].tolist() == [1, 1, 1, 1, 2, 2, 2, 2, PAD, PAD]
    assert window["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert window["labels"].tolist() == [-100, -100, 1, 1, -100, 2, 2, 2, -100, -100]
    assert window["prompt_mask"].long().tolist() == [1, 1, 0, 0, 1, 0, 0, 0, 1, 1]
    assert windows.fill == 0.8
    windows.has_prompt_mask = False
    assert "prompt_mask" not in windows[0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40), size=st.integers(12, 30))
def test_every_row_is_in_one_bin_and_none_overflows(lengths, size):
    bins = fitted(lengths, size)
    assert sorted(number for one in bins for number in one) == list(range(len(lengths)))
    sums = [sum(lengths[number] for number in one) for one in bins]
    assert max(sums) <= size
    assert sum(total <= size / 2 for total in sums) <= 1, "two half-empty bins would be one"


def test_each_epoch_has_every_row_once_in_another_order():
    rows = [example(number, 1 + number % 3, 2) for number in range(20)]
    windows = ChatWindows(rows, 16, PAD, seed=5)
    orders = []
    for epoch in range(3):
        seen = []
        for index in range(len(windows)):
            for document in documents(windows[epoch * len(windows) + index]):
                if document["input_ids"][0] != PAD:
                    seen.append(document["input_ids"][0])
                    number = document["input_ids"][0]
                    assert len(document["input_ids"]) == len(rows[number])
                    learned = [label != IGNORE_LABEL for label in document["labels"]]
                    assert learned == rows[number].is_target.tolist()
        assert sorted(seen) == list(range(20))
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]
    again = ChatWindows(rows, 16, PAD, seed=5)
    assert all(torch.equal(again[i]["input_ids"], windows[i]["input_ids"]) for i in range(30))


def test_a_first_token_is_nobodys_target():
    whole = Example(np.array([7, 8]), np.array([True, True]), "text")
    assert ChatWindows([whole], 4, PAD)[0]["labels"].tolist() == [-100, 8, -100, -100]
