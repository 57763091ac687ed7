"""Run by test_parallel.py, once in each of two processes joined by gloo: every case, for one start of Python.

Each case writes what it found into a dictionary; the main process saves it as JSON for the tests to judge.
"""

import contextlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.baselines import CONFIGS, MIXTURES, RECURRENT, baseline
from tests.families import adaptive_model, random_ids, tiny_model
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.train.build import build_model, model_like, open_data
from unspoken.train.checkpoint import checkpoints
from unspoken.train.loop import TrainingLoop
from unspoken.train.parallel import Engine, Ranks, joined_ranks, whole_number
from unspoken.train.recipe import Recipe, TrainSection
from unspoken.train.selftest import SelfTest
from unspoken.train.step import forward_backward

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp"},
    "fsdp": {"parallel": "fsdp"},
    "fsdp gathered": {"parallel": "fsdp", "keep_gathered": True},
    "fsdp segmented": {"parallel": "fsdp", "segmented_backward": True},
    "fsdp gathered segmented": {"parallel": "fsdp", "keep_gathered": True, "segmented_backward": True},
}


def gradient_cases() -> dict[str, dict[str, Any]]:
    """engine / family / k, and the variations of one of them."""
    cases = {
        f"{engine}, {family}, k={k}": {"engine": engine, "family": family, "k": k}
        for engine in ENGINES
        for family in ("llama_tied", "llama")
        for k in (1, 2, 3)
    }
    for engine in ("ddp", "fsdp", "fsdp segmented"):
        for family in ("gpt_neox", "qwen3_moe"):
            cases[f"{engine}, {family}, k=2"] = {"engine": engine, "family": family, "k": 2}
        common = {"engine": engine, "family": "llama_tied", "k": 2}
        cases[f"{engine}, accumulation"] = {**common, "rows_at_once": 1}
        cases[f"{engine}, checkpointing"] = {**common, "checkpointing": True}
        cases[f"{engine}, all at once"] = {**common, "k": 3, "rows_at_once": 1, "checkpointing": True}
        cases[f"{engine}, ranks of other lengths"] = {**common, "lengths": (7, 12)}
    return cases


def adaptive_cases() -> dict[str, dict[str, Any]]:
    """Ranks whose tokens take other numbers of latent steps."""
    common = {"family": "llama_tied", "k": 1, "rows_at_once": 1, "lengths": (3, 12), "kind": "adaptive"}
    return {f"{engine}, latent steps": {**common, "engine": engine} for engine in ("ddp", "fsdp", "fsdp gathered")}


def baseline_cases() -> dict[str, dict[str, Any]]:
    """Several runs of the backbone in one forward, and what stands between them."""
    common = {"family": "llama_tied", "k": 1, "rows_at_once": 1, "lengths": (7, 12)}
    kinds: dict[str, dict[str, Any]] = {kind: {} for kind in ("looped with a gate", "pause", "ponder")}
    kinds["ponder2"] = {"options": {"num_refinements": 2}}
    kinds["mor"] = {"rows_at_once": 2}  # its balancing loss is that of each forward
    return {
        f"{engine}, {kind}": {**common, "engine": engine, "kind": kind, **more}
        for engine in ("ddp", "fsdp")
        for kind, more in kinds.items()
    }


def compiled_cases() -> dict[str, dict[str, Any]]:
    """The graph whole under DDP, block by block under FSDP. Inductor takes minutes."""
    return {
        f"{engine}, k={k}": {"engine": engine, "family": "llama_tied", "k": k, "rows_at_once": 1, "compile": True}
        for engine in ENGINES
        for k in (2, 3, 1)
    }


def batch_of(rank: int, length: int) -> dict[str, torch.Tensor]:
    """Two rows of a rank, of unequal numbers of targets."""
    ids = random_ids(2, length, seed=rank)
    labels = ids.clone()
    labels[0, 2 : 4 + rank] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length).expand(2, -1)}


def _model(family: str, kind: str) -> LatentForCausalLM:
    if kind in CONFIGS | MIXTURES | RECURRENT:
        return baseline(kind, family, torch.float32).train()
    if kind == "adaptive":
        return adaptive_model(family, torch.float32, exit_threshold=0.15, router_bias=0.3).train()
    return tiny_model(family, torch.float32).train()


def reference(
    family: str, k: int, batches: list[dict[str, torch.Tensor]], kind: str = "recycler", **options: Any
) -> dict[str, torch.Tensor]:
    """One process, one forward and backward for each rank's rows."""
    model = _model(family, kind)
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for batch in batches:
        model(**batch, num_passes=k, num_items_in_batch=count, **options).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(ranks: Ranks, engine: str, family: str, k: int, rows_at_once: int = 2, **case: Any) -> dict[str, Any]:
    options = {"gradient_checkpointing": case.get("checkpointing", False), "compile": case.get("compile", False)}
    train = TrainSection(max_steps=1, **options, **ENGINES[engine])
    batches = [batch_of(rank, length) for rank, length in enumerate(case.get("lengths", (9, 9)))]
    kind, of_forward = case.get("kind", "recycler"), case.get("options", {})
    expected = reference(family, k, batches, kind, **of_forward)
    made = Engine(_model(family, kind), train, ranks)
    test = SelfTest(made, train)
    sums = forward_backward(made, batches[ranks.rank], rows_at_once, k, contextlib.nullcontext(), **of_forward)
    loss, pass_losses = sums.loss, sums.pass_losses
    test.check(k, 2 // rows_at_once, **of_forward)
    worst, largest = 0.0, 0.0
    for name, parameter in made.parameters.items():
        assert parameter.grad is not None, name
        gradient = whole_number(parameter.grad)
        worst = max(worst, float((gradient - expected[name]).abs().max() / expected[name].abs().max()))
        largest = max(largest, float(expected[name].abs().max()))
    assert set(made.parameters) == set(expected)
    found = {"worst": worst, "largest": largest, "loss": ranks.sum([float(loss)])[0], "passes": len(pass_losses)}
    if kind == "adaptive":
        own = [0.0, 0.0]
        own[ranks.rank] = float(sums.latents["latent_length"][0])
        found["latent steps"] = ranks.sum(own)
    return found


def exchanges(ranks: Ranks) -> dict[str, Any]:
    """How often weights are gathered and gradients reduced in a step."""
    found = {}
    for engine, options in ENGINES.items():
        for k in (1, 2, 3):
            train = TrainSection(max_steps=1, **options)
            made = Engine(tiny_model("llama_tied", torch.float32).train(), train, ranks)
            with _Calls() as calls:
                forward_backward(made, batch_of(ranks.rank, 9), 2, k, contextlib.nullcontext())
            counts = [sum(kind in name for name in calls.names) for kind in ("_allgather", "reduce_scatter")]
            found[f"{engine}, k={k}"] = [*counts, len(made.model.model.blocks())]
    return found


class _Calls(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def training(ranks: Ranks, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run of 11 steps over three epochs, whole and in three parts; its first third again, for one process to go on
    with; and the rest of what one process has begun."""
    no_dropout = without_dropout(values)
    found = {}
    for engine in ("ddp", "fsdp", "fsdp segmented"):
        extra = {**ENGINES[engine], "save_in_background": engine == "fsdp"}
        out = folder / engine.replace(" ", "-")
        whole = _run(ranks, values, out / "whole", extra)
        for stop in (3, 7, None):
            parts = _run(ranks, values, out / "parts", extra, stop)
        equal = [torch.equal(whole_number(a), whole_number(b)) for a, b in _pairs(whole, parts)]
        _run(ranks, no_dropout, out / "third", extra, stop=3)
        rest = _run(ranks, no_dropout, out / "begun-alone", extra)
        if (model := rest.engine.whole_model()) is not None:
            model.save_pretrained(out / "begun-alone" / "model")
        model = whole.engine.whole_model()
        if ranks.is_main:
            assert isinstance(model, LatentForCausalLM)
            model.save_pretrained(out / "model")
        found[engine] = {"parts are equal": all(equal), "tensors": len(equal)}
    return found


def without_dropout(values: dict[str, Any]) -> dict[str, Any]:
    """Dropout is drawn by each process for itself, so that it depends on their number."""
    model = values["model"]
    return {**values, "model": {**model, "backbone": {**model["backbone"], "attention_dropout": 0.0}}}


def _pairs(one: TrainingLoop, other: TrainingLoop):
    return zip(one._tensors().values(), other._tensors().values(), strict=True)


def _run(ranks: Ranks, values: dict, out: Path, extra: dict, stop: int | None = None) -> TrainingLoop:
    train = {**values["train"], **extra}
    recipe = Recipe.model_validate({**values, "run": {"out": str(out)}, "train": train})
    ranks.on_main(lambda: out.mkdir(parents=True, exist_ok=True))
    return run_until(recipe, ranks, stop)


def run_until(recipe: Recipe, ranks: Ranks, stop: int | None = None) -> TrainingLoop:
    """Train, or go on; a signal that reaches the last process alone ends it with step `stop`."""
    data, out = open_data(recipe), recipe.run.out
    newest = (checkpoints(out) or [None])[0]
    torch.manual_seed(recipe.run.seed)
    model = build_model(recipe, data) if newest is None else model_like(newest)
    torch.manual_seed(ranks.rank)
    loop = TrainingLoop(recipe, model, data, checkpoint=newest, ranks=ranks)
    step = loop._step

    def stepping():
        if loop.progress.step + 1 == stop and ranks.rank == ranks.size - 1:
            loop.stop.number = 15
        return step()

    loop._step = stepping  # type: ignore[method-assign]
    assert loop.run() == (stop is None)
    ranks.wait()
    return loop


def disagreements(ranks: Ranks) -> dict[str, Any]:
    """The self-test sees a wrapper that is not the one asked for, and a pass that did not run."""
    asked = TrainSection(max_steps=1, parallel="fsdp")
    made = Engine(tiny_model("llama_tied", torch.float32).train(), asked, ranks)
    other = TrainSection(max_steps=1, parallel="ddp")
    messages = {}
    for name, train, k in (("wrapper", other, 2), ("passes", asked, 3)):
        test = SelfTest(made, train)
        forward_backward(made, batch_of(ranks.rank, 9), 2, 2, contextlib.nullcontext())
        try:
            test.check(k, 1)
        except Exception as error:
            messages[name] = str(error)
    return messages


def main(folder: Path, compiled: bool) -> None:
    torch.set_num_threads(1)
    values = json.loads((folder / "values.json").read_text())
    found: dict[str, Any] = {"gradients": {}}
    with joined_ranks(torch.device("cpu")) as ranks:
        try:
            for name, case in (
                compiled_cases() if compiled else gradient_cases() | adaptive_cases() | baseline_cases()
            ).items():
                found["gradients"][name] = gradients(ranks, **case)
            if not compiled:
                found["exchanges"] = exchanges(ranks)
                found["disagreements"] = disagreements(ranks)
                found["training"] = training(ranks, values, folder)
        except Exception:
            found["error"] = f"process {ranks.rank}: {traceback.format_exc()}"
            (folder / f"found-{ranks.rank}.json").write_text(json.dumps(found))
            raise
        (folder / f"found-{ranks.rank}.json").write_text(json.dumps(found))
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), compiled="--compiled" in sys.argv)
