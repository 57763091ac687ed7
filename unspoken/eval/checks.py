"""The equalities that a sound latent model satisfies, each a function of a model that returns the largest deviation.

A deviation is that of two sets of logits, relative to the largest logit (or to 1, if that is less), or of a beam's
score. Token ids are random, sequences short and of odd lengths. The oracles are those of `latent/reference.py`, which
keep no cache and know no padding; they share the model's weights and nothing of its passes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from unspoken.errors import UnspokenError
from unspoken.latent import reference
from unspoken.models.backbone import input_multiplier
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.recycler import RecyclerForCausalLM

LENGTHS = (5, 9, 13)
NUM_NEW_TOKENS = 6
NUM_BEAMS = 4
MAX_PASSES = 3
AWAKE = 0.5  # size of what a random adapter adds, relative to a token's embedding


@dataclass(frozen=True)
class Subject:
    """The model under test, with what the checks need of it."""

    model: LatentForCausalLM
    seed: int = 0

    @property
    def recycles(self) -> bool:
        return isinstance(self.model, RecyclerForCausalLM)

    @property
    def num_passes(self) -> int:
        return MAX_PASSES if self.recycles else 1

    @property
    def prefills(self) -> list[int]:
        """The numbers of prefill passes to try."""
        return sorted({1, 2, self.model.config.num_prefill_passes}) if self.recycles else [1]

    def ids(self, batch: int, length: int, draw: int = 0) -> Tensor:
        """Random token ids [batch, length], the same for equal arguments."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + draw * 100 + length)
        return torch.randint(self.model.config.vocab_size, (batch, length), generator=generator).to(self.model.device)

    def head(self, hidden_states: Tensor) -> Tensor:
        return self.model.transform(self.model.lm_head(hidden_states))

    def pass_logits(self, input_ids: Tensor, num_passes: int | None = None, **inputs: Any) -> Tensor:
        """Logits of every parallel pass, [k, B, T, V]."""
        outputs = self.model.model(input_ids, num_passes=num_passes or self.num_passes, **inputs)
        return self.head(torch.stack(outputs.pass_hidden_states))

    def exact_logits(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        return self.head(self.model.model(input_ids, num_passes="exact", **inputs).last_hidden_state)

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        """Without a mask every token is real: `generate` would take those that look like padding for padding."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        options = {"do_sample": False, "max_new_tokens": NUM_NEW_TOKENS, "return_dict_in_generate": True, **options}
        return self.model.generate(input_ids, attention_mask=mask, **options)  # type: ignore[operator]

    def greedy(self, input_ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Generated ids [B, n] and the logits they were chosen from, [B, n, V]."""
        outputs = self.generate(input_ids, output_logits=True, **inputs)
        return outputs.sequences[:, input_ids.shape[1] :], torch.stack(outputs.logits, dim=1)

    def reference(self) -> tuple[reference.Backbone, reference.Adapter]:
        """Backbone and adapter as the oracles want them; both see what enters the first layer."""
        scale = input_multiplier(self.model.config.text_config)

        def backbone(inputs: Tensor) -> Tensor:
            return self.model.model.backbone(inputs_embeds=inputs / scale, use_cache=False).last_hidden_state

        return backbone, self.model.model.adapter if self.recycles else torch.zeros_like

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.model.model.embed(input_ids, None) * input_multiplier(self.model.config.text_config)

    def decoding_logits(self, input_ids: Tensor, prompt_length: int, num_passes: int) -> Tensor:
        """What decoding must compute from the prompt's last position on, [B, T - prompt_length + 1, V]."""
        hidden = reference.prefill_then_decode(*self.reference(), self.embed(input_ids), prompt_length, num_passes)
        return self.head(hidden[:, prompt_length - 1 :])


def deviation(actual: Tensor, expected: Tensor) -> float:
    """Infinite when anything is not a finite number."""
    largest = (actual.double() - expected.double()).abs().max().item()
    return largest / max(1.0, expected.abs().max().item()) if math.isfinite(largest) else math.inf


def decode_is_reference(subject: Subject) -> float:
    """`generate` against the sequential reference, for each number of prefill passes."""
    worst = 0.0
    for length in LENGTHS[:2]:
        for k in subject.prefills:
            prompt = subject.ids(1, length)
            new, logits = subject.greedy(prompt, num_passes=k)
            expected = subject.decoding_logits(torch.cat([prompt, new[:, :-1]], dim=1), length, k)
            worst = max(worst, deviation(logits, expected))
    return worst


def beams_are_rescored(subject: Subject) -> float:
    """The score that beam search reports against that of the same text under the sequential reference."""
    prompt, k = subject.ids(2, LENGTHS[0]), subject.prefills[-1]
    options: dict[str, Any] = {"num_beams": NUM_BEAMS, "num_return_sequences": 2, "length_penalty": 0.0}
    outputs = subject.generate(prompt, num_passes=k, output_scores=True, **options)
    logits = subject.decoding_logits(outputs.sequences[:, :-1], LENGTHS[0], k)
    chosen = outputs.sequences[:, LENGTHS[0] :].unsqueeze(-1)
    expected = logits.float().log_softmax(-1).gather(-1, chosen).sum((1, 2))
    return deviation(outputs.sequences_scores, expected)


def batch_is_single(subject: Subject) -> float:
    """Three prompts of one length together against each alone: all passes, and decoding."""
    prompts = subject.ids(3, LENGTHS[1])
    together = subject.pass_logits(prompts)
    new, logits = subject.greedy(prompts)
    worst = 0.0
    for i, prompt in enumerate(prompts.split(1)):
        worst = max(worst, deviation(together[:, i : i + 1], subject.pass_logits(prompt)))
        worst = max(worst, _decoding_deviation((new[i], logits[i]), subject.greedy(prompt)))
    return worst


def padded_is_unpadded(subject: Subject) -> float:
    """Prompts of three lengths padded on either side against each alone, with two different tokens as padding."""
    prompts = [subject.ids(1, length, draw=1)[0] for length in LENGTHS]
    alone = [(subject.pass_logits(p[None])[:, 0], subject.greedy(p[None])) for p in prompts]
    worst = 0.0
    for pad_id in subject.ids(1, 2, draw=2)[0].tolist():
        for side in ("left", "right"):
            ids, mask = _padded(prompts, pad_id, side)
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            logits = subject.pass_logits(ids, attention_mask=mask, position_ids=positions, use_cache=False)
            for i, (expected, _) in enumerate(alone):
                worst = max(worst, deviation(logits[:, i, mask[i].bool()], expected))
        ids, mask = _padded(prompts, pad_id, "left")
        new, logits = subject.greedy(ids, attention_mask=mask)
        for i, (_, expected_text) in enumerate(alone):
            worst = max(worst, _decoding_deviation((new[i], logits[i]), expected_text))
    return worst


def packed_is_separate(subject: Subject) -> float:
    """Three documents in one row, told apart by their position ids, against each alone."""
    documents = [subject.ids(1, length, draw=3) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(subject.model.device)
    packed = subject.pass_logits(torch.cat(documents, dim=1), position_ids=positions, use_cache=False)
    parts = packed.split(list(LENGTHS), dim=2)
    return max(deviation(part, subject.pass_logits(document)) for part, document in zip(parts, documents))


def cached_is_uncached(subject: Subject) -> float:
    """Passes that fill a cache against passes without; the recurrence in two turns over a cache against none."""
    ids = subject.ids(1, LENGTHS[2])
    worst = 0.0
    for k in range(1, subject.num_passes + 1):
        filled = subject.pass_logits(ids, k, use_cache=True)
        worst = max(worst, deviation(filled, subject.pass_logits(ids, k, use_cache=False)))
    backbone, adapter = subject.reference()
    expected = subject.head(reference.exact_recurrence(backbone, adapter, subject.embed(ids)))
    first = subject.model.model(ids[:, : LENGTHS[0]], num_passes="exact", use_cache=True)
    second = subject.exact_logits(ids[:, LENGTHS[0] :], cache=first.cache)
    both = torch.cat([subject.head(first.last_hidden_state), second], dim=1)
    return max(worst, deviation(both, expected))


def past_ignores_future(subject: Subject) -> float:
    """Every position's logits, in every pass, before and after all later tokens are replaced."""
    length = LENGTHS[2]
    original = subject.ids(1, length).expand(length, -1)
    later = torch.arange(length)[None] > torch.arange(length)[:, None]
    edited = torch.where(later.to(original.device), subject.ids(1, length, draw=4), original)
    before, after = subject.pass_logits(original), subject.pass_logits(edited)
    kept = ~later
    return deviation(after[:, kept], before[:, kept])


def enough_passes_are_exact(subject: Subject) -> float:
    """As many passes as tokens against the sequential recurrence, the model's own and the reference's."""
    ids = subject.ids(2, LENGTHS[1])
    expected = subject.head(reference.exact_recurrence(*subject.reference(), subject.embed(ids)))
    passes = subject.pass_logits(ids, LENGTHS[1], use_cache=False)
    early = max(deviation(passes[i, :, : i + 1], expected[:, : i + 1]) for i in range(LENGTHS[1]))
    return max(early, deviation(passes[-1], expected), deviation(subject.exact_logits(ids), expected))


def reloaded_is_saved(subject: Subject) -> float:
    """Logits, and the names and values of all weights, after `save_pretrained` and `from_pretrained`."""
    model = subject.model
    with TemporaryDirectory(prefix="unspoken-verify-") as folder:
        model.save_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).eval()
    loaded.to(model.device)
    weights = dict(loaded.named_parameters())
    for name, parameter in model.named_parameters():
        if name not in weights or not torch.equal(weights[name], parameter):
            raise UnspokenError(f"{name} {'differs' if name in weights else 'is missing'} after loading")
    ids = subject.ids(2, LENGTHS[1])
    return deviation(loaded(ids).logits, model(ids).logits)


def base_is_kept(subject: Subject, base: PreTrainedModel) -> float:
    """Logits against those of the checkpoint that the model was made from; it must have weights of the same shapes."""
    body = base.model.backbone if isinstance(base, LatentForCausalLM) else base.base_model
    shapes, expected_shapes = _shapes(subject.model.model.backbone), _shapes(body)
    for name in expected_shapes | shapes:
        here, there = shapes.get(name, "absent"), expected_shapes.get(name, "absent")
        if here != there:
            raise UnspokenError(f"another model than the base: its {name} is {here}, the base's {there}")
    ids = subject.ids(2, LENGTHS[1])
    expected = base(ids, use_cache=False).logits
    return max(deviation(logits, expected) for logits in subject.pass_logits(ids, use_cache=False))


CHECKS = {
    "decode = sequential reference": decode_is_reference,
    "beam score = rescored": beams_are_rescored,
    "batch = single": batch_is_single,
    "padded = unpadded": padded_is_unpadded,
    "packed = separate": packed_is_separate,
    "cached = uncached": cached_is_uncached,
    "causality": past_ignores_future,
    "k >= length = exact": enough_passes_are_exact,
    "save/load": reloaded_is_saved,
}
BASE_CHECK = "logits = base"
BIT_FOR_BIT = {"save/load", BASE_CHECK}
OF_RECYCLING = {"k >= length = exact"}


def base_check(base: PreTrainedModel) -> Callable[[Subject], float]:
    return partial(base_is_kept, base=base)


@contextmanager
def neutral_generation(model: PreTrainedModel) -> Iterator[None]:
    """Generation without the settings saved with the model: no end token, no penalties, no sampling."""
    saved, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    try:
        yield
    finally:
        model.generation_config = saved


@contextmanager
def awake_adapter(model: LatentForCausalLM, seed: int) -> Iterator[bool]:
    """Give an all-zero adapter random weights meanwhile, without which no check could see a lost or misplaced state.

    Yields whether that was done.
    """
    weight = model.model.adapter.proj.weight if isinstance(model, RecyclerForCausalLM) else None
    if weight is None or weight.any():
        yield False
        return
    embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    size = embedding.float().pow(2).mean().sqrt().item() * model.config.embedding_scale
    size *= input_multiplier(model.config.text_config)
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * AWAKE * size
    with torch.no_grad():
        weight.copy_(noise / weight.shape[1] ** 0.5)
    try:
        yield True
    finally:
        torch.nn.init.zeros_(weight)


def _shapes(module: nn.Module) -> dict[str, str]:
    return {name: " x ".join(map(str, parameter.shape)) for name, parameter in module.named_parameters()}


def _padded(prompts: list[Tensor], pad_id: int, side: str) -> tuple[Tensor, Tensor]:
    rows = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=pad_id, padding_side=side)
    masks = [torch.ones_like(prompt) for prompt in prompts]
    return rows, torch.nn.utils.rnn.pad_sequence(masks, batch_first=True, padding_side=side)


def _decoding_deviation(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """Of the logits along the text both have in common: after a tie broken otherwise the texts differ rightly."""
    (ids, logits), (expected_ids, expected_logits) = actual, expected
    same = (ids == expected_ids[0]).long().cumprod(-1).sum().item()
    steps = min(int(same) + 1, len(ids))
    return deviation(logits[:steps], expected_logits[0, :steps])
