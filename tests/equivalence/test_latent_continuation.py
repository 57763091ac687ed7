"""What a cache carries over from one forward to the next: turns, chunks, candidates; and decoding without one.

Latent steps are exact in all of them: no token waits for what a later one might still make.
"""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from tests.equivalence.test_generate import left_padded
from tests.equivalence.test_latent_decoding import (
    NEW_TOKENS,
    PROMPTS,
    SCORE_TOLERANCE,
    WIDE,
    check_greedy,
    greedy,
    thinking,
)
from tests.families import REPRESENTATIVE, random_ids
from tests.oracle import close
from unspoken import export_backbone

LOOKUP = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])  # repeated n-grams: prompt lookup proposes


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_generation_goes_on_from_a_returned_cache(name):
    """No pause: what a cache holds is what one go would hold. Then another turn, of several tokens."""
    model, prompt = thinking(name), PROMPTS[0]
    first = greedy(model, prompt, 4, return_dict_in_generate=True)
    second = greedy(model, first.sequences, 5, cache=first.cache, return_dict_in_generate=True)
    check_greedy(model, prompt, second.sequences)
    turn = torch.cat([second.sequences, random_ids(1, 3, seed=3)], dim=1)
    third = greedy(model, turn, 4, cache=second.cache)
    check_greedy(model, turn, third)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_prompt_in_chunks(name):
    """B28. Exact, as no chunk waits for what an earlier one might still make."""
    model, prompt = thinking(name), random_ids(1, 11)
    whole = greedy(model, prompt, 4, **WIDE)
    check_greedy(model, prompt, whole.sequences)
    for chunk in (1, 3, 20):
        outputs = greedy(model, prompt, 4, prefill_chunk_size=chunk, **WIDE)
        assert torch.equal(outputs.sequences, whole.sequences)
        close(torch.stack(outputs.logits), torch.stack(whole.logits), SCORE_TOLERANCE)
        assert torch.equal(outputs.cache.layers[-1].latent_steps, whole.cache.layers[-1].latent_steps)


def test_chunks_of_a_padded_batch():
    """Chunks that begin within the pads of one row, where the other already thinks."""
    model, prompts = thinking("mistral"), (random_ids(1, 9, seed=1), random_ids(1, 3, seed=2))
    expected = greedy(model, **left_padded(prompts))
    for chunk in (1, 2, 4):
        assert torch.equal(greedy(model, **left_padded(prompts), prefill_chunk_size=chunk), expected)


def rejected(model, prompt: Tensor, **speculation) -> int:
    """Assert equality to the oracle; return how many candidates were rejected."""
    seen = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(max(kwargs.get("logits_to_keep", 1) - 1, 0)), with_kwargs=True
    )
    outputs = greedy(model, prompt, **WIDE, **speculation)
    lengths = check_greedy(model, prompt, outputs.sequences, outputs.logits)
    # Rolled back: rejected candidates' deeper entries go with their token.
    held = outputs.cache.get_seq_length()
    assert outputs.cache.layers[-1].latent_steps.tolist() == [sum(lengths[:held])]
    return sum(seen) - (NEW_TOKENS - len(seen))


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_prompt_lookup(name):
    """B27. Candidates go deep in the forward that rejects them."""
    assert rejected(thinking(name), LOOKUP, prompt_lookup_num_tokens=3) > 0


@pytest.mark.parametrize("kind", ["plain", "adaptive", "shallow"])
def test_a_draft_model(kind):
    """The plain body, another adaptive model, and the model itself with fewer steps."""
    drafts = {
        "plain": lambda: export_backbone(thinking("llama")),
        "adaptive": lambda: thinking("qwen3", seed=3),
        "shallow": lambda: thinking("llama", max_latent_steps=1),
    }
    draft = drafts[kind]()
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.assistant_confidence_threshold = 0.0
    assert rejected(thinking("llama"), PROMPTS[0], assistant_model=draft) > (-1 if kind == "shallow" else 0)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_without_a_cache(name):
    """B10. And with one, from embeddings too (B11)."""
    model = thinking(name, embedding_scale=1.5)
    for prompts in ({"input_ids": PROMPTS[0]}, left_padded(PROMPTS)):
        cached, uncached = (greedy(model, **prompts, max_new_tokens=6, use_cache=u, **WIDE) for u in (True, False))
        assert torch.equal(cached.sequences, uncached.sequences)
        close(torch.stack(cached.logits), torch.stack(uncached.logits), SCORE_TOLERANCE)
        assert uncached.get("cache") is None
    embeds = model.get_input_embeddings()(PROMPTS[0])
    for use_cache in (True, False):
        new = greedy(model, inputs_embeds=embeds, max_new_tokens=3, use_cache=use_cache)
        check_greedy(model, PROMPTS[0], torch.cat([PROMPTS[0], new], dim=1))


@st.composite
def histories(draw) -> list[tuple]:
    """Forwards of pieces, and what rolls back, moves, doubles and drops rows between them."""
    batch, tokens, events = 2, 0, []
    for _ in range(draw(st.integers(2, 6))):
        kind = draw(st.sampled_from(["forward", "forward", "crop", "reorder", "repeat"]))
        if kind == "crop" and tokens:
            events.append(("crop", draw(st.integers(1, tokens))))
            tokens -= events[-1][1]
        elif kind == "reorder" and tokens:
            rows = draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3))
            events.append(("reorder", rows))
            batch = len(rows)
        elif kind == "repeat" and tokens and batch < 4:
            events.append(("repeat", 2))
            batch *= 2
        else:
            events.append(("forward", draw(st.integers(1, 4))))
            tokens += events[-1][1]
    return [*events, ("forward", 2)]


@cache
def model_of(name: str):
    return thinking(name, exit_threshold=0.3)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
@given(history=histories(), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_any_history_of_a_cache_ends_where_one_forward_does(name, history, seed):
    """Flat rows beside deep ones, rows that leave, tokens that come back."""
    model, past, ids = model_of(name), DynamicCache(), torch.empty(2, 0, dtype=torch.long)
    for i, (kind, what) in enumerate(history):
        if kind == "crop":
            past.crop(-what)
            ids = ids[:, :-what]
        elif kind == "reorder":
            past.reorder_cache(torch.tensor(what))
            ids = ids[what]
        elif kind == "repeat":
            past.batch_repeat_interleave(what)
            ids = ids.repeat_interleave(what, dim=0)
        else:
            new = random_ids(len(ids), what, seed=10 * seed + i)
            ids = torch.cat([ids, new], dim=1)
            with torch.no_grad():
                outputs, whole = model(new, cache=past), model(ids, use_cache=False)
            close(outputs.logits, whole.logits[:, -what:])
            assert torch.equal(outputs.latents.lengths, whole.latents.lengths[:, -what:])
            assert past.layers[-1].latent_steps.tolist() == whole.latents.lengths.sum(-1).tolist()
