import json
import shlex
import shutil
import subprocess
import sys

import pytest

from tests import texts
from unspoken import cli
from unspoken.eval import run
from unspoken.eval.report import DEPTH_PLOT, PASSES_PLOT, _signed

SMALL = ["--sequence-length", "24", "--max-sequences", "12"]


def command(folder, data, *more):
    return ["eval", str(folder), "--data", str(data), *SMALL, *more]


def test_table_json_and_plots(model_folder, data_folder, capsys):
    assert cli.main(command(model_folder, data_folder, "--num-passes", "3", "--depth", "5")) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("k=1", "k=3", "exact", "perplexity", "bits/byte", "depth curve to k=5"))
    assert "k=4 " not in printed
    report = json.loads((model_folder / "eval.json").read_text())
    assert report["complete"] and list(report["results"]) == ["k=1", "k=2", "k=3", "exact"]
    assert len(report["depth_curve"]["losses"]) == 5
    assert report["depth_curve"]["losses"][1] == report["results"]["k=2"]["loss"]
    assert report["versions"]["transformers"] and report["model"]["weights_sha256"] and report["data"]["fingerprint"]
    assert f"{report['results']['exact']['loss']:.4f}" in printed
    rows = report["rows"]
    assert list(rows["nats"]) == ["k=1", "k=2", "k=3", "k=4", "k=5", "exact"] and len(rows["document"]) == 12
    assert sum(rows["nats"]["exact"]) / sum(rows["targets"]) == pytest.approx(report["results"]["exact"]["loss"])
    for plot in (PASSES_PLOT, DEPTH_PLOT):
        assert (model_folder / plot).read_bytes().startswith(b"\x89PNG")


def test_the_reported_command_gives_the_reported_numbers(model_folder, data_folder, tmp_path):
    out = tmp_path / "a folder"
    assert cli.main(command(model_folder, data_folder, "--split", "test", "--num-passes", "2", "--out", str(out))) == 0
    report = json.loads((out / "eval.json").read_text())
    first = shlex.split(report["command"])
    assert first[0] == "unspoken"
    shutil.rmtree(out)
    assert cli.main(first[1:]) == 0
    again = json.loads((out / "eval.json").read_text())
    assert again["results"] == report["results"] and again["command"] == report["command"]
    assert again["model"]["weights_sha256"] == report["model"]["weights_sha256"]


def test_an_interrupted_run_writes_a_part_marked_as_such(model_folder, data_folder, monkeypatch, capsys):
    def interrupted(model, scores, batch_size, progress):
        real_score(model, scores, batch_size, lambda tokens: None)
        scores.done[5:] = False
        raise KeyboardInterrupt

    real_score = run.score
    (model_folder / "eval.json").write_text("from before")
    monkeypatch.setattr(run, "score", interrupted)
    assert cli.main(command(model_folder, data_folder)) == 130
    captured = capsys.readouterr()
    assert "partial: 5 of 12 sequences" in captured.out and "interrupted: 5 of 12" in captured.err
    part = json.loads((model_folder / "eval.partial.json").read_text())
    assert part["complete"] is False and part["num_sequences"] == 5 and part["results"]
    assert (model_folder / "eval.json").read_text() == "from before"
    monkeypatch.setattr(run, "score", real_score)
    assert cli.main(command(model_folder, data_folder)) == 0
    assert not (model_folder / "eval.partial.json").exists()


def test_a_model_that_diverged_still_gives_json(tmp_path, shards, data_folder, capsys):
    model = texts.text_model()
    model.model.adapter.proj.weight.data.fill_(float("nan"))
    folder = texts.save(tmp_path / "diverged", model, shards.load_tokenizer())
    assert cli.main(command(folder, data_folder, "--num-passes", "2", "--no-exact")) == 0
    assert "nan" in capsys.readouterr().out
    text = (folder / "eval.json").read_text()
    results = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["results"]
    assert results["k=2"]["loss"] is None and results["k=1"]["loss"] > 0


def test_data_of_another_tokenizer_is_refused(tmp_path, data_folder, capsys):
    folder = texts.save(tmp_path / "other", texts.text_model(), texts.chat_tokenizer())
    assert cli.main(command(folder, data_folder)) == 1
    assert "another tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num-passes", "0"], "--num-passes is 0"),
        (["--depth", "-1"], "--depth is -1"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--sequence-length", "500"], "the model's context is 128"),
        (["--no-exakt"], "unrecognized arguments: --no-exakt"),
    ],
)
def test_wrong_options_exit_with_2(model_folder, data_folder, capsys, more, message):
    try:
        status = cli.main(command(model_folder, data_folder, *more))
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_what_is_not_there_is_named(tmp_path, data_folder, model_folder, capsys):
    assert cli.main(command(tmp_path / "nothing", data_folder, "--out", str(tmp_path / "out"))) == 2
    assert str(tmp_path / "nothing") in capsys.readouterr().err
    assert cli.main(command(tmp_path / "nothing", data_folder)) == 2
    assert f"no such folder: {tmp_path / 'nothing'}" in capsys.readouterr().err, "it was --out that was asked for"
    assert cli.main(command(model_folder, tmp_path / "nowhere")) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_told_before_anything_is_scored(model_folder, data_folder, monkeypatch):
    monkeypatch.setattr(run, "load_model", lambda *args: pytest.fail("the model was loaded"))
    place = model_folder / "config.json"
    assert cli.main(command(model_folder, data_folder, "--out", str(place))) == 2
    assert cli.main(command(model_folder, data_folder, "--out", str(place / "out"))) == 2


def test_a_difference_of_zero_has_no_sign():
    """It was -0.0000."""
    assert [_signed(value) for value in (-0.00004, 0.00004, -0.00006, 0.5)] == [
        "0.0000",
        "0.0000",
        "-0.0001",
        "+0.5000",
    ]
    assert "nan" in _signed(float("nan"))


def test_a_real_process_fails_without_a_traceback(tmp_path, data_folder):
    (tmp_path / "config.json").write_text('{"model_type": "unspoken_recicler"}')
    done = subprocess.run(
        [sys.executable, "-m", "unspoken.cli", *command(tmp_path, data_folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (1, 2)
    assert "unspoken: error:" in done.stderr and "Traceback" not in done.stderr
    assert str(tmp_path) in done.stderr and "unspoken_recicler" in done.stderr
