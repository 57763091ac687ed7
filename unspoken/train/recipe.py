"""What a training recipe may say. `recipe_file.py` reads one; each default stands here and nowhere else.

The method's fields (`num_train_passes`, ...) have theirs in the model's configuration, the backbone's in
transformers'; they are left None here and filled in `resolved.yaml`.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from unspoken.data.frozen_random import MAX_SEED
from unspoken.data.tasks import parse_task
from unspoken.errors import UsageError

FIELDS_OF: dict[str, tuple[str, ...]] = {  # a method's own keys of the model section
    "vanilla": (),
    "looped": (
        "num_loops", "norm_between_loops", "inject_input", "exit_gate", "exit_entropy_weight", "exit_quantile",
    ),
    "pause": ("num_pauses",),
    "ponder": ("num_ponder_steps", "accumulate"),
    "mor": (
        "num_recursions", "recursion_router", "kv_mode", "capacities", "selects_by_capacity", "router_scale",
        "balance_weight", "z_loss_weight", "selection_weight",
    ),
    "ponder2": ("num_latent_thoughts", "train_refinements", "num_refinements"),
    "recycler": (
        "num_train_passes", "num_prefill_passes", "pass_loss_reduction", "pass_loss_weights", "detach_between_passes",
        "adapter_norm", "feedback",
    ),
    "adaptive": (
        "max_latent_steps", "exit_threshold", "exit_at_step", "router", "router_bias", "adaptive_loss",
        "adaptive_loss_weight", "adaptive_loss_exponent", "penalize_cuts", "step_loss_weight",
    ),
}  # fmt: skip
FIELDS_OF["adaptive_recycler"] = FIELDS_OF["recycler"] + FIELDS_OF["adaptive"]
Method = Literal[
    "recycler", "adaptive", "adaptive_recycler", "vanilla", "looped", "pause", "ponder", "ponder2", "mor"
]  # fmt: skip
METHOD_FIELDS = tuple(dict.fromkeys(field for fields in FIELDS_OF.values() for field in fields))
TRACKERS = ("tensorboard", "wandb", "trackio")


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 and 1.2e6 as text; they are numbers here. `true` is not."""
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    if isinstance(value, str):
        try:
            return float(value.replace("_", ""))
        except ValueError:
            return value
    return value


def _names(value: Any) -> Any:
    """`report_to: wandb` for [wandb], and `none` for none, as in transformers."""
    if isinstance(value, str):
        return [] if value == "none" else [value]
    return value


_Number = BeforeValidator(_number)
Count = Annotated[int, _Number, Field(gt=0)]
CountOrNone = Annotated[int, _Number, Field(ge=0)]
Positive = Annotated[float, _Number, Field(gt=0)]
NotNegative = Annotated[float, _Number, Field(ge=0)]
Fraction = Annotated[float, _Number, Field(ge=0, le=1)]
Below1 = Annotated[float, _Number, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class RunSection(Section):
    """Where the run goes. Paths count from the working directory."""

    out: Path
    seed: Annotated[int, _Number, Field(ge=0, le=MAX_SEED)] = 0
    device: str = "auto"
    report_to: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], BeforeValidator(_names)] = []


class ModelSection(Section):
    """Either a pretrained model (`from_pretrained`, made a latent one if `method` says which) or a new one (`method`
    and `backbone`). `backbone` takes the keys of the family's transformers configuration; the vocabulary and the
    special tokens are the data's unless it says otherwise. `init: scaled` is `unspoken.scaled_init`, `backbone` the
    family's own."""

    from_pretrained: str | None = None
    method: Method | None = None
    backbone: dict[str, Any] | None = None
    init: Literal["scaled", "backbone"] | None = None
    num_train_passes: Count | None = None
    num_prefill_passes: Count | None = None
    pass_loss_reduction: Literal["sum", "mean"] | None = None
    pass_loss_weights: list[NotNegative] | None = None
    detach_between_passes: bool | None = None
    adapter_norm: Literal["input", "output", "none"] | None = None
    feedback: Literal["added", "gated"] | None = None
    max_latent_steps: CountOrNone | None = None
    exit_threshold: Fraction | None = None
    exit_at_step: Count | None = None
    router: Literal["linear", "mlp", "multi_linear", "multi_mlp", "none"] | None = None
    router_bias: Annotated[float, _Number] | None = None
    adaptive_loss: Literal["A", "B", "C", "D"] | None = None
    adaptive_loss_weight: NotNegative | None = None
    adaptive_loss_exponent: NotNegative | None = None
    penalize_cuts: bool | None = None
    step_loss_weight: NotNegative | None = None
    num_loops: Count | None = None
    norm_between_loops: bool | None = None
    inject_input: bool | None = None
    exit_gate: bool | None = None
    exit_entropy_weight: NotNegative | None = None
    exit_quantile: Fraction | None = None
    num_pauses: CountOrNone | None = None
    num_ponder_steps: CountOrNone | None = None
    accumulate: bool | None = None
    num_recursions: Count | None = None
    recursion_router: Literal["token_choice", "expert_choice"] | None = None
    kv_mode: Literal["own", "shared"] | None = None
    capacities: list[Fraction] | None = None
    selects_by_capacity: bool | None = None
    router_scale: Positive | None = None
    balance_weight: NotNegative | None = None
    z_loss_weight: NotNegative | None = None
    selection_weight: NotNegative | None = None
    num_latent_thoughts: Count | None = None
    train_refinements: list[CountOrNone] | None = None
    num_refinements: CountOrNone | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_init(cls, values: Any) -> Any:
        """Only a new model has an init."""
        if isinstance(values, dict) and values.get("from_pretrained") is None and values.get("init") is None:
            return {**values, "init": "scaled"}
        return values

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.from_pretrained is None:
            if self.method is None or self.backbone is None:
                raise ValueError("give `from_pretrained`, or `method` and `backbone` for a new model")
            if "model_type" not in self.backbone:
                raise ValueError("`backbone` needs a `model_type`: llama, qwen3, ...")
        elif self.backbone is not None or self.init is not None:
            raise ValueError("`from_pretrained` brings its own backbone and weights: drop `backbone` and `init`")
        if self.method is not None:
            foreign = [field for field in METHOD_FIELDS if field not in FIELDS_OF[self.method]]
            for field in (field for field in foreign if getattr(self, field) is not None):
                owner = next(method for method, fields in FIELDS_OF.items() if field in fields)
                raise ValueError(f"`{field}` is for `method: {owner}`, and this is `method: {self.method}`")
        return self


class SourceSection(Section):
    """One of several data folders, and its share of the windows in proportion to the other weights."""

    path: Path
    weight: Positive = 1.0


class ConversationsSection(Section):
    """Rows to answer, see `data/conversations.py`. A fraction of them is held out unless `validation_files` are given.
    `tokenizer` (a folder, `smollm2` or a hub name) is for a new model; a pretrained one brings its own."""

    files: Annotated[list[Path], Field(min_length=1)]
    validation_files: list[Path] | None = None
    validation_fraction: Below1 = 0.02
    tokenizer: str | None = None
    on_bad_line: Literal["error", "skip"] = "error"


class DataSection(Section):
    """One of four: `path` is a folder written by `unspoken data prepare`, `sources` are several with weights, `task`
    is a task of `unspoken/data/tasks.py` and its settings (`name: running_sum`, ...), which needs no files;
    `conversations` are rows to answer (`unspoken sft`).

    `pause_fraction` of a training window's tokens are pauses at random places (`data/pauses.py`)."""

    path: Path | None = None
    sources: Annotated[list[SourceSection], Field(min_length=1)] | None = None
    task: dict[str, Any] | None = None
    conversations: ConversationsSection | None = None
    sequence_length: Annotated[int, _Number, Field(ge=2)] = 256
    pause_fraction: Below1 = 0.0

    @field_validator("task")
    @classmethod
    def _with_defaults(cls, task: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            return None if task is None else parse_task(task).settings()
        except UsageError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if sum(origin is not None for origin in (self.path, self.sources, self.task, self.conversations)) != 1:
            raise ValueError("give one of `path`, `sources`, `task` and `conversations`")
        if self.pause_fraction and (self.task or self.conversations):
            raise ValueError("`pause_fraction` is for text; other windows have a form of their own")
        num_pauses = round(self.pause_fraction * self.sequence_length)
        if self.pause_fraction and not num_pauses:
            raise ValueError("`pause_fraction` is less than one pause in a window")
        if self.sequence_length - num_pauses < 2:
            raise ValueError("`pause_fraction` leaves fewer than 2 tokens of text in a window")
        paths = [source.path.resolve() for source in self.sources or []]
        if twice := next((path for path in paths if paths.count(path) > 1), None):
            raise ValueError(f"{twice} is twice among `sources`; give it the sum of its weights")
        return self

    @property
    def text_sources(self) -> list[SourceSection]:
        """The folders of `path` or `sources`."""
        return self.sources or ([] if self.path is None else [SourceSection(path=self.path)])


class OptimSection(Section):
    """AdamW. The adapter's learning rate is `adapter_learning_rate_factor` times the others', and it may warm up over
    a longer stretch of its own; it is never decayed. A factor of 0 freezes it: passes and losses without feedback."""

    learning_rate: Positive
    weight_decay: NotNegative = 0.1
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    eps: Positive = 1e-8
    adapter_learning_rate_factor: NotNegative = 1.0
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: CountOrNone | None = None
    warmup_fraction: Fraction | None = None
    adapter_warmup_fraction: Fraction | None = None
    min_learning_rate_ratio: Fraction = 0.1
    max_grad_norm: Positive = 1.0

    @model_validator(mode="before")
    @classmethod
    def _one_warmup(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        steps, fraction = values.get("warmup_steps"), values.get("warmup_fraction")
        if steps is not None and fraction is not None:
            raise ValueError("give `warmup_steps` or `warmup_fraction`, not both")
        return {**values, "warmup_fraction": 0.05} if steps is None and fraction is None else values


class TrainSection(Section):
    """How much and how.

    `batch_size` counts the sequences of one optimizer step over all processes, `micro_batch_size` those of one backward
    in one process (its whole share, unless given). `third_pass_fraction` of the steps run one pass more than
    `model.num_train_passes`. An `..._every` of 0 is never; unless it is 0 the model is also evaluated before the first
    step and after the last, and a checkpoint is written after the last. On the first `no_cut_fraction` of the steps no
    token's latent steps are cut (`method: adaptive`). `keep_best` keeps, beside the last ones, the
    checkpoint of the evaluation with the lowest loss of the last trained pass.

    With several processes (`unspoken launch`), `parallel` says what each holds: `ddp` the whole model, `fsdp` a share;
    `keep_gathered` gathers a layer once for all passes and the backward, at the price of the whole model's memory.
    `segmented_backward` runs the backward pass by pass: see `models/segments.py`.
    """

    total_tokens: Count | None = None
    max_steps: Count | None = None
    num_epochs: Positive | None = None
    batch_size: Count = 8
    micro_batch_size: Count | None = None
    third_pass_fraction: Fraction = 0.0
    no_cut_fraction: Fraction = 0.0
    autocast: Literal["bfloat16", "none"] = "bfloat16"
    gradient_checkpointing: bool = False
    compile: bool = False
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    keep_gathered: bool = False
    segmented_backward: bool = False
    log_every: Count = 10
    eval_every: CountOrNone = 100
    eval_sequences: Count = 64
    save_every: CountOrNone = 500
    keep_last: Count = 2
    keep_best: bool = False
    save_in_background: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.keep_best and not self.eval_every:
            raise ValueError("keep_best needs evaluations; set eval_every")
        if self.keep_gathered and self.parallel != "fsdp":
            raise ValueError("keep_gathered is for `parallel: fsdp`; otherwise nothing is gathered")
        if self.segmented_backward and self.parallel == "ddp":
            raise ValueError("segmented_backward is for `parallel: fsdp`; with ddp every process holds whole gradients")
        if sum(length is not None for length in (self.total_tokens, self.max_steps, self.num_epochs)) != 1:
            raise ValueError("give one of `total_tokens`, `max_steps` and `num_epochs`")
        self.share(1)
        return self

    def engine(self, num_ranks: int) -> Literal["single", "ddp", "fsdp"]:
        """Which engine runs the steps of so many processes."""
        if num_ranks == 1:
            if self.parallel != "auto":
                raise UsageError(
                    f"train.parallel: {self.parallel} needs several processes: `unspoken launch -- train ...`; one "
                    "process alone goes with `auto`"
                )
            return "single"
        if self.parallel != "fsdp" and self.segmented_backward:
            raise UsageError("train.segmented_backward: give `train.parallel: fsdp`; ddp holds whole gradients anyway")
        return "fsdp" if self.parallel == "fsdp" else "ddp"

    def share(self, num_ranks: int) -> tuple[int, int]:
        """Rows of a step for each process, and of one backward.

        Raises:
            ValueError: they do not come out even.
        """
        share, rest = divmod(self.batch_size, num_ranks)
        if rest:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of the {num_ranks} processes")
        rows = min(share, self.micro_batch_size or share)
        if share % rows:
            whose = f"batch_size {self.batch_size}" + (f" over {num_ranks} processes" if num_ranks > 1 else "")
            raise ValueError(f"micro_batch_size {self.micro_batch_size} does not divide {whose}")
        return share, rows


class Recipe(Section):
    """A whole run. `made_with` is written into `resolved.yaml` by a run and ignored when read back."""

    run: RunSection
    model: ModelSection
    data: DataSection
    optim: OptimSection
    train: TrainSection
    made_with: Annotated[dict[str, Any] | None, Field(exclude=True)] = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        method = self.model.method
        for key, owner in (
            ("third_pass_fraction", "recycler"), ("segmented_backward", "recycler"), ("no_cut_fraction", "adaptive"),
        ):  # fmt: skip
            if getattr(self.train, key) and method is not None and owner not in method:
                raise ValueError(f"train.{key} is for `method: {owner}`, and this is `method: {method}`")
        if self.train.segmented_backward and method == "adaptive_recycler":
            raise ValueError("train.segmented_backward is for `method: recycler` alone")
        if self.train.num_epochs is None and self.num_steps == 0:
            raise ValueError(f"train.total_tokens {self.train.total_tokens} is less than one step: {self.step_tokens}")
        return self

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.train.batch_size * self.data.sequence_length

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run; tokens that do not fill a step are left out."""
        if self.train.max_steps is not None:
            return self.train.max_steps
        if self.train.num_epochs is not None:
            raise UsageError("train.num_epochs: how many steps they are is known once the data is open")
        return (self.train.total_tokens or 0) // self.step_tokens

    def with_steps(self, num_windows: int) -> Self:
        """With its epochs counted in steps, where it says so, over data of so many windows; the last one goes on with
        the next epoch's windows."""
        if (epochs := self.train.num_epochs) is None:
            return self
        steps = max(1, math.ceil(epochs * num_windows / self.train.batch_size))
        train = self.train.model_copy(update={"num_epochs": None, "max_steps": steps})
        return self.model_copy(update={"train": train})

    def check_processes(self, number: int) -> None:
        """Raise UsageError if so many processes cannot run it."""
        self.train.engine(number)
        try:
            self.train.share(number)
        except ValueError as error:
            raise UsageError(f"train: {error}") from error

    def plain(self) -> dict[str, Any]:
        """The recipe as what YAML and JSON can hold."""
        return self.model_dump(mode="json")
