"""The slow oracles of the tests: a backbone as a plain function, and decoding that keeps no cache at all."""

from collections.abc import Callable

import torch
from torch import Tensor

from unspoken import AdaptiveLatentForCausalLM, RecyclerForCausalLM
from unspoken.latent import reference
from unspoken.models.latent_lm import LatentForCausalLM

# The bodies take norms, softmax and rotary angles in float32 whatever the model's dtype, so float64 models agree to a
# few float32 roundings, which the recurrence and wide random weights amplify. A wrong state is off by 1e-2 and more.
TOLERANCE = 2e-5


def close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Assert equality to `tolerance`, relative to the largest expected value where that is above 1."""
    assert actual.shape == expected.shape
    scale = max(1.0, expected.abs().max().item())
    assert torch.isfinite(actual).all()
    assert (actual - expected).abs().max().item() <= tolerance * scale


def body(model: RecyclerForCausalLM) -> reference.Backbone:
    """The backbone as the reference wants it: what enters its first layer -> its top hidden states."""
    multiplier = getattr(model.config.text_config, "embedding_multiplier", None) or 1.0

    def run(inputs: Tensor) -> Tensor:
        return model.model.backbone(inputs_embeds=inputs / multiplier, use_cache=False).last_hidden_state

    return run


def embed(model: LatentForCausalLM, input_ids: Tensor) -> Tensor:
    """What enters the first layer for these tokens when nothing is recycled."""
    multiplier = getattr(model.config.text_config, "embedding_multiplier", None) or 1.0
    return model.get_input_embeddings()(input_ids) * model.config.embedding_scale * multiplier


def decoding_logits(model: RecyclerForCausalLM, input_ids: Tensor, prompt_length: int, num_passes: int) -> Tensor:
    """Logits [B, T, V] that decoding must have at each position, given what it emitted."""
    hidden = reference.prefill_then_decode(
        body(model), model.model.adapter, embed(model, input_ids), prompt_length, num_passes
    )
    return model.transform(model.lm_head(hidden))


class NaiveDecoder:
    """Decoding by running the backbone over everything, at each step, in several turns if wanted.

    `hidden` are the states, `inputs` what entered the backbone, both [B, T, d]. One turn equals
    `reference.prefill_then_decode`; a later turn's tokens take several passes with the state before them known.
    """

    def __init__(self, model: RecyclerForCausalLM):
        self.model, self.backbone, self.adapter = model, body(model), model.model.adapter
        self.inputs: Tensor | None = None
        self.hidden: Tensor | None = None

    def read(self, input_ids: Tensor, num_passes: int) -> Tensor:
        """Take in tokens [B, T] with so many passes; return the last position's logits [B, V]."""
        embeds = embed(self.model, input_ids)
        seam = torch.zeros_like(embeds[:, :1]) if self.hidden is None else self.adapter(self.hidden[:, -1:])
        recycled = torch.cat([seam, torch.zeros_like(embeds[:, 1:])], dim=1)
        for _ in range(num_passes):
            new = embeds + recycled
            inputs = new if self.inputs is None else torch.cat([self.inputs, new], dim=1)
            hidden = self.backbone(inputs)
            latest = hidden[:, -embeds.shape[1] :]
            recycled = torch.cat([seam, self.adapter(latest[:, :-1])], dim=1)
        self.inputs, self.hidden = inputs, hidden
        return self.model.transform(self.model.lm_head(hidden[:, -1]))

    def write(self, logits: Tensor, num_tokens: int, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Emit tokens after `logits`; the last is not taken in. Returns (ids [B, n], logits [B, n, V])."""
        ids, all_logits = [], [logits]
        for i in range(num_tokens):
            ids.append(choose(all_logits[-1]))
            if i + 1 < num_tokens:
                all_logits.append(self.read(ids[-1], num_passes=1))
        return torch.cat(ids, dim=1), torch.stack(all_logits, dim=1)


def most_likely(logits: Tensor) -> Tensor:
    return logits.argmax(-1, keepdim=True)


def drawn(logits: Tensor) -> Tensor:
    """As transformers draws: from float32 probabilities, one call a step, with the global generator."""
    return torch.multinomial(logits.float().softmax(-1), num_samples=1)


@torch.no_grad()
def naive_generate(
    model: RecyclerForCausalLM, input_ids: Tensor, num_tokens: int, num_passes: int, choose=most_likely
) -> tuple[Tensor, Tensor]:
    """Prompts [B, P] -> (prompts and text [B, P + n], logits of the new tokens [B, n, V]), without a cache."""
    decoder = NaiveDecoder(model)
    new, logits = decoder.write(decoder.read(input_ids, num_passes), num_tokens, choose)
    return torch.cat([input_ids, new], dim=1), logits


def grid_body(model: AdaptiveLatentForCausalLM) -> reference.GridBackbone:
    """The backbone over any entries of the grid, told in a mask of its own who sees whom."""
    text_config = model.config.text_config
    multiplier = getattr(text_config, "embedding_multiplier", None) or 1.0

    def run(inputs: Tensor, times: Tensor, visible: Tensor) -> Tensor:
        def mask(window: int | None) -> Tensor:
            seen = visible if window is None else visible & (times > times.unsqueeze(-1) - window)
            if text_config._attn_implementation == "eager":
                nothing = torch.zeros((), dtype=inputs.dtype)
                return torch.where(seen, nothing, torch.finfo(inputs.dtype).min)[None, None]
            return seen[None, None]

        window, types = getattr(text_config, "sliding_window", None), getattr(text_config, "layer_types", None)
        masks: Tensor | dict = mask(window)
        if types is not None:
            masks = {kind: mask(window if kind == "sliding_attention" else None) for kind in types}
        outputs = model.model.backbone(
            inputs_embeds=inputs / multiplier, attention_mask=masks, position_ids=times[None], use_cache=False
        )
        return outputs.last_hidden_state

    return run


@torch.no_grad()
def adaptive_oracle(
    model: AdaptiveLatentForCausalLM,
    input_ids: Tensor,
    max_latent_steps: int | None = None,
    exit_threshold: float | None = None,
    exit_at_step: int | None = None,
) -> tuple[Tensor, list[int]]:
    """Logits [1, T, V] of tokens [1, T], and each token's latent steps."""
    config = model.config
    if exit_at_step is not None:  # everybody is certain to go on, until the last step
        max_latent_steps, gate = exit_at_step - 1, lambda state, step: 1.0
    else:
        gate = lambda state, step: torch.sigmoid(model.model.router(state, step)).squeeze()  # noqa: E731
    hidden, states, weights = reference.latent_steps(
        grid_body(model),
        gate,
        embed(model, input_ids),
        config.max_latent_steps if max_latent_steps is None else max_latent_steps,
        config.exit_threshold if exit_threshold is None else exit_threshold,
        adapter=getattr(model.model, "adapter", None),
    )
    assert all(abs(sum(float(weight) for weight in row) - 1) < 1e-12 for row in weights)
    return model.transform(model.lm_head(hidden)), [len(row) - 1 for row in states]
