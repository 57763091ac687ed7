"""A study with latent steps: the table of how deep its arms went, the plot of how they came there."""

import json

import pytest

from tests.paper.conftest import leave_results, read_results
from unspoken.paper.arms import Arms
from unspoken.paper.latent import latent_tables
from unspoken.paper.report import markdown, write_results

LOSSES = {"plain": {"k=1": 5.0}, "adaptive": {"k=1": 4.9}}


@pytest.fixture
def thinking(values):
    """The study of conftest.py with one adaptive arm."""
    values["base"]["model"] = {"method": "adaptive", "max_latent_steps": 4, "backbone": {"model_type": "llama"}}
    values["base"]["train"].pop("third_pass_fraction")
    values["arms"] = {"plain": {"model.method": "vanilla"}, "adaptive": {}}
    values["compare"] = {"equal tokens": "adaptive - plain"}
    values["plots"] = ["latent"]
    return values


@pytest.fixture
def results(thinking, make_plan):
    plan = make_plan(thinking)
    leave_results(plan, LOSSES)
    for run in (run for run in plan.runs if run.arm == "adaptive"):
        path = plan.evaluate(run).output / "eval.json"
        found = json.loads(path.read_text())
        found["results"]["k=1"] |= {"latent_length": 1.0 + run.seed, "prune_ratio": 0.75 - 0.25 * run.seed}
        path.write_text(json.dumps(found))
        rows = [
            {"step": i, "kind": "train", "tokens": i * 100, "latent_length": 3.0 - i / 10, "gate_at_cut": i / 100}
            for i in range(21)
        ]
        (plan.train(run).output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_results(plan)


def test_the_table_has_the_arms_that_think(results):
    ((headers, rows),) = latent_tables(results[0])
    assert headers[:4] == ["arm", "latent steps/token", "pruned", "at the end of training"]
    # The last tenth of 2,000 tokens: rows of 1,800, 1,900 and 2,000.
    assert rows == [
        ["adaptive", "1.50 (1.00, 2.00)", "62% (75%, 50%)", "1.10 (1.10, 1.10)", "0.190 (0.190, 0.190)", ""]
    ]


def test_all_is_written(results, tmp_path):
    paths = {path.name: path for path in write_results(*results, tmp_path)}
    assert "Latent steps while it learns" in paths["latent.svg"].read_text()
    assert "Latent steps" in paths["report.html"].read_text()
    assert "| adaptive | 1.50 (1.00, 2.00) |" in markdown(results[0])


def test_without_latent_steps_there_is_neither(values, make_plan):
    plan = make_plan(values | {"plots": ["latent"]})
    leave_results(plan, {"plain": {"k=1": 5.0}})
    results, pipeline = read_results(plan)
    assert latent_tables(results) == []
    assert "latent.svg" not in [path.name for path in write_results(results, pipeline, plan.out)]


def test_what_a_token_costs_is_known_before_it_runs(thinking, write_study, tmp_path):
    """For the time that is left; an adaptive run has one pass, whatever a Recycler has."""
    thinking["arms"] |= {
        "fixed": {"model.router": "none"},
        "both": {"model.method": "adaptive_recycler"},
        "recycler": {"model.method": "recycler"},
        "looped": {"model.method": "looped"},
        "ponder2": {"model.method": "ponder2"},
    }
    arms = Arms(write_study(thinking), tmp_path / "out")
    found = {run.arm: (run.num_passes, run.runs_per_token) for run in arms.runs(list(thinking["arms"]), [0])}
    assert found == {
        "plain": (1, 1),
        "adaptive": (1, 3),
        "fixed": (1, 5),
        "both": (2, 6),
        "recycler": (2, 2),
        "looped": (1, 4),
        "ponder2": (1, 8),
    }
