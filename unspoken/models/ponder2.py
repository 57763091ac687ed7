"""PonderLM-2: after every token stand latent thoughts, each the state of the slot before it.

    slots        E(x_1) z_1     E(x_2) z_2     ...      ordinary causal attention over all of them
    position     1      1       2      2
    z_t = state of the slot before it;  the head sees the last slot's state

A thought needs all slots of earlier tokens first, so decoding is a recurrence: 1 + K runs a token. A forward over many
tokens approximates it (Jacobi): the thoughts are filled in one after the other, then computed anew from all of them
together, `num_refinements` times, and once more for the states. Gradients flow through all of it.

    no cache               refined in parallel: training, evaluation
    empty cache            a prompt: the same, and the last run alone writes keys and values
    one token, "exact"     the recurrence, token by token

Source: PonderLM-2 (arXiv 2509.23184); oracle: `latent/reference.py` `refined_thoughts` and `thoughts`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils.generic import can_return_tuple

from unspoken.config import Ponder2Config
from unspoken.latent.cache import fork
from unspoken.models.inputs import without_pads
from unspoken.models.latent_lm import LatentForCausalLM, LatentModelOutput, by_pass, joined
from unspoken.models.recurrent import RecurrentDecoding
from unspoken.models.slotted import SlottedModel, SlottedTokens, stretch


class Ponder2Model(SlottedModel):
    """The backbone over tokens and their thoughts."""

    config_class = Ponder2Config
    extra_slots = "latent thoughts"

    def __init__(self, config: Ponder2Config):
        super().__init__(config)
        self.post_init()

    @property
    def num_slots(self) -> int:
        return 1 + self.config.num_latent_thoughts

    def runs_of_pass(self, num_refinements: int | None = None, **options: Any) -> list[int]:
        if num_refinements is None:
            num_refinements = self.config.num_refinements
        return [*range(1, self.num_slots), *[self.num_slots] * (num_refinements + 1)]

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
        num_refinements: int | None = None,
        num_recurrent: int = 0,
        **kwargs,
    ) -> LatentModelOutput:
        """Refined thoughts, or with num_passes="exact" the recurrence.

        num_refinements: by default one of `train_refinements`, drawn, in training, and else the configuration's.
        num_recurrent: so many tokens at the end go through the recurrence one by one.
        """
        if num_passes not in (None, 1, "exact"):
            raise ValueError(
                f"a {self.config.model_type} model has one pass, of num_refinements; got num_passes={num_passes!r}"
            )
        tokens, cache = self._read(input_ids, inputs_embeds, attention_mask, position_ids, cache, use_cache, kwargs)
        num_tokens = len(tokens)
        if num_passes == "exact":
            if tokens.documents is not None:
                raise ValueError("the exact recurrence needs one document a row; position_ids restart within a row")
            num_recurrent = num_tokens
        num_prefilled = num_tokens - num_recurrent
        if num_prefilled == 1 and cache is not None:
            num_prefilled = 0
        if num_prefilled == num_tokens:
            return self._refined(tokens, cache, self._num_refinements(num_refinements))
        keys = self._own_cache() if cache is None else cache
        outputs = []
        if num_prefilled:
            part = tokens.part(0, num_prefilled)
            outputs.append(self._refined(part, keys, self._num_refinements(num_refinements)))
        outputs += [self._recurrence(tokens.part(t, t + 1), keys) for t in range(num_prefilled, num_tokens)]
        whole = outputs[0]
        for output in outputs[1:]:
            whole = joined(whole, output)
        return LatentModelOutput(**{**whole, "cache": cache, "pass_hidden_states": (whole.last_hidden_state,)})

    def _num_refinements(self, given: int | None) -> int:
        if given is not None:
            return given
        if not self.training:
            return self.config.num_refinements
        choices = self.config.train_refinements
        return choices[int(torch.randint(len(choices), ()))]

    def _own_cache(self) -> Cache:
        cache = DynamicCache(config=self.config)
        stretch(cache, self.num_slots, self.config.num_hidden_layers)
        return cache

    def _refined(self, tokens: SlottedTokens, cache: Cache | None, num_refinements: int) -> LatentModelOutput:
        """The thoughts one after the other, then all from all, and at last the states."""
        stages, outputs = [tokens.embeds], []
        *first_runs, _ = self.runs_of_pass(num_refinements)
        for num_slots in first_runs:
            earlier = None if cache is None or tokens.first == 0 else fork(cache)
            output, states = self._run(stages, tokens, earlier)
            outputs.append(output)
            made = [self._as_thought(state, tokens) for state in states]
            stages = [*stages, made[-1]] if num_slots < self.num_slots else [tokens.embeds, *made[:-1]]
        output, states = self._run(stages, tokens, cache)
        outputs.append(output)
        return self._collected(outputs, states[-1], cache)

    def _recurrence(self, token: SlottedTokens, cache: Cache) -> LatentModelOutput:
        """One token, slot by slot over the cache."""
        outputs, entering = [], token.embeds
        for slot in range(self.num_slots):
            output, (state,) = self._run([entering], token, cache, num_written=slot)
            outputs.append(output)
            entering = self._as_thought(state, token)
        return self._collected(outputs, state, cache)

    def _as_thought(self, state: Tensor, tokens: SlottedTokens) -> Tensor:
        return without_pads(self.as_inputs(state), tokens.real)


class Ponder2ForCausalLM(RecurrentDecoding, LatentForCausalLM):
    config_class = Ponder2Config
    base_model_class = Ponder2Model
    _can_compile_fullgraph = False

    @property
    def num_prefill_passes(self) -> int:
        return 1

    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        if generation_config.prefill_chunk_size is not None:
            raise ValueError(
                "prefill_chunk_size would change how a prompt's thoughts are approximated; num_passes='exact' reads it "
                "token by token, without approximation"
            )
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]

    def router_loss(self, outputs: LatentModelOutput, real: Tensor | None) -> Tensor:
        """The family's load-balancing loss of each run by itself, over its slots of real tokens; their mean."""
        num_layers = self.config.num_hidden_layers
        num_tokens = outputs.last_hidden_state.shape[:2].numel()
        losses = []
        for logits in by_pass(outputs.router_logits or (), len(outputs.router_logits or ()) // num_layers):
            slots = len(logits[0]) // num_tokens
            own = None if real is None else real.repeat_interleave(slots, dim=1)
            losses.append(self.balancing_loss(logits, own))
        return torch.stack(losses).mean()
