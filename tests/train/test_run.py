"""`unspoken train` as users meet it: the command, its files, its exit status."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from filelock import FileLock
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from unspoken import cli
from unspoken.data.prepare import PrepareOptions, prepare
from unspoken.train.metrics import read_metrics

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.fixture
def command(values, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return ["train", str(path)]


@pytest.fixture
def start():
    """Starts commands in processes that do not outlive the test."""
    processes = []

    def start(command: list[str]) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "unspoken.cli", *command],
            env=ENVIRONMENT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_an_unknown_key_exits_2_at_once_with_a_suggestion(command, start, tmp_path):
    process = start([*command, "--optim.learnign_rate", "1e-3"])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "optim.learnign_rate: unknown key (did you mean 'learning_rate'?)" in err
    assert "Traceback" not in out + err
    assert not (tmp_path / "run").exists()


def test_a_run_from_recipe_to_model(command, tmp_path, capsys):
    assert cli.main([*command, "--train.max_steps=3", "--train.third_pass_fraction", "0"]) == 0
    run = tmp_path / "run"
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    ids = tokenizer("The module", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] == ids.input_ids.shape[1] + 3
    assert model.config.pass_loss_reduction == "mean"
    resolved = yaml.safe_load((run / "resolved.yaml").read_text())
    assert resolved["train"]["max_steps"] == 3
    assert resolved["model"]["num_train_passes"] == 2
    assert resolved["made_with"]["torch"] and len(resolved["made_with"]["data_fingerprint"]) == 64
    assert f"{run}: recycler, 29,248 parameters, 3 steps of 132 tokens on cpu" in capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    num_parameters = sum(p.numel() for p in model.parameters())
    assert summary["train_flops"] == 6 * num_parameters * 2 * (3 * 4 * 33)
    # The folder is taken now; a finished run has nothing to resume; its resolved recipe trains anew elsewhere.
    assert cli.main(command) == 2
    assert cli.main([*command, "--resume"]) == 0
    again = [str(run / "resolved.yaml"), "--run.out", str(tmp_path / "again")]
    assert cli.main(["train", *again]) == 0
    losses = [[row.get("loss") for row in read_metrics(folder)] for folder in (run, tmp_path / "again")]
    assert losses[0] == losses[1]


def test_ctrl_c_saves_and_says_how_to_go_on(command, start, tmp_path):
    """The printed command, as it is, finishes the run."""
    process = start([*command, "--train.max_steps", "100000", "--train.log_every", "1"])
    log = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (log.exists() and log.read_text().count('"train"') >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    resume = out.strip().splitlines()[-1].split()
    assert resume == ["unspoken", "train", str(tmp_path / "run" / "resolved.yaml"), "--resume"]
    stopped_at = max(row["step"] for row in read_metrics(tmp_path / "run"))
    # A hundred thousand steps are too many to wait for; what began with them cannot end earlier, so they are rewritten.
    resolved = tmp_path / "run" / "resolved.yaml"
    resolved.write_text(resolved.read_text().replace("max_steps: 100000", f"max_steps: {stopped_at + 2}"))
    assert cli.main(resume[1:]) == 0
    steps = [row["step"] for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    assert steps == list(range(1, stopped_at + 3))


def test_a_resumed_run_cannot_become_another_one(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("unspoken.train.loop.stop_on_signal", _stopped_by_a_signal)
    assert cli.main(command) == 130
    monkeypatch.undo()
    assert cli.main([*command, "--resume", "--optim.learning_rate", "1e-3"]) == 2
    assert "optim.learning_rate is 0.001" in capsys.readouterr().err
    for key, value in (("pass_loss_reduction", "sum"), ("num_train_passes", "3"), ("feedback", "gated")):
        capsys.readouterr()
        assert cli.main([*command, "--resume", f"--model.{key}", value]) == 2
        assert key in capsys.readouterr().err
    assert cli.main([*command, "--resume", "--train.save_every", "5"]) == 0


def _stopped_by_a_signal(say, stop):
    """One that comes before the first step."""
    stop.number = 15
    return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["--model.backbone.hiden_size", "64"], r"model.backbone.hiden_size: llama has no such key (did you mean"),
        (["--model.backbone.model_type", "lama"], "unknown family 'lama' (did you mean 'llama'?)"),
        (["--model.backbone.hidden_size", "33"], "model.backbone: "),
        (["--model.backbone.vocab_size", "10"], "the model has 10 embedding rows"),
        (["--data.path", "/nowhere"], "/nowhere does not exist"),
        (["--data.sequence_length", "4096"], "max_position_embeddings, 2048"),
        (["--run.report_to", "tensorboard"], "pip install tensorboard"),
        (["--run.device", "cudda"], "run.device: 'cudda'"),
        (["--train.parallel", "fsdp"], "train.parallel: fsdp needs several processes"),
    ],
)
def test_what_cannot_be_right_is_refused_before_a_step(command, override, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main([*command, *override]) in (1, 2)
    captured = capsys.readouterr()
    assert message in captured.err
    assert not (tmp_path / "run").exists()


def test_continued_pretraining_introduces_recycling_into_a_plain_model(command, values, tmp_path):
    backbone = values["model"]["backbone"]
    plain = {**values, "model": {"method": "vanilla", "backbone": backbone}, "train": {"max_steps": 3, "batch_size": 4}}
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(plain))
    assert cli.main(["train", str(tmp_path / "plain.yaml")]) == 0
    later = {
        **plain,
        "run": {"out": str(tmp_path / "later")},
        "model": {"from_pretrained": str(tmp_path / "run" / "model"), "method": "recycler"},
    }
    (tmp_path / "later.yaml").write_text(yaml.safe_dump(later))
    assert cli.main(["train", str(tmp_path / "later.yaml")]) == 0
    before = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "eval"][-1]
    first = read_metrics(tmp_path / "later")[0]
    assert first["step"] == 0
    assert first["loss_pass_1"] == first["loss_pass_2"] == before["loss_pass_1"]


@pytest.mark.parametrize("content", ["", "text", "[1, 2"])
def test_a_resolved_recipe_that_holds_none_is_named(command, tmp_path, capsys, monkeypatch, content):
    monkeypatch.setattr("unspoken.train.loop.stop_on_signal", _stopped_by_a_signal)
    assert cli.main(command) == 130
    (tmp_path / "run" / "resolved.yaml").write_text(content)
    assert cli.main([*command, "--resume"]) == 1
    assert "resolved.yaml" in capsys.readouterr().err


def test_a_place_that_is_none_is_refused(command, tmp_path, capsys):
    (tmp_path / "file").touch()
    for place, message in (("file", "is a file"), ("file/x", "cannot write into")):
        assert cli.main([*command, "--run.out", str(tmp_path / place)]) == 2
        assert message in capsys.readouterr().err


def _stop_after_a_step(command, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("unspoken.train.loop.stop_on_signal", _stopped_by_a_signal)
        assert cli.main(command) == 130


@pytest.mark.parametrize("other", [["--run.seed", "1"], ["--model.backbone.hidden_size", "48"]])
def test_another_run_s_checkpoint_in_the_folder_is_refused(command, tmp_path, capsys, monkeypatch, other):
    """One of the same shapes, of another seed, once became the run."""
    _stop_after_a_step(command, monkeypatch)
    assert cli.main([*command, "--run.out", str(tmp_path / "other"), *other]) == 0
    foreign = tmp_path / "run" / "checkpoints" / "step-00000007"
    (tmp_path / "other" / "checkpoints" / foreign.name).rename(foreign)
    assert cli.main([*command, "--resume"]) == 1
    assert f"{foreign} was written by another run" in capsys.readouterr().err
    foreign.rename(foreign.with_name("step-00000099"))
    assert cli.main([*command, "--resume"]) == 1
    assert "step-00000099 holds step 7; give the folder its name back" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_whole_is_named_and_left_alone(command, tmp_path, capsys, monkeypatch):
    _stop_after_a_step(command, monkeypatch)
    (whole,) = (tmp_path / "run" / "checkpoints").iterdir()
    cut = whole.with_name("step-00000005")
    shutil.copytree(whole, cut)
    next(cut.glob("*.safetensors")).write_bytes(b"half")
    assert cli.main([*command, "--resume"]) == 0
    assert f"{cut} is not whole, so it is left alone\nresuming from {whole}" in capsys.readouterr().out


def test_two_runs_cannot_share_a_folder(command, tmp_path, capsys, monkeypatch):
    _stop_after_a_step(command, monkeypatch)
    with FileLock(tmp_path / "run" / ".lock"):
        assert cli.main([*command, "--resume"]) == 2
        assert "another process is training into" in capsys.readouterr().err
    assert cli.main([*command, "--resume"]) == 0


def test_a_run_whose_model_could_not_be_written_is_not_lost(command, tmp_path, capsys, monkeypatch):
    """The disk is full when the last step is done: its checkpoint is there, and --resume writes the model."""
    with monkeypatch.context() as patch:
        patch.setattr("unspoken.models.convert.save", _fails_for_want_of_space)
        assert cli.main(command) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert cli.main([*command, "--resume"]) == 0
    run = tmp_path / "run"
    assert "resuming from" in (told := capsys.readouterr()).out and "step-00000007" in told.out
    assert "step      7" not in told.err, "no step was made again"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["final"]["eval"]["step"] == 7
    assert cli.main(["export", str(run), "--out", str(tmp_path / "newest")]) == 0
    exported, trained = (load_file(folder / "model.safetensors") for folder in (tmp_path / "newest", run / "model"))
    assert exported.keys() == trained.keys() and all(torch.equal(exported[name], trained[name]) for name in trained)


def _fails_for_want_of_space(*_args, **_options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_data_that_changed_are_not_resumed_on(command, tmp_path, capsys, monkeypatch, data_folder):
    _stop_after_a_step(command, monkeypatch)
    prepare(PrepareOptions(("stdlib",), tokenizer="bpe:300", seed=1), tmp_path / "data")
    assert cli.main([*command, "--resume", "--data.path", str(tmp_path / "data")]) == 2
    assert "the data are no longer those" in capsys.readouterr().err
    shutil.copytree(data_folder, tmp_path / "moved")
    assert cli.main([*command, "--resume", "--data.path", str(tmp_path / "moved")]) == 0
