"""What an evaluation found, as a table for people and as eval.json, from which it can be run again."""

import argparse
import hashlib
import json
import math
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from unspoken.data.tokens import TokenShards
from unspoken.eval.depth import DepthCurve, depth_curve
from unspoken.eval.perplexity import Loss, Scores
from unspoken.eval.plots import plot_depth, plot_losses
from unspoken.eval.rows import target_byte_lengths
from unspoken.eval.settings import spelled_out
from unspoken.models.latent_lm import LatentForCausalLM

COMPLETE, PARTIAL = "eval.json", "eval.partial.json"
PASSES_PLOT, DEPTH_PLOT = "eval_passes.png", "eval_depth.png"
LATENT_COLUMNS = ("latent steps/token", "pruned")
TASK_SCORES = "eval_tasks.json"  # of lm-eval
_OPTIONS = ("data", "split", "num_passes", "depth", "sequence_length", "max_sequences", "batch_size", "device", "dtype")


@dataclass(frozen=True)
class Evaluation:
    """A run of `unspoken eval`, finished or stopped; `args` are those of the command."""

    args: argparse.Namespace
    model: LatentForCausalLM
    shards: TokenShards
    scores: Scores

    @cached_property
    def losses(self) -> list[Loss]:
        """The lines of the table; empty when nothing was scored."""
        curve_only = {f"k={k}" for k in range(self.args.num_passes + 1, self.args.depth + 1)}
        return [loss for loss in self.scores.losses() if loss.name not in curve_only]

    @cached_property
    def curve(self) -> DepthCurve | None:
        if not self.args.depth or not self.losses:
            return None
        return depth_curve(self.scores, getattr(self.model.config, "num_train_passes", 1), self.args.depth)


def rebuilt_command(args: argparse.Namespace) -> list[str]:
    """The command with every setting spelled out, defaults too."""
    command = ["unspoken", "eval", str(args.model)]
    for name in _OPTIONS:
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += spelled_out(args)
    if args.no_exact:
        command.append("--no-exact")
    return command + (["--out", str(args.out)] if args.out else [])


def print_table(evaluation: Evaluation, console: Console) -> None:
    args, scores, losses, curve = evaluation.args, evaluation.scores, evaluation.losses, evaluation.curve
    partial = "" if scores.is_complete else f" (partial: {int(scores.done.sum())} of {len(scores.rows)} sequences)"
    where = f"{losses[0].num_targets:,} tokens of {losses[0].num_documents} documents"
    console.print(f"{args.model}: {args.split} split of {args.data}, {where}{partial}", highlight=False, soft_wrap=True)
    table = Table()
    latent = LATENT_COLUMNS if scores.latent_steps else ()
    for name in ("passes", "loss", "perplexity", "bits/byte", "loss - loss at k=1", *latent):
        table.add_column(name, justify="left" if name == "passes" else "right", overflow="fold")
    for loss in losses:
        bits = "" if loss.bits_per_byte is None else f"{loss.bits_per_byte:.4f}"
        difference = "" if loss is losses[0] else f"{_signed(loss.difference)}{_spread(loss.difference_interval)}"
        mean = f"{loss.loss:.4f}{_spread(loss.interval)}"
        table.add_row(loss.name, mean, f"{loss.perplexity:.2f}", bits, difference, *latent_cells(loss))
    table.caption = "±: half the 95 % interval over documents; paired for differences"
    console.print(table)
    if curve and len(curve.losses) > 1:
        console.print(
            f"depth curve to k={len(curve.losses)}: best at k={curve.best_depth}, "
            f"{_signed(curve.drift)} from the depth of training (k={curve.num_train_passes}) to the end",
            highlight=False,
            soft_wrap=True,
        )


def write(evaluation: Evaluation, out: Path) -> Path:
    """Write the JSON file, and the plots of a finished run; return the JSON file's path."""
    path = out / (COMPLETE if evaluation.scores.is_complete else PARTIAL)
    path.write_text(json.dumps(finite(as_dict(evaluation)), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if evaluation.scores.is_complete:
        (out / PARTIAL).unlink(missing_ok=True)
        name = Path(evaluation.args.model).name
        plot_losses(evaluation.losses, f"{name}: loss by passes", out / PASSES_PLOT)
        if evaluation.curve:
            plot_depth(evaluation.curve, f"{name}: loss by recycle depth", out / DEPTH_PLOT)
    return path


def as_dict(evaluation: Evaluation) -> dict:
    """Everything about a run: how to repeat it, on what it ran and what it found."""
    args, model, shards, scores = evaluation.args, evaluation.model, evaluation.shards, evaluation.scores
    exact_bytes = target_byte_lengths(shards) is not None
    return {
        "complete": scores.is_complete,
        "command": shlex.join(rebuilt_command(args)),
        "results": loss_results(evaluation.losses),
        "knobs": knobs_by_line(scores),
        "depth_curve": evaluation.curve.as_dict() if evaluation.curve else None,
        "num_sequences": int(scores.done.sum()),
        "num_sequences_asked": len(scores.rows),
        "bytes": "exact" if exact_bytes else "estimated from the documents' lengths",
        "seconds": {name: round(seconds, 3) for name, seconds in scores.seconds.items()},
        "data": {
            "folder": str(shards.folder),
            "split": shards.split,
            "fingerprint": shards.fingerprint,
            "split_tokens": shards.num_tokens,
        },
        "model": model_facts(model, args.model),
        "versions": versions(),
        "rows": row_sums(scores),
    }


def model_facts(model: LatentForCausalLM, folder: str | Path) -> dict[str, Any]:
    """Which model, and as what it ran."""
    return {
        "folder": str(folder),
        "weights_sha256": _weights_fingerprint(Path(folder)),
        "config": model.config.to_diff_dict(),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def versions() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("unspoken", "torch", "transformers")},
        "torch_threads": torch.get_num_threads(),
    }


def loss_results(losses: Sequence[Loss]) -> dict[str, dict]:
    """The table's lines, by name."""
    return {loss.name: {key: value for key, value in vars(loss).items() if key != "name"} for loss in losses}


def row_sums(scores: Scores) -> dict:
    """Document, targets and summed nats of each piece of text: what comparing two models on the same text needs; and
    its tokens and latent steps."""
    done = [row for row, is_done in zip(scores.rows, scores.done) if is_done]
    sums: dict[str, Any] = {
        "document": [row.document for row in done],
        "targets": [row.num_targets for row in done],
        "nats": {name: nats[scores.done].tolist() for name, nats in scores.nats.items()},
    }
    if scores.latent_steps:
        sums["tokens"] = [len(row.ids) for row in done]
        sums["latent_steps"] = {name: steps[scores.done].tolist() for name, steps in scores.latent_steps.items()}
    return sums


def latent_cells(loss: Loss) -> list[str]:
    """The cells under `LATENT_COLUMNS`; none for a model without latent steps."""
    if loss.latent_length is None:
        return []
    return [f"{loss.latent_length:.2f}", "" if loss.prune_ratio is None else f"{100 * loss.prune_ratio:.1f}%"]


def knobs_by_line(scores: Scores) -> dict[str, dict] | None:
    """How deep tokens might think in each line; None for a model without latent steps."""
    return {name: vars(scores.setting(name).knobs) for name in scores.latent_steps} or None


def finite(value: Any) -> Any:
    """JSON has no word for infinite or undefined numbers: null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _spread(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" ± {(interval[1] - interval[0]) / 2:.4f}"


def _signed(value: float) -> str:
    """A difference; what rounds to zero has no sign."""
    return f"{value:+z.4f}".replace("+0.0000", "0.0000")


def _weights_fingerprint(folder: Path) -> str | None:
    """SHA-256 over the weight files of a local folder, in the order of their names."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest() if files else None
