"""Which tokens an evaluation scores: pieces of documents, one a row, never two documents in a row.

    document 7, 600 tokens, sequence_length 256:   [0 .. 255] [256 .. 511] [512 .. 599]

The first token of a piece has no target, as in training windows, so a row of n tokens has n - 1 targets. A fixed
choice of rows, evenly spaced over the split, is scored when there are more than asked for.
"""

from dataclasses import dataclass

import numpy as np

from unspoken.data.tokenizer import token_byte_lengths
from unspoken.data.tokens import TokenShards
from unspoken.errors import UnspokenError, UsageError


@dataclass(frozen=True)
class Row:
    """One piece of one document. `num_bytes` is the length of its targets in bytes of text."""

    ids: np.ndarray
    document: int
    num_bytes: float

    @property
    def num_targets(self) -> int:
        return len(self.ids) - 1


def cut_rows(shards: TokenShards, sequence_length: int, max_rows: int) -> list[Row]:
    """Return at most `max_rows` rows of at most `sequence_length` tokens, in the order of the split.

    Raises UsageError for a length or a number that cannot be, UnspokenError for a split without a single target.
    """
    if sequence_length < 2:
        raise UsageError(f"--sequence-length is {sequence_length}; it must be at least 2")
    if max_rows < 1:
        raise UsageError(f"--max-sequences is {max_rows}; it must be at least 1")
    pieces = [
        (document, int(start), int(min(start + sequence_length, end)))
        for document, (begin, end) in enumerate(zip(shards.offsets[:-1], shards.offsets[1:]))
        for start in range(begin, end, sequence_length)
        if min(start + sequence_length, end) - start >= 2
    ]
    if not pieces:
        raise UnspokenError(f"split {shards.split!r} of {shards.folder} has no document of two tokens or more")
    chosen = np.unique(np.linspace(0, len(pieces) - 1, min(max_rows, len(pieces))).round().astype(int))
    lengths = target_byte_lengths(shards)
    return [_row(shards, pieces[index], lengths) for index in chosen]


def target_byte_lengths(shards: TokenShards) -> np.ndarray | None:
    """Bytes of text that each id stands for; None when the tokenizer cannot say (it is not byte-level).

    Without them a row's bytes are estimated from its document's, in proportion to tokens.
    """
    try:
        return token_byte_lengths(shards.load_tokenizer())
    except UnspokenError:
        return None


def _row(shards: TokenShards, piece: tuple[int, int, int], lengths: np.ndarray | None) -> Row:
    document, start, end = piece
    ids = shards.tokens[start:end].astype(np.int64)
    if lengths is not None:
        num_bytes = float(lengths[ids[1:]].sum())
    else:
        document_tokens = int(shards.offsets[document + 1] - shards.offsets[document])
        num_bytes = float(shards.document_bytes[document]) * (len(ids) - 1) / document_tokens
    return Row(ids, document, num_bytes)
