"""A hand-made data folder whose every token is known, for the readers' tests."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from unspoken.data.tokens import (
    FORMAT,
    MANIFEST,
    SPLITS,
    TokenShards,
    shards_fingerprint,
    token_dtype,
    write_split,
)

DOCUMENT_END = 0


def _write_folder(folder: Path, lengths: list[int], vocab_size: int = 4096) -> Path:
    """Write a folder whose train split has documents of these lengths (end token included)."""
    folder.mkdir(parents=True)
    dtype = token_dtype(vocab_size)
    bounds = np.cumsum([0, *lengths])
    documents = [([*range(a + 1, b), DOCUMENT_END], 3 * (b - a)) for a, b in itertools.pairwise(bounds)]
    counts = {split: write_split(folder, split, documents if split == "train" else [], dtype) for split in SPLITS}
    manifest = {
        "format": FORMAT,
        "dtype": dtype.str,
        "splits": counts,
        "tokenizer": {"size": vocab_size, "document_end_id": DOCUMENT_END},
        "fingerprint": shards_fingerprint(folder),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def write_folder():
    return _write_folder


@pytest.fixture
def shards(tmp_path) -> TokenShards:
    """Documents of odd lengths: shorter than a window of 7, longer than three windows, and of one token."""
    return TokenShards.open(_write_folder(tmp_path / "data", [5, 23, 1, 9, 2, 1, 14, 30]))
