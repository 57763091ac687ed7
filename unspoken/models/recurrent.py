"""What `generate` needs of a model whose decoding is a recurrence that a forward over many tokens only approximates.

    no cache                 every step runs the prompt's passes, and the recurrence over what was generated so far
    assisted decoding        candidates are scored by the recurrence, so that the text is that of plain decoding

The base model's forward takes `num_recurrent`: so many tokens at its end go through the recurrence.
"""

from typing import Any

import torch
from torch import Tensor


class RecurrentDecoding:
    """Mixed in before `LatentForCausalLM`."""

    decodes_by_recurrence = True
    _verification: dict | None = None  # set while candidates of assisted decoding are scored
    get_input_embeddings: Any

    @property
    def num_prefill_passes(self) -> int:
        """The passes of a prompt, unless a call says otherwise."""
        raise NotImplementedError

    def _decoding_options(self, logits_to_keep: int | Tensor) -> dict:
        if self._verification is not None and isinstance(logits_to_keep, int) and logits_to_keep > 1:
            return {"num_recurrent": logits_to_keep - 1}
        return {}

    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, is_first_iteration=False, **kwargs):
        """Without a cache, every step runs the prompt's passes and then the recurrence over what was generated, so
        that `use_cache=False` gives the tokens that a cache gives."""
        cache = kwargs.get("cache")
        if self._verification is not None:
            kwargs |= self._verification
            if is_first_iteration and cache is not None and (length := int(cache.get_seq_length())) > 0:
                # transformers would run the tokens of a returned cache once more
                kwargs["next_sequence_length"] = input_ids.shape[1] - length
        if cache is None:
            kwargs.setdefault("num_passes", self.num_prefill_passes)
            if inputs_embeds is not None and not is_first_iteration:
                generated = self.get_input_embeddings()(input_ids[:, -kwargs["num_recurrent"] :])
                inputs_embeds = torch.cat([inputs_embeds, generated], dim=1)
                is_first_iteration = True  # for transformers: take the embeddings
        return super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, inputs_embeds=inputs_embeds, is_first_iteration=is_first_iteration, **kwargs
        )

    def _update_model_kwargs_for_generation(
        self, outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens: int = 1
    ):
        if outputs.get("cache") is None:
            model_kwargs["num_recurrent"] = model_kwargs.get("num_recurrent", 0) + num_new_tokens
        return super()._update_model_kwargs_for_generation(  # type: ignore[misc]
            outputs, model_kwargs, is_encoder_decoder, num_new_tokens
        )

    def _assisted_decoding(self, *args, **kwargs):
        """Candidates must be scored by the recurrence that decoding would run, not by a prefill's passes."""
        options = ("num_passes",)  # ours, which a draft model would not know
        self._verification = {name: kwargs.pop(name) for name in options if name in kwargs}
        try:
            return super()._assisted_decoding(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._verification = None
