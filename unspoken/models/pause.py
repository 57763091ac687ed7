"""Pause tokens: after every token come `num_pauses` slots with one learned input, and the last slot's state speaks.

    token        x_1               x_2               ...
    slots        E(x_1) P P P      E(x_2) P P P      ...      ordinary causal attention over all of them
    position     1      1 1 1      2      2 2 2                a token's slots share its position
    state                   ^                 ^                what the head sees, and the loss

As the authors of the second paper run it, in training and in decoding alike. A slot never waits for a later one, so a
forward over many tokens computes what decoding computes. A cache holds 1 + num_pauses entries a token. Oracle:
`latent/reference.py` `paused`.
"""

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils.generic import can_return_tuple

from unspoken.config import PauseConfig
from unspoken.models.inputs import without_pads
from unspoken.models.latent_lm import LatentForCausalLM, LatentModelOutput
from unspoken.models.slotted import SlottedModel


class PauseModel(SlottedModel):
    """The backbone over tokens and their pauses."""

    config_class = PauseConfig
    extra_slots = "pauses"

    def __init__(self, config: PauseConfig):
        super().__init__(config)
        self.pause = nn.Embedding(1, config.hidden_size)
        self.post_init()

    @property
    def num_slots(self) -> int:
        return 1 + self.config.num_pauses

    def runs_of_pass(self, **options: Any) -> list[int]:
        return [self.num_slots]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        num_passes: int | str | None = None,
        prompt_mask: Tensor | None = None,
        **kwargs,
    ) -> LatentModelOutput:
        """One run over all slots. `num_passes` must be 1 or "exact", which is the same here."""
        if num_passes not in (None, 1, "exact"):
            raise ValueError(f"a {self.config.model_type} model has one pass; got num_passes={num_passes!r}")
        tokens, cache = self._read(input_ids, inputs_embeds, attention_mask, position_ids, cache, use_cache, kwargs)
        pause = (self.pause.weight * self.config.embedding_scale).to(tokens.embeds.dtype)
        pauses = [without_pads(pause.expand_as(tokens.embeds), tokens.real)] * self.config.num_pauses
        # Without pauses their input stays in the graph, as every parameter does.
        first = tokens.embeds if pauses else tokens.embeds + pause * 0.0
        output, states = self._run([first, *pauses], tokens, cache)
        return self._collected([output], states[-1], cache)


class PauseForCausalLM(LatentForCausalLM):
    config_class = PauseConfig
    base_model_class = PauseModel
    _can_compile_fullgraph = False

    def router_loss(self, outputs: LatentModelOutput, real: Tensor | None) -> Tensor:
        """Over all slots of the real tokens."""
        each = None if real is None else real.repeat_interleave(self.model.num_slots, dim=1)
        return super().router_loss(outputs, each)
