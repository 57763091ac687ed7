"""A small text that every CPython carries, so that tests and first steps need no download."""

import importlib

from unspoken.data.documents import Document
from unspoken.errors import UnspokenError

SOURCE = "stdlib"


def stdlib_documents() -> list[Document]:
    """Return the topics of Python's interactive help (about 0.5 MB of English and code) as documents, by
    name.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise UnspokenError(
            "this Python lacks pydoc_data.topics, the text of `--corpus stdlib`; install the whole standard library"
        ) from error
    return [Document(SOURCE, name, text) for name, text in sorted(topics.items())]
