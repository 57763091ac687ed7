"""Folders that are missing or damaged, and names that no hub knows, as one message each."""

import json
import types

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import PreTrainedTokenizerBase

from unspoken.data import pretrained
from unspoken.data.pretrained import check_there, read_tokenizer, reading
from unspoken.data.tokenizer import load_existing, train_bpe
from unspoken.errors import UnspokenError, UsageError

ANSWER = types.SimpleNamespace(headers={}, request=None)


@pytest.fixture
def folder(tmp_path):
    train_bpe(["a text"], 300).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", [b'{"broken', b"", b"\xff", b"[1]"])
def test_the_damaged_file_of_a_tokenizer_is_named(folder, name, damage):
    """It was `JSONDecodeError: Expecting value`, of no file."""
    assert isinstance(read_tokenizer(folder), PreTrainedTokenizerBase)
    (folder / name).write_bytes(damage)
    expected = f"{folder / name} is damaged" if damage != b"[1]" or name == "tokenizer.json" else str(folder)
    with pytest.raises(UnspokenError, match="do this") as raised:
        read_tokenizer(folder, "do this")
    assert expected in str(raised.value)


def test_what_parses_but_cannot_be_read_is_named_as_a_whole(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with (
        pytest.raises(UnspokenError, match=rf"cannot read a model from {tmp_path}: a shape$"),
        reading("model", tmp_path),
    ):
        raise RuntimeError("a shape\nof many")


def test_our_own_errors_and_interrupts_pass(tmp_path):
    for error in (UsageError("ours"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, reading("model", tmp_path):
            raise error
        assert raised.value is error


@pytest.mark.parametrize("name", ["./absent", "/absent", "a/b/c", ".hidden"])
def test_a_path_is_not_asked_of_the_hub(name, monkeypatch):
    monkeypatch.setattr(pretrained, "get_hf_file_metadata", lambda url: pytest.fail("asked the hub"))
    with pytest.raises(UsageError, match="no such folder"):
        check_there(name, "model")


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UsageError, match=r"model.safetensors is a file; give the folder of a model"):
        check_there(tmp_path / "model.safetensors", "model")


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (RepositoryNotFoundError("404", response=ANSWER), UsageError, "the hub has none of that name"),
        (OSError("Name or service not known"), UnspokenError, r"the hub cannot be reached \(Name or service"),
        (GatedRepoError("403", response=ANSWER), None, ""),
    ],
)
def test_a_name_is_asked_of_the_hub_once(monkeypatch, error, raised, message):
    """transformers asked six times in 24 seconds, and printed two lines about each."""
    asked = []

    def answer(url):
        asked.append(url)
        raise error

    monkeypatch.setattr(pretrained, "get_hf_file_metadata", answer)
    if raised is None:
        check_there("a-name", "model")
    else:
        with pytest.raises(raised, match=f"no model 'a-name': there is no such folder here, and {message}") as found:
            check_there("a-name", "model")
        assert type(found.value) is raised
    assert len(asked) == 1 and asked[0].endswith("/a-name/resolve/main/config.json")


def test_a_name_that_no_hub_could_have():
    with pytest.raises(UsageError, match=r"no tokenizer 'a b': .* the hub has none of that name"):
        check_there("a b", "tokenizer")


def test_a_tokenizer_that_cannot_end_documents_is_refused_when_it_is_loaded(folder):
    """`data prepare` found out after it had read the corpora."""
    tokenizer = read_tokenizer(folder)
    backend = json.loads(tokenizer.backend_tokenizer.to_str().replace("<|endoftext|>", "<|start|>"))
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(UnspokenError, match=r"neither <\|endoftext\|> nor an eos token"):
        load_existing(str(folder))
