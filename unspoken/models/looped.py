"""Looped language model: the whole stack of layers, several times over.

    h^(0) = embeddings,  h^(i) = stack(h^(i-1)),  state = norm(h^(N))

As the authors of the second paper run it; the norm between loops (Ouro) and the embeddings added to each loop's input
(input injection) are options. Source: METHODS of *Adaptive latent CoT* section 4; oracle: `latent/reference.py`
`looped`.
"""

from typing import Any

from torch import Tensor

from unspoken.config import LoopedConfig
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.repeated import RepeatedHead, RepeatedModel


class LoopedModel(RepeatedModel):
    config_class = LoopedConfig

    @property
    def num_runs(self) -> int:
        return self.config.num_loops

    @property
    def norms_between(self) -> bool:  # type: ignore[override]
        return self.config.norm_between_loops

    def next_inputs(self, embeds: Tensor, inputs: Tensor, hidden: Tensor, head: Any) -> Tensor:
        states = self.as_inputs(hidden)
        return states + embeds if self.config.inject_input else states


class LoopedForCausalLM(RepeatedHead, LatentForCausalLM):
    config_class = LoopedConfig
    base_model_class = LoopedModel
