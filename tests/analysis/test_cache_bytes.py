"""Bytes of a token's keys and values, against caches that were filled."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.baselines import CONFIGS, MIXTURES, RECURRENT, baseline
from tests.families import adaptive_model, plain_model, random_ids, tiny_model
from unspoken import convert
from unspoken.analysis.cache_bytes import cache_bytes_per_token
from unspoken.analysis.flops import model_flops
from unspoken.latent.slots import SlotLayer

LENGTH = 6


def measured(cache: Any) -> int:
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


@pytest.mark.parametrize("kind", ["vanilla", "recycler", *CONFIGS, *RECURRENT])
@torch.no_grad()
def test_it_is_what_a_cache_grows_by(kind):
    if kind in ("vanilla", "recycler"):
        model = tiny_model("llama") if kind == "recycler" else convert(plain_model("llama"), "vanilla")
    else:
        model = baseline(kind)
    cache, ids = DynamicCache(), random_ids(2, LENGTH)
    model(ids, cache=cache)
    expected = cache_bytes_per_token(model.config, model_flops(model).cache_entries(), bytes_per_value=8)
    state = 2 * model.config.hidden_size * 8 if kind == "recycler" else 0
    found = measured(cache)
    assert found == 2 * LENGTH * expected, f"beside the recycled state's {state}"


@pytest.mark.parametrize("kind", list(MIXTURES))
@torch.no_grad()
def test_recursions_cost_an_entry_of_the_middle_layers(kind):
    model, ids = baseline(kind), random_ids(1, LENGTH, seed=7)
    output = model(ids, use_cache=True)
    outer = [output.cache.layers[0], output.cache.layers[-2]]
    middle = [tensor for layer in output.cache.layers if isinstance(layer, SlotLayer) for tensor in layer.content()]
    found = sum(layer.keys.nbytes + layer.values.nbytes for layer in outer) + sum(tensor.nbytes for tensor in middle)
    deeper = output.latents.lengths.float().mean().item()
    expected = cache_bytes_per_token(model.config, model_flops(model).cache_entries(deeper), bytes_per_value=8)
    assert deeper > 0 and found == pytest.approx(LENGTH * expected)


@torch.no_grad()
def test_latent_steps_cost_an_entry_each():
    model, ids = adaptive_model("llama", exit_at_step=3), random_ids(1, LENGTH)
    cache = model(ids, use_cache=True).cache
    keys = [tensor for layer in cache.layers if isinstance(layer, SlotLayer) for tensor in layer.content()]
    expected = cache_bytes_per_token(model.config, model_flops(model).cache_entries(2), bytes_per_value=8)
    assert sum(tensor.nbytes for tensor in keys) == LENGTH * expected
