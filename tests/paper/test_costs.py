"""The table of costs, and comparisons of methods, which are studies of their own folder."""

import json
from pathlib import Path

import pytest

from tests.paper.conftest import leave_results, read_results
from unspoken import cli
from unspoken.paper.arms import Arms
from unspoken.paper.costs import HEADERS, cost_tables
from unspoken.paper.report import markdown
from unspoken.paper.study import known_studies, load_study
from unspoken.train.recipe import FIELDS_OF


@pytest.fixture
def results(values, make_plan):
    plan = make_plan(values | {"costs": True})
    leave_results(plan, {"plain": {"k=1": 5.0}, "recycler": {"k=1": 4.9, "k=2": 4.8}})
    for run in plan.runs:
        path = plan.train(run).output / "summary.json"
        if path.is_file():
            more = {"peak_memory_bytes": (1 + run.seed) * 2**30, "train_seconds": 7.0 + run.seed}
            path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return read_results(plan)[0]


def test_what_runs_cost_is_averaged_over_seeds(results):
    ((headers, rows),) = cost_tables(results)
    assert headers == list(HEADERS)
    # These folders hold no model, so what is counted from its modules is left out.
    assert rows[0] == ["plain", "1,234", "", "8", "4", "1.50", "", ""]
    assert "| plain | 1,234 |" in markdown(results)


def test_a_study_that_does_not_ask_has_no_such_table(values, make_plan):
    plan = make_plan(values)
    leave_results(plan, {"plain": {"k=1": 5.0}})
    assert cost_tables(read_results(plan)[0]) == []


def test_comparisons_have_every_method_and_can_be_named(tmp_path, capsys):
    assert "small" in known_studies(comparisons=True)
    assert "small" not in known_studies()
    study = load_study("small")
    assert study.name == "small"
    assert load_study("recipes/compare/small.yaml").path.resolve() == study.path.resolve()
    runs = Arms(study, tmp_path).runs(list(study.file.arms), [0])
    assert {run.values["model"]["method"] for run in runs} == set(FIELDS_OF)
    assert cli.main(["compare", "--list"]) == 0
    assert "small" in capsys.readouterr().out


def test_a_comparison_goes_to_its_own_folder(monkeypatch, tmp_path):
    from unspoken.paper import execution

    seen = []
    monkeypatch.setattr(execution, "run_study", lambda arms, *args: seen.append(arms.out) or 0)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", "small"]) == 0
    assert cli.main(["compare", "small", "--quick"]) == 0
    assert seen == [Path("runs/compare/small"), Path("runs/compare/small-quick")]
