"""`unspoken train` as users meet it: the command, its files, its exit status."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from unspoken import cli
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
    assert "optim: {learning_rate: 0.003" in capsys.readouterr().out
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
    monkeypatch.setattr("unspoken.train.loop.TrainingLoop._until_signal", _stopped_by_a_signal)
    assert cli.main(command) == 130
    monkeypatch.undo()
    assert cli.main([*command, "--resume", "--optim.learning_rate", "1e-3"]) == 2
    assert "optim.learning_rate is 0.001" in capsys.readouterr().err
    assert cli.main([*command, "--resume", "--train.save_every", "5"]) == 0


def _stopped_by_a_signal(loop):
    step = loop._step
    loop._step = lambda: (setattr(loop, "stop_signal", 15), step())[1]
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
    ],
)
def test_what_cannot_be_right_is_refused_before_a_step(command, override, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main([*command, *override]) in (1, 2)
    captured = capsys.readouterr()
    assert message in captured.err
    assert not list(tmp_path.glob("run/*"))


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
    monkeypatch.setattr("unspoken.train.loop.TrainingLoop._until_signal", _stopped_by_a_signal)
    assert cli.main(command) == 130
    (tmp_path / "run" / "resolved.yaml").write_text(content)
    assert cli.main([*command, "--resume"]) == 1
    assert "resolved.yaml" in capsys.readouterr().err


def test_a_place_that_is_none_is_refused(command, tmp_path, capsys):
    (tmp_path / "file").touch()
    for place, message in (("file", "is a file"), ("file/x", "cannot make")):
        assert cli.main([*command, "--run.out", str(tmp_path / place)]) == 2
        assert message in capsys.readouterr().err


def test_another_model_s_checkpoint_in_the_folder_is_refused(command, tmp_path, capsys, monkeypatch):
    """It once became the run: the model was built as the checkpoint said."""
    monkeypatch.setattr("unspoken.train.loop.TrainingLoop._until_signal", _stopped_by_a_signal)
    other = [*command, "--run.out", str(tmp_path / "other"), "--model.backbone.hidden_size", "48"]
    assert cli.main(command) == cli.main(other) == 130
    (foreign,) = (tmp_path / "other" / "checkpoints").iterdir()
    foreign.rename(tmp_path / "run" / "checkpoints" / "step-00000099")
    assert cli.main([*command, "--resume"]) == 1
    message = "step-00000099 was written for another model: its hidden_size is 48, the recipe's 32"
    assert message in capsys.readouterr().err
