import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unspoken.data.packing import IGNORE_LABEL, PackedDataset
from unspoken.data.tokens import TokenShards
from unspoken.errors import UnspokenError, UsageError

T = 7
DOCUMENT_END = 0


def naive_window(shards: TokenShards, start: int, length: int) -> dict[str, list[int]]:
    """Walk over the tokens one by one: the oracle of `PackedDataset.__getitem__`."""
    ids, positions, labels = [], [], []
    position = 0
    for token in shards.tokens[start : start + length].tolist():
        ids.append(token)
        positions.append(position)
        labels.append(IGNORE_LABEL if position == 0 else token)
        position = 0 if token == DOCUMENT_END else position + 1
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def test_a_window_equals_the_walk_over_its_tokens(shards):
    dataset = PackedDataset(shards, T)
    for index in range(3 * len(dataset)):
        window = {key: value.tolist() for key, value in dataset[index].items()}
        assert window == naive_window(shards, dataset.window_start(index), T)


def test_tensors_are_int64_of_one_length(shards):
    for value in PackedDataset(shards, T)[3].values():
        assert value.dtype == torch.int64
        assert value.shape == (T,)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    length=st.integers(2, 19),
    seed=st.integers(0, 2**32 - 1),
)
def test_targets_are_tokens_minus_documents(tmp_path_factory, write_folder, lengths, length, seed):
    folder = tmp_path_factory.mktemp("packs") / "data"
    shards = TokenShards.open(write_folder(folder, [*lengths, length]))
    dataset = PackedDataset(shards, length, seed)
    for index in range(len(dataset)):
        window = dataset[index]
        num_documents = int((window["position_ids"] == 0).sum())
        assert int((window["labels"] != IGNORE_LABEL).sum()) == length - num_documents
        kept = window["labels"] != IGNORE_LABEL
        assert torch.equal(window["labels"][kept], window["input_ids"][kept])
        ends = (window["input_ids"][:-1] == DOCUMENT_END).nonzero()[:, 0]
        assert (window["labels"][ends + 1] == IGNORE_LABEL).all()


def test_an_epoch_holds_every_window_once_and_epochs_differ(shards):
    dataset = PackedDataset(shards, T)
    orders = []
    for epoch in range(3):
        starts = [dataset.window_start(epoch * len(dataset) + place) for place in range(len(dataset))]
        offset = min(starts)
        assert sorted(starts) == [offset + T * i for i in range(len(dataset))]
        assert max(starts) + T <= shards.num_tokens
        orders.append(starts)
    assert orders[0] != orders[1] != orders[2]
    # A seed that is one larger must not replay the first seed's second epoch.
    next_seed = PackedDataset(shards, T, seed=1)
    assert [next_seed.window_start(place) for place in range(len(next_seed))] != orders[1]


def test_the_order_is_frozen():
    """A change of the order would break the exact resume of every run in flight: raise the data format
    instead.
    """
    random = np.random.RandomState(np.array([0, 1], dtype=np.uint32))
    assert (random.randint(8), random.permutation(6).tolist()) == (7, [0, 5, 1, 3, 2, 4])


def test_without_shuffling_windows_follow_the_file(shards):
    dataset = PackedDataset(shards, T, shuffle=False)
    read = torch.cat([dataset[i]["input_ids"] for i in range(len(dataset))]).tolist()
    assert read == shards.tokens[: len(read)].tolist()
    assert torch.equal(dataset[len(dataset)]["input_ids"], dataset[0]["input_ids"])


def test_b74_b78_any_stop_and_resume_reads_the_same_windows(shards):
    """datasets#8308, accelerate#2016: after a resume the order was that of epoch 1 or began anew."""
    batch, steps = 5, 3 * len(PackedDataset(shards, T)) // 5 + 2
    straight = PackedDataset(shards, T, seed=3)
    wanted = [straight.global_batch(step, batch)["input_ids"] for step in range(steps)]
    for first, second in [(1, 2), (2, 7), (4, 5)]:
        read = []
        for begin, end in [(0, first), (first, second), (second, steps)]:
            resumed = PackedDataset(TokenShards.open(shards.folder), T, seed=3)
            read += [resumed.global_batch(step, batch)["input_ids"] for step in range(begin, end)]
        assert all(torch.equal(a, b) for a, b in zip(read, wanted, strict=True))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_the_ranks_together_see_the_batch_of_one_process(shards, num_ranks):
    dataset = PackedDataset(shards, T)
    whole = dataset.global_batch(2, 6)
    parts = [dataset.global_batch(2, 6, rank, num_ranks) for rank in range(num_ranks)]
    for key, value in whole.items():
        assert value.shape == (6, T)
        assert torch.equal(torch.cat([part[key] for part in parts]), value)


def test_a_batch_that_the_ranks_cannot_share_is_refused(shards):
    with pytest.raises(UsageError, match="batch size 4 is not a multiple of the 3 ranks"):
        PackedDataset(shards, T).global_batch(0, 4, 0, 3)


def test_b73_too_few_tokens_says_found_and_needed(shards):
    PackedDataset(shards, 85)
    with pytest.raises(UnspokenError, match=r"has 85 tokens in split 'train', but one window needs 86"):
        PackedDataset(shards, 86)
    with pytest.raises(UnspokenError, match=r"has 0 tokens in split 'val'"):
        PackedDataset(TokenShards.open(shards.folder, "val"), T)


def test_bad_settings_are_named(shards):
    with pytest.raises(UsageError, match="sequence_length is 1"):
        PackedDataset(shards, 1)
    with pytest.raises(UsageError, match="seed is -1"):
        PackedDataset(shards, T, seed=-1)
    with pytest.raises(IndexError, match="numbered from 0"):
        PackedDataset(shards, T)[-1]


def test_a_dataset_can_be_sent_to_a_worker(shards):
    dataset = PackedDataset(shards, T, seed=5)
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy[11]["input_ids"], dataset[11]["input_ids"])
