"""Arms that learn problems: what they read, what they are asked, and what the study says of it."""

import copy
import json

import pytest

from tests.analysis.test_solved import leave_answers
from tests.paper.conftest import leave_results, read_results
from unspoken.errors import UsageError
from unspoken.paper.report import markdown, plots, write_results
from unspoken.paper.solved import gain_tables, solved_tables


@pytest.fixture
def teaching(values):
    values = copy.deepcopy(values)
    del values["base"]["data"]["path"]  # the study prepares its own
    values["arms"] |= {
        "taught": {"after": "plain", "learns": "problems", "model.method": "vanilla", "train.total_tokens": "x0.5"},
        "taught-recycler": {"after": "plain", "learns": "problems"},
    }
    values["compare"]["introduced there"] = "taught-recycler - taught"
    return values | {
        "problems": {"specs": ["a=written_sum", "b=written_sum"], "num_val": 2},
        "plots": ["differences", "solved"],
    }


@pytest.mark.parametrize("is_quick", [False, True])
def test_they_read_the_problems_and_are_asked_them(teaching, make_plan, is_quick):
    plan = make_plan(teaching, is_quick=is_quick)
    text, runs = plan.stages(1)
    data, problems = text.lanes[0]
    assert problems.words[:4] == ("data", "problems", "a=written_sum", "b=written_sum")
    numbers = [problems.words[problems.words.index(option) + 1] for option in ("--num-train", "--num-val")]
    assert numbers == (["40", "4"] if is_quick else ["5000", "2"])
    lanes = {lane[0].name: lane for lane in runs.lanes}
    assert [len(lanes[f"{arm}-s0"]) for arm in ("plain", "taught", "taught-recycler")] == [2, 3, 3]
    train, text_evaluation, asked = lanes["taught-s0"]
    run = next(run for run in plan.runs if run.name == "taught-s0")
    section = run.values["data"]
    assert "path" not in section and section["conversations"] == {
        "files": [str(problems.output / "train.jsonl")],
        "validation_files": [str(problems.output / "val.jsonl")],
    }
    assert run.values["model"]["from_pretrained"].endswith("plain-s0/model")
    assert train.needs == (data.name, "plain-s0", problems.name) and asked.needs == (train.name, problems.name)
    wanted = {"--problems": str(problems.output / "val.jsonl"), "--reward": "last_number"}
    wanted |= {"--max-new-tokens": "8" if is_quick else "96", "--batch-size": "50"}
    assert {option: asked.words[asked.words.index(option) + 1] for option in wanted} == wanted
    assert text_evaluation.words[text_evaluation.words.index("--data") + 1] == str(data.output)


def test_they_learn_them_beside_a_text_that_is_given(teaching, make_plan):
    plan = make_plan(teaching, overrides=["--data.path", "given"])
    (problems,) = plan.stages(1)[0].lanes[0]
    run = next(run for run in plan.runs if run.name == "taught-s0")
    assert problems.name == "problems" and "path" not in run.values["data"]
    train, text_evaluation, _ = plan.commands(run)
    assert train.needs == ("plain-s0", "problems")
    assert text_evaluation.words[text_evaluation.words.index("--data") + 1] == "given"


def test_their_answers_are_compared_and_not_their_losses(teaching, make_plan):
    teaching["baseline"] = "plain"
    plan = make_plan(teaching)
    losses = {"plain": {"k=1": 5.0}, "taught": {"k=1": 6.0}, "taught-recycler": {"k=1": 6.0, "k=2": 6.1}}
    leave_results(plan, losses)
    rewards = {"taught": [1, 0, 0, 0], "taught-recycler": [1, 1, 1, 0]}
    for run in plan.runs:
        if run.arm in rewards:
            leave_answers(plan.out / "evals" / f"{run.name}-problems", rewards[run.arm])
    results, pipeline = read_results(plan)
    ((headers, rows),) = solved_tables(results)
    assert headers == ["arm", "task-0", "task-1", "all", "FLOPs", "seeds"]
    assert [row[0] for row in rows] == ["majority", "taught", "taught-recycler"]
    assert rows[2][1:4] == ["100.0 (100.0, 100.0)", "50.0 (50.0, 50.0)", "75.0 (75.0, 75.0)"]
    ((_, (found,)),) = gain_tables(results)
    assert found[0] == "introduced there" and found[2].text.startswith("+50.0 [") and found[3] == "+50.0, +50.0"
    assert found[2].kind == "unclear", "of four problems"
    assert {str(one.comparison) for one in results.found} == {
        "recycler - plain", "recycler - recycler k=1", "plain-2x - plain", "later - plain"
    }  # fmt: skip
    text = markdown(results)
    assert "| introduced there | taught-recycler - taught | +50.0 [" in text
    assert [name for name, _, _ in plots(results)] == ["solved"]
    whole = json.loads(json.dumps(results.as_dict()))
    problems = next(run for run in whole["runs"] if run["run"] == "taught-s1")["problems"]
    assert problems["all"]["accuracy"] == 0.25 and problems["task-0"]["accuracy"] == 0.5
    (made,) = whole["gains"]
    assert made["percentage_points"] == 50.0 and made["by_seed"] == {"0": 50.0, "1": 50.0}
    write_results(results, pipeline, plan.out)
    page = (plan.out / "report.html").read_text()
    assert page.count("introduced there") >= 2 and "points of right answers" in page


def test_damaged_answers_are_missing_and_the_rest_is_told(teaching, make_plan):
    plan = make_plan(teaching)
    leave_results(plan, {"plain": {"k=1": 5.0}, "taught": {"k=1": 6.0}})
    for run in plan.runs:
        if run.arm == "taught":
            leave_answers(plan.out / "evals" / f"{run.name}-problems", [1, 0, 0, 0])
    (plan.out / "evals" / "taught-s1-problems" / "eval_problems.json").write_text("{")
    results, _ = read_results(plan)
    ((_, rows),) = solved_tables(results)
    assert rows[1][0] == "taught" and rows[1][-1] == "1"
    assert "cannot be read" in markdown(results)


def test_answers_to_other_problems_are_not_compared(teaching, make_plan):
    plan = make_plan(teaching)
    leave_results(plan, {"plain": {"k=1": 5.0}, "taught": {"k=1": 6.0}, "taught-recycler": {"k=1": 6.0, "k=2": 6.1}})
    for run in plan.runs:
        if run.arm.startswith("taught"):
            leave_answers(plan.out / "evals" / f"{run.name}-problems", [1, 0, 0, 0], data=run.arm)
    results, _ = read_results(plan)
    ((_, (found,)),) = gain_tables(results)
    assert "were asked different problems" in found[2].text and "were asked different problems" in markdown(results)


def test_a_study_of_text_has_no_such_tables(values, make_plan):
    plan = make_plan(values)
    leave_results(plan, {"plain": {"k=1": 5.0}})
    results, _ = read_results(plan)
    assert solved_tables(results) == gain_tables(results) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problems": None}, "arm 'taught': learns: problems, and the study says none"),
        ({"budgets": [1000]}, "budgets: not with arms that learn problems"),
        ({"compare": {"x": "taught - plain"}}, "one arm learns problems, the other reads text"),
        ({"compare": {"x": "taught-recycler k=1 - taught-recycler"}}, "right answers are of decoding, with no passes"),
        ({"problems": {"specs": []}}, "problems.specs: "),
        ({"problems": {"specs": ["a=b:c"]}}, "problems: specs: a=b:c: 'c' is no setting"),
        ({"problems": {"specs": ["a"], "reward": "last_numbr"}}, r"no 'last_numbr' \(did you mean 'last_number'\?\)"),
        ({"problems": {"specs": ["a"], "num_vla": 2}}, r"problems.num_vla: unknown key \(did you mean 'num_val'\?\)"),
    ],
)
def test_a_mistake_is_named(teaching, write_study, change, message):
    with pytest.raises(UsageError, match=message):
        write_study({**teaching, **change})


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"learns": "problems"}, "learns: problems needs `after`"),
        ({"learns": "text", "after": "plain"}, "learns: 'text'; an arm can learn `problems`"),
        ({"learns": "problems", "after": "plain", "data.path": "x"}, "data.path: it learns problems, which the study"),
    ],
)
def test_a_mistake_in_such_an_arm_is_named(teaching, write_study, arm, message):
    teaching["arms"]["taught"] = arm
    with pytest.raises(UsageError, match=message):
        write_study(teaching)
