"""The sentences of a text that are prose: no code, no tables, no headings."""

import re
from collections.abc import Iterator

MIN_PROSE = 0.95  # of a paragraph's characters are letters, spaces and these marks
MARKS = " ,.;:!?'\"()-"
MIN_WORDS = 6  # of a sentence
ENDS = re.compile(r"(?<=[a-z)\"'][.!?])\s+(?=[\"'(]?[A-Z])")


def passages(text: str) -> Iterator[list[str]]:
    """Yield stretches of sentences that follow each other, with single spaces between words; what is no prose ends a
    stretch."""
    stretch: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        if _is_prose(flat):
            stretch += ENDS.split(flat)
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _is_prose(paragraph: str) -> bool:
    words = paragraph.split()
    letters = sum(character.isalpha() or character in MARKS for character in paragraph)
    return len(words) >= MIN_WORDS and paragraph[-1] in ".!?" and letters >= MIN_PROSE * len(paragraph)
