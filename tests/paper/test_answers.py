"""A study on a task: what its models are asked, and the table and plot of what they say right."""

import io
import json

import pytest
from rich.console import Console

from tests.paper.conftest import leave_results, read_results
from unspoken.paper import execution
from unspoken.paper.answers import answer_tables
from unspoken.paper.execution import Options, run_study
from unspoken.paper.report import markdown, write_results

LOSSES = {"plain": {"k=1": 1.5}, "recycler": {"k=1": 1.0, "k=2": 0.2, "k=3": 0.3, "exact": 0.9}}


@pytest.fixture
def on_task(values):
    """The study of conftest.py on running sums; arms without continuation."""
    values["base"]["data"] = {"task": {"name": "running_sum"}, "sequence_length": 32}
    values["arms"] = {name: values["arms"][name] for name in LOSSES}
    values["eval"] = {"num_passes": 3, "lengths": [16, 24], "samples": 50}
    values["plots"] = ["answers"]
    return values


@pytest.fixture
def results(on_task, make_plan):
    plan = make_plan(on_task)
    leave_results(plan, LOSSES)
    for run in plan.runs:
        path = plan.evaluate(run).output / "eval.json"
        found = json.loads(path.read_text())
        shares = {"16": 0.9 + 0.02 * run.seed, "24": 0.3}
        answers = {
            length: {"answer": {name: {"share": share} for name in LOSSES[run.arm]}} for length, share in shares.items()
        }
        found["task"] = {"settings": {"name": "running_sum", "max_length": 16}, "lengths": answers}
        path.write_text(json.dumps(found))
    return read_results(plan)


def test_a_model_is_asked_for_its_task_not_for_text(on_task, make_plan):
    plan = make_plan(on_task)
    words = " ".join(plan.evaluate(plan.runs[0]).words)
    assert "--length 16 --length 24 --num-passes 3 --samples 50" in words
    assert not {"--data", "--split", "--batch-size", "--max-sequences"} & set(words.split())
    assert not plan.arms.makes_text and all("path" not in run.values["data"] for run in plan.runs)


def test_the_table_has_the_passes_of_training_and_the_exact_recurrence(results):
    ((headers, rows),) = answer_tables(results[0])
    assert headers == ["arm", "passes", "length 16", "length 24"]
    assert [row[:2] for row in rows] == [["plain", "k=1"], ["recycler", "k=2"], ["recycler", "exact"]]
    assert rows[0][2:] == ["91.0 (90.0, 92.0)", "30.0 (30.0, 30.0)"]


def test_all_is_written(results, tmp_path):
    paths = {path.name: path for path in write_results(*results, tmp_path)}
    assert "Right answers by length" in paths["answers.svg"].read_text()
    assert "Right answers" in paths["report.html"].read_text()
    assert "| recycler | exact | 91.0 (90.0, 92.0) |" in markdown(results[0])
    assert json.loads(paths["results.json"].read_text())["runs"][0]["task"]["settings"]["max_length"] == 16


def test_it_is_printed(results, monkeypatch):
    monkeypatch.setattr(execution, "prepare_environment", lambda: None)
    monkeypatch.setattr(execution, "interrupt_on_signals", lambda: None)
    plan, console = results[0].plan, Console(file=io.StringIO(), width=120)
    assert run_study(plan.arms, plan.runs, [], Options(report_only=True), console) == 0
    assert "length 24" in console.file.getvalue() and "(90.0, 92.0)" in console.file.getvalue()


def test_a_study_on_text_has_no_such_table(values, make_plan):
    plan = make_plan(values)
    leave_results(plan, {"plain": {"k=1": 5.0}})
    assert answer_tables(read_results(plan)[0]) == []
