"""Tasks of lm-eval in a study: made of its text, answered by every model, in one table."""

import copy
import json

import pytest

from tests.paper.conftest import leave_results, read_results
from unspoken.paper.report import markdown
from unspoken.paper.tasks import task_tables


@pytest.fixture
def asking(values):
    values = copy.deepcopy(values)
    del values["base"]["data"]["path"]  # the study prepares its own
    return values | {"tasks": ["local-cloze", "local-choice"], "other_text": ["stdlib"]}


@pytest.mark.parametrize("is_quick", [False, True])
def test_every_model_answers_what_was_made_of_the_text(asking, make_plan, is_quick):
    plan = make_plan(asking, is_quick=is_quick)
    text, runs = plan.stages(1)
    data, *other, questions = text.lanes[0]
    assert questions.words == ("data", "questions", str(data.output), "--out", str(questions.output))
    assert questions.needs == ("data",) and len(other) == (not is_quick), "--quick reads the text that would be another"
    for train, *_, tasks in runs.lanes:
        assert tasks.needs == (train.name, questions.name)
        assert tasks.words[tasks.words.index("--tasks") + 1] == "local-cloze,local-choice"
        assert tasks.words[tasks.words.index("--include-path") + 1] == str(questions.output)
        assert ("--limit" in tasks.words) == is_quick


def test_what_a_given_text_leaves_out_is_said(asking, make_plan, values):
    assert make_plan(asking).notes() == make_plan(values).notes() == []
    asking["base"]["data"]["path"] = "elsewhere"
    assert make_plan(asking).notes() == [
        "other_text and tasks: left out, as they belong to the text that the study prepares itself"
    ]


def test_scores_are_averaged_over_seeds(asking, make_plan):
    plan = make_plan(asking)
    leave_results(plan, {"plain": {"k=1": 5.0}, "recycler": {"k=1": 4.9, "k=2": 4.8}})
    for run in plan.runs:
        folder = plan.evaluate_tasks(run).output
        if folder.is_dir():
            rows = [
                {"task": "local-cloze", "metric": "acc,none", "value": 0.25 + 0.5 * run.seed},
                {"task": "local-choice", "metric": "acc_norm,none", "value": 0.5},
            ]
            (folder / "eval_tasks.json").write_text(json.dumps({"rows": rows}))
    results, _ = read_results(plan)
    ((headers, rows),) = task_tables(results)
    assert headers == ["arm", "local-cloze: acc", "local-choice: acc_norm"]
    assert [row[0] for row in rows] == ["plain", "recycler"]
    assert rows[0][1:] == ["0.5000 (0.2500, 0.7500)", "0.5000 (0.5000, 0.5000)"]
    assert "local-cloze: acc" in markdown(results)


def test_scores_that_are_damaged_or_not_asked_for_leave_no_table(asking, values, make_plan):
    plan = make_plan(asking)
    leave_results(plan, {"plain": {"k=1": 5.0}})
    (plan.evaluate_tasks(plan.runs[0]).output / "eval_tasks.json").write_text("{")
    assert task_tables(read_results(plan)[0]) == []
