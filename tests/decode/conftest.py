"""A model folder with a tokenizer and a chat template, made once."""

import pytest
import torch

from tests import texts


@pytest.fixture(scope="session")
def tokenizer():
    return texts.chat_tokenizer()


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tokenizer):
    return texts.save(tmp_path_factory.mktemp("decode") / "model", texts.text_model(), tokenizer)


@pytest.fixture(scope="session", params=["adaptive", "adaptive_recycler"])
def thinking_folder(request, tmp_path_factory, tokenizer):
    """A model with latent steps, whose texts end at their length."""
    model = texts.text_model(request.param)
    model.generation_config.suppress_tokens = [tokenizer.eos_token_id]
    return texts.save(tmp_path_factory.mktemp("decode") / request.param, model, tokenizer)


@pytest.fixture(scope="session")
def model():
    return texts.text_model(dtype=torch.float64)
