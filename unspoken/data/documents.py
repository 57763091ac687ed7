"""What a corpus is made of: documents with a name that stays the same from run to run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A text with the source it comes from and an identifier that is unique within that source.

    (source, id) decides the split, so it must not depend on order or on where files lie.
    """

    source: str
    id: str
    text: str
