"""How often a latent model is right on a task, at each position and in its answer, and its loss: for every number of
passes.

What a position says is the head's first choice there, given the sample up to it: for a task that labels each position
that is all of decoding. `k=n` are parallel passes, `exact` is the sequential recurrence, which decoding computes; it
runs a whole batch at once, one token after the other.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspoken.data.task_windows import evaluation_samples
from unspoken.data.tasks import NO_TARGET, PAD_ID, Sample, Task
from unspoken.errors import UsageError
from unspoken.eval.perplexity import EXACT, Scores, prepare_scores, row_nats
from unspoken.eval.rows import Row
from unspoken.eval.settings import Setting
from unspoken.models.latent_lm import LatentForCausalLM

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
class SampleRow(Row):
    """A sample as a row of `Scores`: each is its own document."""

    targets: np.ndarray

    @property
    def num_targets(self) -> int:
        return int((self.targets != NO_TARGET).sum())


@dataclass(frozen=True)
class LengthResult:
    """What was found with samples of one length. `answers`: of each of `k=1` ... `exact`, the samples whose answer is
    right; `positions`: of each, the rate at the samples' first target, second, ...; `majority`: the rate of always
    giving the most frequent answer; `scores`: the losses."""

    length: int
    answers: dict[str, Rate]
    positions: dict[str, list[Rate]]
    majority: Rate
    scores: Scores


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
    settings: Sequence[Setting] | None = None,
) -> LengthResult:
    """Measure samples of one length, the same ones for every model. A model that does not recycle has one pass, which
    is exact. settings: see `prepare_scores`.

    Raises:
        UsageError: a count that is less than 1, samples longer than the model's context.
    """
    _check(model, task, {"length": length, "samples": num_samples, "num-passes": num_passes, "batch-size": batch_size})
    samples = evaluation_samples(task, length, num_samples)
    rows = [SampleRow(sample.tokens, number, 0.0, sample.targets) for number, sample in enumerate(samples)]
    scores = prepare_scores(model, rows, num_passes, exact, settings)
    right: dict[str, list[np.ndarray]] = {name: [] for name in scores.names}  # of each sample, bool [its targets]
    for start in range(0, num_samples, batch_size):
        part = slice(start, start + batch_size)
        for name, found in _score(model, samples[part], scores).items():
            right[name] += found.is_right
            scores.nats[name][part] = found.nats
            if found.latent_steps is not None:
                scores.latent_steps[name][part] = found.latent_steps
        scores.done[part] = True
    answers = {name: _answer_rate(task, found) for name, found in right.items()}
    positions = {name: _position_rates(found) for name, found in right.items()}
    return LengthResult(length, answers, positions, _majority(task, samples), scores)


def _check(model: LatentForCausalLM, task: Task, counts: dict[str, int]) -> None:
    for option, count in counts.items():
        if count < 1:
            raise UsageError(f"--{option} is {count}; it must be at least 1")
    context = getattr(model.config.text_config, "max_position_embeddings", None)
    length, needed = counts["length"], task.num_tokens(counts["length"])
    if context and needed > context:
        raise UsageError(f"samples of length {length} take {needed} tokens; the model's context is {context}")


@dataclass(frozen=True)
class _Found:
    """Of each sample: which targets are met, its summed nats, its latent steps (None: the model takes none)."""

    is_right: list[np.ndarray]
    nats: np.ndarray
    latent_steps: np.ndarray | None


@torch.no_grad()
def _score(model: LatentForCausalLM, samples: Sequence[Sample], scores: Scores) -> dict[str, _Found]:
    """What each line finds. The model's mode is kept."""
    was_training = model.training
    model.eval()
    ids = _padded([sample.tokens for sample in samples], PAD_ID).to(model.device)
    targets = _padded([sample.targets for sample in samples], NO_TARGET).to(model.device)
    lengths = torch.tensor([len(sample.tokens) for sample in samples], device=model.device)
    is_token = torch.arange(ids.shape[1], device=model.device) < lengths.unsqueeze(-1)

    def found(states: Tensor, latents: Any) -> _Found:
        said = model.transform(model.lm_head(states)).argmax(-1)
        is_right = [row[wanted != NO_TARGET].cpu().numpy() for row, wanted in zip(said == targets, targets)]
        steps = None if latents is None else (latents.lengths * is_token).sum(-1).cpu().numpy()
        return _Found(is_right, row_nats(model, states, targets).cpu().numpy(), steps)

    lines = {}
    for setting in scores.settings:
        outputs = model.model(ids, num_passes=scores.num_passes, use_cache=False, **setting.options)
        passes = outputs.pass_latents or [None] * scores.num_passes
        for name, states, latents in zip(scores.passes(setting), outputs.pass_hidden_states, passes):
            lines[name] = found(states, latents)
        if (exact := scores.exact(setting)) is not None:
            outputs = model.model(ids, num_passes=EXACT, use_cache=False, **setting.options)
            lines[exact] = found(outputs.last_hidden_state, outputs.latents)
    model.train(was_training)
    return lines


def _padded(rows: Sequence[np.ndarray], value: int) -> Tensor:
    """int64 [B, T]. Pads stand on the right, where nothing that is looked at can see them: no mask is needed."""
    return torch.nn.utils.rnn.pad_sequence(list(map(torch.from_numpy, rows)), batch_first=True, padding_value=value)


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
