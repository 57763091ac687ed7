"""From raw text to clean paragraphs, and the removal of what was seen before.

Three ways, by the kind of text: verse and plays keep their lines, books keep every paragraph with its lines
joined, manuals keep only paragraphs that read like prose. A user's own text is not cleaned beyond `tidy`.
"""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable

MIN_MANUAL_WORDS = 8
MIN_LETTER_SHARE = 0.88  # of characters that are letters or spaces
MIN_WORD_SHARE = 0.75  # of words that are alphabetic, punctuation at their edges aside
SENTENCE_ENDS = ".!?:;\"')”’"
MIN_DUPLICATE_CHARS = 60  # shorter paragraphs ("Exeunt.", "Yes, sir.") may come back

Cleaned = tuple[list[str], Counter[str]]


def tidy(text: str) -> str:
    """Normalise line ends and Unicode (NFC), drop a byte-order mark and spaces at line ends and text edges."""
    text = unicodedata.normalize("NFC", text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n"))
    return re.sub(r"[ \t]+\n", "\n", text).strip()


def clean_verse(text: str) -> Cleaned:
    """Keep the lines of each stanza or speech; drop indentation, leader dots and verse numbers at line ends."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", tidy(text)):
        lines = (re.sub(r"\s{2,}\d+$", "", line).strip().lstrip(".") for line in block.split("\n"))
        paragraphs.append("\n".join(re.sub(r"\s{2,}", " ", line) for line in lines if line))
    return [paragraph for paragraph in paragraphs if paragraph], Counter()


def clean_book(text: str) -> Cleaned:
    """Join the lines of each paragraph."""
    return [paragraph for block in re.split(r"\n\s*\n", tidy(text)) if (paragraph := _joined(block))], Counter()


def clean_manual(text: str) -> Cleaned:
    """Join the lines of each paragraph and drop those that are not prose, counted by reason."""
    kept, dropped = [], Counter[str]()
    for paragraph in clean_book(text)[0]:
        reason = _why_not_prose(paragraph)
        if reason:
            dropped[reason] += 1
        else:
            kept.append(paragraph)
    return kept, dropped


CLEANERS: dict[str, Callable[[str], Cleaned]] = {
    "verse": clean_verse,
    "book": clean_book,
    "manual": clean_manual,
}


class Deduplicator:
    """Remembers texts by hash, across all sources of one run; letter case and white space do not count."""

    def __init__(self) -> None:
        self._documents: set[bytes] = set()
        self._paragraphs: set[bytes] = set()

    def is_new_document(self, text: str) -> bool:
        return _remember(self._documents, text)

    def new_paragraphs(self, paragraphs: list[str]) -> list[str]:
        """Return the paragraphs not seen before; short ones always stay."""
        return [p for p in paragraphs if len(p) < MIN_DUPLICATE_CHARS or _remember(self._paragraphs, p)]


def _remember(seen: set[bytes], text: str) -> bool:
    key = hashlib.sha256(" ".join(text.lower().split()).encode()).digest()[:16]
    is_new = key not in seen
    seen.add(key)
    return is_new


def _joined(block: str) -> str:
    return re.sub(r"\s+", " ", block).strip()


def _why_not_prose(paragraph: str) -> str | None:
    """Return the reason to drop a manual's paragraph, or None."""
    words = paragraph.split()
    if len(words) < MIN_MANUAL_WORDS:
        return "short_paragraph"
    if paragraph[-1] not in SENTENCE_ENDS:
        return "no_sentence_end"
    if sum(char.isalpha() or char == " " for char in paragraph) < MIN_LETTER_SHARE * len(paragraph):
        return "few_letters"
    stripped = (word.strip(".,;:!?()[]\"'“”‘’-–—").replace("'", "").replace("-", "") for word in words)
    if sum(word.isalpha() for word in stripped) < MIN_WORD_SHARE * len(words):
        return "few_words"
    return None
