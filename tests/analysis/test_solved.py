"""Right answers of two models on the same problems, by hand."""

import json
from dataclasses import replace

import pytest

from unspoken.analysis.compare import Outcome
from unspoken.analysis.solved import Solved, accuracy_rows, gain, read_solved
from unspoken.errors import UnspokenError


def leave_answers(folder, rewards: list[float], tasks: int = 2, data: str = "one file") -> None:
    """What `unspoken eval --problems --log-samples` would leave, of so many tasks of equal size."""
    size = len(rewards) // tasks
    own = {f"task-{i}": rewards[i * size : (i + 1) * size] for i in range(tasks)}
    scores = {
        "tasks": {name: {"accuracy": sum(one) / size, "majority": 0.5} for name, one in own.items()},
        "all": {"accuracy": sum(rewards) / len(rewards), "majority": 0.25},
        "data": {"sha256": data},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "eval_problems.json").write_text(json.dumps(scores))
    rows = [{"place": f"some/val.jsonl:{i}", "answer": "\u2028", "reward": reward} for i, reward in enumerate(rewards)]
    (folder / "eval_problems.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@pytest.fixture
def solved(tmp_path):
    def make(name: str, rewards: list[float]) -> Solved:
        leave_answers(tmp_path / name, rewards)
        found = read_solved(tmp_path / name)
        assert found is not None
        return found

    return make


def test_a_gain_is_of_the_same_problems(solved):
    """Partial credit is no right answer; seeds that one side lacks take no part."""
    of = {0: solved("a", [1, 1, 1, 0.95]), 1: solved("b", [1, 1, 0, 0]), 2: solved("c", [0, 0, 0, 0])}
    minus = {0: solved("d", [1, 0, 0, 0]), 1: solved("e", [1, 1, 0, 1])}
    found = gain(of, minus)
    assert found.by_seed == {0: 50.0, 1: -25.0} and found.mean == 12.5 and found.outcome is Outcome.UNCLEAR
    low, high = found.interval
    assert -50 <= low < 12.5 < high <= 50 and str(found).startswith("+12.5 [")
    assert gain(of, {5: minus[0]}) is None


def test_what_is_clear(solved):
    """Nearly every problem in both seeds; not if one seed says nothing, or the other way round."""
    none, most, one = (solved(str(num), [1.0] * num + [0.0] * (40 - num)) for num in (0, 38, 1))
    outcomes = [
        (({0: most, 1: most}, {0: none, 1: none}), Outcome.BETTER),
        (({0: none, 1: none}, {0: most, 1: most}), Outcome.WORSE),
        (({0: most, 1: none}, {0: none, 1: none}), Outcome.UNCLEAR),
        (({0: none}, {0: none}), Outcome.UNCLEAR),
        (({0: one, 1: one}, {0: none, 1: none}), Outcome.UNCLEAR),
    ]
    for sides, outcome in outcomes:
        assert gain(*sides).outcome is outcome


def test_tables_average_over_seeds(solved):
    models = {"plain": {0: solved("a", [1, 1, 0, 0]), 1: solved("b", [1, 0, 0, 0])}, "other": {}}
    headers, rows = accuracy_rows(models)
    assert headers == ["model", "task-0", "task-1", "all"]
    assert rows == [
        ["majority", "50.0", "50.0", "25.0"],
        ["plain", "75.0 (100.0, 50.0)", "0.0 (0.0, 0.0)", "37.5 (50.0, 25.0)"],
    ]
    assert accuracy_rows({}) == (["model", "all"], [])
    other = replace(models["plain"][1], tasks={"task-1": models["plain"][1].tasks["task-1"]})
    _, (_, row) = accuracy_rows({"plain": {0: models["plain"][0], 1: other}})
    assert row == ["plain", "", "0.0 (0.0, 0.0)", "37.5 (50.0, 25.0)"], "a task that one seed lacks"


def test_what_cannot_be_compared_or_read(solved, tmp_path):
    long, short = solved("long", [1, 1, 0, 0]), solved("short", [1, 1])
    with pytest.raises(UnspokenError, match=r"long and .*short were asked different problems"):
        gain({0: long}, {0: short})
    leave_answers(tmp_path / "elsewhere", [1, 1, 0, 0], data="another file")
    with pytest.raises(UnspokenError, match="were asked different problems"):
        gain({0: long}, {0: read_solved(tmp_path / "elsewhere")})
    assert read_solved(tmp_path / "nowhere") is None
    scores = {"tasks": [], "all": {"accuracy": 1, "majority": 1}, "data": {"sha256": ""}}
    for damaged in ({}, scores, scores | {"tasks": {"a": {}}}):
        (tmp_path / "long" / "eval_problems.json").write_text(json.dumps(damaged))
        with pytest.raises(UnspokenError, match=r"long: eval_problems.json and eval_problems.jsonl cannot be read"):
            read_solved(tmp_path / "long")
