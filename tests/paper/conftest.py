"""A small study file for tests to change, and the folders that its runs would leave."""

import copy
import io
import json
import time
from typing import Any

import pytest
import yaml
from rich.console import Console

from tests.analysis.conftest import evaluation, write_run
from unspoken.paper.arms import Arms
from unspoken.paper.command import Record
from unspoken.paper.pipeline import Pipeline
from unspoken.paper.plan import Plan
from unspoken.paper.results import Results
from unspoken.paper.study import Study, load_study

BACKBONE = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
BASE = {
    "run": {"out": "elsewhere"},
    "model": {"method": "recycler", "num_train_passes": 2, "pass_loss_reduction": "mean", "backbone": BACKBONE},
    "data": {"path": "elsewhere", "sequence_length": 32},
    "optim": {"learning_rate": "3e-3"},
    "train": {"total_tokens": "1_000_000", "batch_size": 4, "third_pass_fraction": 0.1},
}


@pytest.fixture
def values() -> dict[str, Any]:
    """A study as YAML would give it."""
    return {
        "title": "A study",
        "question": "Is it better?",
        "base": copy.deepcopy(BASE),
        "arms": {
            "plain": {"model.method": "vanilla"},
            "plain-2x": {"model.method": "vanilla", "train.total_tokens": "x2"},
            "recycler": {"note": "two passes"},
            "later": {"after": "plain", "model.method": "recycler", "train.total_tokens": "x0.25"},
        },
        "compare": {"equal tokens": "recycler - plain", "feedback": "recycler - recycler k=1"},
    }


@pytest.fixture
def write_study(tmp_path):
    """Writes values to tmp_path/claim/study.yaml and reads them back as a study."""

    def write(values: dict[str, Any]) -> Study:
        path = tmp_path / "claim" / "study.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return load_study(str(path))

    return write


@pytest.fixture
def make_plan(tmp_path, write_study):
    """A plan of every run of a study, in tmp_path/out."""

    def make(values: dict[str, Any], seeds: tuple[int, ...] = (0, 1), **more) -> Plan:
        arms = Arms(write_study(values), tmp_path / "out", **more)
        return Plan(arms, arms.runs(list(values["arms"]), seeds))

    return make


def read_results(plan: Plan) -> tuple[Results, Pipeline]:
    """What a study makes of the folders that its runs have left."""
    pipeline = Pipeline(plan.out, plan.stages(1), ["unspoken"], Console(file=io.StringIO()), keep_going=True)
    return Results(plan.arms.study, plan, pipeline), pipeline


def leave_results(plan: Plan, losses: dict[str, dict[str, float]], failed: tuple[str, ...] = ()) -> None:
    """Run, evaluation and record of each run of `plan` as its commands would leave them.

    losses: {arm: {loss name: nats per token}}, to which 0.01 times the seed is added.
    """
    (plan.out / "commands").mkdir(parents=True, exist_ok=True)
    plan.write_recipes()
    texts = [lane for stage in plan.stages(1) if stage.title == "Text" for lane in stage.lanes]
    for command in (command for lane in texts for command in lane):
        command.output.mkdir(parents=True)
        record = Record("done", list(command.words), 1.0, 2.0, 0, time.time(), "", command.recipe_sha256)
        record.write(plan.out / "commands" / f"{command.name}.json")
    for run in plan.runs:
        train, *evaluations = plan.commands(run)
        if run.name in failed or run.arm not in losses:
            continue
        write_run(train.output, run.values["model"]["method"])
        nats = {
            name: [10 * (loss + 0.01 * run.seed) + piece % 3 for piece in range(12)]
            for name, loss in losses[run.arm].items()
        }
        for evaluate in evaluations:
            evaluate.output.mkdir(parents=True)
            (evaluate.output / "eval.json").write_text(json.dumps(evaluation(run.name, nats, run.num_passes)))
        for command in (train, *evaluations):
            record = Record("done", list(command.words), 1.0, 2.0, 0, time.time(), "", command.recipe_sha256)
            record.write(plan.out / "commands" / f"{command.name}.json")
