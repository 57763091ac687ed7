"""The second paper's sizes, and the FLOPs column of its Table 1, from our models and recipes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig

from unspoken.models.convert import METHODS
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.train.build import compute_parameters
from unspoken.train.recipe import Recipe

RECIPES = Path(__file__).parents[2] / "recipes" / "pretrain"
TOKENS = 26e9  # as the paper rounds 50,000 steps of 256 x 2,048
NOMINAL = {"410m": 0.41e9, "1.4b": 1.4e9}  # parameters as it counts them


def recipe(size: str) -> Recipe:
    return Recipe.model_validate(yaml.safe_load((RECIPES / f"llama_{size}.yaml").read_text()))


def model(size: str, method: str, **fields: Any) -> LatentForCausalLM:
    """On the meta device, where a billion parameters cost nothing."""
    text = dict(recipe(size).model.backbone or {})
    text.pop("model_type")
    model_class = METHODS[method]
    with torch.device("meta"):
        return model_class(model_class.config_class(text_config=LlamaConfig(**text), **fields))


@pytest.mark.parametrize(("size", "parameters"), [("70m", 70.5e6), ("410m", 406.6e6), ("1.4b", 1420.4e6)])
def test_the_recipes_have_the_papers_sizes(size, parameters):
    found = sum(p.numel() for p in model(size, "vanilla").parameters())
    assert found == pytest.approx(parameters, rel=1e-3)
    assert recipe(size).num_steps * recipe(size).step_tokens == pytest.approx(26.2e9, rel=1e-3)


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_has_that_shape(method):
    plain = model("70m", "vanilla")
    extra = sum(p.numel() for p in model("70m", method).parameters()) - sum(p.numel() for p in plain.parameters())
    assert 0 <= extra < 512 * 512 + 4 * 512, "at most an adapter, a router and a pause"
    assert compute_parameters(model("70m", method)) - extra == compute_parameters(plain)


@pytest.mark.parametrize(
    ("size", "method", "fields", "flops"),
    [
        ("410m", "looped", {"num_loops": 4}, 2.56),
        ("410m", "pause", {"num_pauses": 3}, 2.56),
        ("410m", "ponder", {"num_ponder_steps": 3}, 2.56),
        ("410m", "ponder2", {}, 5.12),
        ("1.4b", "vanilla", {}, 2.18),
        ("1.4b", "looped", {"num_loops": 4}, 8.74),
        ("1.4b", "pause", {"num_pauses": 3}, 8.74),
        ("1.4b", "ponder", {"num_ponder_steps": 3}, 8.74),
        ("1.4b", "ponder", {"num_ponder_steps": 4}, 10.92),
        ("1.4b", "ponder2", {}, 17.47),
    ],
)
def test_the_papers_flops_of_fixed_depth(size, method, fields, flops):
    """6 N D for every run of the backbone over a token; PonderLM-2 refines twice or three times, equally often."""
    made = model(size, method, **fields)
    each = [{"num_refinements": n} for n in made.config.train_refinements] if method == "ponder2" else [{}]
    runs = sum(sum(made.model.runs_of_pass(**options)) for options in each) / len(each)
    assert 6 * NOMINAL[size] * TOKENS * runs / 1e20 == pytest.approx(flops, abs=0.006)


@pytest.mark.parametrize(
    ("size", "max_latent_steps", "pruned", "flops"),
    [("410m", 3, 0.150, 2.27), ("1.4b", 3, 0.193, 7.47), ("1.4b", 5, 0.207, 10.84)],
)
def test_the_papers_flops_of_adaptive_depth(size, max_latent_steps, pruned, flops):
    """With the prune ratios that its column implies: 6 N D for every latent step that was taken, too."""
    assert model(size, "adaptive", max_latent_steps=max_latent_steps).model.runs_of_pass() == [1]
    runs = 1 + max_latent_steps * (1 - pruned)
    assert 6 * NOMINAL[size] * TOKENS * runs / 1e20 == pytest.approx(flops, abs=0.01)
