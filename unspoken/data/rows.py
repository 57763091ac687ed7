"""Reading text from users' files row by row: good rows, and for each bad one its path, line and reason.

`.txt` and `.md` files are one document each; `.jsonl` and `.parquet` files have one in each row. `.gz` is
fine for all but parquet. A row's content is never put into a message.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from unspoken.errors import UnspokenError, UsageError

TEXT_ENDINGS = (".txt", ".md")
ROW_ENDINGS = (".jsonl", ".ndjson")
PARQUET_ENDING = ".parquet"
ENDINGS = (*TEXT_ENDINGS, *ROW_ENDINGS, PARQUET_ENDING)
_BOM = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Row:
    """A document and where it stands; `line` counts from 1 (in parquet files it is the row)."""

    path: Path
    line: int
    text: str


@dataclass(frozen=True)
class BadRow:
    """A row or file that cannot be used. `kind` is for counting, `reason` for reading; line 0 is the whole
    file.
    """

    path: Path
    line: int
    kind: str
    reason: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else f"{self.path}"
        return f"{place}: {self.reason}"


def find_files(names: Iterable[str | Path]) -> list[Path]:
    """Return the readable files among `names` and inside its folders (hidden ones aside), sorted per folder.

    Raises UsageError for a path that does not exist, a file of an unknown kind, or a folder without any text.
    """
    found: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and _ending(p) in ENDINGS)
            inside = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts)]
            if not inside:
                raise UsageError(f"{path} holds no file that ends in {_listed_endings()}")
            found += inside
        elif not path.exists():
            raise UsageError(f"{path} does not exist")
        elif _ending(path) not in ENDINGS:
            raise UsageError(f"{path}: unknown kind of file; text is read from {_listed_endings()}")
        else:
            found.append(path)
    return found


def read_rows(path: Path, text_field: str = "text") -> Iterator[Row | BadRow]:
    """Yield every row of one file, good or bad, in order. Blank lines are skipped."""
    if path.stat().st_size == 0:
        yield BadRow(path, 0, "empty_file", "the file is empty")
        return
    if _ending(path) == PARQUET_ENDING:
        yield from _read_parquet(path, text_field)
        return
    read = _read_text if _ending(path) in TEXT_ENDINGS else _read_jsonl
    try:
        with _open(path) as file:
            yield from read(path, file, text_field)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        yield BadRow(path, 0, "broken_gzip", f"broken or cut gzip file ({error})")


def _read_text(path: Path, file: IO[bytes], _text_field: str) -> Iterator[Row | BadRow]:
    text = _decoded(path, 1, file.read().removeprefix(_BOM))
    if isinstance(text, BadRow):
        yield text
    else:
        yield _checked(path, 1, text)


def _read_jsonl(path: Path, file: IO[bytes], text_field: str) -> Iterator[Row | BadRow]:
    num_rows = 0
    for number, raw in enumerate(file, start=1):
        line = _decoded(path, number, raw.removeprefix(_BOM) if number == 1 else raw)
        if isinstance(line, BadRow):
            yield line
            num_rows += 1
            if number == 1 and raw.startswith(_UTF16_MARKS):
                return
        elif line.strip():
            yield _parsed(path, number, line.rstrip(), text_field)
            num_rows += 1
    if not num_rows:
        yield BadRow(path, 0, "empty_file", "the file has only blank lines")


def _read_parquet(path: Path, text_field: str) -> Iterator[Row | BadRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        yield BadRow(path, 0, "broken_parquet", f"not a parquet file ({str(error).splitlines()[0]})")
        return
    if text_field not in file.schema_arrow.names:
        yield BadRow(path, 0, "missing_field", _missing(text_field, file.schema_arrow.names))
        return
    number = 0
    for batch in file.iter_batches(columns=[text_field]):
        for value in batch.column(0).to_pylist():
            number += 1
            yield _checked(path, number, value, text_field)
    if not number:
        yield BadRow(path, 0, "empty_file", "the file has no rows")


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]] | BadRow]:
    """Yield every object of a JSONL or parquet file with its line (or row), or what is wrong with it; blank lines are
    skipped."""
    if path.stat().st_size == 0:
        yield BadRow(path, 0, "empty_file", "the file is empty")
        return
    if _ending(path) == PARQUET_ENDING:
        yield from _parquet_objects(path)
        return
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, start=1):
                line = _decoded(path, number, raw.removeprefix(_BOM) if number == 1 else raw)
                if isinstance(line, BadRow):
                    yield line
                elif line.strip():
                    row = _object(path, number, line.rstrip())
                    yield row if isinstance(row, BadRow) else (number, row)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        yield BadRow(path, 0, "broken_gzip", f"broken or cut gzip file ({error})")


def _parquet_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]] | BadRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        yield BadRow(path, 0, "broken_parquet", f"not a parquet file ({str(error).splitlines()[0]})")
        return
    number = 0
    for batch in file.iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield number, {name: value for name, value in row.items() if value is not None}


def _parsed(path: Path, number: int, line: str, text_field: str) -> Row | BadRow:
    row = _object(path, number, line)
    if isinstance(row, BadRow):
        return row
    if text_field not in row:
        return BadRow(path, number, "missing_field", _missing(text_field, list(row)))
    return _checked(path, number, row[text_field], text_field)


def _object(path: Path, number: int, line: str) -> dict[str, Any] | BadRow:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return BadRow(path, number, "broken_json", f"broken JSON at column {error.colno}: {error.msg}")
    except (ValueError, RecursionError) as error:
        return BadRow(path, number, "broken_json", f"JSON that cannot be read ({type(error).__name__})")
    if not isinstance(row, dict):
        return BadRow(path, number, "not_an_object", f"not a JSON object but {_kind(row)}")
    return row


def _checked(path: Path, number: int, text: object, text_field: str = "") -> Row | BadRow:
    """Return a Row if `text` is usable text."""
    what = f"field {text_field!r}" if text_field else "the text"
    if text is None:
        return BadRow(path, number, "null", f"{what} is null")
    if not isinstance(text, str):
        return BadRow(path, number, "wrong_type", f"{what} is {_kind(text)}, not text")
    if not text.strip():
        return BadRow(path, number, "empty_text", f"{what} is empty or white space")
    if "\0" in text:
        return BadRow(path, number, "nul", f"{what} contains a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        return BadRow(path, number, "lone_surrogate", f"{what} contains half of a surrogate pair")
    return Row(path, number, text)


def _decoded(path: Path, number: int, data: bytes) -> str | BadRow:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if data.startswith(_UTF16_MARKS):
            encoding, reason = "utf-16", "UTF-16 and not UTF-8"
        else:
            number += data.count(b"\n", 0, error.start)
            column = error.start - data.rfind(b"\n", 0, error.start)
            encoding, reason = "latin1", f"invalid UTF-8 at byte {column} of the line"
        advice = f"perhaps `iconv -f {encoding} -t utf-8` helps"
        return BadRow(path, number, "invalid_utf8", f"{reason}; {advice}")


def message_fault(messages: list[Any]) -> str | None:
    """What is wrong with the first message that is none, without its content."""
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return f"message {number} is not an object with the texts 'role' and 'content'"
    return None


def _missing(text_field: str, names: list[str]) -> str:
    return f"no field {text_field!r} (it has: {', '.join(map(repr, names[:8])) or 'none'}); see --text-field"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _ending(path: Path) -> str:
    """Return the lower-case ending that says what a file is, `.gz` aside."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix == ".gz" else suffix


def _open(path: Path) -> IO[bytes]:
    try:
        return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise UnspokenError(f"{path} cannot be read: {error.strerror}") from error


def _listed_endings() -> str:
    return f"{', '.join(ENDINGS[:-1])} (or .gz of these) or {PARQUET_ENDING}"
