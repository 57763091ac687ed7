"""A TRL trainer's checkpoints in the form of this project's own: safetensors and JSON, sealed and checked.

transformers would write optimizer and generators as pickles. The trainer's own records (`trainer_state.json`, the
schedule) lie beside as JSON, and its generators (torch's, Python's, numpy's) in the seal. What the trainer holds beside
that, a rollout and how far its updates have come, is not kept: checkpoints lie between one rollout and the next.
"""

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from unspoken.errors import UnspokenError
from unspoken.train.checkpoint import (
    SEAL,
    CheckpointWriter,
    generators,
    read_record,
    read_tensors,
    set_generators,
)
from unspoken.train.loop import model_tensors
from unspoken.train.optim import optimizer_tensors
from unspoken.train.parallel import Ranks


class SealedCheckpoints(Trainer):
    """Mixed into a trainer whose optimizer is `unspoken.train.optim`'s. `keep` must be called before `train`."""

    writer: CheckpointWriter
    run_id: str
    updates_per_step: int
    config: Any
    generation: dict[str, str]

    def keep(
        self, run: Path, run_id: str, keep_last: int, updates_per_step: int, config: Any, generation: dict[str, str]
    ) -> None:
        """Write checkpoints into a run's folder, named by their step: so many updates of the optimizer. config,
        generation: the model's before TRL wrote its pad token there, with which a model would be built whose pads do
        not learn."""
        self.writer = CheckpointWriter(run, Ranks(), keep_last)
        self.run_id, self.updates_per_step, self.config = run_id, updates_per_step, config
        self.generation = generation

    def progress(self) -> dict[str, Any]:
        """What else a checkpoint is to carry on."""
        return {}

    def _tensors(self) -> dict[str, Tensor]:
        model: Any = self.accelerator.unwrap_model(self.model)
        optimizer: Any = self.optimizer
        return model_tensors(model) | optimizer_tensors(getattr(optimizer, "optimizer", optimizer))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """transformers' place for it."""
        if rest := self.state.global_step % self.updates_per_step:
            raise UnspokenError(f"{rest} updates into a rollout: a checkpoint there could not be gone on from")
        schedule: Any = self.lr_scheduler
        record = {
            "run_id": self.run_id,
            "progress": self.progress(),
            "schedule": {name: value for name, value in schedule.state_dict().items() if name != "lr_lambdas"},
            "random": {"python": random.getstate(), "numpy": _plain(np.random.get_state())},
        }
        self.writer.save(
            self.state.global_step // self.updates_per_step,
            self._tensors() | generators(Ranks()),
            record,
            self.config,
            texts={TRAINER_STATE_NAME: json.dumps(asdict(self.state), indent=1) + "\n", **self.generation},
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights are read with the optimizer's state, once there is one."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        read_tensors(Path(checkpoint), self._tensors())
        schedule: Any = self.lr_scheduler
        try:
            schedule.load_state_dict({**schedule.state_dict(), **read_record(Path(checkpoint))["schedule"]})
        except KeyError as error:
            raise UnspokenError(
                f"{Path(checkpoint) / SEAL} is damaged ({error}). Delete {checkpoint} to resume from the one before it"
            ) from error
        optimizer: Any = self.optimizer
        for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        own = generators(Ranks())
        read_tensors(Path(checkpoint), own)
        set_generators(own, Ranks())
        kept = read_record(Path(checkpoint))["random"]
        version, numbers, gauss = kept["python"]
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(tuple(kept["numpy"]))


def _plain(state: Any) -> list[Any]:
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in state]
