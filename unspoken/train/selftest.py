"""What the first step of a run must show, before a night is spent on it.

    every trainable parameter got a gradient                a frozen graph, a bypassed adapter
    the adapter's gradient is not zero, at k >= 2           recycling that no loss reaches
    the backbone ran k times for each part of the batch     a trainer that calls something else than our forward
    the wrapper around the model is the one asked for       an engine that silently became another

The step is the run's own, so nothing is computed twice.
"""

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from unspoken.errors import UnspokenError
from unspoken.train.optim import group_of
from unspoken.train.parallel import Engine, share_of
from unspoken.train.recipe import TrainSection


class SelfTest:
    """Watches the backbone from now on; `check` after the first backward."""

    def __init__(self, engine: Engine, train: TrainSection):
        self.engine = engine
        self.num_runs = 0
        self.expected_kind = train.engine(engine.ranks.size)
        # A graph compiled whole would keep the hook, and count on.
        self.hook = None if train.compile else engine.model.model.backbone.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.num_runs += 1

    def check(self, num_passes: int, num_parts: int, **options: Any) -> None:
        """All processes call it, after a step's last backward. options: that the forward was given.

        Raises:
            UnspokenError: naming what does not hold.
        """
        self._check_wrapper()
        self._check_passes(num_passes, num_parts, options)
        self._check_gradients(num_passes)

    def _check_wrapper(self) -> None:
        wrapped = {
            "ddp": isinstance(self.engine.forward, DistributedDataParallel)
            or isinstance(getattr(self.engine.forward, "_orig_mod", None), DistributedDataParallel),
            "fsdp": isinstance(self.engine.model, FSDPModule),
        }
        found = next((kind for kind, is_there in wrapped.items() if is_there), "single")
        if found != self.expected_kind:
            raise UnspokenError(f"the model should run as {self.expected_kind}, but it is wrapped as {found}")

    def _check_passes(self, num_passes: int, num_parts: int, options: dict[str, Any]) -> None:
        if self.hook is None:
            return
        self.hook.remove()
        base = self.engine.model.model
        expected = num_passes * num_parts * len(base.runs_of_pass(**options))
        may_go_on = hasattr(base, "goes_on_anywhere")
        if self.num_runs != expected and not (may_go_on and self.num_runs > expected):
            raise UnspokenError(
                f"the backbone ran {self.num_runs} times in the first step; {num_passes} passes over {num_parts} parts "
                f"of the batch are {expected}{' at least' if may_go_on else ''}. Something replaces or bypasses the "
                "model's forward."
            )

    def _check_gradients(self, num_passes: int) -> None:
        parameters = {name: p for name, p in self.engine.parameters.items() if p.requires_grad}
        missing = [name for name, parameter in parameters.items() if parameter.grad is None]
        if missing:
            raise UnspokenError(
                f"{len(missing)} trainable parameters got no gradient in the first step, {missing[0]} among them: "
                "they are not part of the loss. Freeze them (requires_grad=False) or put them into the graph."
            )
        adapter = [p for name, p in parameters.items() if group_of(name, p) == "adapter"]
        moved = self.engine.ranks.any(*[bool(share_of(p.grad).any()) for p in adapter if p.grad is not None])
        if adapter and num_passes > 1 and not any(moved):
            raise UnspokenError(
                f"the adapter's gradient is zero after the first step of {num_passes} passes: no pass's loss reaches "
                "it. The model's recycling is broken, or every document of the batch has a single token."
            )
