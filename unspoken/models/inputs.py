"""What the inputs of a forward say: which tokens are real, which rows hold several documents, what is misspelled."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import create_masks_for_generate
from transformers.utils.generic import TransformersKwargs

from unspoken.errors import nearest
from unspoken.latent.recycle import document_starts

_PASSED_ON = set(TransformersKwargs.__annotations__)
_ARGUMENTS = [
    "input_ids",
    "attention_mask",
    "position_ids",
    "cache",
    "inputs_embeds",
    "labels",
    "use_cache",
    "num_passes",
    "prompt_mask",
    "logits_to_keep",
    "skip_logits",
]


def refuse_unknown(kwargs: dict) -> None:
    """transformers' bodies swallow what they do not know; a misspelled argument of ours must not vanish in there."""
    for key in kwargs:
        if key not in _PASSED_ON:
            valid = _ARGUMENTS + sorted(_PASSED_ON)
            raise TypeError(f"forward() got an unexpected argument {key!r}{nearest(key, valid)}")


def real_positions(attention_mask: Tensor | dict | None, num_tokens: int) -> Tensor | None:
    """bool [B, T] of the forward's own tokens, False at pads; None when nothing tells (no mask, or a 4D one)."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        return None
    return attention_mask[:, -num_tokens:].bool()


def without_pads(embeds: Tensor, real: Tensor | None) -> Tensor:
    """Zero the embeddings at pads. An attention weight of zero still multiplies what lies there, and 0 * NaN is NaN."""
    return embeds if real is None else embeds.masked_fill(~real.unsqueeze(-1), 0)


def is_packed(position_ids: Tensor | None, real: Tensor | None) -> bool | None:
    """Whether a row holds several documents; None while compiling, when nobody can look."""
    if position_ids is None or position_ids.shape[-1] < 2:
        return False
    if torch.compiler.is_compiling():
        return None
    return bool(document_starts(position_ids, real).any())


def may_recycle(attention_mask: Tensor | dict | None, receives: Tensor | None) -> Tensor | None:
    """Narrow `receives` by a caller's own 4D mask: a state passes only to a position that may attend to it."""
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get("full_attention", next(iter(attention_mask.values())))
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 4 or attention_mask.shape[2] < 2:
        return receives
    offset = attention_mask.shape[3] - attention_mask.shape[2]
    before = torch.diagonal(attention_mask[:, 0], offset=offset - 1, dim1=-2, dim2=-1)
    before = before[:, -(attention_mask.shape[2] - 1) :]
    visible = before if before.dtype == torch.bool else before == 0
    visible = torch.cat([torch.ones_like(visible[:, :1]), visible], dim=1)
    return visible if receives is None else receives & visible


def document_mask(
    config: PreTrainedConfig, embeds: Tensor, attention_mask: Tensor | dict | None, position_ids: Tensor | None
) -> Tensor | dict | None:
    """Isolate packed documents where transformers would let them see each other.

    Without a mask most bodies isolate documents by their position ids (GPT-OSS does not); with one, of ones even, none
    does. Returns the 4D mask of the backbone's family (one for each layer type where it has several).

    Raises:
        ValueError: the attention backend takes no such mask (flash attention) and would mix the documents.
    """
    if isinstance(attention_mask, Tensor):
        is_callers_own = attention_mask.ndim != 2  # a 4D mask says who sees whom
    else:
        is_callers_own = attention_mask is not None
    if position_ids is None or is_callers_own:
        return attention_mask
    position_ids = position_ids.expand(embeds.shape[0], -1)
    real = None if attention_mask is None else attention_mask[:, -embeds.shape[1] :].bool()
    document = document_starts(position_ids, real).cumsum(-1)

    def same_document(batch, head, query, key):
        return document[batch, query] == document[batch, key]

    # Without position_ids: transformers would count the indices that it gives to `same_document` from each document.
    masks = create_masks_for_generate(config, embeds, attention_mask, cache=None, and_mask_function=same_document)
    for mask in masks.values() if isinstance(masks, dict) else [masks]:
        if isinstance(mask, Tensor) and mask.ndim == 2:
            raise ValueError(
                f"attention {config.get_text_config()._attn_implementation!r} cannot keep packed documents apart under "
                'an attention_mask with pads; pass attention_mask=None, or use attn_implementation="sdpa"'
            )
    return masks
