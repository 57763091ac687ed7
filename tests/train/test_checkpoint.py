"""Checkpoints are whole or not there, and nothing in them is executed."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig

from unspoken import RecyclerConfig, RecyclerForCausalLM
from unspoken.errors import UnspokenError
from unspoken.train.checkpoint import (
    SEAL,
    CheckpointWriter,
    check_files,
    checkpoints,
    generators,
    read_record,
    read_tensors,
    set_generators,
)
from unspoken.train.loop import model_tensors
from unspoken.train.optim import build_optimizer, optimizer_tensors
from unspoken.train.parallel import Ranks
from unspoken.train.recipe import OptimSection

ALONE = Ranks()


def _model(hidden_size: int = 8, tied: bool = True, layers: int = 1) -> RecyclerForCausalLM:
    text = LlamaConfig(
        vocab_size=11, hidden_size=hidden_size, num_hidden_layers=layers, intermediate_size=8, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return RecyclerForCausalLM(RecyclerConfig(text_config=text))


@pytest.fixture(scope="module")
def model():
    return _model()


def _save(run, model, *steps: int, keep_last: int = 2, best: int | None = None, in_background: bool = False):
    writer = CheckpointWriter(run, ALONE, keep_last, in_background)
    paths = [writer.save(step, model_tensors(model), {"note": step}, model.config, best) for step in steps]
    writer.wait()
    return paths


def _names(run) -> list[str]:
    return [path.name.removeprefix("step-000000") for path in checkpoints(run)]


@pytest.mark.parametrize("in_background", [False, True])
def test_the_last_n_are_kept_newest_first(tmp_path, model, in_background):
    _save(tmp_path, model, 2, 10, 9, 33, in_background=in_background)
    assert _names(tmp_path) == ["33", "10"]
    record = read_record(checkpoints(tmp_path)[0])
    assert record["step"] == record["note"] == 33
    check_files(checkpoints(tmp_path)[0])


def test_the_best_is_kept_beside_the_last(tmp_path, model):
    _save(tmp_path, model, 1, 2, 3, 4, keep_last=1, best=2)
    assert _names(tmp_path) == ["04", "02"]


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_comes_back(tmp_path, tied):
    """Weights, both moments, the optimizer's count of steps and the generator; tied weights lie there once."""
    torch.manual_seed(0)
    model = _model(tied=tied)
    optimizer = build_optimizer(dict(model.named_parameters()), OptimSection(learning_rate=1e-2))
    ids = torch.randint(0, 11, (2, 5))
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    saved = model_tensors(model) | optimizer_tensors(optimizer) | generators(ALONE)
    assert ("model.lm_head.weight" in saved) != tied
    expected = {name: tensor.clone() for name, tensor in saved.items()}
    drawn = torch.randn(3)

    CheckpointWriter(tmp_path, ALONE, 1).save(3, saved, {}, model.config)
    other = _model(tied=tied)
    other_optimizer = build_optimizer(dict(other.named_parameters()), OptimSection(learning_rate=1e-2))
    own = generators(ALONE)
    read = model_tensors(other) | optimizer_tensors(other_optimizer) | own
    read_tensors(checkpoints(tmp_path)[0], read)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor), name
    parameter = other.model.adapter.proj.weight
    assert torch.equal(parameter, model.model.adapter.proj.weight)
    assert other_optimizer.state[parameter]["step"] == 3
    set_generators(own, ALONE)
    assert torch.equal(torch.randn(3), drawn)
    assert (other.lm_head.weight is other.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("how", ["cut short", "missing"])
def test_the_newest_whole_one_wins(tmp_path, model, how):
    older, newer = _save(tmp_path, model, 1, 2)
    (shard,) = newer.glob("*.safetensors")
    if how == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    assert checkpoints(tmp_path) == [older]


def test_a_folder_without_its_seal_is_none(tmp_path, model):
    (path,) = _save(tmp_path, model, 1)
    (path / SEAL).unlink()
    assert checkpoints(tmp_path) == []


def test_a_flipped_bit_is_found_and_the_way_out_is_named(tmp_path, model):
    (path,) = _save(tmp_path, model, 1)
    (shard,) = path.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    assert checkpoints(tmp_path) == [path]
    with pytest.raises(UnspokenError, match=r"shard-.*is damaged \(its checksum is another\)\. Delete .*step-00000001"):
        check_files(path)


def test_a_shard_that_is_no_safetensors_is_refused(tmp_path, model):
    (path,) = _save(tmp_path, model, 1)
    (shard,) = path.glob("*.safetensors")
    shard.write_bytes(b"\0" * 100)
    with pytest.raises(UnspokenError, match=r"is damaged .*Delete"):
        read_tensors(path, model_tensors(model))


@pytest.mark.parametrize("other", [{"hidden_size": 12}, {"layers": 2}, {"tied": False}])
def test_another_model_s_checkpoint_is_refused(tmp_path, model, other):
    (path,) = _save(tmp_path, model, 1)
    with pytest.raises(UnspokenError, match=r"step-00000001 was written for another model: .*model\."):
        read_tensors(path, model_tensors(_model(**other)))


def test_another_version_s_format_is_refused(tmp_path, model):
    (path,) = _save(tmp_path, model, 1)
    seal = json.loads((path / SEAL).read_text())
    (path / SEAL).write_text(json.dumps({**seal, "format": 99}))
    with pytest.raises(UnspokenError, match="format 99"):
        check_files(path)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, model, monkeypatch, in_background):
    (first,) = _save(tmp_path, model, 1, keep_last=1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dcp.filesystem.FileSystemWriter, "_write_data", full)
        with pytest.raises(UnspokenError, match=r"step-00000002: .*No space left.*untouched"):
            _save(tmp_path, model, 2, keep_last=1, in_background=in_background)
    assert checkpoints(tmp_path) == [first]
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_place_that_cannot_be_written(tmp_path, model):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UnspokenError, match=r"cannot write the checkpoint .*step-00000001"):
        _save(tmp_path, model, 1)


def test_what_a_kill_left_behind_is_swept_up(tmp_path, model):
    left = tmp_path / "checkpoints" / ".step-00000003"
    left.mkdir(parents=True)
    _save(tmp_path, model, 4)
    assert not left.exists()


def test_nothing_in_a_checkpoint_is_pickled(tmp_path, model):
    (path,) = _save(tmp_path, model, 1)
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
