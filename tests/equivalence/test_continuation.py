"""What a cache carries from one forward to the next: turns, chunks, rollback, beams, copies."""

import copy

import pytest
import torch
from transformers import AutoModel, DynamicCache, StaticCache

from tests.families import REPRESENTATIVE, SLIDING, random_ids, text_config, tiny_model
from tests.oracle import NaiveDecoder, close, most_likely, naive_generate
from unspoken import VanillaConfig, VanillaForCausalLM
from unspoken.errors import CacheError
from unspoken.latent import cache as cache_module
from unspoken.latent.cache import RecycledStateLayer, recycled_state

PROMPT = random_ids(1, 7, seed=1)
# Sizes of a later turn: one new token (with the last generated one, two are read), and more than a window.
TURNS = [1, 3, 9]


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_generation_goes_on_from_a_returned_cache(name):
    """The last generated token alone was not read yet: one token, no new text, no pause."""
    model = tiny_model(name)
    first = model.generate(PROMPT, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    mask = torch.ones_like(first.sequences)
    ids = model.generate(first.sequences, attention_mask=mask, cache=first.cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(ids, naive_generate(model, PROMPT, 11, 2)[0])


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("turn_length", TURNS)
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_another_turn(name, turn_length, num_passes):
    """The state goes over the seam: the new tokens take their passes with the state before them known."""
    model, turn = tiny_model(name, num_prefill_passes=num_passes), random_ids(1, turn_length, seed=3)
    naive = NaiveDecoder(model)
    outputs, ids, unread = None, torch.empty(1, 0, dtype=torch.long), torch.empty(1, 0, dtype=torch.long)
    for new in (PROMPT, turn, turn):
        ids = torch.cat([ids, new], dim=1)
        outputs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # random text holds pad ids too
            cache=None if outputs is None else outputs.cache,
            max_new_tokens=4,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        with torch.no_grad():
            text, logits = naive.write(naive.read(torch.cat([unread, new], dim=1), num_passes), 4, most_likely)
        close(torch.stack(outputs.logits, dim=1), logits.float(), 1e-4)
        ids, unread = torch.cat([ids, text], dim=1), text[:, -1:]
        assert torch.equal(outputs.sequences, ids)


@torch.no_grad()
def test_another_turn_recycles_the_state_over_the_seam():
    """Or the test above could not tell: without the state the next logits differ."""
    model, turn = tiny_model("llama"), random_ids(1, 3, seed=3)
    cache = model(PROMPT, use_cache=True).cache
    forgetful = copy.deepcopy(cache)
    recycled_state(forgetful).states.zero_()
    with_state, without = (model(turn, cache=c).logits for c in (cache, forgetful))
    assert (with_state - without).abs().max() > 0.01


def test_another_turn_of_a_padded_batch():
    model, turns = tiny_model("llama"), random_ids(2, 3, seed=4)
    prompts = [random_ids(1, 6, seed=1), random_ids(1, 4, seed=2)]
    ids = torch.cat([prompts[0], torch.cat([torch.zeros(1, 2, dtype=torch.long), prompts[1]], dim=1)])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(ids, attention_mask=mask, **options)
    ids = torch.cat([first.sequences, turns], dim=1)
    mask = torch.cat([mask, torch.ones(2, 4 + 3, dtype=torch.long)], dim=1)
    second = model.generate(ids, attention_mask=mask, cache=first.cache, **options).sequences
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt, **options)
        again = torch.cat([alone.sequences, turns[row : row + 1]], dim=1)
        again = model.generate(again, cache=alone.cache, **options).sequences
        assert torch.equal(second[row, -7:], again[0, -7:])


@pytest.mark.parametrize("num_passes", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 3, 7, 20])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_prompt_in_chunks(name, chunk, num_passes):
    """B28: the last state of a chunk never reached the next. A prompt of 14 tokens in chunks equals it in one go."""
    model, prompt = tiny_model(name), random_ids(1, 14)
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    outputs = model.generate(prompt, prefill_chunk_size=chunk, num_passes=num_passes, **options)
    ids, logits = naive_generate(model, prompt, 5, num_passes)
    assert torch.equal(outputs.sequences, ids)
    close(torch.stack(outputs.logits, dim=1), logits.float(), 1e-4)
    assert recycled_state(outputs.cache).chunk_caches == []  # the earlier passes' keys are dropped


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_chunks_of_a_padded_batch_and_of_a_second_turn(name, chunk):
    """Chunks that begin within the pads of one row, and chunks that go on from a returned cache."""
    model = tiny_model(name)
    ids, mask = random_ids(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[1, :4] = 0
    results = []
    for prefill_chunk_size in (None, chunk):
        options = {"max_new_tokens": 4, "do_sample": False, "prefill_chunk_size": prefill_chunk_size}
        first = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
        again = torch.cat([first.sequences, random_ids(2, 6, seed=2)], dim=1)
        longer = torch.cat([mask, torch.ones(2, 10, dtype=torch.long)], dim=1)
        results.append(model.generate(again, attention_mask=longer, cache=first.cache, **options))
    assert torch.equal(*results)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_chunks_into_a_static_cache(name, chunk):
    """A last chunk of one token came with a mask of the static length, which the earlier pass's own cache had not."""
    model, prompt = tiny_model(name), random_ids(1, 9)
    ids = model.generate(
        prompt, prefill_chunk_size=chunk, cache_implementation="static", max_new_tokens=5, do_sample=False
    )
    assert torch.equal(ids, naive_generate(model, prompt, 5, 2)[0])


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 2}, {"num_passes": "exact"}])
def test_chunks_with_other_modes(options):
    model, prompt = tiny_model("llama"), random_ids(1, 9)
    options = {"max_new_tokens": 6, "do_sample": False, **options}
    ids = model.generate(prompt, prefill_chunk_size=4, **options)
    assert torch.equal(ids, model.generate(prompt, **options))


@torch.no_grad()
def test_turns_over_a_static_cache():
    model, results = tiny_model("gemma3_text"), []
    for cache in (StaticCache(model.config, max_cache_len=40), DynamicCache(config=model.config)):
        ids = PROMPT
        for turn in range(2):
            outputs = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                cache=cache,
                max_new_tokens=4,
                do_sample=False,
                return_dict_in_generate=True,
            )
            assert outputs.cache is cache
            ids = torch.cat([outputs.sequences, random_ids(1, 3, seed=turn)], dim=1)
        results.append(ids)
    assert torch.equal(*results)


def test_chunks_with_another_number_of_passes_are_refused():
    model = tiny_model("llama")
    cache = model.model(PROMPT[:, :4], use_cache=True, in_chunks=True, num_passes=2).cache
    with pytest.raises(ValueError, match="began with 2 passes and goes on with 1"):
        model.model(PROMPT[:, 4:], cache=cache, in_chunks=True, num_passes=1)


@pytest.mark.parametrize("num_passes", [1, 2, 3])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_last_pass_alone_leaves_keys_and_values(name, num_passes):
    """B02: loops that share a slot. The cache holds what one plain run over the last pass's inputs leaves."""
    model = tiny_model(name)
    naive = NaiveDecoder(model)
    with torch.no_grad():
        naive.read(PROMPT, num_passes)
        cache = model(PROMPT, use_cache=True, num_passes=num_passes).cache
        expected = DynamicCache(config=model.config)
        model.model.backbone(inputs_embeds=naive.inputs, cache=expected, use_cache=True)
    assert cache.get_seq_length() == PROMPT.shape[1]
    assert len(cache.layers) == model.config.num_hidden_layers + 1
    for layer, wanted in zip(cache.layers, expected.layers):
        close(layer.keys, wanted.keys)
        close(layer.values, wanted.values)
    close(recycled_state(cache).read(), naive.hidden[:, -1:])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_forwards_of_any_length_over_one_cache(name, kind):
    """Two tokens, then one, then four, by hand; a static cache's state keeps its address."""
    model, ids = tiny_model(name), random_ids(2, 14, seed=5)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=16)
    naive, addresses = NaiveDecoder(model), set()
    with torch.no_grad():
        for start, stop in ((0, 7), (7, 9), (9, 10), (10, 14)):
            logits = model(ids[:, start:stop], cache=cache).logits[:, -1]
            close(logits, naive.read(ids[:, start:stop], 2))
            addresses.add(recycled_state(cache).states.data_ptr())
    assert kind == "dynamic" or len(addresses) == 1


def cropped(naive: NaiveDecoder, tokens: int) -> NaiveDecoder:
    twin = copy.copy(naive)
    twin.inputs, twin.hidden = naive.inputs[:, :-tokens], naive.hidden[:, :-tokens]
    return twin


@pytest.mark.parametrize("removed", [1, 4, 5])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_cache_rolled_back(name, removed):
    """Up to the whole latest forward is undone, and what was before it is found again."""
    model, ids, other = tiny_model(name), random_ids(2, 12, seed=6), random_ids(2, 3, seed=7)
    naive, cache = NaiveDecoder(model), DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        for part in (ids[:, :7], ids[:, 7:]):
            model(part, cache=cache)
            naive.read(part, 2)
            if part.shape[1] == 7:
                cache.crop(0)
        cache.crop(-removed)
        naive = cropped(naive, removed)
        close(model(other, cache=cache).logits[:, -1], naive.read(other, 2))


@torch.no_grad()
def test_a_cache_rolled_back_over_several_forwards():
    """A draft model decodes token by token, and then all that was rejected goes at once."""
    model, other = tiny_model("llama"), random_ids(1, 3, seed=7)
    naive = NaiveDecoder(model)
    naive.read(PROMPT, 2)
    cache = model(PROMPT, use_cache=True).cache
    for token in random_ids(1, 6, seed=8).split(1, dim=1):
        model(token, cache=cache)
        naive.read(token, 1)
    cache.crop(-4)
    naive = cropped(naive, 4)
    close(model(other, cache=cache).logits[:, -1], naive.read(other, 2))


def test_a_rollback_beyond_the_states_kept_is_refused(monkeypatch):
    monkeypatch.setattr(cache_module, "KEPT_STATES", 2)
    model = tiny_model("llama")
    cache = model(PROMPT, use_cache=True).cache
    for _ in range(3):
        model(PROMPT[:, :2], cache=cache)
    with pytest.raises(CacheError, match=r"cannot remove 4 tokens.*last 4 states.*deepcopy"):
        cache.crop(-4)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_rows_of_a_cache_moved_repeated_and_selected(name):
    model, ids, other = tiny_model(name), random_ids(3, 7, seed=8), random_ids(4, 2, seed=9)
    with torch.no_grad():
        cache = model(ids, use_cache=True).cache
        cache.reorder_cache(torch.tensor([2, 0, 2]))
        cache.batch_select_indices(torch.tensor([0, 1]))
        cache.batch_repeat_interleave(2)
        rows = ids[[2, 2, 0, 0]]
        logits = model(other, cache=cache).logits[:, -1]
        naive = NaiveDecoder(model)
        naive.read(rows, 2)
        close(logits, naive.read(other, 2))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_copies_of_a_cache_go_their_own_ways(name):
    model = tiny_model(name)
    with torch.no_grad():
        cache = model(PROMPT, use_cache=True).cache
        twin = copy.deepcopy(cache)
        for branch, turn in ((cache, random_ids(1, 3, seed=1)), (twin, random_ids(1, 3, seed=2))):
            naive = NaiveDecoder(model)
            naive.read(PROMPT, 2)
            close(model(turn, cache=branch).logits[:, -1], naive.read(turn, 2))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_reset_is_a_new_one(kind):
    """B32: the state of a slot's previous owner was read by the next, even when that has one token alone."""
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=16)
    with torch.no_grad():
        model(random_ids(1, 6, seed=3), cache=cache)
        cache.reset()
        for ids in (PROMPT[:, :1], PROMPT):
            cache.reset()
            close(model(ids, cache=cache).logits[:, -1], NaiveDecoder(model).read(ids, 2))


def filled_by_a_plain_model(cache) -> DynamicCache | StaticCache:
    backbone = AutoModel.from_config(text_config("llama"))
    backbone(PROMPT, cache=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("kind", ["dynamic", "lazy", "static"])
def test_a_cache_without_a_state_is_refused(kind):
    """A stock cache on a model that needs its own would decode from a wrong state, without a word."""
    model = tiny_model("llama", torch.float32)
    caches = {
        "dynamic": DynamicCache(config=model.config),
        "lazy": DynamicCache(),
        "static": StaticCache(model.config, max_cache_len=16),
    }
    cache = filled_by_a_plain_model(caches[kind])
    with pytest.raises(CacheError, match=r"7 tokens but no recycled state.*this model returned"):
        model(PROMPT[:, :1], cache=cache)
    with pytest.raises(ValueError, match="no recycled state"):  # a ValueError too, for those who know only transformers
        model.generate(random_ids(1, 9), cache=cache, max_new_tokens=2)


def test_an_empty_cache_of_any_make_is_filled():
    model = tiny_model("llama")
    expected = model(PROMPT, use_cache=True).logits
    for cache in (DynamicCache(), DynamicCache(config=model.config), DynamicCache(config=model.config.text_config)):
        assert torch.equal(model(PROMPT, cache=cache).logits, expected)
        assert isinstance(cache.layers[-1], RecycledStateLayer)
        assert cache.get_seq_length() == PROMPT.shape[1]


def test_the_older_name_of_a_cache():
    """B05: transformers renamed the argument, and models that swallow what they do not know re-read nothing."""
    model = tiny_model("llama")
    with torch.no_grad():
        naive = NaiveDecoder(model)
        naive.read(PROMPT, 2)
        expected = naive.read(PROMPT[:, :1], 1)
        cache = model(PROMPT, use_cache=True).cache
        outputs = model(PROMPT[:, :1], past_key_values=cache)
        close(outputs.logits[:, -1], expected)
        assert outputs.cache is cache
    expected = naive_generate(model, PROMPT, 4, 2)[0]
    older = model.generate(PROMPT, past_key_values=DynamicCache(), max_new_tokens=4, do_sample=False)
    assert torch.equal(older, expected)
    with pytest.raises(ValueError, match="not both"):
        model(PROMPT, cache=cache, past_key_values=cache)
    with pytest.raises(TypeError, match="transformers Cache, got tuple"):
        model(PROMPT, past_key_values=())
    with pytest.raises(ValueError, match="use_cache"):
        model(PROMPT, cache=cache, use_cache=False)


def test_a_plain_model_continues_too():
    model = VanillaForCausalLM(VanillaConfig(text_config=text_config("llama"))).eval()
    first = model.generate(PROMPT, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    ids = model.generate(first.sequences, cache=first.cache, max_new_tokens=3, do_sample=False)
    assert torch.equal(ids, model.generate(PROMPT, max_new_tokens=6, do_sample=False))


def test_windows_are_shorter_than_these_texts():
    sliding = set(SLIDING) & set(REPRESENTATIVE)
    assert len(sliding) == 2
    assert all(text_config(name).sliding_window < PROMPT.shape[1] for name in sliding)
