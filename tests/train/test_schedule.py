"""A step's learning rate and passes are functions of its number alone."""

from itertools import pairwise

import pytest

from unspoken.train.recipe import OptimSection
from unspoken.train.schedule import LearningRate, passes_at


def test_passes_have_the_asked_mean_and_depend_on_seed_and_step_alone():
    steps = range(20_000)
    passes = [passes_at(step, 7, 2, 0.066) for step in steps]
    assert set(passes) == {2, 3}
    share = passes.count(3) / len(passes)
    assert share == pytest.approx(0.066, abs=4 * (0.066 * 0.934 / len(passes)) ** 0.5)
    assert passes[5000:5100] == [passes_at(step, 7, 2, 0.066) for step in range(5000, 5100)]
    assert passes != [passes_at(step, 8, 2, 0.066) for step in steps]


def test_third_passes_do_not_come_in_runs():
    """One in two steps has as many neighbours of its own kind as of the other."""
    passes = [passes_at(step, 0, 2, 0.5) for step in range(10_000)]
    equal = sum(a == b for a, b in pairwise(passes))
    assert 4_800 < equal < 5_200


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 2), (1.0, 3)])
def test_passes_at_the_ends(fraction, expected):
    assert {passes_at(step, 3, 2, fraction) for step in range(500)} == {expected}


def test_the_hash_of_a_step_is_frozen():
    """A resumed run must find the same third passes under every version of every library."""
    assert [step for step in range(60) if passes_at(step, 0, 2, 0.1) == 3] == [7, 14, 15, 20, 29, 30, 42, 45]


def _optim(**fields) -> OptimSection:
    return OptimSection(learning_rate=2.0, **fields)


def test_warm_up_and_cosine():
    rate = LearningRate(_optim(warmup_steps=4, min_learning_rate_ratio=0.1), num_steps=25)
    values = [rate.at(step) for step in range(25)]
    assert values[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert values[14] == pytest.approx(2.0 * 0.55)
    assert values[24] == pytest.approx(0.2)
    assert all(a >= b for a, b in pairwise(values[4:]))


def test_constant_schedule_and_fraction():
    rate = LearningRate(_optim(schedule="constant", warmup_fraction=0.2), num_steps=10)
    assert [rate.at(step) for step in (0, 1, 2, 9)] == [1.0, 2.0, 2.0, 2.0]


def test_no_warm_up_and_one_step():
    rate = LearningRate(_optim(warmup_steps=0), num_steps=1)
    assert rate.at(0) == 2.0


def test_the_adapter_has_its_own_rate_and_warm_up():
    rate = LearningRate(
        _optim(warmup_steps=2, adapter_learning_rate_factor=0.25, adapter_warmup_fraction=0.5, schedule="constant"),
        num_steps=20,
    )
    assert rate.adapter_at(1) == pytest.approx(2.0 * 0.25 * 2 / 10)
    assert rate.adapter_at(9) == rate.adapter_at(19) == pytest.approx(0.5)
    assert rate.at(9) == 2.0
