"""Which split a document belongs to, so that no document is in two and adding text moves none of the others."""

import hashlib
import itertools
from dataclasses import dataclass

from unspoken.data.documents import Document

VAL_PERCENT = 2
TEST_PERCENT = 2
MIN_SHARE = 0.01  # of all bytes, for val and for test, where hashing gave them less
MAX_MOVED_SHARE = 0.1  # no single document larger than this share is moved, if another one can be
MIN_DOCUMENTS = 3


def hash_percent(source: str, id: str) -> int:
    """Return 0..99, the same for a (source, id) on every machine and in every run."""
    return int(hashlib.sha256(f"{source}\0{id}".encode()).hexdigest(), 16) % 100


def hashed_split(source: str, id: str) -> str:
    percent = hash_percent(source, id)
    if percent < VAL_PERCENT:
        return "val"
    return "test" if percent < VAL_PERCENT + TEST_PERCENT else "train"


@dataclass
class Placed:
    """A document's place: its split, and whether a source's rule or only the hash put it there."""

    source: str
    id: str
    num_bytes: int
    split: str
    by_rule: bool = False


def fill_small_splits(documents: list[Placed]) -> int:
    """Move hashed training documents, in order of hash, to a val or test split that is under `MIN_SHARE`.

    Small corpora need it: with 50 documents the hash may give val none. Changes `split` in place, returns the
    number of documents moved. At least one document stays in train.
    """
    total = sum(document.num_bytes for document in documents)
    movable = [d for d in documents if d.split == "train" and not d.by_rule]
    movable.sort(key=lambda d: hashlib.sha256(f"{d.source}\0{d.id}\0move".encode()).digest())
    movable.sort(key=lambda d: d.num_bytes > MAX_MOVED_SHARE * total)
    num_train = sum(document.split == "train" for document in documents)
    moved = 0
    for split in ("val", "test"):
        size = sum(document.num_bytes for document in documents if document.split == split)
        while size < MIN_SHARE * total and movable and num_train > 1:
            document = movable.pop(0)
            document.split = split
            size += document.num_bytes
            num_train -= 1
            moved += 1
    return moved


def cut_in_three(document: Document) -> list[tuple[Document, str]]:
    """Cut one document into train, val and test parts at line ends, for a corpus of too few documents.

    The last 2 percent are the test part, the 2 percent before them the val part.
    """
    text = document.text
    ends = [_line_end(text, len(text) * (100 - percent) // 100) for percent in (4, 2)]
    bounds = itertools.pairwise([0, *ends, len(text)])
    parts = []
    for split, (begin, end) in zip(("train", "val", "test"), bounds):
        part = text[begin:end].strip()
        if part:
            parts.append((Document(document.source, f"{document.id}[{split}]", part), split))
    return parts


def cut_long(text: str, max_chars: int) -> list[str]:
    """Cut a text into pieces of at most `max_chars`, at the last line end or space before the limit if any."""
    pieces = []
    while len(text) > max_chars:
        at = max(text.rfind("\n", 1, max_chars + 1), text.rfind(" ", max_chars // 2, max_chars + 1))
        at = at if at > 0 else max_chars
        pieces.append(text[:at])
        text = text[at:].lstrip()
    return [*pieces, text] if text else pieces


def _line_end(text: str, at: int) -> int:
    """Return the place after the first line end behind `at`, or after the next space where lines are long."""
    for mark, reach in (("\n", 2000), (" ", 200)):
        found = text.find(mark, at, at + reach)
        if found >= 0:
            return found + 1
    return at
