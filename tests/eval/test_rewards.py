"""Rewards: what is one, and what ends a run with the function's name and the row."""

import json
import sys
import types
from decimal import Decimal

import pytest

from unspoken.errors import UnspokenError, UsageError
from unspoken.eval.rewards import Checked, find, last_number


def reward(value) -> Checked:
    return Checked("mine:reward", lambda prompts, completions, **columns: value)


def test_numbers_pass_and_columns_reach_the_function():
    def function(prompts, completions, answer):
        return [completion == right for completion, right in zip(completions, answer)]

    assert Checked("a:b", function)(["p", "p"], ["1", "2"], answer=["1", "1"]) == [1.0, 0.0]
    assert reward([1, 0.5, True])(["p"] * 3, ["c"] * 3) == [1.0, 0.5, 1.0]
    assert Checked("package.module:function", function).__name__ == "function"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, float("nan")], r"reward mine:reward returned nan for row 1, not a finite number"),
        ([float("inf"), 0.0], "returned inf for row 0"),
        ([0.0, 1e300], "returned 1e\\+300 for row 1"),
        ([None, 1.0], "returned None for row 0"),
        (["1", 1.0], "returned '1' for row 0"),
        ([1.0], "returned 1 rewards for 2 completions"),
        (1.0, "returned float, not a list"),
        ("ab", "returned str, not a list"),
    ],
)
def test_what_is_no_reward_is_named(value, message):
    """B93: TRL takes them for nothing."""
    with pytest.raises(UnspokenError, match=message):
        reward(value)(["p", "p"], ["c", "c"])


def test_a_function_that_fails_is_named():
    def function(prompts, completions, **columns):
        return columns["missing"]

    with pytest.raises(UnspokenError, match=r"reward mine:reward failed: KeyError: 'missing'"):
        Checked("mine:reward", function)(["p"], ["c"])


def test_a_function_of_the_users_is_found(monkeypatch):
    module = types.ModuleType("my_rewards")
    module.length = lambda prompts, completions, **columns: [len(c) for c in completions]
    module.number = 3
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    assert find("my_rewards:length")(["p"], ["four"]) == [4.0]
    for name, message in (
        ("my_rewards:none", "reward my_rewards:none: .*has no attribute 'none'"),
        ("my_rewards:number", "is int, not a function"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("lenght", "no reward 'lenght'; there are reasoning_gym, exact, last_number, math, and your own"),
        ("last_numbr", r"no reward 'last_numbr' \(did you mean 'last_number'\?\)"),
    ):
        with pytest.raises(UsageError, match=message):
            find(name)


def test_a_package_that_is_not_there_is_named(monkeypatch):
    for name, package in (("reasoning_gym", "reasoning_gym"), ("math", "math_verify")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UsageError, match=f"reward {name}: .*pip install"):
            find(name)


def test_texts_are_compared_without_the_space_around_them():
    completions = [" 7\n", "07", "The answer is 7", "yes", [{"role": "assistant", "content": "7 "}], ""]
    assert find("exact")(["p"] * 6, completions, answer=["7", "7", "7", " yes", 7, "7"]) == [1, 0, 0, 1, 1, 0]
    assert find("exact").fault({"answer": ""}) is None
    assert find("exact").fault({"entry": "x"}) == "the row has no 'answer'"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3+8=11;11-5=6;6+9=15", "15"),
        ("11-5", "5"),
        ("(2)-5", "5"),
        ("it is -5.", "-5"),
        ("x=−5", "-5"),
        ("7 - 5", "5"),
        ("about 1,234,567 of them", "1234567"),
        ("1,2,3", "3"),
        ("1234,567", "567"),
        ("1,2345", "2345"),
        ("2.50 euros", "2.5"),
        ("007", "7"),
        ("15.", "15"),
        ("it is .5", "0.5"),
        ("x=-.5", "-0.5"),
        ("1.2.3", "3"),
        ("1e3", "1000"),
        ("2.5E-3", "0.0025"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))
    if number is not None:
        other = f"{text} and then {Decimal(number) + 1}"
        assert find("last_number")(["p", "p"], [text, other], answer=[number, number]) == [1.0, 0.0]


def test_the_last_number_needs_a_number_to_be_compared_with():
    fault = find("last_number").fault
    assert fault({"answer": "-1,234.5"}) is None and fault({"answer": 3}) is None
    assert fault({"answer": "3 apples"}) == "'answer' is not a number" and fault({}) == "the row has no 'answer'"
    assert find("last_number")(["p"], ["none"], answer=["none"]) == [0.0], "nothing is not equal to nothing"


def test_problems_are_scored_exactly_unless_asked_otherwise(monkeypatch):
    """With a stand-in for reasoning-gym's scorers: in full, in part, and one that raises."""

    def scorer(name):
        def score(answer, entry):
            if answer == "?":
                raise ValueError("no number")
            return 1.0 if answer == entry["answer"] else 0.4

        return score

    monkeypatch.setitem(sys.modules, "reasoning_gym", types.SimpleNamespace(get_score_answer_fn=scorer))
    entry = [json.dumps({"answer": "3", "metadata": {"source_dataset": "chain_sum"}})] * 3
    completions = [[{"role": "assistant", "content": " 3\n"}], "4", "?"]
    assert find("reasoning_gym")(["p"] * 3, completions, entry=entry) == [1.0, 0.0, 0.0]
    assert find("reasoning_gym", partial=True)(["p"] * 3, completions, entry=entry) == [1.0, 0.4, 0.0]
    fault = find("reasoning_gym").fault
    assert fault({"entry": entry[0]}) is None and fault({"answer": "3"}) == "the row has no 'entry'"
    assert "no problem of reasoning-gym (KeyError: 'metadata')" in fault({"entry": {}})
    assert "no problem of reasoning-gym (JSONDecodeError" in fault({"entry": "{"})
