import json
import random
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from unspoken.cli import main
from unspoken.data import prepare as prepare_module
from unspoken.data.prepare import PrepareOptions, prepare
from unspoken.data.stdlib_text import stdlib_documents
from unspoken.data.tokens import SPLITS, TokenShards
from unspoken.errors import UnspokenError, UsageError

STDLIB = PrepareOptions(("stdlib",), tokenizer="bpe:512")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare(STDLIB, folder)
    return folder


@pytest.fixture
def rows(tmp_path):
    """Write real text as JSONL: one topic a row."""

    def write(name="rows.jsonl", num_rows=30, extra=()) -> Path:
        lines = [json.dumps({"text": document.text}) for document in stdlib_documents()[:num_rows]]
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join([*lines, *extra]) + "\n")
        return path

    return write


def texts(folder: Path, split: str) -> list[str]:
    shards = TokenShards.open(folder, split, verify=True)
    tokenizer = shards.load_tokenizer()
    return [tokenizer.decode(shards.document(index)[:-1]) for index in range(shards.num_documents)]


def test_every_text_is_in_one_split_whole(folder):
    found = [text for split in SPLITS for text in texts(folder, split)]
    wanted = {document.text.strip() for document in stdlib_documents()}
    assert len(found) == len(wanted)
    assert {" ".join(text.split()) for text in found} == {" ".join(text.split()) for text in wanted}
    assert all(texts(folder, split) for split in SPLITS)


def test_documents_end_with_the_end_token_and_only_there(folder):
    shards = TokenShards.open(folder)
    assert shards.document_end_id == 0
    assert shards.tokens.dtype == np.uint16
    assert (np.flatnonzero(shards.tokens == 0) + 1).tolist() == shards.offsets[1:].tolist()
    assert shards.tokens.max() < shards.vocab_size == 512


def test_the_manifest_counts_what_is_there(folder):
    manifest = TokenShards.open(folder).manifest
    for split in SPLITS:
        shards = TokenShards.open(folder, split)
        assert (
            manifest["splits"][split]
            == manifest["counts"]["stdlib"][split]
            == {
                "documents": shards.num_documents,
                "tokens": shards.num_tokens,
                "bytes": shards.num_bytes,
            }
        )
        assert shards.document_bytes.tolist() == [len(text.encode()) for text in texts(folder, split)]
    assert manifest["sources"][0]["name"] == "stdlib"
    assert manifest["options"]["tokenizer"] == "bpe:512"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [f"{split}.{end}" for split in SPLITS for end in ("bin", "idx", "bytes")] + ["manifest.json", "tokenizer"]
    )


def test_equal_inputs_give_equal_shards_and_another_seed_another_order(folder, tmp_path):
    again = prepare(STDLIB, tmp_path / "again")
    assert again == TokenShards.open(folder).manifest
    other = prepare(PrepareOptions(("stdlib",), tokenizer="bpe:512", seed=1), tmp_path / "other")
    assert other["fingerprint"] != again["fingerprint"]
    assert {split: count["documents"] for split, count in other["splits"].items()} == {
        split: count["documents"] for split, count in again["splits"].items()
    }


def test_an_existing_tokenizer_is_used_as_it_is(folder, tmp_path):
    tokenizer = str(folder / "tokenizer")
    manifest = prepare(PrepareOptions(("stdlib",), tokenizer=tokenizer), tmp_path / "data")
    assert manifest["fingerprint"] == TokenShards.open(folder).fingerprint
    assert manifest["tokenizer"] == TokenShards.open(folder).manifest["tokenizer"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "folder/of/texts"])
def test_files_of_all_kinds_give_the_same_documents(tmp_path, rows, name):
    wanted = {" ".join(document.text.split()) for document in stdlib_documents()[:30]}
    if name.endswith(".jsonl"):
        rows(name)
    elif name.endswith(".parquet"):
        table = pyarrow.table({"text": [document.text for document in stdlib_documents()[:30]]})
        pyarrow.parquet.write_table(table, tmp_path / name)
    else:
        (tmp_path / name).mkdir(parents=True)
        for document in stdlib_documents()[:30]:
            (tmp_path / name / f"{document.id}.txt").write_text(document.text)
    prepare(PrepareOptions((str(tmp_path / name),), tokenizer="bpe:512"), tmp_path / "data")
    found = [" ".join(text.split()) for split in SPLITS for text in texts(tmp_path / "data", split)]
    assert len(found) == len(wanted)
    assert set(found) == wanted


def test_a_saved_data_set_is_read(tmp_path):
    import datasets

    values = [document.text for document in stdlib_documents()[:12]]
    datasets.Dataset.from_dict({"body": [*values, "", None]}).save_to_disk(tmp_path / "saved")
    options = PrepareOptions((str(tmp_path / "saved"),), tokenizer="bpe:300", text_field="body")
    manifest = prepare(options, tmp_path / "data")
    assert sum(count["documents"] for count in manifest["splits"].values()) == len(set(values))
    assert manifest["sources"][0]["dropped"]["empty_text"] == 2
    with pytest.raises(UsageError, match=r"no field 'text' \(it has: body\)"):
        prepare(PrepareOptions((str(tmp_path / "saved"),)), tmp_path / "other")


def test_the_split_of_a_row_survives_reordering_and_renaming(tmp_path):
    lines = [json.dumps({"text": f"Row {number} of many rows."}) for number in range(2000)]
    found = []
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        random.Random(0).shuffle(lines)
        prepare(PrepareOptions((str(tmp_path / f"{name}.jsonl"),), tokenizer="bpe:300"), tmp_path / name)
        found.append({split: sorted(texts(tmp_path / name, split)) for split in SPLITS})
    assert found[0] == found[1]
    assert 20 < len(found[0]["val"]) < 60


def test_repeated_documents_are_dropped_and_counted(tmp_path, rows):
    path = rows(extra=[json.dumps({"text": stdlib_documents()[3].text.upper()})])
    manifest = prepare(PrepareOptions((str(path),), tokenizer="bpe:512"), tmp_path / "data")
    assert manifest["sources"][0]["dropped"] == {"duplicate_document": 1}
    assert sum(count["documents"] for count in manifest["splits"].values()) == 30


def test_b69_bad_rows_stop_the_run_with_their_places(tmp_path, rows, capsys):
    path = rows(extra=["[]", '{"text": ""}', '{"text": "cut'])
    command = ["data", "prepare", "--corpus", str(path), "--out", str(tmp_path / "data"), "--tokenizer", "bpe:512"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "3 bad rows; --on-bad-line skip leaves them out" in error
    assert f"{path}:31: not a JSON object but an array" in error
    assert f"{path}:33: broken JSON at column 10" in error
    assert not list(tmp_path.glob("*data*"))
    assert main([*command, "--on-bad-line", "skip"]) == 0
    assert "dropped broken_json 1; dropped empty_text 1; dropped not_an_object 1" in capsys.readouterr().out
    assert TokenShards.open(tmp_path / "data").manifest["sources"][0]["dropped"]["empty_text"] == 1


def test_b70_a_byte_order_mark_gives_the_same_shards(tmp_path, rows):
    plain = rows("plain/rows.jsonl")
    (tmp_path / "marked").mkdir()
    (tmp_path / "marked/rows.jsonl").write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    fingerprints = {
        prepare(PrepareOptions((str(tmp_path / name / "rows.jsonl"),), "bpe:512"), tmp_path / f"{name}-data")[
            "fingerprint"
        ]
        for name in ("plain", "marked")
    }
    assert len(fingerprints) == 1


def test_b72_a_long_document_is_cut_with_a_notice_and_stays_in_one_split(tmp_path, rows):
    path = rows(extra=[json.dumps({"text": "A long line. " * 20_000})])
    options = PrepareOptions((str(path),), tokenizer="bpe:512", max_document_chars=50_000)
    manifest = prepare(options, tmp_path / "data")
    assert "documents longer than 50000 characters were cut into pieces" in manifest["notices"][0]
    pieces = {split: sum("A long line." in text for text in texts(tmp_path / "data", split)) for split in SPLITS}
    assert sorted(pieces.values()) == [0, 0, 6]


def test_b73_no_text_at_all_says_why(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": ""}\n{"text": "   "}\n{"text": null}\n')
    options = PrepareOptions((str(path),), on_bad_line="skip")
    with pytest.raises(UnspokenError, match=r"no text is left in .*rows\.jsonl \(empty_text 2, null 1\)"):
        prepare(options, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_one_text_file_is_enough(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n".join(document.text for document in stdlib_documents()[:20]))
    manifest = prepare(PrepareOptions((str(path),), tokenizer="bpe:512"), tmp_path / "data")
    assert [count["documents"] for count in manifest["splits"].values()] == [1, 1, 1]
    assert "each was cut" in manifest["notices"][0]
    whole = " ".join(" ".join(texts(tmp_path / "data", split)[0] for split in SPLITS).split())
    assert whole == " ".join(path.read_text().split())


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "_write_shards", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(STDLIB, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_unless_told_otherwise(tmp_path, capsys):
    command = ["data", "prepare", "--corpus", "stdlib", "--tokenizer", "bpe:300", "--out", str(tmp_path / "data")]
    assert main(command) == 0
    first = TokenShards.open(tmp_path / "data").fingerprint
    assert main([*command, "--seed", "3"]) == 2
    assert "exists; --overwrite replaces it" in capsys.readouterr().err
    assert TokenShards.open(tmp_path / "data").fingerprint == first
    assert main([*command, "--seed", "3", "--overwrite"]) == 0
    assert TokenShards.open(tmp_path / "data").fingerprint != first


def test_overwriting_spares_what_is_no_data_folder(tmp_path):
    (tmp_path / "thesis.txt").write_text("the only copy")
    for out in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(UsageError, match="no prepared data folder and will not be replaced"):
            prepare(STDLIB, out, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "the only copy"
    (tmp_path / "empty").mkdir()
    prepare(PrepareOptions(("stdlib",), "bpe:300"), tmp_path / "empty", overwrite=True)
    assert TokenShards.open(tmp_path / "empty").num_tokens > 0


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("cor", "unknown corpus 'cor' (did you mean 'core'?)"),
        ("./absent.jsonl", "'./absent.jsonl' does not exist"),
        (" ", "--corpus is empty"),
    ],
)
def test_a_corpus_that_cannot_be_is_wrong_usage(tmp_path, capsys, corpus, message):
    assert main(["data", "prepare", "--corpus", "stdlib", "--corpus", corpus, "--out", str(tmp_path / "data")]) == 2
    error = capsys.readouterr().err
    assert message in error and "reading" not in error, "a corpus was read before the next one was looked at"


@pytest.mark.parametrize("tokenizer", ["bpe:abc", "bpe:257", "bpe:²", "./absent"])
def test_a_tokenizer_that_cannot_be_is_refused_before_a_corpus_is_read(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(prepare_module, "open_corpus", lambda *args: pytest.fail("a corpus was opened"))
    with pytest.raises(UsageError):
        prepare(PrepareOptions(("stdlib",), tokenizer), tmp_path / "data")


def test_a_place_that_is_in_no_folder_is_wrong_usage(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is a file; give a folder"):
        prepare(STDLIB, tmp_path / "file" / "data")


def test_show_prints_counts_and_decoded_windows(folder, capsys):
    command = ["data", "show", str(folder), "--num-windows", "2", "--sequence-length", "64"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "stdlib" in out
    assert out.count("targets") == 2
    assert main(["data", "show", str(folder / "absent")]) == 2
