"""The training loop, from a step's number to moved weights, read top to bottom.

A step is a function of its number: its batch (global batch g = step), its passes and its learning rate. What a resumed
run needs beside weights and optimizer is therefore one number, and the counts that are reported.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor

from unspoken.errors import UnspokenError
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.loss import IGNORE_INDEX, shift_labels
from unspoken.train.build import Data, max_passes, num_passes
from unspoken.train.checkpoint import load_state, random_state, save_checkpoint, set_random_state
from unspoken.train.console import RunConsole
from unspoken.train.heldout import held_out_losses
from unspoken.train.metrics import LossWindow, MetricFiles, Row, columns, track
from unspoken.train.norms import state_norms
from unspoken.train.optim import build_optimizer, check_gradients, set_learning_rate, trained_parameters
from unspoken.train.recipe import Recipe
from unspoken.train.schedule import LearningRate, passes_at

NORMS_EVERY_STEPS = 50  # a forward of one sequence: a thousandth of the run
SWAMPED_AT = 3.0  # adapter to embedding: 0.2 in runs that win, 15 falling to 5 with the naive init and rate, which lose


@dataclass
class Progress:
    """What has been done so far, over all resumes. `pass_tokens` counts a token once for each pass over it."""

    step: int = 0
    tokens: int = 0
    target_tokens: int = 0
    pass_tokens: int = 0
    train_seconds: float = 0.0
    train_cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0


def forward_backward(
    model: Callable[..., Any],
    batch: dict[str, Tensor],
    micro_batch_rows: int,
    k: int,
    autocast: AbstractContextManager,
) -> tuple[Tensor, Tensor, int]:
    """Add the gradients of one optimizer step's batch, some rows at a time.

    The loss of every part is divided by the targets of the whole batch, so the split changes nothing but rounding.
    Returns the loss, each pass's loss [k], both detached means, and the number of targets. Waits for no device.
    """
    num_targets = max(1, int((shift_labels(batch["labels"]) != IGNORE_INDEX).sum()))
    device = next(model.parameters()).device  # type: ignore[attr-defined]
    loss: Tensor = torch.zeros((), device=device)
    pass_losses = torch.zeros(k, device=device)
    num_rows = len(batch["labels"])
    for start in range(0, num_rows, micro_batch_rows):
        part = {name: rows[start : start + micro_batch_rows].to(device) for name, rows in batch.items()}
        with autocast:
            output = model(**part, num_passes=k, num_items_in_batch=num_targets, use_cache=False)
        output.loss.backward()
        loss += output.loss.detach()
        pass_losses += output.pass_losses
    return loss, pass_losses, num_targets


class TrainingLoop:
    """Trains `model` in place. `checkpoint`: resume from it; the model holds its weights already."""

    def __init__(
        self,
        recipe: Recipe,
        model: LatentForCausalLM,
        data: Data,
        trackers: list[Any] | None = None,
        checkpoint: Path | None = None,
    ):
        self.recipe, self.model, self.data, self.trackers = recipe, model, data, trackers or []
        self.folder = recipe.run.out
        self.num_passes, self.max_passes = num_passes(model.config), max_passes(model.config)
        self.optimizer = build_optimizer(model, recipe.optim)
        self.parameters = [parameter for _, parameter in trained_parameters(self.optimizer)]
        self.learning_rate = LearningRate(recipe.optim, recipe.num_steps)
        self.progress = Progress()
        self.window = LossWindow(self.max_passes, model.device)
        self.last_rows: dict[str, Row] = {}
        self.stop_signal = 0
        self.has_warned = False
        if recipe.train.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.forward: Callable[..., Any] = torch.compile(model) if recipe.train.compile else model
        if checkpoint is not None:
            self._load(load_state(checkpoint), checkpoint)
        self.files = MetricFiles(
            self.folder, columns(self.max_passes), None if checkpoint is None else self.progress.step
        )
        self.console = RunConsole(recipe.num_steps, self.progress.step)
        self._clock = _Clock()
        self._begin = self._logged = replace(self.progress)

    def run(self) -> bool:
        """Train to the last step and return True; or False where a signal ended it, with a checkpoint saved."""
        train, num_steps = self.recipe.train, self.recipe.num_steps
        with self.console, self._until_signal():
            if self.progress.step == 0 and train.eval_every:
                self._evaluate()
            while self.progress.step < num_steps and not self.stop_signal:
                row = self._step()
                step = self.progress.step
                if row is not None:
                    self._log(row)
                if train.eval_every and (step % train.eval_every == 0 or step == num_steps):
                    self._evaluate()
                if step < num_steps and (self.stop_signal or (train.save_every and step % train.save_every == 0)):
                    self.save()
                self.console.advance()
        self._clock.add_to(self.progress)
        return self.progress.step == num_steps

    def _step(self) -> Row | None:
        """One optimizer step; its metrics if it is one to be logged."""
        step, train, clock = self.progress.step, self.recipe.train, _Clock()
        k = passes_at(step, self.recipe.run.seed, self.num_passes, train.third_pass_fraction)
        set_learning_rate(self.optimizer, self.learning_rate, step)
        batch = self.data.train.global_batch(step, train.batch_size)
        loss, pass_losses, num_targets = forward_backward(
            self.forward, batch, train.micro_batch_rows, k, self._autocast()
        )
        if step == self._begin.step:
            check_gradients(self.optimizer, k)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.optim.max_grad_norm)
        # The one place where a step waits for the device: weights must not move on a gradient that is not a number.
        if not bool(torch.isfinite(loss + grad_norm)):
            self._stop_not_finite(batch, pass_losses, float(grad_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.window.add(loss, pass_losses, num_targets)
        self._count(num_targets, k, clock)
        step += 1
        if step % train.log_every and step != self.recipe.num_steps:
            return None
        row: Row = {"learning_rate": self.learning_rate.at(step - 1), "grad_norm": float(grad_norm), "num_passes": k}
        if step <= train.log_every or step // NORMS_EVERY_STEPS != (step - train.log_every) // NORMS_EVERY_STEPS:
            with self._autocast():
                row |= state_norms(self.model, batch, k)
        return row

    def _autocast(self) -> AbstractContextManager:
        enabled = self.recipe.train.autocast == "bfloat16"
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=enabled)

    def _count(self, num_targets: int, k: int, clock: "_Clock") -> None:
        progress, tokens = self.progress, self.recipe.step_tokens
        progress.step += 1
        progress.tokens += tokens
        progress.target_tokens += num_targets
        progress.pass_tokens += tokens * k
        seconds, cpu_seconds = clock.lap()
        progress.train_seconds += seconds
        progress.train_cpu_seconds += cpu_seconds

    def _log(self, row: Row) -> None:
        now, before = self.progress, self._logged
        tokens = now.tokens - before.tokens
        row = self.window.read() | row
        row["tokens_per_second"] = tokens / (now.train_seconds - before.train_seconds)
        row["tokens_per_cpu_second"] = tokens / max(1e-9, now.train_cpu_seconds - before.train_cpu_seconds)
        if row.get("adapter_to_embedding", 0.0) > SWAMPED_AT and not self.has_warned:
            self.has_warned = True
            self.console.say(
                f"warning: the adapter's output is {row['adapter_to_embedding']:.1f} times as large as the token "
                "embeddings; lower optim.adapter_learning_rate_factor, or use model.init: scaled"
            )
        self._write(row, "train")
        self._logged = replace(now)

    def _evaluate(self) -> None:
        data = self.data.held_out
        assert data is not None
        train = self.recipe.train
        with self._autocast():
            losses = held_out_losses(self.model, data, train.eval_sequences, train.micro_batch_rows, self.max_passes)
        names = [f"loss_pass_{i}" for i in range(1, self.max_passes + 1)]
        self._write(dict(zip(names, losses, strict=True)), "eval")

    def _write(self, row: Row, kind: str) -> None:
        progress = self.progress
        self._clock.add_to(progress)
        row = {"step": progress.step, "kind": kind, "tokens": progress.tokens} | row
        row |= {"wall_seconds": round(progress.wall_seconds, 3), "cpu_seconds": round(progress.cpu_seconds, 3)}
        self.last_rows[kind] = row
        self.files.write(row)
        track(self.trackers, row)
        num_done = progress.step - self._begin.step
        elapsed = progress.wall_seconds - self._begin.wall_seconds
        remaining = elapsed / num_done * (self.recipe.num_steps - progress.step) if num_done else None
        self.console.show(row, remaining)

    def save(self) -> Path:
        """Write a checkpoint of the steps done so far."""
        self._clock.add_to(self.progress)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "random": random_state(),
            "window": self.window.state_dict(),
            "progress": asdict(self.progress),
        }
        return save_checkpoint(self.folder, self.progress.step, self.model, state, self.recipe.train.keep_last)

    def _load(self, state: dict[str, Any], checkpoint: Path) -> None:
        names = [group["param_names"] for group in self.optimizer.param_groups]
        if [group["param_names"] for group in state["optimizer"]["param_groups"]] != names:
            raise UnspokenError(f"{checkpoint} was written for a model with other parameters than this one")
        self.optimizer.load_state_dict(state["optimizer"])
        self.window.load_state_dict(state["window"])
        self.progress = Progress(**state["progress"])
        set_random_state(state["random"])

    def _stop_not_finite(self, batch: dict[str, Tensor], pass_losses: Tensor, grad_norm: float) -> NoReturn:
        step = self.progress.step + 1
        path = self.folder / f"not-finite-step-{step}.safetensors"
        save_file({name: rows.contiguous() for name, rows in batch.items()}, path, {"global_batch": str(step - 1)})
        losses = " / ".join(f"{loss:.4g}" for loss in pass_losses.tolist())
        raise UnspokenError(
            f"step {step}: not a finite number: loss by pass {losses}, gradient norm {grad_norm:.4g}. The batch is in "
            f"{path}; the weights were not moved. A lower optim.learning_rate, a longer warm-up or "
            "train.autocast: none may help."
        )

    @contextmanager
    def _until_signal(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the current step; a second one ends it at once."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before: dict[int, Any] = {number: signal.getsignal(number) for number in signals}

        def stop(number: int, _frame: object) -> None:
            self.stop_signal = number
            signal.signal(number, before[number])
            self.console.say("stopping after this step; once more ends it at once")

        for number in signals:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number in signals:
                signal.signal(number, before[number])


class _Clock:
    """Wall and CPU seconds since it was made or last read."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def lap(self) -> tuple[float, float]:
        wall, cpu = self.wall, self.cpu
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        return self.wall - wall, self.cpu - cpu

    def add_to(self, progress: Progress) -> None:
        seconds, cpu_seconds = self.lap()
        progress.wall_seconds += seconds
        progress.cpu_seconds += cpu_seconds
