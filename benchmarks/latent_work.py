"""Whether latent steps that tokens do not take cost nothing: time against counted FLOPs, at forced prune ratios."""

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig

from benchmarks.arms import random_ids
from benchmarks.ceiling import matmul_flops_per_second, read_bytes_per_second, weight_bytes
from benchmarks.measure import Quantities, check, cpu_seconds, interleave, progress, ratio
from benchmarks.record import Result, Row, Spread, Target
from unspoken import AdaptiveLatentConfig, AdaptiveLatentForCausalLM, scaled_init
from unspoken.analysis.flops import FORWARD_AND_BACKWARD, ModelFlops, model_flops
from unspoken.latent.slots import SlotLayer, SlotTable

MAX_LATENT_STEPS = 3
RATIOS = (0.0, 0.1, 0.2, 0.4, 0.6)
JUDGED_FROM = 0.4
WITHIN = 0.1
TOLERANCE = 1e-3  # of logits, which float32 sums in another order
SIZES = {
    "20M": {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1376, "num_attention_heads": 8},
    "0.9M": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 384, "num_attention_heads": 4},
}
QUICK = {"tiny": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 2}}


def run(quick: bool) -> Result:
    settings: dict[str, Any] = {
        "models": QUICK if quick else SIZES,
        "vocab_size": 64 if quick else 4096,
        "max_latent_steps": MAX_LATENT_STEPS,
        "train_batch": 4,
        "train_tokens": 16 if quick else 256,
        "prompt_tokens": 8 if quick else 128,
        "new_tokens": 4 if quick else 16,
        "rounds": 2 if quick else 7,
        "warmup_rounds": 1,
    }
    result = Result(
        name="latent_work",
        question="Do latent steps that tokens do not take cost nothing?",
        method="A token's gates are set so that it takes as many latent steps as were drawn for it (the prune ratio's "
        "share of them all is left out, anywhere); all else is the unmodified model, float32. `training` is forward "
        "and backward; `decoding` is one forward a token over a filled cache. Relative to nothing pruned: `FLOPs` are "
        "counted (`unspoken.analysis.flops`), with attention to visible keys alone; `as run` count what short rows are "
        "filled up with, and attention to masked keys; `runs` are the backbone's in decoding, each of which reads all "
        "weights for however few rows of the batch go on. Target: the time ratio within 10 % of the FLOP ratio.",
        ceiling="the counted FLOPs at the measured matrix rate; in decoding no faster than every run of the backbone "
        "reads its weights at the measured memory rate; for the cache, an entry for every run of every token",
        settings=settings,
        checks=[],
        rows=[],
    )
    for name, sizes in settings["models"].items():
        model = build(sizes, settings["vocab_size"])
        result.rows += training(name, model, settings, result.checks)
        for batch in (1, 8):
            result.rows += decoding(name, model, batch, settings, result.checks)
    return result


def build(sizes: dict[str, Any], vocab_size: int) -> AdaptiveLatentForCausalLM:
    torch.manual_seed(0)
    scales = scaled_init(sizes["hidden_size"])
    text_config = LlamaConfig(vocab_size=vocab_size, initializer_range=scales["initializer_range"], **sizes)
    return AdaptiveLatentForCausalLM(
        AdaptiveLatentConfig(
            text_config=text_config,
            max_latent_steps=MAX_LATENT_STEPS,
            embedding_scale=scales["embedding_scale"],
        )
    )


@dataclass
class Forced:
    """Stands behind a model's gates: token (b, t) of the next forward takes `lengths[b, t]` latent steps, [B, T].

    `entered` counts the rows and tokens that go into the backbone, what fills short rows among them.
    """

    model: AdaptiveLatentForCausalLM
    lengths: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    entered: int = 0

    def __enter__(self) -> "Forced":
        base: Any = self.model.model
        self._asked = base._gate
        base._gate = self._gate
        self._hook = base.backbone.register_forward_pre_hook(self._count, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        del self.model.model._gate  # the class has its own
        self._hook.remove()

    def _gate(self, hidden: Tensor, active: Any, step: int, knobs: Any) -> Tensor | None:
        """The router is asked as ever; its answer is overruled."""
        gate = self._asked(hidden, active, step, knobs)
        if gate is None:
            return None
        return torch.where(active.taken & (active.of(self.lengths) >= step), 0.9 + 0.0 * gate, 0.0 * gate)

    def _count(self, _module: Any, _arguments: Any, options: dict[str, Any]) -> None:
        self.entered += options["inputs_embeds"].shape[:2].numel()


def drawn_lengths(prune: float, batch: int, tokens: int) -> Tensor:
    """Latent lengths [B, T]: that share of all steps is left out, wherever the lot falls."""
    generator = torch.Generator().manual_seed(round(100 * prune))
    order = torch.randperm(batch * tokens * MAX_LATENT_STEPS, generator=generator)
    kept = order >= round(prune * len(order))
    return kept.view(batch, tokens, MAX_LATENT_STEPS).sum(-1)


def arm_of(prune: float) -> str:
    return f"prune {prune:.0%}"


BASELINE = arm_of(0.0)


def training(name: str, model: Any, settings: dict[str, Any], checks: list[str]) -> list[Row]:
    shape = settings["train_batch"], settings["train_tokens"]
    case = {"phase": "training", "model": name, "batch": shape[0], "tokens": shape[1]}
    progress(case)
    ids = random_ids(settings["vocab_size"], *shape)
    lengths = {arm_of(prune): drawn_lengths(prune, *shape) for prune in RATIOS}
    flops = model_flops(model)
    counted = {arm: training_flops(flops, taken) for arm, taken in lengths.items()}
    as_run = {arm: training_flops(flops, taken, is_dense=True) for arm, taken in lengths.items()}
    model.train()
    with Forced(model) as forced:
        arms = {arm: partial(_timed_step, forced, ids, taken, checks) for arm, taken in lengths.items()}
        rounds = interleave(arms, settings["rounds"], settings["warmup_rounds"])
    rate = matmul_flops_per_second(torch.float32)
    ceilings = {arm: flops / rate for arm, flops in counted.items()}
    return _rows(case, "CPU-seconds per step", rounds, {"FLOPs": counted, "as run": as_run}, ceilings)


def training_flops(flops: ModelFlops, lengths: Tensor, is_dense: bool = False) -> int:
    """Of one step with random text: every token but a row's last has a target."""
    assert flops.latent is not None and flops.latent.prices == "steps"
    forward = flops.steps(lengths, is_dense=is_dense, keeps_rows=True)
    targets = lengths[:, :-1]
    return FORWARD_AND_BACKWARD * (forward + flops.head * targets.numel()) + flops.head * int(targets.sum())


def _timed_step(forced: Forced, ids: Tensor, lengths: Tensor, checks: list[str]) -> Quantities:
    forced.lengths = lengths
    forced.model.zero_grad()
    outputs = []

    def step() -> None:
        outputs.append(forced.model(ids, labels=ids, use_cache=False))
        outputs[0].loss.backward()

    seconds = cpu_seconds(step)
    check(torch.equal(outputs[0].latents.lengths, lengths), "every token took the steps drawn for it", checks)
    return {"seconds": seconds}


def decoding(name: str, model: Any, batch: int, settings: dict[str, Any], checks: list[str]) -> list[Row]:
    case = {"phase": "decoding", "model": name, "batch": batch, "tokens": settings["new_tokens"]}
    progress(case)
    prompt, new = settings["prompt_tokens"], settings["new_tokens"]
    ids = random_ids(settings["vocab_size"], batch, prompt + new)
    lengths = {
        arm_of(prune): torch.cat([drawn_lengths(prune, batch, tokens) for tokens in (prompt, new)], dim=1)
        for prune in RATIOS
    }
    flops, model = model_flops(model), model.eval()
    counted = {arm: decoding_flops(flops, taken, prompt) for arm, taken in lengths.items()}
    runs = {arm: int((1 + taken[:, prompt:].amax(0)).sum()) for arm, taken in lengths.items()}
    with Forced(model) as forced:
        caches = {arm: filled(forced, ids[:, :prompt], taken) for arm, taken in lengths.items()}
        for arm, taken in lengths.items():
            _check_logits(forced, ids, taken, caches[arm], checks)
        arms = {arm: partial(_timed_tokens, forced, ids, taken, caches[arm], checks) for arm, taken in lengths.items()}
        rounds = interleave(arms, settings["rounds"], settings["warmup_rounds"])
    rate = matmul_flops_per_second(torch.float32)
    read = weight_bytes(model.model.backbone) / read_bytes_per_second()
    ceilings = {arm: max(counted[arm] / rate, runs[arm] * read) / new for arm in lengths}
    rows = _rows(case, "CPU-seconds per token", rounds, {"FLOPs": counted, "runs": runs}, ceilings)
    shown = [arm_of(prune) for prune in RATIOS if prune == 0 or prune >= JUDGED_FROM]
    return rows + [_cache_row(name, arm, caches[arm], lengths[arm][:, :prompt]) for arm in shown]


def decoding_flops(flops: ModelFlops, lengths: Tensor, prompt: int) -> int:
    """Of all tokens behind the prompt, one by one."""
    return sum(flops.decode_steps(lengths[:, : t + 1]) for t in range(prompt, lengths.shape[1]))


@torch.no_grad()
def filled(forced: Forced, prompt: Tensor, lengths: Tensor) -> DynamicCache:
    """A cache of the prompt, whose tokens took the first of these steps."""
    cache, forced.lengths = DynamicCache(), lengths[:, : prompt.shape[1]]
    forced.model(prompt, cache=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def decode(forced: Forced, ids: Tensor, lengths: Tensor, cache: DynamicCache) -> Tensor:
    """The tokens that the cache does not hold yet, one by one; the last one's logits."""
    for t in range(int(cache.get_seq_length()), ids.shape[1]):
        forced.lengths = lengths[:, t : t + 1]
        logits = forced.model(ids[:, t : t + 1], cache=cache).logits
    return logits


def _timed_tokens(
    forced: Forced, ids: Tensor, lengths: Tensor, prompt_cache: DynamicCache, checks: list[str]
) -> Quantities:
    cache, forced.entered = copy.deepcopy(prompt_cache), 0
    new = lengths[:, int(cache.get_seq_length()) :]
    seconds = cpu_seconds(lambda: decode(forced, ids, lengths, cache))
    check(torch.equal(_table(cache).latent_steps, lengths.sum(-1)), "every token took the steps drawn for it", checks)
    check(forced.entered == int((1 + new).sum()), "in decoding only rows that go on enter the backbone", checks)
    return {"seconds": seconds / new.shape[1]}


@torch.no_grad()
def _check_logits(forced: Forced, ids: Tensor, lengths: Tensor, prompt_cache: DynamicCache, checks: list[str]) -> None:
    """Of the second token behind the prompt."""
    end = int(prompt_cache.get_seq_length()) + 2
    decoded = decode(forced, ids[:, :end], lengths, copy.deepcopy(prompt_cache))
    forced.lengths = lengths[:, :end]
    whole = forced.model(ids[:, :end], use_cache=False, logits_to_keep=1).logits
    close = bool((decoded - whole).abs().max() <= TOLERANCE * whole.abs().max())
    check(close, f"decoding gives the logits of one forward to {TOLERANCE:g}", checks)


def _cache_row(name: str, arm: str, cache: DynamicCache, lengths: Tensor) -> Row:
    """Memory of a prompt's cache; at best an entry for each run of each token, and nothing behind shorter rows."""
    tensors = [tensor for layer in cache.layers if isinstance(layer, SlotLayer) for tensor in layer.content()]
    entries = _table(cache).entries
    assert entries is not None
    num_bytes = sum(tensor.nbytes for tensor in (*tensors, entries.times, entries.steps))
    slots = entries.times.numel()
    per_token = num_bytes / lengths.numel() / 1024
    runs = int((1 + lengths).sum())
    case = {"phase": "cache", "model": name, "batch": len(lengths), "runs a token": f"{runs / lengths.numel():.3f}"}
    return Row(case, arm, "KiB of cache per token", Spread.of([per_token]), ceiling=per_token * runs / slots)


def _table(cache: DynamicCache) -> SlotTable:
    return next(layer for layer in cache.layers if isinstance(layer, SlotTable))


def _rows(
    case: dict[str, Any],
    unit: str,
    rounds: dict[str, Any],
    work: dict[str, dict[str, int]],
    ceilings: dict[str, float],
) -> list[Row]:
    """Of each arm, with its `work` relative to nothing pruned."""
    rows = []
    for prune in RATIOS:
        arm = arm_of(prune)
        relative = {name: amounts[arm] / amounts[BASELINE] for name, amounts in work.items()}
        judged = Target(*(round(factor * relative["FLOPs"], 3) for factor in (1 - WITHIN, 1 + WITHIN)))
        rows.append(
            Row(
                case=case | {name: f"{share:.3f}" for name, share in relative.items()},
                arm=arm,
                unit=unit,
                value=Spread.of(rounds[arm]["seconds"]),
                baseline=None if arm == BASELINE else BASELINE,
                ratio=None if arm == BASELINE else ratio(rounds, arm, BASELINE, "seconds"),
                target=judged if prune >= JUDGED_FROM else None,
                ceiling=ceilings[arm],
            )
        )
    return rows
