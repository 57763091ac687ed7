"""The training loop, from a step's number to moved weights, read top to bottom.

A step is a function of its number: its batch (global batch g = step), its passes and its learning rate. What a resumed
run needs beside weights and optimizer is therefore one number, and the counts that are reported. With several
processes all run this same loop, each on its rows of the batch; what they have in common (targets, a signal, a loss
that is not finite) is agreed on in two small exchanges a step.
"""

from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor

from unspoken.errors import UnspokenError
from unspoken.latent.counts import COUNTS
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.train.build import GENERATION, Data, max_passes, num_passes
from unspoken.train.checkpoint import SEAL, CheckpointWriter, generators, read_record, read_tensors, set_generators
from unspoken.train.console import RunConsole
from unspoken.train.heldout import held_out_losses
from unspoken.train.metrics import LATENT_COLUMNS, MeanWindow, MetricFiles, Row, columns, loss_names, track
from unspoken.train.norms import state_norms
from unspoken.train.optim import build_optimizer, freeze_adapter, optimizer_tensors, set_learning_rate
from unspoken.train.parallel import Engine, Ranks, naming_lost_ranks, whole_number
from unspoken.train.progress import Clock, Progress
from unspoken.train.recipe import Recipe
from unspoken.train.schedule import LearningRate, drawn_at, is_uncut, passes_at
from unspoken.train.selftest import SelfTest
from unspoken.train.signals import Stop, stop_on_signal
from unspoken.train.step import forward_backward

NORMS_EVERY_STEPS = 50  # a forward of one sequence: a thousandth of the run
SWAMPED_AT = 3.0  # adapter to embedding: 0.2 to 0.4 in runs that win, 15 falling to 5 with the families' own init


class TrainingLoop:
    """Trains `model` in place. `checkpoint`: resume from it; it fills the model's weights too. `run_id` is written into
    checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        model: LatentForCausalLM,
        data: Data,
        trackers: list[Any] | None = None,
        checkpoint: Path | None = None,
        ranks: Ranks | None = None,
        run_id: str = "",
    ):
        self.recipe, self.model, self.data, self.trackers = recipe, model, data, trackers or []
        self.ranks = ranks or Ranks()
        self.folder, self.run_id = recipe.run.out, run_id
        recipe.check_processes(self.ranks.size)
        _, self.rows_at_once = recipe.train.share(self.ranks.size)
        self.num_passes, self.max_passes = num_passes(model.config), max_passes(model.config)
        if recipe.optim.adapter_learning_rate_factor == 0:
            freeze_adapter(model)
        self.engine = Engine(model, recipe.train, self.ranks)
        self.optimizer = build_optimizer(self.engine.parameters, recipe.optim)
        self.learning_rate = LearningRate(recipe.optim, recipe.num_steps)
        self.progress = Progress()
        self.losses = MeanWindow(loss_names(self.max_passes), model.device)
        self.latents = MeanWindow(LATENT_COLUMNS, model.device, counts_are_own=True)
        self.best: dict[str, Any] = {"step": None, "loss": None}
        self.stop = Stop()
        self.is_stopping = self.has_warned = False
        self.writer = CheckpointWriter(self.folder, self.ranks, recipe.train.keep_last, recipe.train.save_in_background)
        if checkpoint is not None:
            self._load(checkpoint)
        resume_step = None if checkpoint is None else self.progress.step
        self.files = MetricFiles(self.folder, columns(self.max_passes), resume_step) if self.ranks.is_main else None
        self.last_rows: dict[str, Row] = {row["kind"]: row for row in self.files.kept} if self.files else {}
        self.console = RunConsole(recipe.num_steps, self.progress.step, is_quiet=not self.ranks.is_main)
        self._clock = Clock()
        self._begin = self._logged = replace(self.progress)

    def run(self) -> bool:
        """Train to the last step and return True; or False where a signal ended it, with a checkpoint saved.

        Raises:
            UnspokenError: a check of the first step, a loss that is not finite, a checkpoint that cannot be written,
                another process of this run that is gone.
        """
        train, num_steps = self.recipe.train, self.recipe.num_steps
        with naming_lost_ranks(self.ranks), self.console, stop_on_signal(self.console.say, self.stop):
            if self.progress.step == 0 and train.eval_every:
                self._evaluate()
            while self.progress.step < num_steps and not self.is_stopping:
                row = self._step()
                step = self.progress.step
                if row is not None:
                    self._log(row)
                is_best = False
                if train.eval_every and (step % train.eval_every == 0 or step == num_steps):
                    is_best = self._evaluate() and train.keep_best
                is_due = train.save_every and (step % train.save_every == 0 or step == num_steps)
                if is_due or is_best or self.is_stopping:
                    self.save()
                self.console.advance()
            self.writer.wait()
        self._clock.add_to(self.progress)
        return self.progress.step == num_steps

    def _step(self) -> Row | None:
        """One optimizer step; its metrics if it is one to be logged."""
        step, train, clock = self.progress.step, self.recipe.train, Clock()
        k = passes_at(step, self.recipe.run.seed, self.num_passes, train.third_pass_fraction)
        set_learning_rate(self.optimizer, self.learning_rate, step)
        batch = self.data.train.global_batch(step, train.batch_size, self.ranks.rank, self.ranks.size)
        self_test = SelfTest(self.engine, train) if step == self._begin.step else None
        options = self._forward_options(step)
        sums = forward_backward(self.engine, batch, self.rows_at_once, k, self._autocast(), **options)
        loss, pass_losses, num_targets, latents, counts = sums
        if self_test is not None:
            self_test.check(k, len(batch["labels"]) // self.rows_at_once, **options)
        parameters = list(self.engine.parameters.values())
        grad_norm = whole_number(torch.nn.utils.clip_grad_norm_(parameters, self.recipe.optim.max_grad_norm))
        # The one place where a step waits for the device: weights must not move on a gradient that is not a number.
        is_finite = bool(torch.isfinite(loss + grad_norm))
        is_broken, self.is_stopping = self.ranks.any(not is_finite, bool(self.stop))
        if is_broken:
            self._stop_not_finite(batch, pass_losses, float(grad_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        means = zip(self.losses.names, [loss, *pass_losses], strict=False)
        self.losses.add({name: (mean * num_targets, num_targets) for name, mean in means})
        self.latents.add(latents)
        self._count(num_targets, k * sum(self.model.model.runs_of_pass(**options)), counts, clock)
        step += 1
        if step % train.log_every and step != self.recipe.num_steps:
            return None
        row: Row = {"learning_rate": self.learning_rate.at(step - 1), "grad_norm": float(grad_norm), "num_passes": k}
        if step <= train.log_every or step // NORMS_EVERY_STEPS != (step - train.log_every) // NORMS_EVERY_STEPS:
            with self._autocast():
                row |= state_norms(self.model, batch, k)
            self.engine.settle()
        return row

    def _autocast(self) -> AbstractContextManager:
        enabled = self.recipe.train.autocast == "bfloat16"
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=enabled)

    def _forward_options(self, step: int) -> dict[str, Any]:
        """What a step's forwards are given beside its batch, the same in all processes."""
        recipe, choices = self.recipe, getattr(self.model.config, "train_refinements", None)
        options: dict[str, Any] = {}
        if is_uncut(step, recipe.num_steps, recipe.train.no_cut_fraction):
            options["exit_threshold"] = 0.0
        if choices:
            options["num_refinements"] = drawn_at(step, recipe.run.seed, choices)
        return options

    def _count(self, num_targets: int, num_runs: int, counts: Tensor | None, clock: "Clock") -> None:
        progress, tokens = self.progress, self.recipe.step_tokens
        if counts is not None:
            before = progress.latent_steps
            for name, count in zip(COUNTS, self.ranks.sum([float(count) for count in counts]), strict=True):
                setattr(progress, name, getattr(progress, name) + int(count))
            progress.pass_tokens += progress.latent_steps - before
        progress.step += 1
        progress.tokens += tokens
        progress.target_tokens += num_targets
        progress.pass_tokens += tokens * num_runs
        seconds, cpu_seconds = clock.lap()
        progress.train_seconds += seconds
        progress.train_cpu_seconds += cpu_seconds

    def _log(self, row: Row) -> None:
        now, before = self.progress, self._logged
        tokens = now.tokens - before.tokens
        cpu_seconds = self.ranks.sum([now.train_cpu_seconds - before.train_cpu_seconds])[0]
        row = self.losses.read(self.ranks) | self.latents.read(self.ranks) | row
        row["tokens_per_second"] = tokens / (now.train_seconds - before.train_seconds)
        row["tokens_per_cpu_second"] = tokens / max(1e-9, cpu_seconds)
        if row.get("adapter_to_embedding", 0.0) > SWAMPED_AT and not self.has_warned:
            self.has_warned = True
            self.console.say(
                f"warning: the adapter's output is {row['adapter_to_embedding']:.1f} times as large as the token "
                "embeddings; lower optim.adapter_learning_rate_factor, or use model.init: scaled"
            )
        self._write(row, "train")
        self._logged = replace(now)

    def _evaluate(self) -> bool:
        """Log the losses on held-out text; whether the last trained pass's is the lowest so far."""
        data = self.data.held_out
        assert data is not None
        with self._autocast():
            row = held_out_losses(
                self.model, data, self.recipe.train.eval_sequences, self.rows_at_once, self.max_passes, self.ranks
            )
        self.engine.settle()
        self._write(row, "eval")
        loss = row[f"loss_pass_{self.num_passes}"]
        is_best = self.progress.step > 0 and (self.best["loss"] is None or loss < self.best["loss"])
        if is_best:
            self.best = {"step": self.progress.step, "loss": loss}
        return is_best

    def _write(self, row: Row, kind: str) -> None:
        self._clock.add_to(self.progress)
        progress = self.progress.over(self.ranks)
        row = {"step": progress.step, "kind": kind, "tokens": progress.tokens} | row
        row |= {"wall_seconds": round(progress.wall_seconds, 3), "cpu_seconds": round(progress.cpu_seconds, 3)}
        self.last_rows[kind] = row
        if self.files is not None:
            self.files.write(row)
        track(self.trackers, row)
        num_done = progress.step - self._begin.step
        elapsed = progress.wall_seconds - self._begin.wall_seconds
        remaining = elapsed / num_done * (self.recipe.num_steps - progress.step) if num_done else None
        self.console.show(row, remaining)

    def save(self) -> Path:
        """Write a checkpoint of the steps done so far."""
        self._clock.add_to(self.progress)
        record = {
            "run_id": self.run_id,
            "progress": asdict(self.progress.over(self.ranks)),
            "losses": self.losses.record(self.ranks),
            "latents": self.latents.record(self.ranks),
            "best": self.best,
        }
        best = self.best["step"] if self.recipe.train.keep_best else None
        tensors = self._tensors() | generators(self.ranks)
        texts = generation_text(self.model)
        return self.writer.save(self.progress.step, tensors, record, self.model.config, best, texts)

    def _tensors(self) -> dict[str, Tensor]:
        return model_tensors(self.model) | optimizer_tensors(self.optimizer)

    def _load(self, checkpoint: Path) -> None:
        record, ranks = read_record(checkpoint), self.ranks
        tensors = self._tensors()
        own = generators(ranks) if record["processes"] == ranks.size else {}
        read_tensors(checkpoint, tensors | own, ranks)
        if own:
            set_generators(own, ranks)
        try:
            self.progress = Progress(**record["progress"])
            self.best = record["best"]
        except (KeyError, TypeError) as error:
            raise UnspokenError(
                f"{checkpoint / SEAL} is damaged ({error}). Delete {checkpoint} to resume from the one before it"
            ) from error
        self.losses.restore(record["losses"], ranks.is_main)
        self.latents.restore(record["latents"], ranks.is_main)
        if not ranks.is_main:  # which carries on what all have used
            self.progress.cpu_seconds = self.progress.train_cpu_seconds = 0.0

    def _stop_not_finite(self, batch: dict[str, Tensor], pass_losses: Tensor, grad_norm: float) -> NoReturn:
        step, rank = self.progress.step + 1, self.ranks.rank
        which = f"-process-{rank}" if self.ranks.size > 1 else ""
        path = self.folder / f"not-finite-step-{step}{which}.safetensors"
        save_file({name: rows.contiguous() for name, rows in batch.items()}, path, {"global_batch": str(step - 1)})
        losses = " / ".join(f"{loss:.4g}" for loss in self.ranks.sum(pass_losses.tolist()))
        raise UnspokenError(
            f"step {step}: not a finite number: loss by pass {losses}, gradient norm {grad_norm:.4g}. The batch is in "
            f"{path}; the weights were not moved. A lower optim.learning_rate, a longer warm-up or "
            "train.autocast: none may help.",
            said_by_main=True,
        )


def generation_text(model: LatentForCausalLM) -> dict[str, str]:
    """How the model's text is generated, and what ends it, as a checkpoint's file."""
    config = model.generation_config
    return {} if config is None else {GENERATION: config.to_json_string(use_diff=False)}


def model_tensors(model: LatentForCausalLM) -> dict[str, Tensor]:
    """What of the model a checkpoint holds: its state, tied weights once."""
    names = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    state = model.state_dict()
    return {f"model.{name}": state[name] for name in names.values()}
