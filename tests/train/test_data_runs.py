"""Whole runs on a mixture and on a task: stopped and resumed, they are the run without a pause, or refused."""

import contextlib
import json
import shutil

import pytest
import yaml
from transformers import AutoTokenizer

from unspoken import cli
from unspoken.data.tasks import parse_task
from unspoken.train.metrics import read_metrics

TASK = {"name": "running_sum", "modulus": 3, "min_length": 2, "max_length": 8}


@pytest.fixture
def data(request, data_folder, tmp_path):
    if request.param == "task":
        return {"task": dict(TASK), "sequence_length": 33}
    shutil.copytree(data_folder, tmp_path / "copy")
    sources = [{"path": str(data_folder), "weight": 3}, {"path": str(tmp_path / "copy"), "weight": 1}]
    return {"sources": sources, "sequence_length": 33}


@pytest.fixture
def command(values, tmp_path):
    """The command of a recipe with that data, in that run folder."""

    def command(data, name="run") -> list[str]:
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**values, "data": data, "run": {"out": str(tmp_path / name)}}))
        return ["train", str(path)]

    return command


def stop_after_one_step(say, stop):
    """A signal that comes before the first step."""
    stop.number = 15
    return contextlib.nullcontext()


@pytest.mark.parametrize("data", ["sources", "task"], indirect=True)
def test_b80_a_resumed_run_is_the_run_without_a_pause(data, command, tmp_path, monkeypatch):
    assert cli.main(command(data, "straight")) == 0
    with monkeypatch.context() as patched:
        patched.setattr("unspoken.train.loop.stop_on_signal", stop_after_one_step)
        assert cli.main(command(data)) == 130
        assert cli.main([*command(data), "--resume"]) == 130
    assert cli.main([*command(data), "--resume"]) == 0
    curves = [[(row["step"], row.get("loss")) for row in read_metrics(tmp_path / name)] for name in ("straight", "run")]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("data", ["sources"], indirect=True)
def test_other_weights_are_another_run(data, command, capsys, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("unspoken.train.loop.stop_on_signal", stop_after_one_step)
        assert cli.main(command(data)) == 130
    data["sources"][1]["weight"] = 2
    assert cli.main([*command(data), "--resume"]) == 2
    assert "data.sources is [{'path': " in capsys.readouterr().err


def test_a_model_of_a_task_from_recipe_to_right_answers(command, tmp_path, capsys, monkeypatch):
    data = {"task": TASK, "sequence_length": 33}
    with monkeypatch.context() as patched:
        patched.setattr("unspoken.train.loop.stop_on_signal", stop_after_one_step)
        assert cli.main(command(data)) == 130
    assert cli.main([*command(data), "--resume", "--data.task.modulus", "4"]) == 2
    assert "data.task.modulus is 4, but" in capsys.readouterr().err
    assert cli.main([*command(data), "--resume"]) == 0
    folder = tmp_path / "run" / "model"
    resolved = yaml.safe_load((tmp_path / "run" / "resolved.yaml").read_text())
    assert resolved["made_with"]["data_fingerprint"] == parse_task(TASK).fingerprint()
    assert AutoTokenizer.from_pretrained(folder)("2 0 1").input_ids == [4, 2, 3]
    assert cli.main(["eval", str(folder), "--samples", "30", "--num-passes", "2"]) == 0
    assert list(json.loads((folder / "eval.json").read_text())["task"]["lengths"]) == ["8", "12", "16", "32"]
