"""A small folder of real text, and a recipe for a model that trains in seconds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from unspoken.data.prepare import PrepareOptions, prepare
from unspoken.train.recipe import Recipe

BACKBONE = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "stdlib"
    prepare(PrepareOptions(("stdlib",), tokenizer="bpe:300"), folder)
    return folder


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def values(data_folder, tmp_path) -> dict[str, Any]:
    """A recipe as YAML would give it, for a test to change."""
    return {
        "run": {"out": str(tmp_path / "run")},
        "model": {"method": "recycler", "backbone": dict(BACKBONE), "pass_loss_reduction": "mean"},
        "data": {"path": str(data_folder), "sequence_length": 33},
        "optim": {"learning_rate": "3e-3"},
        "train": {
            "max_steps": 7,
            "batch_size": 4,
            "third_pass_fraction": 0.3,
            "log_every": 2,
            "eval_every": 3,
            "eval_sequences": 5,
        },
    }


@pytest.fixture
def recipe(values) -> Recipe:
    return Recipe.model_validate(values)
