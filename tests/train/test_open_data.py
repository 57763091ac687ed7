"""Which windows a recipe's `data` section stands for, and what a resumed run is held to."""

import json
import shutil

import pytest
import torch
from pydantic import ValidationError

from unspoken.data.prepare import PrepareOptions, prepare
from unspoken.errors import UsageError
from unspoken.models.convert import save
from unspoken.train.build import build_model, open_data
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
    assert data.fingerprint == data.train.shards.fingerprint
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
        ({"task": {"name": "running_sum"}, "path": "a"}, "give one of `path`, `sources`, `task` and `conversations`"),
        ({"task": {"name": "running_som"}}, r"unknown task 'running_som' \(did you mean 'running_sum'"),
        ({"task": {"name": "running_sum", "modulos": 7}}, r"no setting 'modulos' \(did you mean 'modulus'"),
        ({}, "give one of `path`, `sources`, `task` and `conversations`"),
        ({"path": "a", "sources": [{"path": "a"}]}, "give one of `path`, `sources`, `task` and `conversations`"),
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


@pytest.fixture
def task(values):
    def task(seed=0, sequence_length=64, **settings) -> Recipe:
        data = {"task": {"name": "running_sum", **settings}, "sequence_length": sequence_length}
        return Recipe.model_validate({**values, "data": data, "run": {**values["run"], "seed": seed}})

    return task


def test_a_task_needs_no_files(task):
    recipe = task(modulus=3)
    data = open_data(recipe)
    assert recipe.data.task == {"name": "running_sum", "min_length": 4, "max_length": 16, "modulus": 3}
    assert data.train.task == data.held_out.task
    assert len(data.tokenizer) == 2 + 3
    assert not torch.equal(data.train[0]["input_ids"], data.held_out[0]["input_ids"])
    other = open_data(task(seed=1, modulus=3))
    assert torch.equal(data.held_out[0]["input_ids"], other.held_out[0]["input_ids"])
    assert not torch.equal(data.train[0]["input_ids"], other.train[0]["input_ids"])
    assert data.fingerprint == other.fingerprint != open_data(task(modulus=4)).fingerprint


def test_windows_too_short_for_a_task_are_refused(task):
    with pytest.raises(UsageError, match=r"data.sequence_length is 16, but running_sum's samples need up to 17"):
        open_data(task(sequence_length=16))


def test_a_new_model_of_a_task_has_its_vocabulary_and_sees_one_sample_at_a_time(task):
    recipe = task()
    data = open_data(recipe)
    torch.manual_seed(0)
    model = build_model(recipe, data)
    torch.nn.init.normal_(model.model.adapter.proj.weight, std=0.1)
    assert model.config.vocab_size == len(data.tokenizer) and model.config.text_config.eos_token_id == 0
    window = {name: row[None] for name, row in data.train[0].items()}
    second = documents(data.train[0])[1]
    packed = model.model(window["input_ids"], position_ids=window["position_ids"], use_cache=False).last_hidden_state
    alone = model.model(window["input_ids"][:, second], use_cache=False).last_hidden_state
    torch.testing.assert_close(packed[:, second], alone)


def documents(window):
    starts = (window["position_ids"] == 0).nonzero()[:, 0].tolist()
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(window["position_ids"])])]


def test_a_text_model_cannot_go_on_with_a_task(task, values, tmp_path):
    recipe = Recipe.model_validate(values)
    data = open_data(recipe)
    torch.manual_seed(0)
    save(build_model(recipe, data), data.tokenizer, tmp_path / "text")
    values["model"] = {"from_pretrained": str(tmp_path / "text")}
    with pytest.raises(
        UsageError, match=r"data.task: running_sum has another tokenizer than .*train a new model on it"
    ):
        build_model(task(), open_data(task()))
