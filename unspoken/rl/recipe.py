"""What a recipe of `unspoken rl` may say; each default stands here and nowhere else.

Everything counts in rollouts: one rollout is `num_prompts` prompts with `num_generations` completions each, and then
`updates_per_rollout` optimizer steps over parts of them (GSPO's mini-batches), `num_iterations` times.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from unspoken.train.recipe import (
    Below1,
    Count,
    CountOrNone,
    Fraction,
    ModelSection,
    NotNegative,
    OptimSection,
    Positive,
    RunSection,
    Section,
)


class PromptsSection(Section):
    """Rows with a `prompt` (a text, or messages) and what the rewards read beside it: `unspoken data problems` writes
    such. A fraction of them is held out unless `validation_files` are given."""

    files: Annotated[list[Path], Field(min_length=1)]
    validation_files: list[Path] | None = None
    validation_fraction: Below1 = 0.05


def _functions(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class RewardSection(Section):
    """`functions`: names of `unspoken/eval/rewards.py`, or `package.module:function`. Rewards are added up by their
    `weights` (1 each). The first one says which answers are right. `partial`: reasoning-gym's partial credit."""

    functions: Annotated[list[str], BeforeValidator(_functions), Field(min_length=1)]
    weights: list[float] | None = None
    partial: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(f"{len(self.weights)} weights for {len(self.functions)} functions")
        names = [name.rpartition(":")[2] for name in self.functions]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{twice} is twice among `functions`; give it a weight, or one of them another name")
        if self.partial and "reasoning_gym" not in self.functions:
            raise ValueError("`partial` is for reasoning_gym, which is not among `functions`")
        return self


class RolloutSection(Section):
    """What is sampled. Nothing truncates the distribution: what is sampled is what is scored."""

    num_prompts: Count = 8
    num_generations: Annotated[int, Field(ge=2)] = 8
    max_new_tokens: Count = 128
    temperature: Positive = 1.0

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.num_generations


class PolicySection(Section):
    """The loss: GSPO's, unless `importance_sampling_level` is `token` (GRPO's ratio). Names and values are TRL's.

    num_scoring_passes: k parallel passes of new and old policy, the model's `num_train_passes` by default, or `exact`:
    the recurrence, token by token. `gap_limit`: of the mean |difference| between a token's log-probability as sampled
    and as scored, in nats; above it `on_gap` stops the run, or corrects by the completion's ratio, at most
    `correction_limit`. Completions that were cut off take no part with `mask_truncated_completions`.
    """

    importance_sampling_level: Literal["sequence", "token"] = "sequence"
    epsilon: Positive = 3e-4
    epsilon_high: Positive = 4e-4
    beta: NotNegative = 0.0
    scale_rewards: Literal["group", "batch", "none"] = "group"
    mask_truncated_completions: bool = False
    num_scoring_passes: Count | Literal["exact"] | None = None
    gap_limit: Positive | None = 0.5
    on_gap: Literal["stop", "correct"] = "stop"
    correction_limit: Annotated[float, Field(ge=1)] = 2.0


class RLOptimSection(OptimSection):
    """As in training; a policy is neither decayed nor annealed unless the recipe says so."""

    weight_decay: NotNegative = 0.0
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    schedule: Literal["cosine", "constant"] = "constant"
    max_grad_norm: Positive = 1.0
    warmup_fraction: Fraction | None = None


class RLTrainSection(Section):
    """How much and how. An `..._every` counts rollouts, 0 is never; unless it is 0, held-out problems are also answered
    before the first rollout and after the last, and a checkpoint is written after the last. `micro_batch_size`
    completions are scored at once."""

    num_rollouts: Count
    updates_per_rollout: Count = 4
    num_iterations: Count = 1
    micro_batch_size: Count | None = None
    autocast: Literal["bfloat16", "none"] = "none"
    gradient_checkpointing: bool = False
    eval_every: CountOrNone = 10
    eval_problems: Count = 64
    save_every: CountOrNone = 10
    keep_last: Count = 2


class RLRecipe(Section):
    """A whole run. `made_with` is written into `resolved.yaml` by a run and ignored when read back."""

    run: RunSection
    model: ModelSection
    data: PromptsSection
    reward: RewardSection
    rollout: RolloutSection = RolloutSection()
    policy: PolicySection = PolicySection()
    optim: RLOptimSection
    train: RLTrainSection
    made_with: Annotated[dict[str, Any] | None, Field(exclude=True)] = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model.from_pretrained is None:
            raise ValueError("model.from_pretrained: required; a policy begins as a trained model")
        if self.policy.num_scoring_passes == "exact" and self.train.gradient_checkpointing:
            raise ValueError(
                "train.gradient_checkpointing: the recurrence of `num_scoring_passes: exact` needs a cache"
            )
        share, rest = divmod(self.rollout.num_completions, self.train.updates_per_rollout)
        if rest:
            raise ValueError(
                f"train.updates_per_rollout: {self.train.updates_per_rollout} does not divide the "
                f"{self.rollout.num_completions} completions of a rollout (num_prompts * num_generations)"
            )
        if share % self.micro_batch_size:
            raise ValueError(
                f"train.micro_batch_size: {self.train.micro_batch_size} does not divide the {share} completions of an "
                "update"
            )
        return self

    @property
    def update_size(self) -> int:
        """Completions of an optimizer step."""
        return self.rollout.num_completions // self.train.updates_per_rollout

    @property
    def micro_batch_size(self) -> int:
        """Completions of one backward."""
        return min(self.update_size, self.train.micro_batch_size or self.update_size)

    @property
    def updates(self) -> int:
        """Optimizer steps between one rollout and the next."""
        return self.train.updates_per_rollout * self.train.num_iterations

    @property
    def num_updates(self) -> int:
        return self.train.num_rollouts * self.updates

    def plain(self) -> dict[str, Any]:
        """The recipe as what YAML and JSON can hold."""
        return self.model_dump(mode="json")
