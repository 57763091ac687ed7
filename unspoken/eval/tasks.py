"""How often a latent model is right on a task: at each position and in its answer, for every number of passes.

What a position says is the head's first choice there, given the sample up to it: for a task that labels each position
that is all of decoding. `k=n` are parallel passes, `exact` is the sequential recurrence, which decoding computes; it
runs a whole batch at once, one token after the other.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unspoken.data.task_windows import evaluation_samples
from unspoken.data.tasks import NO_TARGET, PAD_ID, Sample, Task
from unspoken.errors import UsageError
from unspoken.eval.perplexity import EXACT
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.recycler import RecyclerForCausalLM

Z95 = 1.959964  # of the normal distribution, for two-sided 95 %


@dataclass(frozen=True)
class Rate:
    """So many right of so many."""

    num_right: int
    num: int

    @property
    def share(self) -> float:
        return self.num_right / self.num

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval: it stays within 0 and 1, and has a width at both."""
        n, share = self.num, self.share
        centre = share + Z95**2 / (2 * n)
        half = Z95 * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n))
        scale = 1 + Z95**2 / n
        return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


@dataclass(frozen=True)
class LengthResult:
    """What was found with samples of one length. `answers`: of each of `k=1` ... `exact`, the samples whose answer is
    right; `positions`: of each, the rate at the samples' first target, second, ...; `majority`: the rate of always
    giving the most frequent answer."""

    length: int
    answers: dict[str, Rate]
    positions: dict[str, list[Rate]]
    majority: Rate


def default_lengths(task: Task) -> list[int]:
    """The longest that was trained, and half as long again, twice and four times as long."""
    longest = task.max_length
    return sorted({longest, -(-longest * 3 // 2), 2 * longest, 4 * longest})


def evaluate_task(
    model: LatentForCausalLM,
    task: Task,
    length: int,
    num_samples: int = 1000,
    num_passes: int = 4,
    exact: bool = True,
    batch_size: int = 250,
) -> LengthResult:
    """Measure samples of one length, the same ones for every model. A plain model has one pass, which is exact.

    Raises:
        UsageError: a count that is less than 1, samples longer than the model's context.
    """
    counts = {"length": length, "samples": num_samples, "num_passes": num_passes, "batch_size": batch_size}
    for name, count in counts.items():
        if count < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {count}; it must be at least 1")
    context = getattr(model.config.text_config, "max_position_embeddings", None)
    if context and task.num_tokens(length) > context:
        raise UsageError(f"samples of length {length} take {task.num_tokens(length)} tokens; the context is {context}")
    samples = evaluation_samples(task, length, num_samples)
    if not isinstance(model, RecyclerForCausalLM):
        num_passes, exact = 1, False
    batches = [samples[start : start + batch_size] for start in range(0, num_samples, batch_size)]
    right: dict[str, list[np.ndarray]] = {}  # of each sample, bool [its targets]
    for batch in batches:
        for name, rows in _right(model, batch, num_passes, exact).items():
            right.setdefault(name, []).extend(rows)
    answers = {name: _answer_rate(task, rows) for name, rows in right.items()}
    positions = {name: _position_rates(rows) for name, rows in right.items()}
    return LengthResult(length, answers, positions, _majority(task, samples))


@torch.no_grad()
def _right(
    model: LatentForCausalLM, samples: Sequence[Sample], num_passes: int, exact: bool
) -> dict[str, list[np.ndarray]]:
    """Which targets of each sample are met, for `k=1` ... `k=num_passes` and `exact`. The model's mode is kept."""
    was_training = model.training
    model.eval()
    ids = _padded(samples).to(model.device)
    outputs = model.model(ids, num_passes=num_passes, use_cache=False)
    hidden = {f"k={k}": states for k, states in enumerate(outputs.pass_hidden_states, start=1)}
    if exact:
        outputs = model.model(ids, num_passes=EXACT, use_cache=False)
        hidden[EXACT] = outputs.last_hidden_state
    model.train(was_training)
    targets = [(sample.targets != NO_TARGET).nonzero()[0] for sample in samples]
    said = {name: model.transform(model.lm_head(states)).argmax(-1).cpu().numpy() for name, states in hidden.items()}
    return {
        name: [row[places] == sample.targets[places] for row, places, sample in zip(rows, targets, samples)]
        for name, rows in said.items()
    }


def _padded(samples: Sequence[Sample]) -> Tensor:
    """Token ids [B, T]. Pads stand on the right, where nothing that is looked at can see them: no mask is needed."""
    rows = [torch.from_numpy(sample.tokens) for sample in samples]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)


def _answer_rate(task: Task, rows: Sequence[np.ndarray]) -> Rate:
    return Rate(sum(bool(row[-1] if task.answer == "last" else row.all()) for row in rows), len(rows))


def _position_rates(rows: Sequence[np.ndarray]) -> list[Rate]:
    longest = max(len(row) for row in rows)
    places = [[bool(row[i]) for row in rows if len(row) > i] for i in range(longest)]
    return [Rate(sum(found), len(found)) for found in places]


def _majority(task: Task, samples: Sequence[Sample]) -> Rate:
    targets = [sample.targets[sample.targets != NO_TARGET] for sample in samples]
    answers = Counter(tuple(row[-1:] if task.answer == "last" else row) for row in targets)
    return Rate(max(answers.values()), len(samples))
