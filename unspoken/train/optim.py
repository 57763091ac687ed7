"""AdamW and its parameter groups.

    group       weights                                    weight decay    learning rate
    decayed     matrices and embeddings                    yes             base
    plain       norms, biases, routers of latent steps     no              base
    adapter     the adapter, whole                         no              base * factor

Embeddings are decayed, as is usual where they are the head too (GPT-2's successors, nanoGPT). The adapter starts at
zero and is not pulled back there. Its factor is 1: with embeddings of RMS 1 (`model.init: scaled`) the full rate is
best (docs/lab_log.md); beside the families' usual small embeddings it outgrows them before it carries anything.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unspoken.errors import UnspokenError
from unspoken.train.recipe import OptimSection
from unspoken.train.schedule import LearningRate

GROUPS = ("decayed", "plain", "adapter")


def group_of(name: str, parameter: nn.Parameter) -> str:
    """The group a parameter belongs to, by its name in the model and its shape."""
    parts = name.split(".")
    if "adapter" in parts:
        return "adapter"
    is_plain = parameter.ndim < 2 or parts[-1].endswith("bias") or parts[:2] == ["model", "router"]
    return "plain" if is_plain else "decayed"


def parameter_groups(parameters: dict[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters, each once (tied weights too), as named AdamW groups; empty groups are left out.

    Raises:
        UnspokenError: nothing is trainable.
    """
    members: dict[str, list[tuple[str, nn.Parameter]]] = {group: [] for group in GROUPS}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            members[group_of(name, parameter)].append((name, parameter))
    groups = [
        {"group": group, "params": params, "weight_decay": weight_decay if group == "decayed" else 0.0}
        for group, params in members.items()
        if params
    ]
    if not groups:
        raise UnspokenError("the model has no trainable parameter")
    return groups


def build_optimizer(parameters: dict[str, nn.Parameter], optim: OptimSection) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`, in its fused form: on a CPU too it is faster than `foreach`."""
    groups = parameter_groups(parameters, optim.weight_decay)
    return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=optim.betas, eps=optim.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: LearningRate, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate.adapter_at(step) if group["group"] == "adapter" else learning_rate.at(step)


def trained_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of everything the optimizer moves."""
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def freeze_adapter(model: nn.Module) -> None:
    """Leave the adapter as it is, its gradient out of the norm that clipping looks at: the control with passes and
    losses but without feedback."""
    for name, parameter in model.named_parameters():
        if group_of(name, parameter) == "adapter":
            parameter.requires_grad_(False)


def optimizer_tensors(optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimizer's state by parameter name, as it is or (before its first step) as the first step would find it.
    Reading a checkpoint into them restores it; rates and decay come from the recipe."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in trained_parameters(optimizer):
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    return tensors
