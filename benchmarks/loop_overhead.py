"""What the training loop costs beside the few lines of PyTorch that move the weights."""

import contextlib
import copy
import io
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import check, cpu_seconds, progress, ratio
from benchmarks.record import Result, Row, Spread, Target
from unspoken.data.packing import PackedDataset
from unspoken.data.prepare import PrepareOptions, prepare
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.train.build import Data, build_model, num_passes, open_data
from unspoken.train.loop import TrainingLoop
from unspoken.train.optim import build_optimizer, set_learning_rate
from unspoken.train.recipe import Recipe
from unspoken.train.schedule import LearningRate

UNIT = "CPU-seconds per step"
TARGET = Target(at_most=1.03)
BACKBONE = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


def run(quick: bool) -> Result:
    settings: dict[str, Any] = {
        "backbone": BACKBONE,
        "tokenizer": "bpe:4096",
        "sequence_length": 256,
        "batch_size": 2 if quick else 8,
        "steps": 12 if quick else 150,
        "steps_per_round": 3 if quick else 10,
        "warmup_rounds": 1,
    }
    result = Result(
        name="loop_overhead",
        question="What does our training loop add to a bare PyTorch loop?",
        method="Both train the same model on the same packed windows of the standard library's text, bf16 autocast, "
        "fused AdamW, clipping. The bare loop has its batches in memory and does nothing else; it makes its step each "
        "time our loop asks for a batch. Ours reads and packs its data, checks, counts, logs every ten steps, and "
        "measures norms. No evaluation, no checkpoints.",
        ceiling="the bare loop",
        settings=settings,
        checks=[],
        rows=[],
    )
    with tempfile.TemporaryDirectory() as folder:
        prepare(PrepareOptions(("stdlib",), tokenizer=settings["tokenizer"]), Path(folder) / "data")
        for method in ("vanilla", "recycler"):
            result.rows += measure(method, Path(folder), settings, result.checks)
    return result


def measure(method: str, folder: Path, settings: dict[str, Any], checks: list[str]) -> list[Row]:
    """Rows of one case, over the data in `folder/data`. Raises RedCheckError when the loops' weights differ."""
    progress({"model": method})
    recipe = recipe_for(method, folder, settings, folder / method)
    data = open_data(recipe)
    torch.manual_seed(0)
    model = build_model(recipe, data)
    bare_model = copy.deepcopy(model)
    assert isinstance(data.train, PackedDataset)
    turns = Turns(data.train, bare_step(bare_model, recipe, data))
    recipe.run.out.mkdir(parents=True)
    with contextlib.redirect_stderr(io.StringIO()):
        TrainingLoop(recipe, model, replace(data, train=turns)).run()
    turns.end()
    pairs = zip(model.parameters(), bare_model.parameters(), strict=True)
    check(all(torch.equal(a, b) for a, b in pairs), "both loops end with the same weights, bit for bit", checks)
    rounds = {arm: {"seconds": _per_round(steps, settings)} for arm, steps in turns.seconds.items()}
    bare, ours = "bare loop", "unspoken"
    case = {"model": method, "passes": num_passes(model.config), "batch": recipe.train.batch_size}
    value = {arm: Spread.of(rounds[arm]["seconds"]) for arm in rounds}
    return [
        Row(case, bare, UNIT, value[bare]),
        Row(case, ours, UNIT, value[ours], bare, ratio(rounds, ours, bare, "seconds"), TARGET, value[bare].median),
    ]


def bare_step(model: LatentForCausalLM, recipe: Recipe, data: Data) -> Callable[[int], None]:
    """The bare loop's body, as a function of the step's number. Everything but its arithmetic is done here."""
    batches = [data.train.global_batch(step, recipe.train.batch_size) for step in range(recipe.num_steps)]
    optimizer = build_optimizer(dict(model.named_parameters()), recipe.optim)
    set_learning_rate(optimizer, LearningRate(recipe.optim, recipe.num_steps), 0)
    parameters = list(model.parameters())

    def step(number: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batches[number]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, recipe.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


class Turns(PackedDataset):
    """The loop's training data, which makes one bare step before it hands out a batch.

    So the two loops take turns within one process, step by step, and one that a neighbour slows down slows the other.
    """

    def __init__(self, dataset: PackedDataset, bare: Callable[[int], None]):
        super().__init__(dataset.shards, dataset.sequence_length, dataset.seed)
        self.bare = bare
        self.seconds: dict[str, list[float]] = {"bare loop": [], "unspoken": []}
        self.since: float | None = None

    def global_batch(self, index: int, batch_size: int, rank: int = 0, num_ranks: int = 1) -> dict[str, Tensor]:
        self.end()
        self.seconds["bare loop"].append(cpu_seconds(lambda: self.bare(index)))
        self.since = time.process_time()
        return super().global_batch(index, batch_size, rank, num_ranks)

    def end(self) -> None:
        """The loop's step is over, with all that it did after it."""
        if self.since is not None:
            self.seconds["unspoken"].append(time.process_time() - self.since)
            self.since = None


def _per_round(steps: list[float], settings: dict[str, Any]) -> list[float]:
    """Mean seconds of a step over each round's steps, a logged one among them; the first rounds are left out."""
    size = settings["steps_per_round"]
    rounds = [sum(steps[i : i + size]) / size for i in range(0, len(steps) - size + 1, size)]
    return rounds[settings["warmup_rounds"] :]


def recipe_for(method: str, folder: Path, settings: dict[str, Any], out: Path, **train: Any) -> Recipe:
    """A run into `out` over the data in `folder/data`, without evaluations."""
    return Recipe.model_validate(
        {
            "run": {"out": out},
            "model": {"method": method, "backbone": settings["backbone"]},
            "data": {"path": folder / "data", "sequence_length": settings["sequence_length"]},
            "optim": {"learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 0},
            "train": {
                "max_steps": settings["steps"],
                "batch_size": settings["batch_size"],
                "log_every": settings["steps_per_round"],
                "eval_every": 0,
                **train,
            },
        }
    )
