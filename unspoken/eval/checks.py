"""The equalities that a sound latent model satisfies, each a function of a model that returns the largest deviation.

A deviation is that of two sets of logits, relative to the largest logit (or to 1, if that is less), or of a beam's
score. Token ids are random, sequences short and of odd lengths. The oracles are those of `latent/reference.py`, which
keep no cache and know no padding; they share the model's weights and nothing of its passes.
"""

from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from unspoken.errors import UnspokenError
from unspoken.eval.subject import Subject, deviation
from unspoken.models.backbone import input_multiplier
from unspoken.models.drift import Drift, drift
from unspoken.models.knobs import takes_latent_steps
from unspoken.models.latent_lm import LatentForCausalLM

LENGTHS = (5, 9, 13)
NUM_BEAMS = 4


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
    expected = subject.recurrence(ids)
    first = subject.model.model(ids[:, : LENGTHS[0]], num_passes="exact", use_cache=True)
    second = subject.exact_logits(ids[:, LENGTHS[0] :], cache=first.cache)
    both = torch.cat([subject.head(first.last_hidden_state), second], dim=1)
    return max(worst, deviation(both, expected))


def chunks_are_whole(subject: Subject) -> float:
    """A prompt read in chunks, down to a token, against the same in one go, for each number of prefill passes."""
    prompt, worst = subject.ids(1, LENGTHS[1]), 0.0
    for k in subject.prefills:
        whole = subject.greedy(prompt, num_passes=k)
        for size in (1, 4):
            new, logits = subject.greedy(prompt, num_passes=k, prefill_chunk_size=size)
            worst = max(worst, _decoding_deviation((new[0], logits[0]), whole))
    return worst


def steps_are_sequential(subject: Subject) -> float:
    """All tokens' latent steps in one forward against token by token, step by step; also with no room for any."""
    ids = subject.ids(2, LENGTHS[1])
    embeds = subject.embed(ids)
    expected = subject.head(subject.body(embeds))
    plain = subject.model.model(ids, num_passes=1, use_cache=False, max_latent_steps=0).last_hidden_state
    scale = input_multiplier(subject.model.config.text_config)
    backbone = subject.model.model.backbone(inputs_embeds=embeds / scale, use_cache=False).last_hidden_state
    return max(
        deviation(subject.pass_logits(ids, 1, use_cache=False)[0], expected),
        deviation(subject.head(plain), subject.head(backbone)),
    )


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
    expected = subject.recurrence(ids)
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
    """Logits, with no latent step, against those of the checkpoint that the model was made from; it must have weights
    of the same shapes."""
    body = base.model.backbone if isinstance(base, LatentForCausalLM) else base.base_model
    shapes, expected_shapes = _shapes(subject.model.model.backbone), _shapes(body)
    for name in expected_shapes | shapes:
        here, there = shapes.get(name, "absent"), expected_shapes.get(name, "absent")
        if here != there:
            raise UnspokenError(f"another model than the base: its {name} is {here}, the base's {there}")
    ids = subject.ids(2, LENGTHS[1])
    expected = base(ids, use_cache=False).logits
    plain = {"max_latent_steps": 0} if takes_latent_steps(subject.model) else {}
    return max(deviation(logits, expected) for logits in subject.pass_logits(ids, use_cache=False, **plain))


def base_drift(subject: Subject, base: PreTrainedModel) -> Drift:
    """How far latent steps take the first pass from the base."""
    ids = subject.ids(2, LENGTHS[1])
    one_pass = {"num_passes": 1} if isinstance(base, LatentForCausalLM) else {}
    return drift(subject.model, ids, base(ids, use_cache=False, **one_pass).logits)


CHECKS = {
    "decode = sequential reference": decode_is_reference,
    "beam score = rescored": beams_are_rescored,
    "batch = single": batch_is_single,
    "padded = unpadded": padded_is_unpadded,
    "packed = separate": packed_is_separate,
    "cached = uncached": cached_is_uncached,
    "prefill in chunks = whole": chunks_are_whole,
    "causality": past_ignores_future,
    "k >= length = exact": enough_passes_are_exact,
    "latent steps = one by one": steps_are_sequential,
    "save/load": reloaded_is_saved,
}
BASE_CHECK, DRIFT_CHECK = "logits = base", "latent steps stay near base"
BIT_FOR_BIT = {"save/load", BASE_CHECK}
OF_RECYCLING, OF_LATENT_STEPS = {"k >= length = exact"}, {"latent steps = one by one"}
IN_CHUNKS = {"prefill in chunks = whole"}


def base_check(base: PreTrainedModel) -> Callable[[Subject], float]:
    return partial(base_is_kept, base=base)


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
