"""Which windows a recipe's `data` section stands for, and what a resumed run is held to."""

import json
import shutil

import pytest
import torch
from pydantic import ValidationError

from unspoken.data.prepare import PrepareOptions, prepare
from unspoken.errors import UsageError
from unspoken.train.build import open_data
from unspoken.train.recipe import Recipe


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory, data_folder):
    """A second source under the first one's tokenizer."""
    where = tmp_path_factory.mktemp("other")
    (where / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": f"Line {i} of a text about the number {i * i}. " * 9}) for i in range(300))
    )
    options = PrepareOptions((str(where / "text.jsonl"),), tokenizer=str(data_folder / "tokenizer"))
    prepare(options, where / "data")
    return where / "data"


@pytest.fixture
def mixture(values, data_folder, other_folder):
    def mixture(weights=(3, 1), seed=0, **more) -> Recipe:
        paths = (str(data_folder), str(other_folder))
        sources = [{"path": path, "weight": weight} for path, weight in zip(paths, weights)]
        data = {"sources": sources, "sequence_length": 33, **more}
        return Recipe.model_validate({**values, "data": data, "run": {**values["run"], "seed": seed}})

    return mixture


def test_one_folder_is_itself(recipe, data_folder):
    data = open_data(recipe)
    assert data.fingerprint == data.train.shards.fingerprint == data.shards.fingerprint
    assert str(data_folder) in data.name


def test_three_windows_of_the_first_to_one_of_the_second(mixture):
    data = open_data(mixture())
    assert data.train.counts(4096).tolist() == [3072, 1024]
    batch = data.train.global_batch(1, 8, rank=1, num_ranks=2)
    assert {name: tuple(rows.shape) for name, rows in batch.items()} == dict.fromkeys(batch, (4, 33))
    assert data.held_out.counts(8).tolist() == [6, 2]
    assert {part.shards.split for part in data.held_out.sources} == {"val"}


def test_both_arms_of_a_comparison_are_measured_on_the_same_windows(mixture):
    first, second = (open_data(mixture(seed=seed)) for seed in (0, 1))
    assert all(torch.equal(first.held_out[i]["input_ids"], second.held_out[i]["input_ids"]) for i in range(8))
    assert any(not torch.equal(first.train[i]["input_ids"], second.train[i]["input_ids"]) for i in range(8))


def test_without_evaluation_no_validation_split_is_needed(mixture):
    recipe = mixture()
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"eval_every": 0})})
    assert open_data(recipe).held_out is None


def test_the_fingerprint_covers_every_source_and_weight(mixture, data_folder, other_folder):
    print_of = {name: open_data(recipe).fingerprint for name, recipe in {
        "as it was": mixture(), "again": mixture(), "weights": mixture((3, 2)), "seed": mixture(seed=1),
    }.items()}  # fmt: skip
    assert print_of["as it was"] == print_of["again"] == print_of["seed"] != print_of["weights"]
    swapped = [{"path": path, "weight": weight} for path, weight in ((other_folder, 3), (data_folder, 1))]
    assert open_data(mixture(sources=swapped)).fingerprint != print_of["as it was"]


def test_sources_of_two_tokenizers_are_refused_with_the_command_that_helps(mixture, tmp_path):
    prepare(PrepareOptions(("stdlib",), tokenizer="bpe:280"), tmp_path / "b")
    recipe = mixture(sources=[{"path": mixture().data.sources[0].path}, {"path": tmp_path / "b"}])
    with pytest.raises(
        UsageError, match=r"data.sources: .*/b was made with another tokenizer .*--tokenizer .*stdlib/tok"
    ):
        open_data(recipe)


def test_a_source_too_rare_for_a_block_is_refused(mixture):
    with pytest.raises(UsageError, match=r"data.sources: the weight 1 is 0.0005 of all"):
        open_data(mixture((2000, 1)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "give `path` or `sources`"),
        ({"path": "a", "sources": [{"path": "a"}]}, "give `path` or `sources`"),
        ({"sources": []}, "at least 1 item"),
        ({"sources": [{"path": "a"}, {"path": "b/../a"}]}, "is twice among `sources`"),
        ({"sources": [{"path": "a", "weight": 0}]}, "greater than 0"),
    ],
)
def test_what_cannot_be_meant(values, data, message):
    with pytest.raises(ValidationError, match=message):
        Recipe.model_validate({**values, "data": data})


def test_a_copy_of_a_source_is_the_same_source(mixture, tmp_path, other_folder):
    copy = tmp_path / "copy"
    shutil.copytree(other_folder, copy)
    first = mixture().data.sources[0].path
    same = open_data(mixture(sources=[{"path": first}, {"path": copy}])).fingerprint
    assert same == open_data(mixture(sources=[{"path": first}, {"path": other_folder}])).fingerprint
