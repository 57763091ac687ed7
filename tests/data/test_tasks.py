"""Each task against an answer worked out in another way, and settings that cannot be."""

import itertools
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspoken.data.frozen_random import frozen_random
from unspoken.data.tasks import END_ID, FIRST_WORD_ID, NO_TARGET, TASKS, Task, parse_task
from unspoken.errors import UsageError

SEEDS = st.integers(0, 2**32 - 1)


def drawn(task: Task, seed: int, length: int) -> tuple[list[str], list[str]]:
    """A sample's tokens and targets as words; targets of nothing and of the end as `.` and `end`."""
    sample = task.draw(frozen_random(seed), length)
    words = dict(enumerate(task.words(), start=FIRST_WORD_ID)) | {NO_TARGET: ".", END_ID: "end"}
    assert sample.tokens.dtype == sample.targets.dtype == np.int64
    assert len(sample.tokens) == len(sample.targets) < task.num_tokens(length)
    return [words[i] for i in sample.tokens.tolist()], [words[i] for i in sample.targets.tolist()]


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, length=st.integers(1, 40), modulus=st.integers(2, 30))
def test_running_sums(seed, length, modulus):
    tokens, targets = drawn(parse_task({"name": "running_sum", "modulus": modulus}), seed, length)
    assert len(tokens) == length
    for i in range(length):
        assert int(targets[i]) == sum(map(int, tokens[: i + 1])) % modulus


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, length=st.integers(1, 20), num_elements=st.integers(2, 5))
def test_permutation_states_as_products_of_matrices(seed, length, num_elements):
    task = parse_task({"name": "permutation_state", "num_elements": num_elements})
    tokens, targets = drawn(task, seed, length)
    state = np.eye(num_elements, dtype=int)
    for token, target in zip(tokens, targets, strict=True):
        state = state @ np.eye(num_elements, dtype=int)[[int(i) for i in token]].T
        assert [int(i) for i in target] == state.argmax(axis=0).tolist()


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, length=st.integers(1, 12), modulus=st.sampled_from([2, 7, 10, 97]))
def test_arithmetic_from_left_to_right(seed, length, modulus):
    task = parse_task({"name": "arithmetic", "modulus": modulus})
    tokens, targets = drawn(task, seed, length)
    question, result = "".join(tokens).split("=")
    parts = ["".join(group) for _, group in itertools.groupby(question, str.isdigit)]
    value = int(parts[0])
    for sign, number in zip(parts[1::2], parts[2::2], strict=True):
        assert sign != "*" or 0 < int(number) < modulus
        value = {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign](value, int(number)) % modulus
    assert len(parts) == 2 * length - 1
    assert result == str(value % modulus)
    assert targets == ["."] * len(question) + [*result, "end"]


def test_the_draws_are_frozen():
    """A change of what is drawn would break the exact resume of every run in flight: raise `VERSION` with it."""
    assert drawn(parse_task({"name": "running_sum"}), 1, 6)[0] == [*"340130"]
    assert drawn(parse_task({"name": "permutation_state", "num_elements": 3}), 1, 3)[0] == ["210", "120", "201"]
    assert "".join(drawn(parse_task({"name": "arithmetic"}), 1, 4)[0]) == "5-3+4-0=6"


@pytest.mark.parametrize("name", TASKS)
def test_every_word_and_every_sign_comes_up(name):
    task = parse_task({"name": name} | ({"num_elements": 3} if name == "permutation_state" else {}))
    seen = set().union(*(drawn(task, seed, task.max_length)[0] for seed in range(60)))
    unused = {"7", "8", "9"} if name == "arithmetic" else set()
    assert seen == set(task.words()) - unused


@pytest.mark.parametrize("name", TASKS)
def test_settings_make_the_task_again(name):
    task = parse_task({"name": name, "max_length": 9})
    assert parse_task(task.settings()) == task
    assert parse_task(task.settings()).fingerprint() == task.fingerprint()


def test_every_setting_is_in_the_fingerprint():
    variants = [
        {"name": "running_sum"},
        {"name": "running_sum", "modulus": 6},
        {"name": "running_sum", "min_length": 3},
        {"name": "running_sum", "max_length": 15},
        {"name": "permutation_state"},
        {"name": "arithmetic"},
    ]
    assert len({parse_task(values).fingerprint() for values in variants}) == len(variants)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "no `name` is given; the tasks are running_sum, permutation_state, arithmetic"),
        ({"name": "runing_sum"}, r"unknown task 'runing_sum' \(did you mean 'running_sum'\?\)"),
        ({"name": ["running_sum"]}, "unknown task"),
        ({"name": "running_sum", "modulos": 3}, r"running_sum has no setting 'modulos' \(did you mean 'modulus'\?\)"),
        (
            {"name": "running_sum", "num_elements": 3},
            "has no setting 'num_elements'.*it has min_length, max_length, mod",
        ),
        ({"name": "running_sum", "modulus": 1}, "running_sum: modulus is 1; it must lie in 2 .. 1000"),
        ({"name": "running_sum", "modulus": 2.5}, "modulus is 2.5; it must be a whole number"),
        ({"name": "running_sum", "modulus": True}, "modulus is True; it must be a whole number"),
        (
            {"name": "running_sum", "min_length": 0},
            "min_length 0 and max_length 16 must be at least 1 and in this order",
        ),
        ({"name": "running_sum", "max_length": 3}, "min_length 4 and max_length 3"),
        ({"name": "permutation_state", "num_elements": 7}, "num_elements is 7; it must lie in 2 .. 6"),
        ({"name": "arithmetic", "modulus": "7"}, "modulus is '7'"),
    ],
)
def test_what_cannot_be_meant(values, message):
    with pytest.raises(UsageError, match=message):
        parse_task(values)
