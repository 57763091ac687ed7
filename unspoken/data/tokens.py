"""The prepared data folder: flat token shards, document boundaries and the manifest, written and read here.

    manifest.json             what the folder holds and where it came from
    train.bin val.bin test.bin   token ids end to end (uint16 or uint32, as the manifest says), little-endian
    train.idx ...             int64 offsets into the .bin, one more than there are documents
    train.bytes ...           int64 UTF-8 length of each document's text (for bits per byte)
    tokenizer/                loads with AutoTokenizer.from_pretrained

Each document ends with the end-of-document token. Windows for training are cut in `packing.py`.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unspoken.errors import UnspokenError, UsageError, nearest

FORMAT = 1
SPLITS = ("train", "val", "test")
MANIFEST = "manifest.json"
MAX_UINT16_VOCAB = 65535
_OFFSET = np.dtype("<i8")


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the little-endian dtype that holds the ids of a vocabulary."""
    return np.dtype("<u2") if vocab_size <= MAX_UINT16_VOCAB else np.dtype("<u4")


def write_split(
    folder: Path, split: str, documents: Iterable[tuple[list[int], int]], dtype: np.dtype
) -> dict[str, int]:
    """Write the shards of one split from (token ids, text bytes) pairs; return the manifest's counts."""
    offsets, sizes = [0], []
    with (folder / f"{split}.bin").open("wb") as file:
        for ids, num_bytes in documents:
            file.write(np.asarray(ids, dtype=dtype).tobytes())
            offsets.append(offsets[-1] + len(ids))
            sizes.append(num_bytes)
    (folder / f"{split}.idx").write_bytes(np.asarray(offsets, dtype=_OFFSET).tobytes())
    (folder / f"{split}.bytes").write_bytes(np.asarray(sizes, dtype=_OFFSET).tobytes())
    return {"documents": len(sizes), "tokens": offsets[-1], "bytes": int(sum(sizes))}


def shards_fingerprint(folder: Path) -> str:
    """Return the SHA-256 over the shard files of all splits, in a fixed order."""
    digest = hashlib.sha256()
    for split in SPLITS:
        for suffix in ("bin", "idx", "bytes"):
            with (folder / f"{split}.{suffix}").open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Return the manifest of a prepared folder; UsageError when there is none, UnspokenError when it is damaged
    or of another format."""
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        what = "has no manifest.json" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
        raise UsageError(
            f"{folder} {what}; make a data folder with `unspoken data prepare --corpus core --out {folder}`"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnspokenError(f"{path} is not valid JSON ({error}); prepare the folder again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise UnspokenError(f"{path}: format {found}, this version reads format {FORMAT}; prepare the folder again")
    if missing := [key for key in ("splits", "dtype", "tokenizer", "fingerprint") if key not in manifest]:
        raise UnspokenError(f"{path} has no {missing[0]!r}; prepare the folder again")
    return manifest


@dataclass(frozen=True)
class TokenShards:
    """One split of a prepared folder, memory-mapped.

    `tokens` [N] are the ids of all documents end to end, `offsets` [D + 1] where each document starts,
    `document_bytes` [D] the UTF-8 length of each text. Open with `TokenShards.open`.
    """

    folder: Path
    split: str
    manifest: dict[str, Any]
    tokens: np.ndarray
    offsets: np.ndarray
    document_bytes: np.ndarray

    @classmethod
    def open(cls, folder: str | Path, split: str = "train", verify: bool = False) -> "TokenShards":
        """Open a split; file sizes are checked against the manifest, with `verify` also the fingerprint
        (reads all).

        Raises UsageError for an unknown split or no data folder, UnspokenError for one that was cut short or changed.
        """
        if split not in SPLITS:
            raise UsageError(f"unknown split {split!r}{nearest(split, SPLITS)}; the splits are {', '.join(SPLITS)}")
        folder = Path(folder)
        manifest = read_manifest(folder)
        counts = manifest["splits"][split]
        dtype = np.dtype(manifest["dtype"])
        tokens = _open_array(folder / f"{split}.bin", dtype, counts["tokens"])
        offsets = _open_array(folder / f"{split}.idx", _OFFSET, counts["documents"] + 1)
        sizes = _open_array(folder / f"{split}.bytes", _OFFSET, counts["documents"])
        if offsets[0] != 0 or offsets[-1] != len(tokens):
            raise UnspokenError(f"{folder / split}.idx does not match {split}.bin; prepare the folder again")
        if verify and shards_fingerprint(folder) != manifest["fingerprint"]:
            raise UnspokenError(f"{folder}: the shards are not those of the manifest; prepare the folder again")
        return cls(folder, split, manifest, tokens, offsets, sizes)

    def __reduce__(self):
        """Send the path, not the tokens, to worker processes."""
        return TokenShards.open, (self.folder, self.split)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.document_bytes)

    @property
    def num_bytes(self) -> int:
        return int(self.document_bytes.sum())

    @property
    def vocab_size(self) -> int:
        """Length of the tokenizer that made the shards, added tokens included."""
        return self.manifest["tokenizer"]["size"]

    @property
    def document_end_id(self) -> int:
        return self.manifest["tokenizer"]["document_end_id"]

    @property
    def fingerprint(self) -> str:
        return self.manifest["fingerprint"]

    @property
    def tokenizer_fingerprint(self) -> str:
        return self.manifest["tokenizer"]["fingerprint"]

    def document(self, index: int) -> np.ndarray:
        """Return the ids of one document, the end-of-document token included."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def load_tokenizer(self):
        """Return the tokenizer saved in the folder."""
        from unspoken.data.pretrained import read_tokenizer

        folder = self.folder / "tokenizer"
        if not folder.is_dir():
            raise UnspokenError(f"{folder} is missing; prepare the folder again")
        return read_tokenizer(folder, "prepare the folder again")


def check_embedding_rows(num_token_ids: int, num_embedding_rows: int) -> None:
    """Raise UsageError if a tokenizer of `num_token_ids` ids can produce an id that has no embedding row.

    Fewer ids than rows is fine: many checkpoints pad their embedding to a round number.
    """
    if num_token_ids > num_embedding_rows:
        raise UsageError(
            f"the tokenizer has {num_token_ids} ids but the model has {num_embedding_rows} embedding rows; "
            "prepare the data with the model's own tokenizer or call model.resize_token_embeddings first"
        )


def check_same_tokenizer(sources: Sequence[TokenShards]) -> None:
    """Raise UsageError if the ids of two folders mean different tokens."""
    first = sources[0]
    for source in sources:
        if source.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise UsageError(
                f"{source.folder} was made with another tokenizer than {first.folder}, so its ids mean other tokens; "
                f"prepare it again with `--tokenizer {first.folder / 'tokenizer'}`"
            )


def _open_array(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    if not path.is_file():
        raise UnspokenError(f"{path} is missing; prepare the folder again")
    size, wanted = path.stat().st_size, length * dtype.itemsize
    if size != wanted:
        raise UnspokenError(f"{path} has {size} bytes, the manifest says {wanted}; prepare the folder again")
    return np.memmap(path, dtype=dtype, mode="r") if length else np.empty(0, dtype=dtype)
