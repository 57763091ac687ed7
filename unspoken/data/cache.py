"""Where downloads and derived files are kept, and how a folder appears whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder: `$UNSPOKEN_CACHE`, else `~/.cache/unspoken`. It may not exist yet."""
    return Path(os.environ.get("UNSPOKEN_CACHE") or "~/.cache/unspoken").expanduser()


@contextmanager
def whole_folder(target: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that becomes `target` when the block ends without an error.

    After an error or an interrupt nothing is left. An existing `target` is kept unless `replace` is true: of
    two processes that write the same thing, the first one wins.
    """
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
