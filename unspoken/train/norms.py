"""What happens inside a step, for the log: how large the recycled input is beside the token's own (a rise far above 1
means that it swamps the token), and how evenly experts are used."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unspoken.models.backbone import family_of
from unspoken.models.latent_lm import LatentForCausalLM, by_pass
from unspoken.models.recursions import Recursions
from unspoken.models.recycler import RecyclerModel
from unspoken.train.metrics import Row


@torch.no_grad()
def state_norms(model: LatentForCausalLM, batch: dict[str, Tensor], num_passes: int) -> Row:
    """Root mean squares over the batch's first sequence: scaled embeddings, each pass's top states, and the adapter's
    output on the last state that is recycled, as a ratio to the embeddings'. With experts, the load of the least and
    of the most used one in each pass.

    Everything is read from one forward of the whole model, so a sharded one works too; all processes call it.
    """
    base = model.model
    inputs = {name: batch[name][:1].to(model.device) for name in ("input_ids", "position_ids")}
    adapter = base.adapter if isinstance(base, RecyclerModel) else nn.Module()
    with _outputs_of(base.get_input_embeddings()) as embeddings, _outputs_of(adapter) as added:
        output = model(**inputs, num_passes=num_passes, use_cache=False, skip_logits=True)
    embedding_rms = _rms(embeddings[0]) * model.config.embedding_scale
    row: Row = {"embedding_rms": embedding_rms}
    if added and isinstance(base, RecyclerModel) and base.config.feedback == "added":  # a product is no sum's part
        row["adapter_to_embedding"] = _rms(added[-1]) * base.adapter_scale / max(embedding_rms, 1e-12)
    row |= {f"state_rms_pass_{i}": _rms(state) for i, state in enumerate(output.pass_hidden_states, start=1)}
    router_logits = output.router_logits
    if isinstance(output.latents, Recursions) and router_logits is not None:
        router_logits = output.latents.first_run(router_logits)
    return row | _expert_loads(model, router_logits, num_passes)


def _expert_loads(model: LatentForCausalLM, router_logits: tuple[Tensor, ...] | None, num_passes: int) -> Row:
    """The share of tokens of the least and the most used expert of any layer, 1 where all are used alike."""
    if router_logits is None:
        return {}
    text_config = model.config.text_config
    num_experts = getattr(text_config, str(family_of(text_config).experts))
    row: Row = {}
    num_layers = text_config.num_hidden_layers
    for i, layers in enumerate(by_pass(router_logits[: num_passes * num_layers], num_passes), start=1):
        chosen = [logits.topk(text_config.num_experts_per_tok, dim=-1).indices.flatten() for logits in layers]
        counts = torch.stack([layer.bincount(minlength=num_experts) for layer in chosen]).float()
        loads = counts / counts.mean(dim=-1, keepdim=True)
        row |= {f"expert_load_min_pass_{i}": float(loads.min()), f"expert_load_max_pass_{i}": float(loads.max())}
    return row


@contextmanager
def _outputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """What the module returns while the block runs."""
    outputs: list[Tensor] = []
    hook = module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        hook.remove()


def _rms(values: Tensor) -> float:
    return float(values.float().pow(2).mean().sqrt())
