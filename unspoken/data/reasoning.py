"""Problems with one right answer, from reasoning-gym: those that come with this package, and others where it is
installed."""

import json
from collections.abc import Sequence
from importlib.resources import files

from unspoken.errors import UsageError, nearest

SHIPPED = "problems.jsonl"  # of reasoning-gym 0.1.25, as `fresh_problems(NAMES, NUM_SHIPPED, seed=0)` gives them
NAMES = ("chain_sum", "letter_counting", "spell_backward")
NUM_SHIPPED = 120
INSTALL = "pip install reasoning-gym"

Problems = dict[str, list[dict[str, str]]]


def shipped_problems() -> Problems:
    """Rows of `question` and `answer` by data set."""
    lines = files("unspoken.data").joinpath("question_files", SHIPPED).read_text(encoding="utf-8").splitlines()
    problems: Problems = {name: [] for name in NAMES}
    for line in lines:
        row = json.loads(line)
        problems[row.pop("name")].append(row)
    return problems


def fresh_problems(names: Sequence[str], num: int, seed: int) -> Problems:
    """Newly made ones, no question twice. Their answers are compared as text, not with the data set's own scoring.

    Raises UsageError without reasoning-gym, or for a data set that it has not.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UsageError(f"--reasoning: reasoning-gym is not installed ({error}); run `{INSTALL}`") from error
    problems: Problems = {}
    for name in names:
        if name not in DATASETS:
            raise UsageError(f"--reasoning: reasoning-gym has no data set {name!r}{nearest(name, sorted(DATASETS))}")
        rows: dict[str, dict[str, str]] = {}
        for item in reasoning_gym.create_dataset(name, size=4 * num, seed=seed):
            rows.setdefault(item["question"], {"question": item["question"], "answer": str(item["answer"])})
        problems[name] = list(rows.values())[:num]
    return problems
