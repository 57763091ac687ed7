"""AdamW and its parameter groups.

    group       weights                                    weight decay    learning rate
    decayed     matrices and embeddings                    yes             base
    plain       norms, biases, anything one-dimensional    no              base
    adapter     the adapter, whole                         no              base * factor

Embeddings are decayed, as is usual where they are the head too (GPT-2's successors, nanoGPT). Why the adapter differs:
it starts at zero and is added to the embedding; at the full rate it outgrows the embedding before it carries anything.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from unspoken.errors import UnspokenError
from unspoken.train.recipe import OptimSection
from unspoken.train.schedule import LearningRate

GROUPS = ("decayed", "plain", "adapter")


def group_of(name: str, parameter: nn.Parameter) -> str:
    """The group a parameter belongs to, by its name in the model and its shape."""
    parts = name.split(".")
    if "adapter" in parts:
        return "adapter"
    return "plain" if parameter.ndim < 2 or parts[-1].endswith("bias") else "decayed"


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters, each once (tied weights too), as named AdamW groups; empty groups are left out.

    Raises:
        UnspokenError: nothing is trainable.
    """
    members: dict[str, list[tuple[str, nn.Parameter]]] = {group: [] for group in GROUPS}
    for name, parameter in model.named_parameters():
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


def build_optimizer(model: nn.Module, optim: OptimSection) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`, in its fused form: on a CPU too it is faster than `foreach`."""
    groups = parameter_groups(model, optim.weight_decay)
    return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=optim.betas, eps=optim.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: LearningRate, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate.adapter_at(step) if group["group"] == "adapter" else learning_rate.at(step)


def trained_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of everything the optimizer moves."""
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def check_gradients(optimizer: torch.optim.Optimizer, num_passes: int) -> None:
    """After the first backward: every parameter got a gradient, and one that moves the adapter if it was used.

    Raises:
        UnspokenError: naming the parameters that would stay as they are.
    """
    parameters = dict(trained_parameters(optimizer))
    missing = [name for name, parameter in parameters.items() if parameter.grad is None]
    if missing:
        raise UnspokenError(
            f"{len(missing)} trainable parameters got no gradient in the first step, {missing[0]} among them: "
            "they are not part of the loss. Freeze them (requires_grad=False) or put them into the graph."
        )
    adapter = [p for name, p in parameters.items() if group_of(name, p) == "adapter"]
    if adapter and num_passes > 1 and not any(bool(p.grad.any()) for p in adapter if p.grad is not None):
        raise UnspokenError(
            f"the adapter's gradient is zero after the first step of {num_passes} passes: no pass's loss reaches it. "
            "The model's recycling is broken, or every document of the batch has a single token."
        )
