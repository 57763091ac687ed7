"""Runs that were made before: never deleted for other settings unasked, and shared between studies."""

import io
import shutil

import pytest
import yaml
from rich.console import Console

from tests.paper.conftest import leave_results
from unspoken.errors import UsageError
from unspoken.paper import reuse
from unspoken.paper.pipeline import Pipeline
from unspoken.paper.plan import Plan
from unspoken.paper.reuse import adopt, refuse_other_settings

LOSSES = {name: {"k=1": 5.0} for name in ("plain", "plain-2x", "recycler", "later")}


class Shards:
    fingerprint = "f"


@pytest.fixture
def made(values, make_plan, tmp_path, monkeypatch):
    """A finished study in tmp_path/runs/first."""
    plan = make_plan(values)
    plan.out = plan.arms.out = tmp_path / "runs" / "first"
    plan = Plan(plan.arms, plan.arms.runs(list(values["arms"]), (0,)))
    leave_results(plan, LOSSES)
    for run in plan.runs:
        folder = plan.out / "runs" / run.name
        resolved = yaml.safe_load((folder / "resolved.yaml").read_text()) | {"made_with": {"data_fingerprint": "f"}}
        (folder / "resolved.yaml").write_text(yaml.safe_dump(resolved))
        summary = (folder / "summary.json").read_text()
        (folder / "summary.json").write_text(summary.replace("{", '{"status": "finished", ', 1))
        (folder / "checkpoints").mkdir()
    monkeypatch.setattr(reuse.TokenShards, "open", lambda *_: Shards())
    return plan


def pipeline_of(plan: Plan) -> Pipeline:
    pipeline = Pipeline(plan.out, plan.stages(1), ["unspoken"], Console(file=io.StringIO()))
    pipeline.prepare()
    return pipeline


def test_a_run_with_other_settings_is_not_deleted_unasked(made, values):
    refuse_other_settings(made)
    made.runs[0].values["optim"]["learning_rate"] = 1e-3
    with pytest.raises(UsageError, match=r"plain-s0 was made with other settings \(optim.learning_rate: '3e-3', now"):
        refuse_other_settings(made)
    shutil.rmtree(made.out / "runs" / "plain-s0")
    refuse_other_settings(made)


def test_the_same_run_of_another_study_is_copied(made, values, make_plan, tmp_path):
    values["arms"]["recycler"]["optim.learning_rate"] = 1e-3  # another run than the first study's
    values["arms"]["baseline"] = values["arms"].pop("plain")  # the same run under another name
    values["arms"]["later"]["after"] = "baseline"
    values["compare"] = {}
    plan = make_plan(values, seeds=(0,))
    plan.out = plan.arms.out = tmp_path / "runs" / "second"
    plan = Plan(plan.arms, plan.arms.runs(list(values["arms"]), (0,)))
    plan.out.mkdir()
    pipeline = pipeline_of(plan)
    plan.write_recipes()
    assert sorted(adopt(plan, pipeline)) == ["baseline-s0", "plain-2x-s0"]
    assert (plan.out / "runs" / "baseline-s0" / "summary.json").is_file()
    assert not (plan.out / "runs" / "baseline-s0" / "checkpoints").exists()
    record = pipeline.record("baseline-s0")
    assert record.status == "done" and record.cpu_seconds == 2.0 and "first/runs/plain-s0" in record.note
    run = next(run for run in plan.runs if run.name == "baseline-s0")
    assert pipeline.is_done(plan.train(run)) and adopt(plan, pipeline) == []


def test_another_text_is_another_run(made, values, make_plan, tmp_path, monkeypatch):
    plan = make_plan(values, seeds=(0,))
    plan.out = plan.arms.out = tmp_path / "runs" / "second"
    plan = Plan(plan.arms, plan.arms.runs(list(values["arms"]), (0,)))
    plan.out.mkdir()
    monkeypatch.setattr(Shards, "fingerprint", "g")
    assert adopt(plan, pipeline_of(plan)) == []
