"""What `--corpus` can name, turned into a stream of documents: packages, the standard library, files, data
sets.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unspoken.data.clean import Deduplicator, tidy
from unspoken.data.documents import Document
from unspoken.data.rows import ENDINGS, BadRow, find_files, read_rows
from unspoken.data.sources import CORPORA, Source, read_source
from unspoken.data.stdlib_text import SOURCE as STDLIB
from unspoken.data.stdlib_text import stdlib_documents
from unspoken.errors import UnspokenError, UsageError, first_line, nearest

MAX_LISTED = 100


@dataclass(frozen=True)
class CorpusOptions:
    text_field: str = "text"
    on_bad_line: str = "error"


@dataclass
class Stream:
    """One source of a corpus: `documents` to read once, then `dropped` (counts by reason) and `described`."""

    name: str
    documents: Iterator[Document]
    dropped: Counter[str] = field(default_factory=Counter)
    described: Callable[[], dict] = dict
    held_out: dict[str, str] = field(default_factory=dict)


def open_corpus(name: str, deduplicator: Deduplicator, options: CorpusOptions) -> Iterator[Stream]:
    """Yield the sources of `core`, `full`, `stdlib`, a file or folder, or the name of a data set.

    A source is fetched when it is reached. Raises UsageError, see `check_corpus`, and UnspokenError for a data set that
    cannot be loaded.
    """
    check_corpus(name)
    if name in CORPORA:
        for source in CORPORA[name]:
            yield _package_stream(source, deduplicator)
    elif name == STDLIB:
        yield Stream(STDLIB, iter(stdlib_documents()), described=lambda: {"licence": "PSF-2.0"})
    elif Path(name).exists() and not _is_saved_dataset(Path(name)):
        yield _file_stream(name, options)
    else:
        yield _dataset_stream(name, options)


def check_corpus(name: str) -> None:
    """Raises UsageError for what cannot be a corpus; nothing is read or fetched."""
    if not name.strip():
        raise UsageError("--corpus is empty")
    known = [*CORPORA, STDLIB]
    if name in known or _is_saved_dataset(Path(name)):
        return
    if Path(name).exists():
        find_files([name])
    elif name.endswith(ENDINGS) or name.startswith((".", "/", "~")):
        raise UsageError(f"{name!r} does not exist")
    elif nearest(name, known) and "/" not in name:
        raise UsageError(f"unknown corpus {name!r}{nearest(name, known)}")


def source_names(corpus: str) -> list[str]:
    """Return the names of a corpus's sources, for progress."""
    return [source.name for source in CORPORA.get(corpus, [])] or [corpus]


def _package_stream(source: Source, deduplicator: Deduplicator) -> Stream:
    text = read_source(source, deduplicator)
    return Stream(source.name, iter(text), text.dropped, text.described, source.held_out)


def _file_stream(name: str, options: CorpusOptions) -> Stream:
    files = find_files([name])
    dropped = Counter[str]()
    digest = hashlib.sha256()

    def documents() -> Iterator[Document]:
        bad: list[BadRow] = []
        for path in files:
            for row in read_rows(path, options.text_field):
                if isinstance(row, BadRow):
                    dropped[row.kind] += 1
                    bad.append(row)
                elif not bad or options.on_bad_line == "skip":
                    digest.update(row.text.encode() + b"\0")
                    yield _local_document("local", row.text)
        if bad and options.on_bad_line == "error":
            raise UnspokenError(listed_bad_rows(bad))

    def described() -> dict:
        return {"path": name, "files": len(files), "text_sha256": digest.hexdigest()}

    return Stream(name, documents(), dropped, described)


def listed_bad_rows(bad: list[BadRow]) -> str:
    lines = [str(row) for row in bad[:MAX_LISTED]]
    if len(bad) > MAX_LISTED:
        lines.append(f"... and {len(bad) - MAX_LISTED} more; `unspoken data validate` lists all")
    what = f"{len(bad)} bad row{'s' if len(bad) > 1 else ''}"
    return "\n".join([f"{what}; --on-bad-line skip leaves them out", *lines])


def _dataset_stream(name: str, options: CorpusOptions) -> Stream:
    """Read the train split of a `datasets` data set: `name`, `name:configuration`, or a folder it was saved to.

    Empty rows are common in data sets and are only counted.
    """
    rows = _load_dataset(name)
    dropped = Counter[str]()

    def documents() -> Iterator[Document]:
        for number, row in enumerate(rows):
            if options.text_field not in row:
                raise UsageError(
                    f"{name}: no field {options.text_field!r} (it has: {', '.join(row)}); see --text-field"
                )
            text = row[options.text_field]
            if isinstance(text, str) and text.strip():
                yield _local_document("dataset", text)
            elif text is None or isinstance(text, str):
                dropped["empty_text"] += 1
            else:
                raise UsageError(f"{name}: field {options.text_field!r} of row {number} is no text; see --text-field")

    return Stream(name, documents(), dropped, lambda: {"dataset": name})


def _load_dataset(name: str):
    import datasets
    from huggingface_hub.utils.logging import set_verbosity_error

    set_verbosity_error()  # it tells of every attempt to reach the hub
    try:
        if _is_saved_dataset(Path(name)):
            loaded = datasets.load_from_disk(name)
            return loaded["train"] if isinstance(loaded, datasets.DatasetDict) else loaded
        path, _, configuration = name.partition(":")
        return datasets.load_dataset(path, configuration or None, split="train")
    except Exception as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise UnspokenError(
            f"{name!r} is no file here, and `datasets` cannot load it{offline}: {first_line(error)}\n"
            f"corpora that need no data set: {', '.join([*CORPORA, STDLIB])}, or a file or folder of text"
        ) from error


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _local_document(source: str, text: str) -> Document:
    """Name a document by its content: the split of a row then survives reordering and renaming."""
    text = tidy(text)
    return Document(source, hashlib.sha256(text.encode()).hexdigest()[:16], text)
