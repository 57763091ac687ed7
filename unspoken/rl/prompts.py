"""What a policy is asked: rows of files, checked before anything is sampled, in the order of the rollouts.

    {"prompt": "3+4=" or [{"role": "user", "content": ...}], "answer": "7", ...}       what the rewards read beside it

A row's `completion` is left aside: `unspoken sft` learns from the same file.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from unspoken.data.frozen_random import frozen_random, hash_share
from unspoken.decode.prompts import encode
from unspoken.decode.sampling import context_length
from unspoken.errors import UnspokenError, UsageError
from unspoken.eval.problems import COMPLETION, Problem, check_rows, first_of_each_task, read_problems
from unspoken.eval.rewards import Checked
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.rl.recipe import RLRecipe

_STREAM = 5
TAKEN = {"prompts", "completions", "completion_ids", "image", "images", "trainer_state", "log_extra", "log_metric"}


@dataclass(frozen=True)
class Prompts:
    """The problems of a run: `train` in rollouts, `held_out` at evaluations. `fingerprint` changes with any of them."""

    train: list[Problem]
    held_out: list[Problem]
    tasks: list[str]
    fingerprint: str


def read_prompts(
    recipe: RLRecipe, tokenizer: PreTrainedTokenizerBase, model: LatentForCausalLM, functions: Sequence[Checked]
) -> Prompts:
    """The recipe's problems.

    Raises:
        UsageError: no such file, no problem on one of the sides.
        UnspokenError: a row that cannot be used, lacks what a reward reads, or is too long for the model.
    """
    section, train = recipe.data, read_problems(recipe.data.files)
    if section.validation_files:
        held_out = read_problems(section.validation_files)
    else:
        shares = [_share(problem) for problem in train]
        held_out = [one for one, share in zip(train, shares) if share < section.validation_fraction]
        train = [one for one, share in zip(train, shares) if share >= section.validation_fraction]
    if not train:
        raise UsageError("data.validation_fraction: all problems are held out")
    if recipe.train.eval_every and not held_out:
        raise UsageError(
            "data: no problem is held out, so there is nothing to evaluate on; raise validation_fraction, give "
            "validation_files, or set train.eval_every: 0"
        )
    _check_kinds([*train, *held_out])
    limit = recipe.rollout.max_new_tokens
    for problem in [*train, *held_out]:
        _check_length(problem, tokenizer, model, limit)
    for function in functions:
        check_rows([*train, *held_out], function)
    tasks = sorted({problem.task for problem in held_out})
    asked = first_of_each_task(held_out, math.ceil(recipe.train.eval_problems / max(1, len(tasks))))
    return Prompts(train, asked if recipe.train.eval_every else [], tasks, _fingerprint(train, held_out))


class Rollouts(Dataset):
    """The rows that TRL asks, one after another, as many as the whole run needs: the problems are gone through in a new
    order each time. So a run that resumes needs to know no more than its rollout."""

    def __init__(self, problems: Sequence[Problem], recipe: RLRecipe):
        self.problems, self.seed = problems, recipe.run.seed
        self.length = recipe.train.num_rollouts * recipe.rollout.num_prompts
        names = dict.fromkeys(name for problem in problems for name in problem.row if name != COMPLETION)
        self.columns = list(names)
        self._epochs: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        epoch, place = divmod(index, len(self.problems))
        if epoch not in self._epochs:
            self._epochs = {epoch: frozen_random(self.seed, epoch, _STREAM).permutation(len(self.problems))}
        row = self.problems[int(self._epochs[epoch][place])].row
        return {name: row.get(name) for name in self.columns}


def _check_kinds(problems: Sequence[Problem]) -> None:
    """Raise UnspokenError for a row that TRL could not ask."""
    for problem in problems:
        if not problem.prompt:
            raise UnspokenError(f"{problem.place}: the prompt is empty")
        if isinstance(problem.prompt, str) != isinstance(problems[0].prompt, str):
            raise UnspokenError(f"{problem.place}: prompts must all be texts or all be messages, unlike the first")
        if taken := TAKEN & problem.row.keys():
            raise UnspokenError(f"{problem.place}: {min(taken)!r} means something else to TRL; give it another name")


def _check_length(
    problem: Problem, tokenizer: PreTrainedTokenizerBase, model: LatentForCausalLM, max_new_tokens: int
) -> None:
    num = len(encode(problem.request, tokenizer, model.config.vocab_size))
    context = context_length(model)
    if context is not None and num + max_new_tokens > context:
        raise UnspokenError(
            f"{problem.place}: the prompt has {num} tokens and rollout.max_new_tokens is {max_new_tokens}, together "
            f"more than the model's context of {context}"
        )


def _share(problem: Problem) -> float:
    """In [0, 1), from the prompt: an equal prompt falls on the same side."""
    return hash_share(json.dumps(problem.prompt, sort_keys=True).encode())


def _fingerprint(train: Sequence[Problem], held_out: Sequence[Problem]) -> str:
    digest = hashlib.sha256()
    for problems in (train, held_out):
        for problem in problems:
            digest.update(json.dumps(problem.row, sort_keys=True, default=str).encode() + b"\n")
        digest.update(b"\n")
    return digest.hexdigest()
