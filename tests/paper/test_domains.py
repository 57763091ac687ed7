"""Text of another kind: prepared in the same tokens, evaluated by every model, and held beside its own."""

import copy
import json

import pytest

from tests.paper.conftest import leave_results, read_results
from unspoken.paper.domains import HEADERS, domain_tables
from unspoken.paper.report import markdown


@pytest.fixture
def asking(values):
    values = copy.deepcopy(values)
    del values["base"]["data"]["path"]  # the study prepares its own
    return values | {"other_text": ["stdlib"], "text": {"corpus": ["core"]}, "eval": {"depth": 4}}


def test_every_model_is_evaluated_on_both_texts(asking, make_plan):
    plan = make_plan(asking)
    text, runs = plan.stages(1)
    data, other = text.lanes[0]
    assert other.needs == ("data",) and other.words[:4] == ("data", "prepare", "--corpus", "stdlib")
    assert other.words[other.words.index("--tokenizer") + 1] == str(data.output / "tokenizer")
    for train, own, elsewhere in runs.lanes:
        assert elsewhere.needs == (train.name, other.name) and elsewhere.output != own.output
        changed = {"--data", "--depth", "--out"}
        pairs = zip(own.words, elsewhere.words, own.words[1:], elsewhere.words[1:], strict=False)
        assert {name for name, _, a, b in pairs if a != b} == changed
        assert elsewhere.words[elsewhere.words.index("--data") + 1] == str(other.output)
        assert elsewhere.words[elsewhere.words.index("--depth") + 1] == "0"


def test_both_stand_in_one_table(asking, make_plan):
    plan = make_plan(asking)
    leave_results(plan, {"plain": {"k=1": 5.0}, "recycler": {"k=1": 4.9, "k=2": 4.8}})
    for run in plan.runs:
        for place, command in enumerate(plan.commands(run)[1:]):
            path = command.output / "eval.json"
            if path.is_file():
                found = json.loads(path.read_text())
                for number, loss in enumerate(found["results"].values()):
                    loss |= {"perplexity": 100.0 + 10 * place + number + run.seed, "bits_per_byte": 1.0 + place}
                path.write_text(json.dumps(found))
    results, _ = read_results(plan)
    ((headers, rows),) = domain_tables(results)
    assert headers == list(HEADERS) and [row[0] for row in rows] == ["plain", "recycler"]
    assert rows[0][1:] == ["100.5000", "1.0000", "110.5000", "2.0000"], "averaged over two seeds"
    assert rows[1][1] == "101.5000", "of the second pass, as it decodes"
    assert "other text: perplexity" in markdown(results)


def test_an_arm_without_the_other_evaluation_is_not_done(asking, make_plan):
    plan = make_plan(asking)
    leave_results(plan, {"plain": {"k=1": 5.0}})
    (plan.out / "commands" / "plain-s0-other-eval.json").unlink()
    results, _ = read_results(plan)
    assert [r.run.name for r in results.all if r.is_done] == ["plain-s1"]


def test_a_study_that_does_not_ask_has_no_such_table(values, make_plan):
    plan = make_plan(values)
    leave_results(plan, {"plain": {"k=1": 5.0}})
    assert domain_tables(read_results(plan)[0]) == [] and len(plan.commands(plan.runs[0])) == 2
