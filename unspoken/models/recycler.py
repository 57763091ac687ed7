"""Recycler: h_t = T(Emb(x_t) + A(h_{t-1})), trained with k parallel passes, decoded with one run per token.

How the passes over a forward's tokens go (`seam` is the state before its first token, kept by the cache):

    no cache            k passes over all tokens: pass i adds A of pass i-1's state, one position earlier
    empty cache         a prefill: the same, and the last pass alone writes keys and values
    one token           the recurrence itself: one run, the seam recycled
    more tokens         a prefill that goes on: the seam is known and enters every pass
    "exact"             the recurrence token by token, whatever the number of tokens

Source: Recycler sections 2.1 and 2.2; oracle: `latent/reference.py`.
"""

from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils.generic import can_return_tuple

from unspoken.config import RecyclerConfig
from unspoken.latent.cache import RecycledStateLayer, attach_state, fork, recycled_state
from unspoken.latent.recycle import GatedAdapter, RecycleAdapter, carry, receiving_positions, shift
from unspoken.models.backbone import input_multiplier
from unspoken.models.inputs import document_mask, is_packed, may_recycle, real_positions, refuse_unknown, without_pads
from unspoken.models.latent_lm import LatentForCausalLM, LatentModel, LatentModelOutput, joined
from unspoken.models.recurrent import RecurrentDecoding
from unspoken.models.segments import Segment, cut


@dataclass
class _Tokens:
    """The tokens of one forward: what the backbone sees of them, and which of them receive a state."""

    embeds: Tensor
    attention_mask: Tensor | dict | None
    position_ids: Tensor | None
    real: Tensor | None
    receives: Tensor | None
    options: dict

    def __len__(self) -> int:
        return self.embeds.shape[1]

    def part(self, start: int, stop: int) -> "_Tokens":
        """Tokens start..stop, with the attention mask of all tokens up to stop."""
        if (start, stop) == (0, len(self)):
            return self
        mask = self.attention_mask
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.ndim != 2:
                raise ValueError("running part of a sequence at a time needs a 2D attention_mask [batch, tokens]")
            mask = mask[:, : mask.shape[1] - len(self) + stop]
        columns = slice(start, stop)
        return _Tokens(
            self.embeds[:, columns],
            mask,
            None if self.position_ids is None else self.position_ids[..., columns],
            None if self.real is None else self.real[:, columns],
            None if self.receives is None else self.receives[:, columns],
            self.options,
        )


class RecyclerModel(LatentModel):
    """The backbone, the adapter and the passes. Returns the last pass's states; the head comes later."""

    config_class = RecyclerConfig

    def __init__(self, config: RecyclerConfig):
        super().__init__(config)
        is_added = config.feedback == "added"
        self.adapter = (
            RecycleAdapter(config.hidden_size, config.adapter_norm) if is_added else GatedAdapter(config.hidden_size)
        )
        # A body that multiplies its inputs would multiply A(h) too, which belongs beside the multiplied embedding.
        self.adapter_scale = 1.0 / input_multiplier(config.text_config)
        self.post_init()

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
        num_recurrent: int = 0,
        in_chunks: bool = False,
        segmented: bool = False,
        **kwargs,
    ) -> LatentModelOutput:
        """Run the passes.

        num_passes: k, or "exact" for the sequential recurrence. Default: `num_prefill_passes` if a cache was asked
            for, else `num_train_passes`.
        prompt_mask: bool or int [B, T]; no state is recycled into these positions (a model trained for one-pass
            prefill).
        num_recurrent: so many tokens at the end go through the recurrence one by one, as decoding would: candidates
            to be verified, or what `generate` without a cache made so far.
        in_chunks: these tokens are a chunk of a prompt; together the chunks equal one prefill of the whole prompt, at
            the price of a second cache until decoding starts.
        segmented: cut the graph between the parallel passes; see `models/segments.py`.
        """
        embeds = self.embed(input_ids, inputs_embeds)
        real = real_positions(attention_mask, embeds.shape[1])
        embeds = without_pads(embeds, real)
        packed = is_packed(position_ids, real)
        cache, asked = self.resolve_cache(cache, kwargs, use_cache, packed)
        options = self._run_options(kwargs)
        if prompt_mask is not None and prompt_mask.shape != embeds.shape[:2]:
            raise ValueError(
                f"prompt_mask must be [batch, tokens] = {tuple(embeds.shape[:2])}, got {tuple(prompt_mask.shape)}"
            )
        receives = may_recycle(attention_mask, receiving_positions(real, position_ids, prompt_mask))
        if packed or (packed is None and cache is None):
            attention_mask = self._document_mask(embeds, attention_mask, position_ids)
        tokens = _Tokens(embeds, attention_mask, position_ids, real, receives, options)
        if num_passes is None:
            num_passes = self.config.num_prefill_passes if asked else self.config.num_train_passes
        if num_passes == "exact":
            if packed:
                raise ValueError("the exact recurrence needs one document a row; position_ids restart within a row")
            return self._recurrence(tokens, cache)
        if not isinstance(num_passes, Integral) or isinstance(num_passes, bool) or num_passes < 1:
            raise ValueError(f"num_passes must be a whole number of at least 1, or 'exact'; got {num_passes!r}")
        num_passes = int(num_passes)
        if cache is None:
            if num_recurrent == 0:
                return self._parallel(tokens, num_passes, segmented)
            outputs = self._decode(tokens, DynamicCache(config=self.config), None, num_passes, num_recurrent)
            return _with_cache(outputs, None)
        state = recycled_state(cache)
        if in_chunks:
            return self._chunk(tokens, cache, state, num_passes)
        if state is not None:
            state.end_chunks()
        return self._decode(tokens, cache, state, num_passes, num_recurrent)

    def _parallel(self, tokens: _Tokens, num_passes: int, segmented: bool = False) -> LatentModelOutput:
        """k passes without a cache: training, evaluation, scoring."""
        outputs: list[LatentModelOutput] = []
        segments: list[Segment] = []
        if segmented:
            segments.append((cut(tokens.embeds),))  # read by every pass
            tokens = replace(tokens, embeds=segments[0][0][1])
        recycled = None
        if num_passes == 1 and torch.is_grad_enabled():
            recycled = torch.zeros_like(tokens.embeds[:1, :1])  # A(0) = 0 keeps the adapter in every step's graph
        for i in range(num_passes):
            outputs.append(self._run(tokens, recycled))
            if segmented:
                segments.append(_cut(outputs[-1]))
            if i + 1 < num_passes:
                recycled = self._recycled(outputs[-1], tokens)
        collected = _collected(outputs)
        collected.segments = tuple(segments) or None
        return collected

    def _decode(
        self, tokens: _Tokens, cache: Cache, state: RecycledStateLayer | None, num_passes: int, num_recurrent: int
    ) -> LatentModelOutput:
        """A prefill, then the recurrence over the last `num_recurrent` tokens."""
        num_prefilled = len(tokens) - num_recurrent
        outputs = self._prefill(tokens.part(0, num_prefilled), cache, state, num_passes)
        if num_recurrent:
            rest = self._recurrence(tokens.part(num_prefilled, len(tokens)), cache, in_same_forward=True)
            outputs = joined(outputs, rest)
        return outputs

    def _prefill(
        self,
        tokens: _Tokens,
        cache: Cache,
        state: RecycledStateLayer | None,
        num_passes: int,
        in_same_forward: bool = False,
    ) -> LatentModelOutput:
        """k passes over tokens that follow the cache's; only the last pass writes keys and values."""
        seam = state.read() if state is not None else None
        if len(tokens) == 1:
            num_passes = 1  # the seam is exact, and so is the first pass
        outputs: list[LatentModelOutput] = []
        recycled = None if seam is None else _seam_only(seam, tokens)
        for i in range(num_passes):
            if i > 0:
                recycled = self._recycled(outputs[-1], tokens, seam)
            is_last = i + 1 == num_passes
            pass_cache = cache if is_last else None if seam is None else fork(cache)
            outputs.append(self._run(tokens, recycled, pass_cache))
        self._remember(outputs[-1], tokens, cache, state, in_same_forward)
        return _collected(outputs, cache)

    def _chunk(
        self, tokens: _Tokens, cache: Cache, state: RecycledStateLayer | None, num_passes: int
    ) -> LatentModelOutput:
        """One chunk of a prompt, all passes of it, each over its own keys and values of the chunks before."""
        if state is None or not state.chunk_states:
            seam = state.read() if state is not None else None
            caches = [fork(cache) for _ in range(num_passes - 1)]
            states = [seam] * num_passes
        else:
            caches, states = state.chunk_caches, state.chunk_states
        if len(states) != num_passes:
            raise ValueError(f"chunked prefill began with {len(states)} passes and goes on with {num_passes}")
        outputs: list[LatentModelOutput] = []
        recycled = None if states[0] is None else _seam_only(states[0], tokens)
        for i, pass_cache in enumerate([*caches, cache]):
            if i > 0:
                recycled = self._recycled(outputs[-1], tokens, states[i])
            outputs.append(self._run(tokens, recycled, pass_cache))
        state = self._remember(outputs[-1], tokens, cache, state)
        # The plain pass recycles nothing, across chunks neither; pass i reads pass i-1's last state of this chunk.
        last_states = [
            carry(output.last_hidden_state, tokens.real, before)[:, -1:]
            for output, before in zip(outputs[:-1], states[1:], strict=True)
        ]
        state.chunk_states = [None, *last_states]
        state.chunk_caches = caches
        return _collected(outputs, cache)

    def _recurrence(self, tokens: _Tokens, cache: Cache | None, in_same_forward: bool = False) -> LatentModelOutput:
        """Eq. 3, token by token over the cache (one of its own if there is none): what decoding computes."""
        keys = DynamicCache(config=self.config) if cache is None else cache
        outputs = []
        for t in range(len(tokens)):
            token, state = tokens.part(t, t + 1), recycled_state(keys)
            outputs.append(self._prefill(token, keys, state, num_passes=1, in_same_forward=in_same_forward or t > 0))
        whole = outputs[0]
        for output in outputs[1:]:
            whole = joined(whole, output)
        return _with_cache(whole, cache)

    def _run_options(self, kwargs: dict) -> dict:
        """What every run of the backbone is given beside its inputs.

        Raises:
            TypeError: a misspelled argument of the forward.
        """
        refuse_unknown(kwargs)
        return kwargs

    def _document_mask(self, embeds: Tensor, attention_mask, position_ids: Tensor | None):
        """The attention mask that keeps packed documents apart."""
        return document_mask(self.config, embeds, attention_mask, position_ids)

    def _recycled(self, output: LatentModelOutput, tokens: _Tokens, previous: Tensor | None = None) -> Tensor:
        """One pass's states where the next pass reads them, [B, T, d]."""
        hidden = output.last_hidden_state
        if self.config.detach_between_passes:
            hidden = hidden.detach()
        return shift(carry(hidden, tokens.real, previous), tokens.receives, previous)

    def _run(self, tokens: _Tokens, recycled: Tensor | None, cache: Cache | None = None):
        """One run of the backbone, with A(recycled) added to its input."""
        inputs = tokens.embeds
        if recycled is not None:
            inputs = self.adapter.enter(inputs, recycled, self.adapter_scale)
        return self._run_inputs(inputs, tokens, cache)

    def _run_inputs(self, inputs: Tensor, tokens: _Tokens, cache: Cache | None):
        """One run of the backbone over these inputs of the tokens."""
        if cache is not None and self.training and torch.is_grad_enabled() and self.is_gradient_checkpointing:
            raise ValueError(
                "gradient checkpointing drops the cache that this forward needs (num_passes='exact', use_cache=True or "
                "a cache); call gradient_checkpointing_disable(), or eval()"
            )
        return self.backbone(
            inputs_embeds=inputs,
            attention_mask=tokens.attention_mask,
            position_ids=tokens.position_ids,
            cache=cache,
            use_cache=cache is not None,
            **tokens.options,
        )

    def _remember(
        self,
        output: LatentModelOutput,
        tokens: _Tokens,
        cache: Cache,
        state: RecycledStateLayer | None,
        in_same_forward: bool = False,
    ) -> RecycledStateLayer:
        state = attach_state(cache) if state is None else state
        state.write(carry(output.last_hidden_state, tokens.real, state.read()), in_same_forward)
        return state


class RecyclerForCausalLM(RecurrentDecoding, LatentForCausalLM):
    """Recycler with its head. See `LatentForCausalLM.forward` for the losses, `RecyclerModel` for the passes."""

    config_class = RecyclerConfig
    base_model_class: type[LatentModel] = RecyclerModel

    @property
    def num_prefill_passes(self) -> int:
        return self.config.num_prefill_passes

    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        """A prompt prefilled in chunks keeps every pass's keys and values until decoding, so chunks change nothing."""
        if generation_config.prefill_chunk_size is not None:
            model_kwargs = {**model_kwargs, "in_chunks": True}
            cache = model_kwargs.get("cache")
            if cache is not None and (state := recycled_state(cache)) is not None:
                state.end_chunks()  # of an earlier prompt
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, is_first_iteration=False, **kwargs):
        if kwargs.get("prompt_mask") is not None:
            raise ValueError("generate() takes no prompt_mask; num_passes=1 prefills the prompt without recycling")
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds, is_first_iteration, **kwargs)
        if kwargs.get("in_chunks") and kwargs.get("attention_mask") is not None:
            inputs["attention_mask"] = kwargs["attention_mask"]  # 2D in a chunk of one token too: it shows the pads
        return inputs


def _seam_only(seam: Tensor, tokens: _Tokens) -> Tensor:
    """The carried state at the first of the real tokens, nothing at the others: [B, T, d]."""
    nothing = torch.zeros_like(tokens.embeds)
    return shift(carry(nothing, tokens.real, seam), tokens.receives, seam)


def _cut(output) -> Segment:
    """Cut the graph behind a pass: its states, and its router logits, which have a loss of their own."""
    pairs = [cut(output.last_hidden_state)]
    output.last_hidden_state = pairs[0][1]
    if (logits := output.get("router_logits")) is not None:
        pairs += [cut(layer) for layer in logits]
        output.router_logits = tuple(start for _, start in pairs[1:])
    return tuple(pairs)


def _collected(outputs: list, cache: Cache | None = None) -> LatentModelOutput:
    """The last of several passes, with every pass's states and router logits."""
    last = outputs[-1]
    router_logits = [logits for output in outputs for logits in output.get("router_logits") or ()]
    return LatentModelOutput(
        last_hidden_state=last.last_hidden_state,
        cache=cache,
        hidden_states=last.get("hidden_states"),
        attentions=last.get("attentions"),
        router_logits=tuple(router_logits) or None,
        pass_hidden_states=tuple(output.last_hidden_state for output in outputs),
        pass_latents=tuple(latents for output in outputs for latents in output.get("pass_latents") or ()) or None,
    )


def _with_cache(outputs: LatentModelOutput, cache: Cache | None) -> LatentModelOutput:
    return LatentModelOutput(**{**outputs, "cache": cache})
