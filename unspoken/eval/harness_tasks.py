"""Which tasks of lm-eval a command names, loaded and checked before anything is scored.

A name is a suite's (`suites.py`), or a task's, group's or tag's of lm-eval or of a folder of task files. A folder's
files are looked through first: lm-eval's own thousands take seconds.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from unspoken.errors import UnspokenError, UsageError, first_line, nearest
from unspoken.eval.suites import suites

EXTRAS = "pip install 'lm_eval[math,ifeval]'"


@dataclass(frozen=True)
class Wanted:
    """A task, group or tag to be run once. shots: examples in front of each question; None: as the task says."""

    name: str
    shots: int | None = None

    def __str__(self) -> str:
        return self.name if self.shots is None else f"{self.name} with {self.shots} examples"


@dataclass(frozen=True)
class Loaded:
    """`tasks` is what `lm_eval.evaluator.evaluate` takes."""

    wanted: Wanted
    tasks: Any

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks["tasks"].values())


def wanted_tasks(names: Sequence[str], num_fewshot: int | None = None) -> list[Wanted]:
    """What the names ask for, suites row by row, each once.

    num_fewshot: for tasks, and for rows whose number the paper does not give. Raises UsageError where there are none.
    """
    found: list[Wanted] = []
    for name in names:
        if name not in suites():
            found.append(Wanted(name, num_fewshot))
            continue
        rows = suites()[name].present
        if num_fewshot is not None and all(row.shots for row in rows):
            raise UsageError(f"--num-fewshot: the paper gives the examples of all rows of {name}; leave it out")
        found += [Wanted(row.task, shots) for row in rows for shots in row.shots or (num_fewshot,)]
    return list(dict.fromkeys(found))


def find(names: Sequence[str], include_path: str | None = None) -> TaskManager:
    """An index that has all the names. Raises UsageError for one that nobody knows."""
    if include_path:
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            where = f"lm-eval nor in {include_path}" if include_path else "lm-eval"
            own = "" if include_path else "; --include-path FOLDER takes in task files of your own"
            raise UsageError(
                f"--tasks: there is no task {name!r} in {where}{nearest(name, [*manager.all_tasks, *suites()])}; "
                f"`lm_eval ls tasks` shows what there is, `unspoken eval --list-suites` the papers' suites{own}"
            )
    return manager


def load(wanted: Sequence[Wanted], manager: TaskManager) -> list[Loaded]:
    """Load the tasks with their data.

    Raises UnspokenError that names every task that cannot be loaded, and why.
    """
    loaded: list[Loaded] = []
    failures: dict[str, str] = {}
    for one in wanted:
        try:
            with seeded():
                loaded.append(Loaded(one, manager.load([one.name])))
        except ImportError as error:
            failures[one.name] = f"{first_line(error)} ({EXTRAS} may be what it needs)"
        except Exception as error:  # whatever a data set's library says
            failures[one.name] = f"{type(error).__name__}: {first_line(error)}"
    if failures:
        others = ",".join(dict.fromkeys(one.wanted.name for one in loaded))
        hint = f"\nwithout them: --tasks {others}" if others else ""
        told = "".join(f"\n  {name}: {reason}" for name, reason in failures.items())
        raise UnspokenError(f"{len(failures)} of {len(wanted)} tasks could not be loaded:{told}{hint}")
    for tasks in loaded:
        for task in tasks:
            _set_shots(task, tasks.wanted.shots)
    return loaded


def check(loaded: Sequence[Loaded], lm: HFLM, max_new_tokens: int | None, runs_code: bool) -> None:
    """Refuse what would fail after hours, or have no effect.

    max_new_tokens: of tasks that generate, instead of their own number; it is set here. runs_code: whether they may.
    """
    tasks = [task for one in loaded for task in one]
    if unsafe := sorted({task.task_name for task in tasks if getattr(task, "UNSAFE_CODE", False)}):
        if not runs_code:
            raise UsageError(
                f"{', '.join(unsafe)}: the program that the model writes is run on this machine; "
                "--confirm-run-unsafe-code allows it"
            )
    elif runs_code:
        raise UsageError("--confirm-run-unsafe-code: none of the tasks runs code; leave it out")
    generating = [task for task in tasks if task.OUTPUT_TYPE == "generate_until"]
    if max_new_tokens is not None and not generating:
        raise UsageError("--max-new-tokens: none of the tasks generates; leave it out")
    for task in generating:
        if max_new_tokens is not None:
            task.set_config("generation_kwargs", {"max_gen_toks": max_new_tokens}, update=True)
        new_tokens = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", lm.max_gen_toks)
        if new_tokens >= lm.max_length:
            raise UsageError(
                f"{task.task_name} generates up to {new_tokens} tokens, the model's context is {lm.max_length}; "
                "--max-new-tokens with less leaves room for the question"
            )


@contextmanager
def seeded() -> Iterator[None]:
    """The seeds that lm-eval begins with, for this block alone."""
    state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(DEFAULT_OTHER_SEED)
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _set_shots(task: Task, shots: int | None) -> None:
    """As lm-eval does, but that a number which it would ignore is refused."""
    own = task.get_config("num_fewshot")
    if shots and task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise UsageError(f"--num-fewshot: {task.task_name} scores whole texts, before which no example stands")
    if shots and own == 0:
        raise UsageError(f"--num-fewshot: {task.task_name} takes no examples")
    task.set_config("num_fewshot", (own or 0) if shots is None else shots)
    task.set_fewshot_seed(DEFAULT_OTHER_SEED)
