"""How large the recycled input is beside the token's own: a rise far above 1 means that it swamps the token."""

import torch
from torch import Tensor

from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.recycler import RecyclerModel
from unspoken.train.metrics import Row


@torch.no_grad()
def state_norms(model: LatentForCausalLM, batch: dict[str, Tensor], num_passes: int) -> Row:
    """Root mean squares over the batch's first sequence: scaled embeddings, each pass's top states, and the adapter's
    output on the last state that is recycled, as a ratio to the embeddings'."""
    base = model.model
    inputs = {name: batch[name][:1].to(model.device) for name in ("input_ids", "position_ids")}
    states = base(**inputs, num_passes=num_passes, use_cache=False).pass_hidden_states
    embedding_rms = _rms(base.embed(inputs["input_ids"], None))
    row: Row = {"embedding_rms": embedding_rms}
    if isinstance(base, RecyclerModel):
        recycled = states[max(0, num_passes - 2)]
        row["adapter_to_embedding"] = _rms(base.adapter(recycled)) * base.adapter_scale / max(embedding_rms, 1e-12)
    return row | {f"state_rms_pass_{i}": _rms(state) for i, state in enumerate(states, start=1)}


def _rms(values: Tensor) -> float:
    return float(values.float().pow(2).mean().sqrt())
