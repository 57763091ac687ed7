"""Right answers of two models on the same problems, by hand."""

import json

import pytest

from unspoken.analysis.solved import Solved, accuracy_rows, gain, read_solved
from unspoken.errors import UnspokenError


def leave_answers(folder, rewards: list[float], tasks: int = 2) -> None:
    """What `unspoken eval --problems --log-samples` would leave, of so many tasks of equal size."""
    size = len(rewards) // tasks
    own = {f"task-{i}": rewards[i * size : (i + 1) * size] for i in range(tasks)}
    scores = {
        "tasks": {name: {"accuracy": sum(one) / size, "majority": 0.5} for name, one in own.items()},
        "all": {"accuracy": sum(rewards) / len(rewards), "majority": 0.25},
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
    of = {0: solved("a", [1, 1, 1, 0.5]), 1: solved("b", [1, 1, 0, 0]), 2: solved("c", [0, 0, 0, 0])}
    minus = {0: solved("d", [1, 0, 0, 0]), 1: solved("e", [1, 1, 0, 1])}
    found = gain(of, minus)
    assert found.by_seed == {0: 50.0, 1: -25.0} and found.mean == 12.5 and not found.is_clear
    low, high = found.interval
    assert -50 <= low < 12.5 < high <= 50 and str(found).startswith("+12.5 [")
    assert gain(of, {5: minus[0]}) is None


def test_what_is_clear(solved):
    """Nearly every problem in both seeds; not if one seed says nothing, or the other way round."""
    none, most = solved("none", [0.0] * 40), solved("most", [1.0] * 38 + [0.0] * 2)
    assert gain({0: most, 1: most}, {0: none, 1: none}).is_clear
    assert gain({0: none, 1: none}, {0: most, 1: most}).is_clear
    assert not gain({0: most, 1: none}, {0: none, 1: none}).is_clear
    assert not gain({0: none}, {0: none}).is_clear


def test_tables_average_over_seeds(solved):
    models = {"plain": {0: solved("a", [1, 1, 0, 0]), 1: solved("b", [1, 0, 0, 0])}, "other": {}}
    headers, rows = accuracy_rows(models)
    assert headers == ["model", "task-0", "task-1", "all"]
    assert rows == [
        ["majority", "50.0", "50.0", "25.0"],
        ["plain", "75.0 (100.0, 50.0)", "0.0 (0.0, 0.0)", "37.5 (50.0, 25.0)"],
    ]
    assert accuracy_rows({}) == (["model", "all"], [])


def test_what_cannot_be_compared_or_read(solved, tmp_path):
    long, short = solved("long", [1, 1, 0, 0]), solved("short", [1, 1])
    with pytest.raises(UnspokenError, match=r"long and .*short were asked different problems"):
        gain({0: long}, {0: short})
    assert read_solved(tmp_path / "nowhere") is None
    (tmp_path / "long" / "eval_problems.json").write_text("{}")
    with pytest.raises(UnspokenError, match=r"long: eval_problems.json and eval_problems.jsonl cannot be read"):
        read_solved(tmp_path / "long")
