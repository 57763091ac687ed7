"""Loss of a latent model on rows of text, for each number of parallel passes and for the exact recurrence.

One run of n passes gives all of `k=1` ... `k=n`, since pass i is the same whatever comes after it. `exact` is the
model's own sequential recurrence over a cache, a stretch of tokens at a time. Latent steps need no such line: taken in
parallel they are what decoding computes. Thresholds beside the model's own have lines of their own, `k=1 tau=0.1`.
Per-row sums are kept, so that a result can be stated with its spread over documents, two results be compared on the
same documents, and an interrupted evaluation still says what it found. Logits exist for a few tokens at a time only.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache

from unspoken.errors import UsageError
from unspoken.eval.rows import Row
from unspoken.eval.settings import EXACT, Setting, settings_of
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.recycler import RecyclerForCausalLM

CHUNK_LOGITS = 2**24  # logits held at once: 64 MiB in float32
MAX_STATES = 2**27  # hidden-state numbers held at once; with many passes fewer rows run together
EXACT_STRETCH = 16  # tokens of the recurrence between two reports of progress
NUM_RESAMPLES = 1000
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Loss:
    """One line of a table. `loss` is in nats per target; intervals are 95 % over documents, None for one document.

    `difference` is the loss minus that of `k=1` on the same rows, with its own, paired interval. `latent_length` is the
    mean number of latent steps of a token, `prune_ratio` the share of those allowed that were not taken; both None for
    a model without.
    """

    name: str
    loss: float
    interval: tuple[float, float] | None
    difference: float
    difference_interval: tuple[float, float] | None
    perplexity: float
    bits_per_byte: float | None
    num_targets: int
    num_documents: int
    latent_length: float | None = None
    prune_ratio: float | None = None


@dataclass
class Scores:
    """What was measured: summed nats [rows] for each of `k=1` ... `k=n` and `exact` of each setting, as many latent
    steps [rows] (nothing from a model without), and which rows are done."""

    rows: Sequence[Row]
    num_passes: int
    has_exact: bool
    settings: Sequence[Setting]
    nats: dict[str, np.ndarray]
    latent_steps: dict[str, np.ndarray]
    done: np.ndarray
    seconds: dict[str, float] = field(default_factory=lambda: {"parallel": 0.0, EXACT: 0.0})

    @property
    def names(self) -> list[str]:
        return list(self.nats)

    def passes(self, setting: Setting) -> list[str]:
        """The names of a setting's parallel passes."""
        return [f"k={k}{setting.suffix}" for k in range(1, self.num_passes + 1)]

    def exact(self, setting: Setting) -> str | None:
        return f"{EXACT}{setting.suffix}" if self.has_exact else None

    def setting(self, name: str) -> Setting:
        """That of a line."""
        return next(one for one in self.settings if name in (*self.passes(one), self.exact(one)))

    @property
    def is_complete(self) -> bool:
        return bool(self.done.all())

    def losses(self) -> list[Loss]:
        """The results on the rows done so far, in order; none when no row is done."""
        return [self.loss(name) for name in self.names] if self.done.any() else []

    def loss(self, name: str) -> Loss:
        targets = self._by_document(np.array([row.num_targets for row in self.rows]))
        num_bytes = self._by_document(np.array([row.num_bytes for row in self.rows])).sum()
        nats, first = self._by_document(self.nats[name]), self._by_document(self.nats["k=1"])
        mean = nats.sum() / targets.sum()
        return Loss(
            name=name,
            loss=mean,
            interval=interval(nats, targets),
            difference=(nats - first).sum() / targets.sum(),
            difference_interval=interval(nats - first, targets),
            perplexity=math.exp(mean) if mean < 700 else math.inf,
            bits_per_byte=nats.sum() / math.log(2) / num_bytes if num_bytes else None,
            num_targets=int(targets.sum()),
            num_documents=len(targets),
            **self._latent(name),
        )

    def _latent(self, name: str) -> dict[str, float | None]:
        if name not in self.latent_steps:
            return {}
        num_tokens = np.array([len(row.ids) for row in self.rows])[self.done].sum()
        latent_length = float(self.latent_steps[name][self.done].sum() / num_tokens)
        return {"latent_length": latent_length, "prune_ratio": self.setting(name).prune_ratio(latent_length)}

    def _by_document(self, values: np.ndarray) -> np.ndarray:
        """Sums over the rows done of each document that has any."""
        documents = np.array([row.document for row in self.rows])[self.done]
        _, place = np.unique(documents, return_inverse=True)
        return np.bincount(place, weights=values[self.done])


def interval(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float] | None:
    """95 % interval of sum(sums) / sum(counts) when the documents are drawn anew (bootstrap, fixed seed)."""
    if len(sums) < 2:
        return None
    random = np.random.RandomState(0)
    draws = random.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=NUM_RESAMPLES)
    low, high = np.percentile(draws @ sums / (draws @ counts), [2.5, 97.5])
    return float(low), float(high)


def prepare_scores(
    model: LatentForCausalLM,
    rows: Sequence[Row],
    num_passes: int,
    exact: bool = True,
    settings: Sequence[Setting] | None = None,
) -> Scores:
    """Empty scores for `score`. A model that does not recycle has one pass. settings: the first is
    without a suffix; by default it is the only one."""
    if num_passes < 1:
        raise UsageError(f"the number of passes is {num_passes}; it must be at least 1")
    recycles = isinstance(model, RecyclerForCausalLM)
    done = np.zeros(len(rows), dtype=bool)
    settings = settings or settings_of(model)
    has_exact = exact and model.decodes_by_recurrence
    scores = Scores(rows, num_passes if recycles else 1, has_exact, settings, {}, {}, done)
    for setting in settings:
        for name in filter(None, (*scores.passes(setting), scores.exact(setting))):
            scores.nats[name] = np.zeros(len(rows))
            if setting.knobs is not None:
                scores.latent_steps[name] = np.zeros(len(rows), dtype=int)
    return scores


def evaluate(
    model: LatentForCausalLM, rows: Sequence[Row], num_passes: int, exact: bool = True, batch_size: int = 8
) -> list[Loss]:
    """Losses of `k=1` ... `k=num_passes` and `exact`. `prepare_scores` and `score` give more control."""
    scores = prepare_scores(model, rows, num_passes, exact)
    score(model, scores, batch_size)
    return scores.losses()


@torch.no_grad()
def score(model: LatentForCausalLM, scores: Scores, batch_size: int = 8, progress: Progress = lambda tokens: None):
    """Fill in the scores of the rows that are not done, a batch at a time; it may be interrupted and called again.

    progress: called with numbers of token positions as they are finished; they sum to `work(scores)`. Results depend
    on batch_size by rounding alone. The model's training mode is kept.
    """
    if batch_size < 1:
        raise UsageError(f"--batch-size is {batch_size}; it must be at least 1")
    was_training = model.training
    model.eval()
    try:
        for places in _batches(scores, _rows_at_once(model, scores, batch_size)):
            _score_batch(model, scores, places, progress)
            scores.done[places] = True
    finally:
        model.train(was_training)


def work(scores: Scores) -> int:
    """Token positions that `score` reports: a row's once for all parallel passes, and once more for `exact`, in each
    setting."""
    return sum(len(row.ids) for row in scores.rows) * (1 + scores.has_exact) * len(scores.settings)


def row_nats(model: LatentForCausalLM, hidden: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy of each row, float64 [B]: hidden [B, T, d], targets [B, T] (negative: none)."""
    total = torch.zeros(len(targets), dtype=torch.float64, device=hidden.device)
    places, columns = (targets >= 0).nonzero(as_tuple=True)
    chunk_tokens = max(1, CHUNK_LOGITS // model.config.vocab_size)
    for part in torch.arange(len(places), device=hidden.device).split(chunk_tokens):
        row, column = places[part], columns[part]
        logits = model.transform(model.lm_head(hidden[row, column]))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total.index_add_(0, row, F.cross_entropy(logits, targets[row, column], reduction="none").double())
    return total


def _rows_at_once(model: LatentForCausalLM, scores: Scores, batch_size: int) -> int:
    longest = max(len(row.ids) for row in scores.rows)
    states_per_row = (scores.num_passes + scores.has_exact) * longest * model.config.hidden_size
    return max(1, min(batch_size, MAX_STATES // states_per_row))


def _batches(scores: Scores, size: int) -> list[np.ndarray]:
    """Places of rows of like length together, the batches in a fixed random order: a part of them is a fair sample."""
    places = np.flatnonzero(~scores.done)
    lengths = np.array([len(row.ids) for row in scores.rows])[places]
    places = places[np.argsort(-lengths, kind="stable")]
    batches = [places[start : start + size] for start in range(0, len(places), size)]
    return [batches[index] for index in np.random.RandomState(0).permutation(len(batches))]


def _score_batch(model: LatentForCausalLM, scores: Scores, places: np.ndarray, progress: Progress) -> None:
    ids, mask = _padded([scores.rows[place].ids for place in places], model.device)
    targets = F.pad(ids[:, 1:], (0, 1)).masked_fill(~F.pad(mask[:, 1:], (0, 1)), -1)
    for setting in scores.settings:
        start = time.perf_counter()
        options = {"num_passes": scores.num_passes, "use_cache": False, **setting.options}
        outputs = model.model(ids, attention_mask=mask.long(), **options)
        for name, hidden in zip(scores.passes(setting), outputs.pass_hidden_states):
            scores.nats[name][places] = row_nats(model, hidden, targets).cpu().numpy()
        for name, latents in zip(scores.passes(setting), outputs.pass_latents or ()):
            scores.latent_steps[name][places] = latents.lengths.sum(-1).cpu().numpy()
        scores.seconds["parallel"] += time.perf_counter() - start
        progress(int(mask.sum()))
        if (exact := scores.exact(setting)) is not None:
            start = time.perf_counter()
            nats, latent_steps = _exact(model, ids, mask, targets, setting, progress)
            scores.nats[exact][places] = nats.cpu().numpy()
            if setting.knobs is not None:
                scores.latent_steps[exact][places] = latent_steps.cpu().numpy()
            scores.seconds[EXACT] += time.perf_counter() - start


def _exact(
    model: LatentForCausalLM, ids: Tensor, mask: Tensor, targets: Tensor, setting: Setting, progress: Progress
) -> tuple[Tensor, Tensor]:
    """Summed nats and latent steps of each row, [B]."""
    total = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    latent_steps = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
    cache = DynamicCache(config=model.config)
    options = {"cache": cache, "use_cache": True, "num_passes": EXACT, **setting.options}
    for start in range(0, ids.shape[1], EXACT_STRETCH):
        part = slice(start, min(start + EXACT_STRETCH, ids.shape[1]))
        outputs = model.model(ids[:, part], attention_mask=mask[:, : part.stop].long(), **options)
        total += row_nats(model, outputs.last_hidden_state, targets[:, part])
        if outputs.latents is not None:
            latent_steps += outputs.latents.lengths.sum(-1)
        progress(int(mask[:, part].sum()))
    return total, latent_steps


def _padded(rows: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids -> (ids [B, T], bool mask [B, T]), padded on the right with id 0."""
    tensors = [torch.from_numpy(ids) for ids in rows]
    ids = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids.to(device), (torch.arange(ids.shape[1]) < lengths[:, None]).to(device)
