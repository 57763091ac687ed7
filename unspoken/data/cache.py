"""Where downloads and derived files are kept, whether results can be written, and how a folder appears whole or not
at all.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unspoken.errors import UsageError


def cache_folder() -> Path:
    """Return the cache folder: `$UNSPOKEN_CACHE`, else `~/.cache/unspoken`. It may not exist yet."""
    return Path(os.environ.get("UNSPOKEN_CACHE") or "~/.cache/unspoken").expanduser()


def check_folder(option: str, folder: str | Path) -> None:
    """Raises UsageError unless files can be written into a folder, which need not exist yet. Nothing is made."""
    folder = Path(folder)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise UsageError(f"{option}: {there} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{option}: no permission to write into {there}; give another folder")


def check_file(option: str, file: str | Path) -> None:
    """Raises UsageError unless a file can be written in a folder that exists. Nothing is made."""
    file = Path(file)
    if file.is_dir():
        raise UsageError(f"{option}: {file} is a folder; give a file")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"{option} {file}: its folder does not exist")
    if not file.exists():
        check_folder(option, file.absolute().parent)
    elif not os.access(file, os.W_OK):
        raise UsageError(f"{option}: no permission to write {file}; give another file")


@contextmanager
def whole_folder(target: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that becomes `target` when the block ends without an error.

    After an error or an interrupt nothing is left. An existing `target` is kept unless `replace` is true: of
    two processes that write the same thing, the first one wins.
    """
    target = target.parent.resolve() / target.name  # a path that leads through the target would break when it moves
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield made
        made.chmod(0o777 & ~_umask())
        for file in made.rglob("*"):  # safetensors writes for the owner alone
            if file.is_file():
                file.chmod(0o666 & ~_umask())
        if replace and target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
            target.rename(old / target.name)
            made.rename(target)
            shutil.rmtree(old)
        else:
            _rename_if_absent(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _rename_if_absent(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
