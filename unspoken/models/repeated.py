"""Models whose every token runs the backbone a fixed number of times, all tokens at once, run after run.

    run 1    the embeddings
    run i    what the method makes of run i-1's states (`next_inputs`); its keys and values are its own

A run is an ordinary causal forward, so a forward over many tokens computes what decoding computes. A cache holds the
layers of all runs, one run's after the other's: a token costs as many entries as runs.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.utils.generic import can_return_tuple

from unspoken.config import LatentConfig
from unspoken.latent.cache import give_layers
from unspoken.models.backbone import final_norm
from unspoken.models.inputs import document_mask, without_pads
from unspoken.models.latent_lm import LatentModel, LatentModelOutput, by_pass


class RepeatedModel(LatentModel):
    """The runs. A subclass says how many there are and what enters them."""

    config: Any
    _can_compile_fullgraph = False
    norms_between = True  # whether the states that leave a run, but for the last one, went through the final norm

    def __init__(self, config: LatentConfig):
        super().__init__(config)
        self.post_init()

    @property
    def num_runs(self) -> int:
        raise NotImplementedError

    def runs_of_pass(self, **options: Any) -> list[int]:
        return [1] * self.num_runs

    def next_inputs(self, embeds: Tensor, inputs: Tensor, hidden: Tensor, head: Any) -> Tensor:
        """Inputs of the next run [B, T, d], on the embeddings' scale, from those of this one and its states."""
        raise NotImplementedError

    def chosen(self, states: list[Tensor]) -> tuple[Tensor, Any]:
        """The state [B, T, d] that the head sees, of those of all runs, and what the loss is to know of them."""
        return states[-1], None

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
        head: Any = None,
        **kwargs,
    ) -> LatentModelOutput:
        """All runs. `num_passes` must be 1 or "exact", which is the same here; `prompt_mask` has no state to stop.

        head: the output head, which the head model gives to methods that need it; a tied one's weight by default.
        """
        if num_passes not in (None, 1, "exact"):
            raise ValueError(f"a {self.config.model_type} model has one pass; got num_passes={num_passes!r}")
        embeds, real, packed, cache = self.read(
            input_ids, inputs_embeds, attention_mask, position_ids, cache, use_cache, kwargs
        )
        if packed or (packed is None and cache is None):
            attention_mask = document_mask(self.config, embeds, attention_mask, position_ids)
        caches = [None] * self.num_runs if cache is None else caches_of_runs(cache, self.num_runs, self.config)
        inputs, states, router_logits = embeds, [], ()
        for run, own in enumerate(caches, start=1):
            is_last = run == self.num_runs
            outputs = self._run(inputs, attention_mask, position_ids, own, is_last or self.norms_between, kwargs)
            router_logits += tuple(outputs.get("router_logits") or ())
            states.append(outputs.last_hidden_state)
            if not is_last:
                inputs = without_pads(self.next_inputs(embeds, inputs, states[-1], head), real)
        hidden, exits = self.chosen(states)
        return LatentModelOutput(
            last_hidden_state=hidden,
            cache=cache,
            hidden_states=outputs.get("hidden_states"),
            attentions=outputs.get("attentions"),
            router_logits=router_logits or None,
            pass_hidden_states=(hidden,),
            exits=exits,
        )

    def _run(self, inputs: Tensor, mask, position_ids: Tensor | None, cache: Cache | None, is_normed: bool, options):
        hook = None if is_normed else final_norm(self.backbone).register_forward_hook(_what_entered)
        try:
            return self.backbone(
                inputs_embeds=inputs,
                attention_mask=mask,
                position_ids=position_ids,
                cache=cache,
                use_cache=cache is not None,
                **options,
            )
        finally:
            if hook is not None:
                hook.remove()


class RepeatedHead:
    """What a head model over a `RepeatedModel` adds: mixed in before `LatentForCausalLM`."""

    config: Any
    model: Any
    balancing_loss: Any
    _can_compile_fullgraph = False

    def router_loss(self, outputs: LatentModelOutput, real: Tensor | None) -> Tensor:
        """The family's load-balancing loss of each run by itself; their mean."""
        runs = by_pass(outputs.router_logits or (), self.model.num_runs)
        return torch.stack([self.balancing_loss(logits, real) for logits in runs]).mean()


def caches_of_runs(cache: Cache, num_runs: int, config: LatentConfig) -> list[Cache]:
    """A view of the cache for each run. An empty dynamic cache gets the layers of all runs, in place.

    Raises:
        CacheError: the cache was filled by another model, or has room for one run alone.
    """
    num_layers = config.num_hidden_layers
    if len(cache.layers) != num_runs * num_layers or not all(isinstance(layer, DynamicLayer) for layer in cache.layers):
        layers = [layer for _ in range(num_runs) for layer in DynamicCache(config=config).layers]
        give_layers(cache, layers, "one entry a token and layer", f"{num_runs} runs")
    return [Cache(layers=cache.layers[i * num_layers : (i + 1) * num_layers]) for i in range(num_runs)]


def _what_entered(_module: Any, arguments: tuple[Tensor, ...], _output: Tensor) -> Tensor:
    return arguments[0]
