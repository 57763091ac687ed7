"""PonderLM: the embedding that a run predicts, averaged over the vocabulary, is added to the next run's input.

    p^(i) = softmax(head(h^(i))),  e^(i) = sum over v of p^(i)_v E_v,  input^(i+1) = E(x) + e^(i)

or, accumulating, input^(i) + e^(i). The loss is that of the last run. Source: PonderLM (arXiv 2505.20674); oracle:
`latent/reference.py` `pondering`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unspoken.config import PonderConfig
from unspoken.models.backbone import logit_transform
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.repeated import RepeatedHead, RepeatedModel

CHUNK = 1024  # tokens whose distributions over the vocabulary are held at once


class PonderModel(RepeatedModel):
    config_class = PonderConfig

    def __init__(self, config: PonderConfig):
        super().__init__(config)
        self.transform = logit_transform(config.text_config)

    @property
    def num_runs(self) -> int:
        return self.config.num_ponder_steps + 1

    def next_inputs(self, embeds: Tensor, inputs: Tensor, hidden: Tensor, head: Any) -> Tensor:
        pondered = self.predicted_embedding(hidden, head)
        return (inputs if self.config.accumulate else embeds) + pondered

    def predicted_embedding(self, hidden: Tensor, head: Any) -> Tensor:
        """The mean embedding under each state's prediction, on the scale of inputs: [B, T, d] -> [B, T, d]."""
        table: Any = self.get_input_embeddings().weight
        if head is None:
            if not self.config.tie_word_embeddings:
                raise ValueError("PonderLM's base model needs the output head (head=...), as it is not tied")
            head = _Tied(table)

        def mean_embedding(states: Tensor) -> Tensor:
            logits = self.transform(head(states))
            precise = torch.promote_types(logits.dtype, torch.float32)
            return logits.softmax(-1, dtype=precise).to(table.dtype) @ table

        parts = []
        for states in hidden.flatten(0, 1).split(CHUNK):
            # Recomputed in the backward pass: a run's distributions are larger than all its other activations.
            is_learning = torch.is_grad_enabled()
            parts.append(
                checkpoint(mean_embedding, states, use_reentrant=False) if is_learning else mean_embedding(states)
            )
        return torch.cat(parts).view_as(hidden).to(hidden.dtype) * self.config.embedding_scale


class _Tied:
    def __init__(self, weight: Tensor):
        self.weight = weight

    def __call__(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight)


class PonderForCausalLM(RepeatedHead, LatentForCausalLM):
    config_class = PonderConfig
    base_model_class = PonderModel

    def _decoding_options(self, logits_to_keep: int | Tensor) -> dict:
        return super()._decoding_options(logits_to_keep) | {"head": self.lm_head}
