import pytest

from unspoken.cli import main

GOOD = '{"text": "A good row."}'


@pytest.fixture
def files(tmp_path):
    (tmp_path / "good.jsonl").write_text(f"{GOOD}\n\n{GOOD}\n")
    (tmp_path / "bad.jsonl").write_text(f'{GOOD}\n[]\n{{"text": ""}}\n{{"text": "private"\n{GOOD}\n')
    (tmp_path / "hopeless.jsonl").write_text("1\n2\n")
    return tmp_path


def test_good_files_pass(files, capsys):
    assert main(["data", "validate", str(files / "good.jsonl")]) == 0
    assert capsys.readouterr().out == "2 good and 0 bad rows in 1 file\n"


def test_b69_every_bad_row_is_listed_before_the_exit(files, capsys):
    """Automodel#1694: one malformed line aborted loading with a generic error."""
    assert main(["data", "validate", str(files)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines() == [
        f"{files}/bad.jsonl:2: not a JSON object but an array",
        f"{files}/bad.jsonl:3: field 'text' is empty or white space",
        f"{files}/bad.jsonl:4: broken JSON at column 19: Expecting ',' delimiter",
        f"{files}/hopeless.jsonl:1: not a JSON object but a number",
        f"{files}/hopeless.jsonl:2: not a JSON object but a number",
        "4 good and 5 bad rows in 3 files",
        "  broken_json: 1",
        "  empty_text: 1",
        "  not_an_object: 3",
    ]
    assert "private" not in out


def test_skipping_passes_if_rows_are_left(files, capsys):
    assert main(["data", "validate", str(files / "bad.jsonl"), "--on-bad-line", "skip"]) == 0
    assert "2 good and 3 bad rows in 1 file" in capsys.readouterr().out
    assert main(["data", "validate", str(files / "hopeless.jsonl"), "--on-bad-line", "skip"]) == 1


def test_b72_an_over_long_row_is_a_notice_and_no_error(files, capsys):
    assert main(["data", "validate", str(files / "good.jsonl"), "--max-document-chars", "5"]) == 0
    out = capsys.readouterr().out
    assert f"note: {files}/good.jsonl:3: 11 characters; `data prepare` cuts at 5" in out


def test_wrong_usage_exits_with_2(files, capsys):
    assert main(["data", "validate", str(files / "absent.jsonl")]) == 2
    assert "absent.jsonl does not exist" in capsys.readouterr().err
