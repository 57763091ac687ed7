from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspoken.data.mixing import BLOCK, MixedDataset
from unspoken.data.packing import PackedDataset
from unspoken.data.tokens import TokenShards
from unspoken.data.windows import Windows
from unspoken.errors import UsageError

T = 7


class Numbered(Windows):
    """A source whose window i says which it is."""

    def __init__(self, number: int, length: int = 1000, sequence_length: int = 2):
        self.number, self.length, self.sequence_length = number, length, sequence_length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([self.number, index])}


def numbered(*lengths: int) -> list[Numbered]:
    return [Numbered(number, length) for number, length in enumerate(lengths)]


@pytest.fixture
def texts(tmp_path, write_folder) -> list[TokenShards]:
    lengths = {"a": [5, 23, 1, 9, 2, 1, 14, 30], "b": [40, 3, 8], "c": [11, 12]}
    return [TokenShards.open(write_folder(tmp_path / name, documents)) for name, documents in lengths.items()]


def mixed(texts: list[TokenShards], seed: int = 3) -> MixedDataset:
    return MixedDataset([PackedDataset(shards, T, seed) for shards in texts], [3, 1, 0.5], seed)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(0.03, 3.0), min_size=1, max_size=7),  # a block holds a window of each
    block=st.integers(0, 10**6),
    place=st.integers(0, BLOCK - 1),
    shuffle=st.booleans(),
)
def test_every_source_is_read_in_its_own_order_in_proportion_to_its_weight(weights, block, place, shuffle):
    dataset = MixedDataset(numbered(*[10] * len(weights)), weights, seed=5, shuffle=shuffle)
    shares = np.array(weights) / sum(weights)
    number = block * BLOCK
    next_of = dataset.counts(number)
    assert next_of.sum() == number
    np.testing.assert_allclose(next_of, number * shares, atol=1.001)
    for index in range(number, number + place + 1):
        source, window = dataset.place(index)
        assert window == next_of[source]
        next_of[source] += 1
    assert dataset.counts(number + place + 1).tolist() == next_of.tolist()


def test_weights_are_taken_as_they_are_written():
    """As binary fractions 0.1 and 0.3 are not 1 : 3."""
    assert MixedDataset(numbered(1, 1), [0.1, 0.3]).shares == [Fraction(1, 4), 1]


def test_b80_every_window_of_every_source_is_read_equally_often():
    """Over 3 epochs of the larger source and 12 of the smaller: a resumed or split run must not favour any."""
    dataset = MixedDataset([Numbered(0, 512), Numbered(1, 128)], [1, 1], seed=1)
    seen = Counter()
    for index in range(2 * 3 * 512):
        source, window = dataset.place(index)
        seen[source, window % len(dataset.sources[source])] += 1
    assert {seen[0, window] for window in range(512)} == {3}
    assert {seen[1, window] for window in range(128)} == {12}
    assert len(seen) == 512 + 128


def test_the_order_is_frozen():
    """A change of the order would break the exact resume of every run in flight."""
    drawn = MixedDataset(numbered(9, 9), [2, 1], seed=7)
    assert drawn.counts(2 * BLOCK).tolist() == [1365, 683]
    assert drawn.place(3 * BLOCK - 1) == (0, 2047)
    assert [drawn.place(2 * BLOCK + i)[0] for i in range(16)] == [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0]
    even = MixedDataset(numbered(9, 9), [3, 1], shuffle=False)
    assert [even.place(i)[0] for i in range(8)] == [0, 0, 1, 0, 0, 0, 1, 0]


def test_blocks_and_seeds_draw_different_orders():
    first, second = (MixedDataset(numbered(9, 9), [1, 1], seed=seed) for seed in (0, 1))
    orders = [[d.place(b * BLOCK + i)[0] for i in range(BLOCK)] for d in (first, second) for b in (0, 1)]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 12])
def test_the_ranks_together_see_the_batch_of_one_process(texts, num_ranks):
    dataset = mixed(texts)
    epoch = len(dataset.sources[0])
    for step in (0, 1, 2, 3 * epoch // 12, BLOCK // 12):  # the last one spans two blocks, others two epochs
        whole = dataset.global_batch(step, 12)
        parts = [mixed(texts).global_batch(step, 12, rank, num_ranks) for rank in range(num_ranks)]
        for key, value in whole.items():
            assert value.shape == (12, T)
            assert torch.equal(torch.cat([part[key] for part in parts]), value)


def test_b74_b78_any_stop_and_resume_reads_the_same_windows(texts):
    """Fresh objects at every stop, in epoch 2 and later of each source."""
    straight = mixed(texts)
    wanted = [straight.global_batch(step, 5)["input_ids"] for step in range(24)]
    for first, second in [(1, 2), (3, 17), (11, 12)]:
        read = []
        for begin, end in [(0, first), (first, second), (second, 24)]:
            resumed = mixed([TokenShards.open(shards.folder) for shards in texts])
            read += [resumed.global_batch(step, 5)["input_ids"] for step in range(begin, end)]
        assert all(torch.equal(a, b) for a, b in zip(read, wanted, strict=True))


def test_any_window_is_reached_without_those_before_it():
    dataset = MixedDataset(numbered(9, 9), [2, 1])
    source, window = dataset.place(10**12)
    assert dataset[10**12]["input_ids"].tolist() == [source, window]
    assert len(dataset._blocks) == 1


@pytest.mark.parametrize(
    ("lengths", "weights"), [((10, 10), (3, 1)), ((1, 50), (1, 9)), ((7,), (2,)), ((2000, 900), (1, 1))]
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_length_is_where_the_first_source_begins_anew(lengths, weights, shuffle):
    dataset = MixedDataset(numbered(*lengths), weights, shuffle=shuffle)
    places = [dataset.place(index) for index in range(len(dataset) + 1)]
    assert all(window < lengths[source] for source, window in places[:-1])
    source, window = places[-1]
    assert window == lengths[source]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 0], "a weight is 0; it must be a positive number"),
        ([1, -0.5], "a weight is -0.5"),
        ([1, float("nan")], "a weight is nan"),
        ([1, float("inf")], "a weight is inf"),
        ([1024, 1], r"the weight 1 is 0.00098 of all; it must be at least 1/1024"),
        ([1], r"2 sources of sequence lengths \[2\], 1 weights"),
    ],
)
def test_weights_that_are_refused(weights, message):
    with pytest.raises(UsageError, match=message):
        MixedDataset(numbered(9, 9), weights)


def test_the_smallest_weight_has_a_window_in_every_block():
    dataset = MixedDataset(numbered(9, 9, 9), [1, 1, 1022])
    for block in range(50):
        counts = dataset.counts((block + 1) * BLOCK) - dataset.counts(block * BLOCK)
        assert counts.tolist() == [1, 1, 1022]


def test_windows_of_different_lengths_are_refused():
    with pytest.raises(UsageError, match=r"sequence lengths \[2, 3\]"):
        MixedDataset([Numbered(0), Numbered(1, sequence_length=3)], [1, 1])
