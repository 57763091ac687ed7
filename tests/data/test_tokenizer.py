import subprocess
import sys

import numpy as np
import pytest
from transformers import AutoTokenizer

from unspoken.data.stdlib_text import stdlib_documents
from unspoken.data.tokenizer import (
    document_end_id,
    encode_documents,
    load_existing,
    parse_bpe_size,
    token_byte_lengths,
    tokenizer_fingerprint,
    train_bpe,
)
from unspoken.errors import UnspokenError, UsageError

TEXTS = [document.text for document in stdlib_documents()]
HARD_TEXT = "naïve 2026-11-30\n\n1. \t日本 🙂 x  =  12 <|endoftext|> and <|pad|>"


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS, 1024)


def test_special_tokens_and_size(tokenizer):
    assert len(tokenizer) == 1024
    assert tokenizer.convert_ids_to_tokens([0, 1]) == ["<|endoftext|>", "<|pad|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)
    assert tokenizer("plain").input_ids == list(tokenizer("plain", add_special_tokens=False).input_ids)


def test_any_text_survives_and_numbers_are_split_into_digits(tokenizer):
    for text in [HARD_TEXT, *TEXTS[:10]]:
        (ids,) = encode_documents(tokenizer, [text])
        assert tokenizer.decode(ids[:-1]) == text
    assert "12" not in tokenizer.get_vocab()
    assert tokenizer.tokenize("a 2026")[-4:] == ["2", "0", "2", "6"]


@pytest.mark.parametrize("fast", [True, False])
def test_a_special_token_spelled_in_the_text_does_not_end_the_document(tokenizer, fast, monkeypatch):
    """A document that quotes "<|endoftext|>" would otherwise be two, and a stray <|pad|> would be trained on."""
    if not fast:
        monkeypatch.setattr(type(tokenizer), "backend_tokenizer", None)
    (ids,) = encode_documents(tokenizer, [HARD_TEXT])
    assert ids.count(0) == 1
    assert ids[-1] == 0
    assert 1 not in ids


def test_encoding_leaves_the_tokenizer_as_it_was(tokenizer):
    before = tokenizer("<|endoftext|>").input_ids
    list(encode_documents(tokenizer, TEXTS[:3]))
    assert tokenizer("<|endoftext|>").input_ids == before == [0]


def test_byte_lengths_add_up_to_the_text(tokenizer):
    lengths = token_byte_lengths(tokenizer)
    assert lengths[[0, 1]].tolist() == [0, 0]
    for text in [HARD_TEXT, *TEXTS]:
        (ids,) = encode_documents(tokenizer, [text])
        assert lengths[ids].sum() == len(text.encode())


def test_saving_keeps_ids_and_fingerprint(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)
    assert loaded(TEXTS[0]).input_ids == tokenizer(TEXTS[0]).input_ids
    assert loaded.decode(loaded(HARD_TEXT).input_ids) == HARD_TEXT
    assert tokenizer_fingerprint(train_bpe(TEXTS, 512)) != tokenizer_fingerprint(tokenizer)


def test_training_is_the_same_in_another_process(tokenizer):
    code = (
        "from unspoken.data.tokenizer import *; from unspoken.data.stdlib_text import *;"
        "print(tokenizer_fingerprint(train_bpe([d.text for d in stdlib_documents()], 1024)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == tokenizer_fingerprint(tokenizer)


def test_a_small_text_gives_a_small_vocabulary():
    tokenizer = train_bpe(["a b"], 4096)
    assert len(tokenizer) < 300
    assert tokenizer.decode(tokenizer("日本").input_ids) == "日本"


def test_the_document_end_is_endoftext_else_eos():
    assert document_end_id(train_bpe(["a"], 300)) == 0

    class Other:
        eos_token_id = 7

        def get_vocab(self):
            return {"a": 0}

    assert document_end_id(Other()) == 7
    Other.eos_token_id = None
    with pytest.raises(UnspokenError, match="neither"):
        document_end_id(Other())


@pytest.mark.parametrize("name", ["bpe:", "bpe:257", "bpe:big", "bpe:-4096", "bpe:4k"])
def test_sizes_that_cannot_be_are_refused(name):
    with pytest.raises(UsageError, match="at least 258"):
        parse_bpe_size(name)


def test_sizes_and_other_names():
    assert [parse_bpe_size(name) for name in ["bpe:258", "bpe:4096", "smollm2", "some/name"]] == [258, 4096, None, None]


def test_a_tokenizer_that_is_not_there_says_what_may_be_given(tmp_path):
    with pytest.raises(
        UsageError, match=r"--tokenizer: no such folder.*; give `bpe:SIZE`, `smollm2`, a folder or a hub name"
    ):
        load_existing(str(tmp_path / "absent"))


def test_lengths_fit_an_index_array(tokenizer):
    assert token_byte_lengths(tokenizer).dtype == np.int64
    assert (token_byte_lengths(tokenizer)[2:] >= 1).all()
