import gzip

import pyarrow
import pyarrow.parquet
import pytest

from unspoken.data.rows import BadRow, Row, find_files, read_rows
from unspoken.errors import UsageError

GOOD = '{"text": "A good row."}'


def write(path, *lines: str | bytes):
    data = [line.encode() if isinstance(line, str) else line for line in lines]
    path.write_bytes(b"\n".join(data) + b"\n")
    return path


def bad_rows(path, **options) -> list[BadRow]:
    return [row for row in read_rows(path, **options) if isinstance(row, BadRow)]


@pytest.mark.parametrize(
    ("line", "kind", "reason"),
    [
        ('{"text": "cut', "broken_json", "broken JSON at column 10: Unterminated string"),
        ("['a']", "broken_json", "broken JSON at column 2"),
        ("[1, 2]", "not_an_object", "not a JSON object but an array"),
        ("7", "not_an_object", "not a JSON object but a number"),
        ("true", "not_an_object", "not a JSON object but a boolean"),
        ("null", "not_an_object", "not a JSON object but null"),
        ('"text"', "not_an_object", "not a JSON object but a string"),
        ('{"txt": "secret"}', "missing_field", "no field 'text' (it has: 'txt'); see --text-field"),
        ("{}", "missing_field", "no field 'text' (it has: none)"),
        ('{"text": null}', "null", "field 'text' is null"),
        ('{"text": 3}', "wrong_type", "field 'text' is a number, not text"),
        ('{"text": ["secret"]}', "wrong_type", "field 'text' is an array, not text"),
        ('{"text": ""}', "empty_text", "field 'text' is empty or white space"),
        ('{"text": " \\n\\t "}', "empty_text", "field 'text' is empty or white space"),
        ('{"text": "a\\u0000b secret"}', "nul", "field 'text' contains a NUL character"),
        ('{"text": "\\ud83d secret"}', "lone_surrogate", "field 'text' contains half of a surrogate pair"),
        ('{"text": "' + "[" * 3 + '", "n": ' + "[" * 100_000 + "}", "broken_json", "JSON that cannot be read"),
        ('{"text": "secret", "n": ' + "9" * 5000 + "}", "broken_json", "JSON that cannot be read (ValueError)"),
        (
            b'{"text": "caf\xe9 secret"}',
            "invalid_utf8",
            "invalid UTF-8 at byte 14 of the line; perhaps `iconv -f latin1",
        ),
    ],
)
def test_b67_a_bad_row_is_named_by_path_line_and_reason_without_its_text(tmp_path, line, kind, reason):
    """rai-toolkit#82: a bad row was reported as line 1 and without the file's name."""
    path = write(tmp_path / "rows.jsonl", GOOD, GOOD, GOOD, line, GOOD)
    rows = list(read_rows(path))
    assert [type(row) for row in rows] == [Row, Row, Row, BadRow, Row]
    assert rows[3].kind == kind
    assert str(rows[3]).startswith(f"{path}:4: {reason}")
    assert "secret" not in str(rows[3])
    assert len(str(rows[3])) < len(str(path)) + 150


def test_b68_blank_lines_are_skipped_and_counted_as_lines(tmp_path):
    """graphrag#2424: one blank line made the whole file vanish."""
    path = write(tmp_path / "rows.jsonl", "", GOOD, "", "  \t ", GOOD, "[]", "")
    rows = list(read_rows(path))
    assert [row.line for row in rows] == [2, 5, 6]
    assert [type(row) for row in rows] == [Row, Row, BadRow]


def test_b69_a_cut_last_line_spares_the_rows_before(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(f"{GOOD}\n{GOOD}\n".encode() + GOOD[:-4].encode())
    rows = list(read_rows(path))
    assert [type(row) for row in rows] == [Row, Row, BadRow]
    assert rows[2].line == 3


@pytest.mark.parametrize("name", ["rows.jsonl", "text.txt", "rows.jsonl.gz"])
def test_b70_a_byte_order_mark_changes_nothing(tmp_path, name):
    content = f"{GOOD}\r\n{GOOD}\r\n".encode()
    opener = gzip.open if name.endswith(".gz") else open
    for folder, mark in [("with", b"\xef\xbb\xbf"), ("without", b"")]:
        (tmp_path / folder).mkdir()
        with opener(tmp_path / folder / name, "wb") as file:
            file.write(mark + content)
    with_mark, without = ([row.text for row in read_rows(tmp_path / f / name)] for f in ("with", "without"))
    assert with_mark == without
    assert with_mark


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "a.md"])
def test_b72_an_empty_file_says_so(tmp_path, name):
    (tmp_path / name).touch()
    assert [str(row) for row in bad_rows(tmp_path / name)] == [f"{tmp_path / name}: the file is empty"]


def test_b72_a_file_of_blank_lines_says_so(tmp_path):
    path = write(tmp_path / "a.jsonl", "", "  ", "")
    assert [row.reason for row in bad_rows(path)] == ["the file has only blank lines"]
    assert [row.kind for row in bad_rows(write(tmp_path / "a.txt", "", "  "))] == ["empty_text"]


def test_b72_latin1_text_names_the_line(tmp_path):
    path = write(tmp_path / "a.txt", "first", "second", b"na\xefve")
    assert str(bad_rows(path)[0]).startswith(f"{path}:3: invalid UTF-8 at byte 3 of the line; perhaps `iconv -f latin1")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_b72_utf16_is_recognised_once(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(f"{GOOD}\n{GOOD}\n".encode("utf-16"))
    assert [row.reason for row in bad_rows(path)] == ["UTF-16 and not UTF-8; perhaps `iconv -f utf-16 -t utf-8` helps"]


def test_b72_nul_in_a_text_file(tmp_path):
    assert [row.kind for row in bad_rows(write(tmp_path / "a.txt", "a\0b"))] == ["nul"]


def test_b72_a_line_of_30_megabytes_is_read(tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD, '{"text": "' + "word " * 6_000_000 + '"}')
    assert [len(row.text) for row in read_rows(path)] == [11, 30_000_000]


def test_other_fields_and_unicode_line_ends_stay_in_the_row(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"id": 1, "body": "one\u2028two\u0085three", "text": 7}')
    assert [row.text for row in read_rows(path, text_field="body")] == ["one\u2028two\u0085three"]


def test_a_cut_gzip_file_gives_its_whole_rows_and_an_error(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for number in range(20_000):
            file.write(f'{{"text": "row {number} {hash(str(number))}"}}\n')
    whole = path.read_bytes()
    assert len(list(read_rows(path))) == 20_000
    path.write_bytes(whole[: len(whole) // 2])
    rows = list(read_rows(path))
    assert len(rows) > 1000
    assert [row.kind for row in rows if isinstance(row, BadRow)] == ["broken_gzip"]
    path.write_bytes(b"no gzip at all")
    assert [row.kind for row in bad_rows(path)] == ["broken_gzip"]


def test_parquet_rows_are_numbered_and_checked(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None, "", "four"], "n": [1, 2, 3, 4]}), path)
    assert [str(row).removeprefix(f"{path}:") for row in bad_rows(path)] == [
        "2: field 'text' is null",
        "3: field 'text' is empty or white space",
    ]
    assert [row.line for row in read_rows(path) if isinstance(row, Row)] == [1, 4]
    assert next(iter(bad_rows(path, text_field="n"))).reason == "field 'n' is a number, not text"
    assert [row.kind for row in bad_rows(path, text_field="body")] == ["missing_field"]
    path.write_bytes(b"PAR1 not really")
    assert [row.kind for row in bad_rows(path)] == ["broken_parquet"]


def test_folders_are_searched_in_order_without_hidden_files(tmp_path):
    for name in ["b/2.txt", "b/1.jsonl.gz", "a/3.MD", ".git/x.txt", "b/.hidden.txt", "b/picture.png", "c.parquet"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [path.relative_to(tmp_path).as_posix() for path in find_files([tmp_path])]
    assert found == ["a/3.MD", "b/1.jsonl.gz", "b/2.txt", "c.parquet"]


def test_paths_that_cannot_be_text_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"none\.txt does not exist"):
        find_files([tmp_path / "none.txt"])
    (tmp_path / "a.docx").touch()
    with pytest.raises(UsageError, match=r"a\.docx: unknown kind of file; text is read from \.txt"):
        find_files([tmp_path / "a.docx"])
    with pytest.raises(UsageError, match="holds no file that ends in"):
        find_files([tmp_path])
