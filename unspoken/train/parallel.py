"""The processes of a run, and how the model is spread over them.

    engine    what a process holds                    gradients
    single    everything                              its own
    ddp       everything                              averaged in buckets while backward runs
    fsdp      a share of every parameter, gradient    reduced to the shares, layer by layer
              and optimizer state

All k passes lie inside one forward of the root module, so either engine sees one step: one all-reduce under DDP, one
reduction a layer under FSDP. Each layer is gathered anew for every pass, unless `keep_gathered`; its whole gradient
lives until the first pass's backward, unless `segmented_backward` (see `models/segments.py`). The loss is divided by
the targets of all processes and multiplied by their number, because both engines average.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from unspoken.errors import UnspokenError, UsageError
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.segments import backward_by_pass
from unspoken.train.recipe import TrainSection

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)  # of a collective: a process that is gone is noticed much sooner


@dataclass(frozen=True)
class Ranks:
    """The processes of this run. Alone (`size` 1) there is no process group, and every method is the identity."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """The sums over all processes, in float64; whole numbers up to 2**53 stay exact."""
        if self.size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=_messages())
        return total.tolist()

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set in any process."""
        return [total > 0 for total in self.sum([float(flag) for flag in flags])]

    def from_main(self, number: float) -> float:
        """What the main process gave."""
        return self.sum([number if self.is_main else 0.0])[0]

    def on_main(self, act: Callable[[], None]) -> None:
        """Something for the main process alone. Where it fails, every process does; the main one says why."""
        error = None
        if self.is_main:
            try:
                act()
            except UnspokenError as failure:
                error = failure
        has_failed = self.any(error is not None)[0]
        if error is not None:
            raise error
        if has_failed:
            raise UnspokenError("the main process has failed", said_by_main=True)

    def together(self, act: Callable[[], T]) -> T:
        """Something that each process does for itself. Where it fails in one, every process fails; what the main
        process meets too is said once."""
        result, error = None, None
        try:
            result = act()
        except UnspokenError as failure:
            error = failure
        has_failed, has_main_failed = self.any(error is not None, error is not None and self.is_main)
        if error is not None:
            error.said_by_main = has_main_failed
            raise error
        if has_failed:
            raise UnspokenError("another process has failed; its message stands above", said_by_main=True)
        return cast(T, result)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier(group=_messages())


_MESSAGES: list[Any] = []  # the CPU group for flags, counts and checkpoints, apart from the gradients' own


def _messages() -> Any:
    return _MESSAGES[0]


def new_messages_group() -> Any:
    """Another CPU group, for what runs beside training: two streams of collectives must not share one."""
    return dist.new_group(backend="gloo", timeout=TIMEOUT)


@contextmanager
def joined_ranks(device: torch.device) -> Iterator[Ranks]:
    """The processes that torchrun (`unspoken launch`) started, joined into one group; this one alone otherwise."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=TIMEOUT)
    _MESSAGES.append(dist.new_group(backend="gloo", timeout=TIMEOUT))
    try:
        yield Ranks(dist.get_rank(), size)
    finally:
        _MESSAGES.clear()
        dist.destroy_process_group()


def local_device(name: str) -> str:
    """`run.device` for this process: with several, each takes the GPU of its local rank."""
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None or name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return name
    if name not in ("auto", "cuda"):
        raise UsageError(f"run.device: {name!r}: several processes choose their own GPU; give `auto`, `cuda` or `cpu`")
    return f"cuda:{local_rank}"


class Engine:
    """A model made ready for a step: `forward`, `backward`, and what must happen around them.

    `parameters` are what the optimizer moves, by name, each once; under FSDP they are the shares.
    """

    def __init__(self, model: LatentForCausalLM, train: TrainSection, ranks: Ranks):
        self.model, self.ranks = model, ranks
        self.model_class: Any = type(model)  # fully_shard gives the module a class of its own
        self.kind = train.engine(ranks.size)
        self.segmented = train.segmented_backward
        self.keep_gathered = train.keep_gathered and self.kind == "fsdp"
        if train.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        is_by_block = self.kind == "fsdp" or self.segmented or not model._can_compile_fullgraph
        if train.compile and is_by_block:
            for block in model.model.blocks():
                block.compile()
        if self.kind == "fsdp" and hasattr(model.model, "goes_on_anywhere"):
            model.model.goes_on_anywhere = lambda goes_on: ranks.any(goes_on)[0]
        self.forward: Callable[..., Any] = model
        if self.kind == "fsdp":
            _shard(model, self.keep_gathered)
        elif self.kind == "ddp":
            self.forward = DistributedDataParallel(model)
        if train.compile and not is_by_block:
            self.forward = torch.compile(self.forward)
        self.parameters = dict(model.named_parameters())

    def backward(self, output: Any) -> None:
        """Add the gradients of this process's part of the loss, which is divided by the targets of all processes."""
        loss = output.loss * self.ranks.size if self.ranks.size > 1 else output.loss
        if self.segmented:
            backward_by_pass(loss, output.segments)
        else:
            loss.backward()

    def part(self, is_last: bool) -> AbstractContextManager:
        """Around a micro-batch's forward and backward: gradients are exchanged after the last one alone."""
        if self.kind == "fsdp":
            assert isinstance(self.model, FSDPModule)
            self.model.set_requires_gradient_sync(is_last)
        if self.kind == "ddp" and not is_last:
            return self.forward.no_sync()  # type: ignore[attr-defined]
        return nullcontext()

    def settle(self) -> None:
        """Before the shares are read or moved: give back what forwards have left gathered."""
        if self.kind == "fsdp":
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def whole_model(self) -> LatentForCausalLM | None:
        """The model with all its weights on the CPU, in the main process (None in others). All processes call it."""
        if self.kind != "fsdp":
            return self.model if self.ranks.is_main else None
        self.settle()
        state = {}
        for name, tensor in self.model.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.ranks.is_main:
                state[name] = whole.cpu()
        if not self.ranks.is_main:
            return None
        whole_model = self.model_class(self.model.config)
        whole_model.load_state_dict(state)
        return whole_model


def _shard(model: LatentForCausalLM, keep_gathered: bool) -> None:
    """FSDP2: each block is a unit, and so is what is left (embedding, adapter, final norm, head)."""
    for block in model.model.blocks():
        fully_shard(block, reshard_after_forward=not keep_gathered)
    fully_shard(model, reshard_after_forward=not keep_gathered)
    if keep_gathered:
        model.set_reshard_after_backward(False)  # type: ignore[operator]


@contextmanager
def naming_lost_ranks(ranks: Ranks) -> Iterator[None]:
    """Turn what the backend says when a process is gone into a message.

    Raises:
        UnspokenError: another process of this run has stopped.
    """
    try:
        yield
    except RuntimeError as error:
        if ranks.size == 1 or not _is_lost_connection(error):
            raise
        raise UnspokenError(
            "another process of this run has stopped; its own message stands above. Go on from the newest checkpoint "
            "with --resume (`unspoken launch --max-restarts N` does it itself)"
        ) from error


def _is_lost_connection(error: RuntimeError) -> bool:
    text = str(error)
    return isinstance(error, dist.DistBackendError) or any(
        sign in text for sign in ("gloo", "Gloo", "Connection closed by peer", "Connection reset", "Broken pipe")
    )


def share_of(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_number(value: Tensor) -> Tensor:
    """A scalar that may be spread over processes."""
    return value.full_tensor() if isinstance(value, DTensor) else value
