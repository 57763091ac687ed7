"""Several processes from the command line, and what happens when one of them is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from unspoken import cli
from unspoken.train.checkpoint import checkpoints

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "unspoken.cli", "launch", "--processes", "2"]


@pytest.fixture
def recipe(values, tmp_path) -> Path:
    values["train"] |= {"max_steps": 6, "batch_size": 4, "eval_every": 3, "save_every": 2, "log_every": 1}
    values["model"]["backbone"]["attention_dropout"] = 0.1
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def _start(recipe: Path, out: Path, *options: str, restarts: int = 0) -> subprocess.Popen:
    command = [*LAUNCH, "--max-restarts", str(restarts), "--", "train", str(recipe), "--run.out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def _weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def test_a_sharded_run_from_recipe_to_model(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    process = _start(recipe, out, "--train.parallel", "fsdp", "--train.keep_best", "true")
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert output.count("of 132 tokens on 2 processes") == output.count("tokens in") == 1  # one process speaks
    assert errors.count("step      6/6") == 1
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["processes"]) == ("finished", 6, 2)
    assert summary["num_parameters"] == sum(tensor.numel() for tensor in _weights(out).values())
    assert cli.main(["export", str(out), "--checkpoint", "best", "--out", str(tmp_path / "best")]) == 0
    best = summary["best"]["step"]
    assert f"step-{best:08d}" in capsys.readouterr().out
    exported = load_file(tmp_path / "best" / "model.safetensors")
    assert exported.keys() == _weights(out).keys()
    assert best != 6 or all(torch.equal(tensor, exported[name]) for name, tensor in _weights(out).items())
    assert (tmp_path / "best" / "tokenizer.json").is_file()
    assert cli.main(["export", str(out), "--checkpoint", "1", "--out", str(tmp_path / "no")]) == 1
    assert "has no checkpoint of step 1, but of steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "x"], "launch runs `train`"),
        ([], "launch runs `train`"),
        (["train", "RECIPE", "--train.max_step", "3"], "did you mean 'max_steps'"),
        (["train", "RECIPE", "--run.out", "FULL"], "is not empty"),
        (["train", "RECIPE", "--train.batch_size", "3"], "batch_size 3 is not a multiple of the 2 processes"),
    ],
)
def test_what_every_process_would_refuse_is_refused_once(recipe, words, message, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    names = {"RECIPE": str(recipe), "FULL": str(tmp_path / "full")}
    assert cli.main(["launch", "--processes", "2", "--", *(names.get(word, word) for word in words)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_what_only_the_processes_can_see_is_not_tried_again(recipe, tmp_path):
    process = _start(recipe, tmp_path / "out", "--data.path", str(tmp_path / "nowhere"), restarts=1)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 2, errors
    assert errors.count("nowhere does not exist") == errors.count("not tried again") == 1
    assert len(errors.splitlines()) <= 4, errors  # with the advice, and nothing of torchrun's
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["foo", "foo:", "foo:port"])
def test_a_rendezvous_that_is_no_address_is_refused(recipe, address, capsys):
    assert cli.main(["launch", "--processes", "2", "--rendezvous", address, "--", "train", str(recipe)]) == 2
    assert "must be HOST:PORT" in capsys.readouterr().err


def _worker(launcher: int, rank: int) -> int:
    """The process id of a rank, found by its environment."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != launcher:
            try:
                words = (folder / "environ").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            if parent == launcher and f"RANK={rank}".encode() in words:
                return int(folder.name)
    raise AssertionError("no such process")


def _wait_for_step(out: Path, step: int) -> None:
    limit = time.monotonic() + 150
    while not any(int(path.name.removeprefix("step-")) >= step for path in checkpoints(out)):
        assert time.monotonic() < limit, "no checkpoint came"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_killed_process_changes_no_bit(recipe, tmp_path, engine, number):
    """One process is killed (or told to stop) in the middle; the run starts again by itself and ends as if not."""
    options = ["--train.parallel", engine, "--train.max_steps", "60", "--train.eval_every", "0"]
    whole = _start(recipe, tmp_path / "whole", *options)
    assert whole.wait(300) == 0
    killed = _start(recipe, tmp_path / "killed", *options, restarts=3)
    _wait_for_step(tmp_path / "killed", 10)
    os.kill(_worker(killed.pid, rank=1), number)
    output, errors = killed.communicate(timeout=300)
    assert killed.returncode == 0, errors
    assert "resuming from" in output
    assert "Traceback" not in errors
    expected, actual = _weights(tmp_path / "whole"), _weights(tmp_path / "killed")
    assert all(torch.equal(tensor, actual[name]) for name, tensor in expected.items())


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_and_says_so(recipe, tmp_path):
    out = tmp_path / "out"
    process = _start(recipe, out, "--train.max_steps", "2000", "--train.eval_every", "0", restarts=3)
    _wait_for_step(out, 4)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert "go on with" in output
    assert "Traceback" not in errors and "elastic" not in errors
    step = json.loads((out / "summary.json").read_text())["step"]
    assert int(checkpoints(out)[0].name.removeprefix("step-")) == step


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_all_processes_and_is_not_tried_again(recipe, tmp_path):
    process = _start(
        recipe, tmp_path / "out", "--optim.learning_rate", "1e30", "--optim.max_grad_norm", "1e30", restarts=2
    )
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert errors.count("not a finite number: loss by pass") == 1
    assert errors.count("not tried again") == 2, "once for each restart, and nothing is trained in it"
    assert "Traceback" not in errors
    assert len(list((tmp_path / "out").glob("not-finite-step-*-process-*.safetensors"))) == 2
