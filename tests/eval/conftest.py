"""A data folder and a model folder on disk, made once."""

import pytest

from tests import texts
from unspoken.data.tokens import TokenShards


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    return texts.write_data(tmp_path_factory.mktemp("data") / "stdlib")


@pytest.fixture(scope="session")
def shards(data_folder):
    return TokenShards.open(data_folder, "train")


@pytest.fixture
def model_folder(tmp_path, shards):
    return texts.save(tmp_path / "model", texts.text_model(), shards.load_tokenizer())
