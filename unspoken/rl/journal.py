"""What a policy's training shows and keeps: a row for each rollout, its samples, and how held-out problems go.

RUN/metrics.jsonl .csv   `train` rows: TRL's names, means over the rollout's updates; `eval` rows: held-out problems
RUN/samples.jsonl        the first prompt of each rollout with its completions, rewards and advantages

A loss near zero is no fault here: advantages add up to nothing, so it says little. Reward and gradient norm do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unspoken.analysis.policy_report import SAMPLES, read_samples, sample_line
from unspoken.rl.recipe import RLRecipe
from unspoken.train.console import RunConsole
from unspoken.train.metrics import MetricFiles, Row, track
from unspoken.train.progress import Clock
from unspoken.train.signals import Stop, stop_on_signal

OF_TRAINER = (
    "loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std", "groups/all_truncated",
    "completions/mean_length", "completions/max_length", "completions/clipped_ratio", "completions/empty_ratio",
    "entropy", "kl", "clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean",
    "gap/mean", "gap/mean_abs", "gap/max_abs", "gap/ratio", "gap/ratio_spread", "gap/flipped", "gap/max_abs_unflipped",
)  # fmt: skip
Evaluate = Callable[[], Row]


def columns(reward_names: list[str], tasks: list[str]) -> list[str]:
    """The CSV's columns. JSONL rows hold those that apply."""
    return [
        "step",
        "kind",
        "completion_tokens",
        "accuracy",
        *(f"accuracy/{task}" for task in tasks),
        *OF_TRAINER,
        *(f"rewards/{name}/{what}" for name in reward_names for what in ("mean", "std")),
        "num_problems",
        "tokens_per_second",
        "wall_seconds",
        "cpu_seconds",
    ]


@dataclass
class Progress:
    """What a run has done and used so far, over all resumes. Seconds but for `wall_seconds` are the processor's."""

    step: int = 0
    completions: int = 0
    completion_tokens: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0


class Journal(TrainerCallback):
    """Follows a `LatentGRPOTrainer`, evaluates when it is time, and ends the run between two rollouts after a signal.

    evaluate: answers held-out problems, as a row. progress: where a resumed run goes on.
    """

    def __init__(
        self,
        recipe: RLRecipe,
        reward_names: list[str],
        tasks: list[str],
        evaluate: Evaluate,
        trackers: list[Any],
        progress: Progress | None,
    ):
        self.recipe, self.evaluate, self.trackers = recipe, evaluate, trackers
        self.progress = progress or Progress()
        resume_step = None if progress is None else progress.step
        self.files = MetricFiles(recipe.run.out, columns(reward_names, tasks), resume_step)
        self.samples = recipe.run.out / SAMPLES
        _drop_later_samples(self.samples, resume_step)
        self.reward_names = reward_names
        self.last_rows: dict[str, Row] = {row["kind"]: row for row in self.files.kept}
        self.first_evaluation = next((row for row in self.files.kept if row["kind"] == "eval"), None)
        self.console = RunConsole(recipe.train.num_rollouts, self.progress.step, describe=_words, unit="rollout")
        self.stop, self._clock = Stop(), Clock()
        self._begin = (self.progress.step, self.progress.wall_seconds)
        self.trainer: Any = None

    @contextmanager
    def following(self, trainer: Any) -> Iterator[None]:
        """While the trainer trains."""
        self.trainer = trainer
        after = "this rollout and its updates"
        with self.console, stop_on_signal(self.console.say, self.stop, after):
            yield

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._clock = Clock()
        if self.progress.step == 0 and self.recipe.train.eval_every:
            self._write(self.evaluate(), "eval")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.recipe.updates:
            return
        self.progress.step = state.global_step // self.recipe.updates
        is_last = self.progress.step == self.recipe.train.num_rollouts
        control.should_log = True
        every = self.recipe.train.save_every
        control.should_save = bool(self.stop) or bool(every and (is_last or self.progress.step % every == 0))
        control.should_training_stop = bool(self.stop) or is_last

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        if "reward" not in logs:  # transformers' summary at the end
            return
        num_completions = self.recipe.rollout.num_completions
        self.progress.completions += num_completions
        self.progress.completion_tokens += round(logs["completions/mean_length"] * num_completions)
        names = [*OF_TRAINER, *(name for name in self.files.names if name.startswith("rewards/"))]
        row = {name: logs[name] for name in names if name in logs}
        self._write(row | {"tokens_per_second": logs["rollout/tokens_per_second"]}, "train")
        self._keep_samples()
        self.console.advance()
        every, step = self.recipe.train.eval_every, self.progress.step
        if every and (step % every == 0 or step == self.recipe.train.num_rollouts):
            self._write(self.evaluate(), "eval")

    def settle(self) -> None:
        """Before the progress is read."""
        self._clock.add_to(self.progress)

    def _write(self, row: Row, kind: str) -> None:
        self.settle()
        progress = self.progress
        row = {"step": progress.step, "kind": kind, "completion_tokens": progress.completion_tokens} | row
        row |= {"wall_seconds": round(progress.wall_seconds, 3), "cpu_seconds": round(progress.cpu_seconds, 3)}
        self.last_rows[kind] = row
        if kind == "eval" and self.first_evaluation is None:
            self.first_evaluation = row
        self.files.write(row)
        track(self.trackers, row)
        num_done, began = progress.step - self._begin[0], self._begin[1]
        left = self.recipe.train.num_rollouts - progress.step
        remaining = (progress.wall_seconds - began) / num_done * left if num_done else None
        self.console.show(row, remaining)

    def _keep_samples(self) -> None:
        """The last rollout's first prompt, with all that was sampled for it."""
        logs, count = self.trainer._logs, self.recipe.rollout.num_generations
        offset = len(logs["prompt"]) - self.recipe.rollout.num_completions
        with self.samples.open("a", encoding="utf-8") as file:
            for number in range(offset, offset + count):
                sample = {
                    "step": self.progress.step,
                    "prompt": logs["prompt"][number],
                    "completion": logs["completion"][number],
                    "rewards": {name: logs["rewards"][name][number] for name in self.reward_names},
                    "advantage": logs["advantages"][number],
                }
                file.write(sample_line(sample))

    def record(self) -> dict[str, Any]:
        """For a checkpoint."""
        self.settle()
        return asdict(self.progress)


def _words(row: Row) -> str:
    if row["kind"] == "eval":
        return f"accuracy {row['accuracy']:.3f} of {row['num_problems']} problems"
    parts = [
        f"reward {row['reward']:.3f}",
        f"gradient {row.get('grad_norm', 0.0):.2f}",
        f"length {row['completions/mean_length']:.0f}",
        f"entropy {row['entropy']:.2f}",
        f"gap {row['gap/mean_abs']:.1g}",
    ]
    if equal := row["frac_reward_zero_std"]:
        parts.append(f"{equal:.0%} of groups of equal reward")
    if cut := row["completions/clipped_ratio"]:
        parts.append(f"{cut:.0%} cut off")
    return "  ".join(parts)


def _drop_later_samples(path: Path, resume_step: int | None) -> None:
    """Those after the checkpoint that a run resumes from; all of them without one."""
    samples = read_samples(path) if resume_step else []
    kept = [sample for sample in samples if sample["step"] <= (resume_step or 0)]
    path.write_text("".join(map(sample_line, kept)), encoding="utf-8")
