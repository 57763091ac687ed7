"""The same weights as a plain transformers model, as our plain model and as a Recycler: the arms of a comparison."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from unspoken.models.convert import convert, export_backbone
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.load import load_source


@dataclass(frozen=True)
class Arms:
    """Three models over one body and one head: what one trains or times, it trains or times with the same memory."""

    plain: PreTrainedModel
    vanilla: LatentForCausalLM
    recycler: LatentForCausalLM

    def __iter__(self):
        return iter((self.plain, self.vanilla, self.recycler))


def smollm2(dtype: torch.dtype) -> PreTrainedModel:
    return load_source("smollm2", str(dtype).removeprefix("torch."))[0]


def shared_arms(source: PreTrainedModel) -> Arms:
    """Convert a loaded model. The adapter is zero, so all arms compute the same logits, at the cost of a real one."""
    recycler = convert(source, "recycler")
    plain = export_backbone(recycler)
    return Arms(plain, convert(plain, "vanilla"), recycler)


def random_ids(vocab_size: int, batch: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocab_size, (batch, tokens), generator=generator)


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
