"""The papers' suites: every row is a task that lm-eval has, with that metric, or says why there is none."""

import re

import pytest
from lm_eval.tasks import TaskManager

from unspoken import cli
from unspoken.errors import UsageError
from unspoken.eval import harness_tasks
from unspoken.eval.harness_tasks import Wanted, find, wanted_tasks
from unspoken.eval.suites import Row, suites

PRESENT = {row.task: row for suite in suites().values() for row in suite.present}
# What a task file names in Python code: a function's name, as lm-eval will name the metric.
IN_CODE = {"humaneval": "pass_at_k", "mbpp_plus": "pass_at_1"}


@pytest.fixture(scope="module")
def index():
    """All of lm-eval's tasks: ten seconds."""
    return TaskManager()


def test_the_rows_are_those_of_the_papers():
    counts = {name: len({row.row for row in suite.rows}) for name, suite in suites().items()}
    assert counts == {"paper-adaptive": 13, "paper-recycler-pt": 14, "paper-recycler-sft": 22}
    assert all(len({row.row for row in suite.rows}) == len(suite.rows) for suite in suites().values())


@pytest.mark.parametrize(
    "fields", [{"task": "piqa"}, {"metric": "acc"}, {"task": "a", "metric": "b", "missing": "c"}, {}]
)
def test_a_row_has_a_task_or_a_reason(fields):
    with pytest.raises(ValueError, match="'X' has a task and its metric, or says why it is missing"):
        Row("X", **fields)


def test_lm_eval_has_every_task_with_its_metric(index):
    for name, row in PRESENT.items():
        assert name in index.task_index, row.row
        config = index.task_index[name].cfg
        metric, _, filtered = row.metric.partition(",")
        listed = config.get("metric_list") or config["aggregate_metric_list"]
        metrics = [str(one["metric"]).rpartition(".")[2] for one in listed]
        assert IN_CODE.get(name, metric) in metrics, name
        if "metric_list" in config:
            filters = [one["name"] for one in config.get("filter_list", [])]
            assert filtered in (filters or [""]), name
        else:
            assert filtered in [one.get("filter_list", "") for one in listed], name


def test_what_is_missing_is_missing(index):
    """A task that a later lm-eval brings is to be used."""
    names = " ".join(index.all_tasks).lower().replace("_", "")
    for suite in suites().values():
        for row in suite.missing:
            word = re.sub("[^a-z]", "", row.row.lower().removeprefix("perplexity ").removesuffix(" verified"))
            if word not in ("pile", "omnimath", "hle", "harp", "swe"):  # told in the row, or parts of other words
                assert word not in names, row.row


def test_a_suite_is_its_tasks_each_once():
    adaptive = wanted_tasks(["paper-adaptive"])
    assert len(adaptive) == 9 * 2 + 1  # perplexity and accuracy of LAMBADA are one run
    assert {one.shots for one in adaptive} == {0, 5} and Wanted("wikitext", 0) in adaptive
    pretraining = wanted_tasks(["paper-recycler-pt", "mmlu"])
    assert len(pretraining) == 11 and all(one.shots is None for one in pretraining)
    assert Wanted("mmlu", 5) in wanted_tasks(["paper-recycler-pt"], 5)
    with pytest.raises(UsageError, match="the paper gives the examples of all rows of paper-adaptive"):
        wanted_tasks(["paper-adaptive"], 5)


def test_a_task_that_nobody_knows_is_named(index, monkeypatch, tmp_path):
    monkeypatch.setattr(harness_tasks, "TaskManager", lambda **options: index)
    with pytest.raises(UsageError, match=r"no task 'lambada_opnai' in lm-eval \(did you mean 'lambada_openai'\?\)"):
        find(["piqa", "lambada_opnai"])
    with pytest.raises(UsageError, match=r"'paper-adaptiv' in lm-eval nor in .*did you mean 'paper-adaptive'"):
        find(["paper-adaptiv"], str(tmp_path))
    assert find(["piqa"]) is index


def test_suites_are_shown(capsys):
    assert cli.main(["eval", "--list-suites"]) == 0
    out = capsys.readouterr().out
    assert all(row.row in out for suite in suites().values() for row in suite.rows)
    assert "missing" in out and "0, 5" in out
