"""The state layer alone: what each of a cache's operations does to the states."""

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from unspoken.errors import CacheError
from unspoken.latent import cache as cache_module
from unspoken.latent.cache import RecycledStateLayer, attach_state, fork, recycled_state

CONFIG = LlamaConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def numbered(start: int, stop: int, batch: int = 2) -> torch.Tensor:
    """States [B, stop - start, 1] that say their row (hundreds) and position."""
    return (100.0 * torch.arange(batch)[:, None] + torch.arange(start, stop)).unsqueeze(-1)


def filled(static: bool = False) -> RecycledStateLayer:
    layer = RecycledStateLayer(static=static)
    layer.write(numbered(0, 3))
    layer.write(numbered(3, 7))
    return layer


@pytest.mark.parametrize("static", [False, True])
def test_the_last_state_is_read(static):
    layer = RecycledStateLayer(static=static)
    assert layer.read() is None
    layer.write(numbered(0, 3))
    assert layer.read().flatten().tolist() == [2, 102]
    layer.write(numbered(3, 4))
    assert layer.read().flatten().tolist() == [3, 103]


def test_a_static_state_keeps_its_address():
    """A compiled graph reads it where it was when the graph was made."""
    layer = RecycledStateLayer(static=True)
    layer.write(numbered(0, 3))
    address = layer.states.data_ptr()
    layer.write(numbered(3, 4))
    layer.reorder_cache(torch.tensor([1, 0]))
    layer.reset()
    layer.write(numbered(0, 1))
    assert layer.states.data_ptr() == address
    assert layer.read().flatten().tolist() == [0, 100]


def test_a_write_does_not_keep_the_tensor_it_was_given():
    layer, given = RecycledStateLayer(static=True), numbered(0, 1)
    layer.write(given)
    given.zero_()
    assert layer.read().flatten().tolist() == [0, 100]


@pytest.mark.parametrize("removed", [0, 1, 4, 5, 6])
def test_crop_goes_back(removed):
    layer = filled()
    layer.crop(-removed)
    assert layer.read().flatten().tolist() == [6 - removed, 106 - removed]
    layer.write(numbered(50, 51))
    assert layer.read().flatten().tolist() == [50, 150]


def test_crop_beyond_what_is_kept(monkeypatch):
    monkeypatch.setattr(cache_module, "KEPT_STATES", 1)
    layer = filled()
    with pytest.raises(CacheError, match="keeps the last 5 states"):
        layer.crop(-5)
    assert layer.read().flatten().tolist() == [6, 106]
    layer.crop(-4)
    assert layer.read().flatten().tolist() == [2, 102]


def test_states_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(cache_module, "KEPT_STATES", 5)
    layer = RecycledStateLayer()
    for position in range(20):
        layer.write(numbered(position, position + 1))
    assert layer.states.shape[1] == 6


def test_a_static_state_says_that_it_cannot_be_cropped():
    assert RecycledStateLayer().is_croppable
    assert not RecycledStateLayer(static=True).is_croppable


@pytest.mark.parametrize("static", [False, True])
def test_rows_follow_their_beams(static):
    layer = filled(static)
    layer.reorder_cache(torch.tensor([1, 1]))
    assert layer.read().flatten().tolist() == [106, 106]
    layer = filled(static)
    layer.batch_repeat_interleave(2)
    assert layer.read().flatten().tolist() == [6, 6, 106, 106]
    layer.batch_select_indices(torch.tensor([3, 0, 1]))
    assert layer.read().flatten().tolist() == [106, 6, 6]


def test_an_empty_layer_bears_every_operation():
    layer = RecycledStateLayer()
    layer.reorder_cache(torch.tensor([0]))
    layer.batch_repeat_interleave(3)
    layer.batch_select_indices(torch.tensor([0]))
    layer.crop(-2)
    layer.reset()
    assert layer.read() is None


@pytest.mark.parametrize("static", [False, True])
def test_reset_forgets(static):
    layer = filled(static)
    layer.chunk_caches, layer.chunk_states = [DynamicCache()], [None, numbered(0, 1)]
    layer.reset()
    assert layer.read() is None
    assert (layer.chunk_caches, layer.chunk_states) == ([], [])
    assert not static or not layer.states.any()


def keys(length: int) -> torch.Tensor:
    return torch.randn(1, 2, length, 4)


def with_tokens(cache, length: int = 6):
    for layer in range(2):
        cache.update(keys(length), keys(length), layer)
    return cache


def caches() -> list:
    windowed = LlamaConfig(**{**CONFIG.to_dict(), **WINDOWED})
    return [
        DynamicCache(),
        DynamicCache(config=CONFIG),
        DynamicCache(config=windowed),
        StaticCache(CONFIG, max_cache_len=12),
        StaticCache(windowed, max_cache_len=12),
    ]


@pytest.mark.parametrize("kind", range(5))
def test_a_cache_with_tokens_and_no_state_is_refused(kind):
    cache = caches()[kind]
    assert recycled_state(cache) is None
    with_tokens(cache)
    with pytest.raises(CacheError, match="6 tokens but no recycled state"):
        recycled_state(cache)
    layer = attach_state(cache)
    assert recycled_state(cache) is layer is cache.layers[-1]
    assert layer.static == isinstance(cache, StaticCache)


@pytest.mark.parametrize("kind", range(5))
def test_the_state_layer_changes_nothing_else_of_a_cache(kind):
    plain, cache = with_tokens(caches()[kind]), with_tokens(caches()[kind])
    attach_state(cache).write(torch.ones(1, 6, 8))
    assert cache.get_seq_length() == plain.get_seq_length() == 6
    assert cache.get_mask_sizes(1, 0) == plain.get_mask_sizes(1, 0)
    assert cache.is_compileable == plain.is_compileable


@pytest.mark.parametrize("kind", range(5))
def test_a_fork_grows_without_touching_the_original(kind):
    """Pass 1's keys and values go into a fork: what leaks from it would be attended to for ever after."""
    cache = with_tokens(caches()[kind])
    attach_state(cache).write(torch.ones(1, 6, 8))
    before = copy.deepcopy(cache)
    twin = fork(cache)
    for _ in range(2):
        with_tokens(twin, length=2)
    assert (int(twin.get_seq_length()), int(cache.get_seq_length())) == (10, 6)
    for layer, old in zip(cache.layers[:-1], before.layers):
        assert torch.equal(layer.keys, old.keys)
        assert torch.equal(layer.values, old.values)
    assert torch.equal(recycled_state(twin).states, recycled_state(cache).states)
