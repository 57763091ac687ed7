"""Checkpoints are whole or not there, and nothing in them is executed."""

import os
import pickle

import pytest
import torch
from transformers import LlamaConfig

from unspoken import RecyclerConfig, RecyclerForCausalLM
from unspoken.errors import UnspokenError
from unspoken.train.checkpoint import SEAL, STATE, checkpoints, load_state, save_checkpoint

STATE_VALUES = {"tensor": torch.arange(3), "nested": {"list": [1, 2.5, "x"], "none": None}}


@pytest.fixture(scope="module")
def model():
    text = LlamaConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, intermediate_size=8, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return RecyclerForCausalLM(RecyclerConfig(text_config=text))


def _save(run, model, *steps: int, keep_last: int = 2):
    return [save_checkpoint(run, step, model, STATE_VALUES, keep_last) for step in steps]


def test_the_last_n_are_kept_newest_first(tmp_path, model):
    _save(tmp_path, model, 2, 10, 9, 100)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000100", "step-00000010"]
    loaded = load_state(checkpoints(tmp_path)[0])
    assert torch.equal(loaded["tensor"], STATE_VALUES["tensor"])
    assert loaded["nested"] == STATE_VALUES["nested"]


@pytest.mark.parametrize("file", ["model.safetensors", STATE])
@pytest.mark.parametrize("how", ["cut short", "missing"])
def test_the_newest_whole_one_wins(tmp_path, model, file, how):
    older, newer = _save(tmp_path, model, 1, 2)
    if how == "missing":
        (newer / file).unlink()
    else:
        (newer / file).write_bytes((newer / file).read_bytes()[:-1])
    assert checkpoints(tmp_path) == [older]


def test_a_folder_without_its_seal_is_none(tmp_path, model):
    (path,) = _save(tmp_path, model, 1)
    (path / SEAL).unlink()
    assert checkpoints(tmp_path) == []


def test_a_save_that_fails_leaves_what_was_there(tmp_path, model, monkeypatch):
    (first,) = _save(tmp_path, model, 1, keep_last=1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(UnspokenError, match=r"step-00000002: .*No space left.*untouched"):
            _save(tmp_path, model, 2, keep_last=1)
    assert checkpoints(tmp_path) == [first]
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_what_a_kill_left_behind_is_swept_up(tmp_path, model):
    left = tmp_path / "checkpoints" / ".step-00000003.abc"
    left.mkdir(parents=True)
    _save(tmp_path, model, 4)
    assert not left.exists()


class _Attack:
    def __reduce__(self):
        return os.mkdir, (os.environ["ATTACK"],)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickled_object_is_refused_not_run(tmp_path, model, monkeypatch):
    (path,) = _save(tmp_path, model, 1)
    monkeypatch.setenv("ATTACK", str(tmp_path / "attacked"))
    torch.save({"optimizer": _Attack()}, path / STATE)
    with pytest.raises(UnspokenError, match="damaged"):
        load_state(path)
    (path / STATE).write_bytes(pickle.dumps(_Attack()))
    with pytest.raises(UnspokenError, match=r"damaged.*Delete"):
        load_state(path)
    assert not (tmp_path / "attacked").exists()


def test_random_bytes_are_refused(tmp_path, model):
    (path,) = _save(tmp_path, model, 1)
    (path / STATE).write_bytes(b"\0" * 100)
    with pytest.raises(UnspokenError, match="damaged"):
        load_state(path)
