"""Models and tokenizers that others saved: whether they are there, and which file is damaged if one cannot be read.

The libraries that read them raise whatever comes to hand and name no file.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from unspoken.errors import UnspokenError, UsageError, first_line

_CONFIG = "config.json"


def check_there(name: str | Path, what: str) -> None:
    """Look for a folder, else ask the hub and its cache here: once, where transformers would ask six times.

    Raises:
        UsageError: there is no such folder, nor a hub's name.
        UnspokenError: it could be a hub's name, but no hub is reached.
    """
    path = Path(name)
    if path.is_dir():
        return
    if path.exists():
        raise UsageError(f"{path} is a file; give the folder of a {what}")
    if path.is_absolute() or str(name).startswith(".") or str(name).count("/") > 1:
        raise UsageError(f"no such folder: {path}")
    nowhere = f"no {what} {str(name)!r}: there is no such folder here, and the hub"
    try:
        if try_to_load_from_cache(str(name), _CONFIG) is None:
            get_hf_file_metadata(hf_hub_url(str(name), _CONFIG))
    except (HfHubHTTPError, HFValidationError) as error:
        if type(error) in (RepositoryNotFoundError, HFValidationError):
            raise UsageError(f"{nowhere} has none of that name") from error
        # Other answers (no such file, gated, too busy) are transformers' to try again or to explain.
    except Exception as error:  # the HTTP library's own
        raise UnspokenError(f"{nowhere} cannot be reached ({first_line(error)})") from error


def read_tokenizer(name: str | Path, remedy: str = "") -> PreTrainedTokenizerBase:
    """Load a tokenizer; `remedy` ends the message of the UnspokenError."""
    with reading("tokenizer", name, remedy):
        return AutoTokenizer.from_pretrained(name, local_files_only=Path(name).is_dir())


@contextmanager
def reading(what: str, name: str | Path, remedy: str = "") -> Iterator[None]:
    """Whatever is raised inside becomes an UnspokenError that names the damaged file, if it is one."""
    try:
        yield
    except UnspokenError:
        raise
    except Exception as error:
        reason = _damage(Path(name)) or f"cannot read a {what} from {name}: {first_line(error)}"
        raise UnspokenError(f"{reason}; {remedy}" if remedy else reason) from error


def _damage(folder: Path) -> str | None:
    """The first file of a folder that does not even parse, and why."""
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        try:
            _parser(path)(path)
        except Exception as error:  # the tokenizers library raises bare Exceptions
            return f"{path} is damaged ({first_line(error)})"
    return None


def _parser(path: Path) -> Callable[[Path], Any]:
    if path.suffix == ".safetensors":
        return lambda path: safe_open(path, "numpy")
    if path.name == "tokenizer.json":
        return lambda path: Tokenizer.from_file(str(path))
    return lambda path: json.loads(path.read_text(encoding="utf-8"))
