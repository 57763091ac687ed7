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

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils.generic import can_return_tuple

from unspoken.config import Ponder2Config
from unspoken.latent.cache import fork
from unspoken.latent.recycle import document_starts
from unspoken.models.backbone import attention_windows
from unspoken.models.inputs import is_packed, real_positions, refuse_unknown, without_pads
from unspoken.models.latent_lm import LatentForCausalLM, LatentModel, LatentModelOutput, by_pass, joined
from unspoken.models.recurrent import RecurrentDecoding
from unspoken.models.slotted import slot_masks, stretch


@dataclass
class _Tokens:
    """The tokens of a forward. mask bool [B, first + T]: which of them, and of the `first` ones that the cache holds
    before, are real. documents [B, T] (None: one a row)."""

    embeds: Tensor
    mask: Tensor
    position_ids: Tensor
    documents: Tensor | None
    first: int
    options: dict

    def __len__(self) -> int:
        return self.embeds.shape[1]

    @property
    def real(self) -> Tensor:
        return self.mask[:, self.first :]

    def part(self, start: int, stop: int) -> "_Tokens":
        """Tokens start..stop behind those before them."""
        return replace(
            self,
            embeds=self.embeds[:, start:stop],
            mask=self.mask[:, : self.first + stop],
            position_ids=self.position_ids[..., start:stop],
            first=self.first + start,
        )


class Ponder2Model(LatentModel):
    """The backbone over tokens and their thoughts."""

    config_class = Ponder2Config
    config: Any
    _can_compile_fullgraph = False

    def __init__(self, config: Ponder2Config):
        super().__init__(config)
        self.post_init()

    @property
    def num_slots(self) -> int:
        """Of a token."""
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
        if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2):
            raise ValueError("a 4D attention_mask says nothing of latent thoughts; give a 2D one")
        embeds = self.embed(input_ids, inputs_embeds)
        batch, num_tokens = embeds.shape[:2]
        real = real_positions(attention_mask, num_tokens)
        packed = is_packed(position_ids, real)
        cache, _ = self.resolve_cache(cache, kwargs, use_cache, packed)
        refuse_unknown(kwargs)
        first = 0 if cache is None else stretch(cache, self.num_slots, self.config.num_hidden_layers)
        if attention_mask is None:
            attention_mask = torch.ones(batch, first + num_tokens, dtype=torch.long, device=embeds.device)
        if position_ids is None:
            position_ids = torch.arange(first, first + num_tokens, device=embeds.device).unsqueeze(0)
        documents = document_starts(position_ids, real).cumsum(-1).expand(batch, -1) if packed else None
        tokens = _Tokens(without_pads(embeds, real), attention_mask.bool(), position_ids, documents, first, kwargs)
        if num_passes == "exact":
            if packed:
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

    def _refined(self, tokens: _Tokens, cache: Cache | None, num_refinements: int) -> LatentModelOutput:
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

    def _recurrence(self, token: _Tokens, cache: Cache) -> LatentModelOutput:
        """One token, slot by slot over the cache."""
        outputs, entering = [], token.embeds
        for slot in range(self.num_slots):
            output, (state,) = self._run([entering], token, cache, num_written=slot)
            outputs.append(output)
            entering = self._as_thought(state, token)
        return self._collected(outputs, state, cache)

    def _as_thought(self, state: Tensor, tokens: _Tokens) -> Tensor:
        return without_pads(self.as_inputs(state), tokens.real)

    def _run(self, stages: list[Tensor], tokens: _Tokens, cache: Cache | None, num_written: int = 0):
        """One run over the given slots of each token, [B, T, d] each; `num_written` slots of it are in the cache."""
        num_slots, num_queries = len(stages), len(stages) * len(tokens)
        mask, times = tokens.mask, torch.arange(tokens.mask.shape[1], device=tokens.mask.device)
        counts = torch.full_like(times, num_slots + num_written)
        counts[: tokens.first] = self.num_slots if cache is not None else 0
        real = mask.repeat_interleave(counts, dim=1)
        documents = None
        if tokens.documents is not None:
            documents = tokens.documents.repeat_interleave(num_slots, dim=1)
        if cache is None and documents is None and not any(attention_windows(self.config.text_config)):
            # What the body makes of it is causal. Without a mask it would take repeated positions for documents.
            masks: Tensor | dict = real.long()
        else:
            masks = slot_masks(
                self.config.text_config,
                times.repeat_interleave(counts),
                real,
                num_queries,
                documents,
                tokens.embeds.dtype,
            )
        output = self.backbone(
            inputs_embeds=torch.stack(stages, dim=2).flatten(1, 2),
            attention_mask=masks,
            position_ids=tokens.position_ids.repeat_interleave(num_slots, dim=-1),
            cache=cache,
            use_cache=cache is not None,
            **tokens.options,
        )
        states = output.last_hidden_state.unflatten(1, (len(tokens), num_slots))
        return output, states.unbind(2)

    def _collected(self, outputs: list, hidden: Tensor, cache: Cache | None) -> LatentModelOutput:
        router_logits = [logits for output in outputs for logits in output.get("router_logits") or ()]
        return LatentModelOutput(
            last_hidden_state=hidden,
            cache=cache,
            hidden_states=outputs[-1].get("hidden_states"),
            attentions=outputs[-1].get("attentions"),
            router_logits=tuple(router_logits) or None,
            pass_hidden_states=(hidden,),
        )


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
