"""What a study found, from folders with invented numbers: means, both spreads, what is missing, the files."""

import io
import json

import pytest
from rich.console import Console

from tests.paper.conftest import leave_results, read_results
from unspoken.analysis.compare import Outcome
from unspoken.paper import execution
from unspoken.paper.execution import Options, run_study
from unspoken.paper.pipeline import Pipeline
from unspoken.paper.report import loss_rows, markdown, write_results
from unspoken.paper.results import Results

LOSSES = {
    "plain": {"k=1": 5.0},
    "plain-2x": {"k=1": 4.6},
    "recycler": {"k=1": 5.0, "k=2": 4.92, "k=3": 4.91, "exact": 4.9},
    "later": {"k=1": 4.8, "k=2": 4.7, "k=3": 4.7, "exact": 4.7},
}


@pytest.fixture
def make_results(make_plan):
    def make(values, losses=LOSSES, failed=()) -> tuple[Results, Pipeline]:
        plan = make_plan(values)
        leave_results(plan, losses, failed)
        return read_results(plan)

    return make


def test_differences_have_both_spreads(values, make_results):
    results, _ = make_results(values)
    tokens, feedback = results.found
    assert tokens.difference.mean.mean == pytest.approx(-0.1)  # the exact recurrence minus the plain model's only pass
    assert feedback.difference.mean.mean == pytest.approx(-0.1)
    assert list(tokens.difference.by_seed) == [0, 1] and tokens.difference.deviation == pytest.approx(0, abs=1e-9)
    assert tokens.difference.outcome is Outcome.BETTER
    _, rows = loss_rows(results)
    assert rows[0][:1] + rows[0][5:6] == ["plain", "5.1050"]  # 5.0 and 5.01, and 0.1 of the pieces' own


def test_costs_are_those_of_all_stages(values, make_results):
    results, _ = make_results(values)
    by_arm = {row["arm"]: row for row in results.as_dict()["arms"]}
    assert by_arm["recycler"]["train_flops"] == 1.8e10 and by_arm["plain"]["train_flops"] == 9e9
    assert by_arm["later"]["train_flops"] == 1.8e10 + 9e9 and by_arm["later"]["tokens"] == 6000
    assert by_arm["later"]["counted_flops"] is None  # these folders have no model


def test_seeds_that_do_not_agree_leave_it_open(values, make_results, make_plan):
    results, _ = make_results(values)
    evaluation = next(r for r in results.all if r.run.name == "recycler-s1").evaluation
    evaluation["rows"]["nats"]["exact"] = [nats + 1.5 for nats in evaluation["rows"]["nats"]["exact"]]
    found = results.found[0].difference
    assert found.by_seed[0].mean < 0 < found.by_seed[1].mean and found.outcome is Outcome.UNCLEAR
    assert found.deviation == pytest.approx(0.15 / 2**0.5)


def test_what_is_not_there_is_named_and_the_rest_compared(values, make_results):
    results, _ = make_results(values, failed=("plain-s1",))
    written = results.as_dict()
    status = {run["run"]: run["status"] for run in written["runs"]}
    assert status["plain-s1"] == "not run" and status["plain-s0"] == "finished"
    assert list(results.found[0].difference.by_seed) == [0]  # the seed that both have


def test_an_arm_without_results(values, make_results):
    results, _ = make_results(values, {name: LOSSES[name] for name in ("plain", "later")})
    assert results.found[0].missing == "recycler has no finished run" and "recycler-s0: not run" in markdown(results)


def test_a_model_that_diverged_does_not_end_the_study(values, make_results):
    results, _ = make_results(values)
    evaluation = next(r for r in results.all if r.run.name == "recycler-s0").evaluation
    evaluation["rows"]["nats"]["exact"][0] = None
    evaluation["results"]["exact"]["loss"] = None
    assert "it has diverged" in results.found[0].missing and results.found[0].difference is None
    assert "recycler" in [row[0] for row in loss_rows(results)[1]] and "diverged" in markdown(results)


def test_all_is_written(values, make_results, tmp_path):
    values |= {"plots": ["differences", "depth", "cost", "curves"], "paper": {"said": "<0.033>"}, "baseline": "plain"}
    results, pipeline = make_results(values)
    paths = {path.name: path for path in write_results(results, pipeline, tmp_path)}
    assert {"results.json", "table.md", "report.html", "differences.svg", "depth.svg", "cost.svg"} <= set(paths)
    written = json.loads(paths["results.json"].read_text())
    assert len(written["runs"]) == 8 and written["paper"] == {"said": "<0.033>"} and not written["is_quick"]
    (comparison,) = [one for one in written["comparisons"] if one["name"] == "equal tokens"]
    assert comparison["by_seed"]["1"]["difference"] == pytest.approx(-0.1) and len(comparison["interval"]) == 2
    html = paths["report.html"].read_text()
    assert "&lt;0.033&gt;" in html and "recycler is better" in html and "<script" not in html
    assert paths["depth.svg"].read_text().startswith("<svg") and "xmlns=" in paths["depth.svg"].read_text()[:300]
    assert "| equal tokens | recycler - plain | -0.100 [" in paths["table.md"].read_text()


def test_report_only_runs_nothing(values, make_results, make_plan, monkeypatch):
    monkeypatch.setattr(execution, "prepare_environment", lambda: None)
    monkeypatch.setattr(execution, "interrupt_on_signals", lambda: None)
    make_results(values)
    plan, console = make_plan(values), Console(file=io.StringIO(), width=120)
    assert run_study(plan.arms, plan.runs, [], Options(report_only=True), console) == 0
    assert (plan.out / "report.html").is_file() and "equal tokens" in console.file.getvalue()
