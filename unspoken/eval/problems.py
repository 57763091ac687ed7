"""How many problems a model solves: its greedy answer to each row's prompt, and what a reward function says to it.

    {"prompt": "3+4=" or [{"role": "user", "content": ...}], "answer": "7", "task": "easy", ...}

The reward reads the row's other columns as TRL hands them over: lists by column, `prompt` and `completion` aside, and
a completion that is messages where the prompt is; its tokens are `completion_ids`. Answers do not depend on the batch
size, but for rounding.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from unspoken.data.rows import BadRow, find_files, message_fault, read_objects
from unspoken.decode.generate import BatchWriter
from unspoken.decode.prompts import Request, batches
from unspoken.decode.sampling import Sampling
from unspoken.errors import UnspokenError
from unspoken.eval.rewards import ANSWER, Checked
from unspoken.eval.tasks import Rate
from unspoken.models.knobs import LatentKnobs
from unspoken.models.latent_lm import LatentForCausalLM

PROMPT, COMPLETION, TASK = "prompt", "completion", "task"


@dataclass(frozen=True)
class Problem:
    """A row with a prompt. `task` is its own, or its file's name; `place` names it in messages."""

    row: dict[str, Any]
    task: str
    place: str

    @property
    def prompt(self) -> str | list[dict[str, str]]:
        return self.row[PROMPT]

    @property
    def request(self) -> Request:
        return Request({PROMPT if isinstance(self.prompt, str) else "messages": self.prompt}, self.place)

    @property
    def answer(self) -> str | None:
        """As text; None where the row has none."""
        value = self.row.get(ANSWER)
        return None if value is None else str(value)


@dataclass(frozen=True)
class Answer:
    """What the model wrote. `num_tokens` with the end token; `is_cut`: no end token came within the limit."""

    problem: Problem
    text: str
    num_tokens: int
    is_cut: bool
    reward: float

    @property
    def is_right(self) -> bool:
        return self.reward >= 1


@dataclass(frozen=True)
class Score:
    """Of some answers. right: those whose reward is 1 or more; majority: what the most frequent `answer` of each task
    would give, None where a row has no `answer`; cut: the share that the limit ended."""

    right: Rate
    reward: float
    majority: Rate | None
    mean_tokens: float
    cut: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> "Score":
        num = len(answers)
        return cls(
            Rate(sum(one.is_right for one in answers), num),
            sum(one.reward for one in answers) / num,
            _majority([one.problem for one in answers]),
            sum(one.num_tokens for one in answers) / num,
            sum(one.is_cut for one in answers) / num,
        )


def by_task(answers: Sequence[Answer]) -> dict[str, Score]:
    """In the order of the tasks' names."""
    tasks: dict[str, list[Answer]] = {}
    for answer in answers:
        tasks.setdefault(answer.problem.task, []).append(answer)
    return {task: Score.of(tasks[task]) for task in sorted(tasks)}


def read_problems(files: Sequence[str | Path]) -> list[Problem]:
    """The rows of JSONL or parquet files, and of folders of such; blank lines are skipped.

    Raises:
        UsageError: no such file.
        UnspokenError: a row that cannot be used, named with file and line, or no row at all.
    """
    problems = []
    for path in find_files(files):
        for found in read_objects(path):
            if isinstance(found, BadRow):
                raise UnspokenError(str(found))
            number, row = found
            if fault := _fault(row):
                raise UnspokenError(f"{path}:{number}: {fault}")
            problems.append(Problem(row, str(row.get(TASK) or path.name.partition(".")[0]), f"{path}:{number}"))
    if not problems:
        raise UnspokenError(f"{', '.join(map(str, files))}: no rows; each line is an object with `prompt`")
    return problems


def first_of_each_task(problems: Iterable[Problem], num: int) -> list[Problem]:
    """In their order."""
    counts = Counter[str]()
    chosen = []
    for problem in problems:
        counts[problem.task] += 1
        if counts[problem.task] <= num:
            chosen.append(problem)
    return chosen


def check_rows(problems: Iterable[Problem], reward: Checked) -> None:
    """Raises UnspokenError for the first row that lacks what the reward reads, naming file and line."""
    for problem in problems:
        if fault := reward.fault(problem.row):
            raise UnspokenError(f"{problem.place}: reward {reward.name}: {fault}")


def answer_problems(
    model: LatentForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    reward: Checked,
    *,
    max_new_tokens: int,
    batch_size: int,
    num_prefill_passes: int | None = None,
    knobs: LatentKnobs | None = None,
    progress: Callable[[int], object] = lambda num: None,
) -> list[Answer]:
    """Greedy answers, in the problems' order, and their rewards. The model's mode is kept.

    num_prefill_passes, knobs: instead of the configuration's. progress: told how many more problems are answered.

    Raises:
        UsageError: messages, and no chat template; what the model cannot follow.
        UnspokenError: a row that lacks what the reward reads, or whose prompt does not fit into the model's context.
    """
    check_rows(problems, reward)
    sampling = Sampling(max_new_tokens, num_prefill_passes=num_prefill_passes, knobs=knobs or LatentKnobs())
    writer = BatchWriter(model, tokenizer, sampling, with_ids=True)
    prompts = [writer.encode(problem.request) for problem in problems]
    written: dict[int, dict[str, Any]] = {}
    was_training = model.training
    model.eval()
    # Prompts of like length together: few pads, and the batch that needs most memory comes first.
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    for batch in batches(order, batch_size):
        for index, answer in zip(batch, writer.complete([prompts[index] for index in batch])):
            written[index] = answer["completions"][0]
        progress(len(batch))
    model.train(was_training)
    completions = [written[index] for index in range(len(problems))]
    return [
        Answer(problem, completion["text"], completion["num_tokens"], completion["finish_reason"] == "length", value)
        for problem, completion, value in zip(problems, completions, _rewards(problems, completions, reward))
    ]


def _rewards(problems: Sequence[Problem], written: Sequence[dict[str, Any]], reward: Checked) -> list[float]:
    """A column that some rows have is None in the others."""
    names = dict.fromkeys(name for problem in problems for name in problem.row if name not in (PROMPT, COMPLETION))
    columns = {name: [problem.row.get(name) for problem in problems] for name in names}
    completions = [
        one["text"] if isinstance(problem.prompt, str) else [{"role": "assistant", "content": one["text"]}]
        for problem, one in zip(problems, written)
    ]
    columns["completion_ids"] = [one["ids"] for one in written]
    return reward([problem.prompt for problem in problems], completions, **columns)


def _majority(problems: Sequence[Problem]) -> Rate | None:
    if any(problem.answer is None for problem in problems):
        return None
    counts: dict[str, Counter[str | None]] = {}
    for problem in problems:
        counts.setdefault(problem.task, Counter())[problem.answer] += 1
    return Rate(sum(max(count.values()) for count in counts.values()), len(problems))


def _fault(row: dict[str, Any]) -> str | None:
    """What is wrong with a row, without its content."""
    if PROMPT not in row:
        return f"the row has no {PROMPT!r} (it has: {', '.join(map(repr, list(row)[:8])) or 'nothing'})"
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair in a text"
    except TypeError:
        pass  # parquet holds more than JSON does
    prompt = row[PROMPT]
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list):
        return f"{PROMPT!r} is {type(prompt).__name__}, not a text or a list of messages"
    fault = message_fault(prompt) if prompt else "no message"
    return f"{PROMPT!r}: {fault}" if fault else None
