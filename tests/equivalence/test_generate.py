"""`generate` of transformers, unmodified, equals decoding without any cache, in every mode."""

import pytest
import torch
from transformers import GenerationConfig, StaticCache
from transformers.generation.streamers import BaseStreamer

from tests.families import ALL, EOS, PAD, REPRESENTATIVE, random_ids, tiny_model
from tests.oracle import TOLERANCE, NaiveDecoder, close, decoding_logits, drawn, naive_generate

PROMPTS = (random_ids(1, 7, seed=1), random_ids(1, 4, seed=2))
NEW_TOKENS = 11  # longer than the sliding windows
# Scores are float32 in generate, whatever the model.
SCORE_TOLERANCE = 1e-4


def left_padded(prompts=PROMPTS) -> dict[str, torch.Tensor]:
    longest = max(p.shape[1] for p in prompts)
    pads = [torch.full((1, longest - p.shape[1]), PAD) for p in prompts]
    mask = [torch.cat([torch.zeros_like(pad), torch.ones_like(p)], dim=1) for pad, p in zip(pads, prompts)]
    ids = [torch.cat([pad, p], dim=1) for pad, p in zip(pads, prompts)]
    return {"input_ids": torch.cat(ids), "attention_mask": torch.cat(mask)}


def greedy(model, input_ids=None, max_new_tokens=NEW_TOKENS, **options):
    return model.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=False, **options)


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("name", ALL)
def test_greedy(name, num_passes):
    """B01: right on re-reading the text, garbage from the second cached token on. `reference` is the oracle here."""
    model = tiny_model(name, num_prefill_passes=num_passes)
    for prompt in PROMPTS:
        outputs = greedy(model, prompt, return_dict_in_generate=True, output_logits=True)
        ids, length = outputs.sequences, prompt.shape[1]
        logits = decoding_logits(model, ids, length, num_passes)[:, length - 1 : -1]
        assert torch.equal(logits.argmax(-1), ids[:, length:])
        close(torch.stack(outputs.logits, dim=1), logits.float(), SCORE_TOLERANCE)
        if name in REPRESENTATIVE:
            assert len(set(ids[0, length:].tolist())) > 1  # text that varies, or it tests little


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_naive_decoder_is_the_reference(name, num_passes):
    """The oracle of the tests below against the oracle of the package."""
    model, prompt = tiny_model(name), PROMPTS[0]
    ids, logits = naive_generate(model, prompt, 5, num_passes)
    close(logits, decoding_logits(model, ids, prompt.shape[1], num_passes)[:, -6:-1])


@pytest.mark.parametrize("num_passes", [1, 2, "exact"])
def test_the_passes_of_one_call(num_passes):
    model, prompt = tiny_model("llama"), PROMPTS[0]
    ids = greedy(model, prompt, num_passes=num_passes)
    expected = naive_generate(model, prompt, NEW_TOKENS, prompt.shape[1] if num_passes == "exact" else num_passes)
    assert torch.equal(ids, expected[0])


def test_prefills_of_one_and_two_passes_differ():
    """Or the tests above prove nothing about the second."""
    one, two = (naive_generate(tiny_model("llama"), PROMPTS[0], 3, num_passes)[1] for num_passes in (1, 2))
    assert (one - two).abs().max() > 0.01


@pytest.mark.parametrize("num_return_sequences", [1, 3])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_sampling_with_a_seed(name, num_return_sequences):
    """The state is repeated for several sequences of one prompt, and each goes on from its own."""
    model, prompt = tiny_model(name), PROMPTS[1]
    torch.manual_seed(3)
    ids = model.generate(
        prompt, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, num_return_sequences=num_return_sequences
    )
    torch.manual_seed(3)
    expected, _ = naive_generate(model, prompt.repeat(num_return_sequences, 1), NEW_TOKENS, 2, choose=drawn)
    assert torch.equal(ids, expected)
    assert len({tuple(row) for row in ids.tolist()}) == num_return_sequences


def test_the_distribution_of_a_sampled_second_token():
    """The second token is the first that needs the carried state. Chi-square over 4000 draws, bins of at least 5."""
    model, prompt, draws = tiny_model("llama"), PROMPTS[1], 4000
    ids = model.generate(prompt, do_sample=True, top_k=0, max_new_tokens=2, num_return_sequences=draws)
    with torch.no_grad():
        first = decoding_logits(model, prompt, prompt.shape[1], 2)[0, -1].softmax(-1)
        every_first = torch.cat([prompt.repeat(64, 1), torch.arange(64).unsqueeze(1)], dim=1)
        second = decoding_logits(model, every_first, prompt.shape[1], 2)[:, -1].softmax(-1)
    expected = draws * (first.unsqueeze(1) * second).sum(0)
    counts = torch.bincount(ids[:, -1], minlength=64)
    common = expected >= 5
    statistic = ((counts - expected) ** 2 / expected)[common].sum().item()
    freedom = common.sum().item() - 1
    assert statistic < freedom + 3 * (2 * freedom) ** 0.5  # p of about 0.003


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_score_of_a_beam_is_its_log_probability(name):
    """B18: the state did not follow its beam, and the reported score was not the sequence's."""
    model = tiny_model(name)
    for prompt in PROMPTS:
        length = prompt.shape[1]
        outputs = greedy(
            model,
            prompt,
            num_beams=4,
            num_return_sequences=3,
            length_penalty=0.0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        log_probs = decoding_logits(model, outputs.sequences, length, 2)[:, length - 1 : -1].log_softmax(-1)
        scores = log_probs.gather(-1, outputs.sequences[:, length:].unsqueeze(-1)).sum((1, 2))
        close(outputs.sequences_scores.double(), scores, SCORE_TOLERANCE)
        parents = outputs.beam_indices[:, :NEW_TOKENS]
        assert any(len(set(row.tolist())) > 1 for row in parents)  # a beam did change places


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_beams_of_a_padded_batch(name):
    model = tiny_model(name)
    options = {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    batch = greedy(model, **left_padded(), **options)
    for row, prompt in enumerate(PROMPTS):
        alone = greedy(model, prompt, **options)
        assert torch.equal(batch.sequences[row, -NEW_TOKENS:], alone.sequences[0, -NEW_TOKENS:])
        close(batch.sequences_scores[row], alone.sequences_scores[0], SCORE_TOLERANCE)


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("name", ALL)
def test_a_left_padded_batch(name, num_passes):
    """B06, B14, B15: a prompt in a batch and the same prompt alone went on differently."""
    dtype = torch.float32 if name == "gemma2" else torch.float64  # see test_padding.py
    model = tiny_model(name, dtype, num_prefill_passes=num_passes)
    prompts = (PROMPTS[0], PROMPTS[1], PROMPTS[1], random_ids(1, 12))
    ids = greedy(model, **left_padded(prompts))
    for row, prompt in enumerate(prompts):
        assert torch.equal(
            ids[row, -NEW_TOKENS:], naive_generate(model, prompt, NEW_TOKENS, num_passes)[0][0, -NEW_TOKENS:]
        )


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_row_that_ends_first(name):
    """Rows that met their end token keep the batch's other rows as they were."""
    model = tiny_model(name)
    alone = [greedy(model, prompt)[0, -NEW_TOKENS:] for prompt in PROMPTS]
    end = alone[0][3].item()
    ids = greedy(model, **left_padded(), eos_token_id=end, pad_token_id=PAD)[:, PROMPTS[0].shape[1] :]
    for row, text in enumerate(alone):
        stop = text.tolist().index(end) + 1 if end in text else NEW_TOKENS
        assert torch.equal(ids[row, :stop], text[:stop])
        assert not ids[row, stop:].any()
    assert not ids[0, 4:].any()


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_static_cache(name):
    model = tiny_model(name)
    for prompt in PROMPTS:
        ids = greedy(model, prompt, cache_implementation="static")
        assert torch.equal(ids, naive_generate(model, prompt, NEW_TOKENS, 2)[0])
    batch = greedy(model, **left_padded(), cache_implementation="static")
    for row, prompt in enumerate(PROMPTS):
        expected = naive_generate(model, prompt, NEW_TOKENS, 2)[0]
        assert torch.equal(batch[row, -NEW_TOKENS:], expected[0, -NEW_TOKENS:])


@pytest.mark.parametrize("name", ["llama_tied", "gemma3_text"])
def test_a_static_cache_with_beams_and_samples(name):
    model, prompt = tiny_model(name), PROMPTS[0]
    beams = [greedy(model, prompt, num_beams=3, cache_implementation=kind) for kind in ("static", "dynamic")]
    assert torch.equal(*beams)
    samples = []
    for kind in ("static", "dynamic"):
        torch.manual_seed(0)
        samples.append(
            model.generate(prompt, do_sample=True, num_return_sequences=3, max_new_tokens=6, cache_implementation=kind)
        )
    assert torch.equal(*samples)


@torch.no_grad()
def test_a_compiled_decoding_step_is_one_graph(num_graphs):
    """The state of a static cache is read and written where it lies, and the position is data."""
    model, prompt = tiny_model("llama_tied"), PROMPTS[0]
    cache, naive = StaticCache(model.config, max_cache_len=24), NaiveDecoder(model)
    model(prompt, cache=cache)
    logits = naive.read(prompt, 2)
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    for position in range(7, 12):
        token = logits.argmax(-1, keepdim=True)
        logits = naive.read(token, 1)
        close(step(token, cache=cache, position_ids=torch.tensor([[position]])).logits[:, -1], logits)
    assert num_graphs() == 1


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streaming():
    model, prompt, streamer = tiny_model("llama"), PROMPTS[0], Collector()
    ids = greedy(model, prompt, streamer=streamer)
    assert streamer.ended
    assert streamer.tokens == ids[0].tolist()
    assert torch.equal(ids, naive_generate(model, prompt, NEW_TOKENS, 2)[0])


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", [*REPRESENTATIVE, "granite"])
def test_a_prompt_of_embeddings(name, use_cache):
    """B11: without a cache the embeddings did not grow, and generation crashed."""
    model = tiny_model(name, embedding_scale=1.5)
    for prompt in PROMPTS:
        embeds = model.get_input_embeddings()(prompt)
        expected = naive_generate(model, prompt, NEW_TOKENS, 2)[0]
        new = greedy(model, inputs_embeds=embeds, use_cache=use_cache)
        assert torch.equal(new, expected[:, prompt.shape[1] :])
        both = greedy(model, prompt, inputs_embeds=embeds, use_cache=use_cache)
        assert torch.equal(both, expected)


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_scores_without_a_cache_equal_those_with_one(name, num_passes):
    """B10: they differed from the second token on."""
    model = tiny_model(name, num_prefill_passes=num_passes)
    options = {"return_dict_in_generate": True, "output_scores": True}
    for prompts in ({"input_ids": PROMPTS[0]}, left_padded()):
        cached, uncached = (greedy(model, **prompts, max_new_tokens=6, use_cache=u, **options) for u in (True, False))
        assert torch.equal(cached.sequences, uncached.sequences)
        for a, b in zip(cached.scores, uncached.scores):
            close(a, b, SCORE_TOLERANCE)
    assert uncached.get("cache") is None


def test_uncached_beams_and_samples():
    model, prompt = tiny_model("llama"), PROMPTS[0]
    assert torch.equal(*(greedy(model, prompt, num_beams=3, use_cache=use_cache) for use_cache in (True, False)))
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        samples.append(model.generate(prompt, do_sample=True, max_new_tokens=5, use_cache=use_cache))
    assert torch.equal(*samples)


def test_bfloat16_with_and_without_a_cache():
    """B10: bounded by bfloat16's 8 bits of a logit of about 4, over a recurrence; a wrong state is off by 1."""
    model, prompt = tiny_model("llama", torch.bfloat16), PROMPTS[0]
    options = {"return_dict_in_generate": True, "output_scores": True}
    cached, uncached = (greedy(model, prompt, 5, use_cache=use_cache, **options) for use_cache in (True, False))
    for a, b in zip(cached.scores, uncached.scores):
        close(a, b, tolerance=0.05)


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_new_token_costs_one_run_of_the_backbone_over_one_token(name, num_passes):
    """B05 and B07: a model that swallows `cache` re-reads everything at each step; here by count, not by time."""
    model = tiny_model(name, num_prefill_passes=num_passes)
    body_runs, layer_runs = [], []
    model.model.backbone.register_forward_hook(
        lambda module, args, kwargs, output: body_runs.append(tuple(kwargs["inputs_embeds"].shape[:2])),
        with_kwargs=True,
    )
    model.model.backbone.layers[0].register_forward_hook(
        lambda module, args, output: layer_runs.append(tuple(args[0].shape[:2]))
    )
    greedy(model, PROMPTS[0])
    assert body_runs == [(1, 7)] * num_passes + [(1, 1)] * (NEW_TOKENS - 1)
    assert layer_runs == body_runs
    body_runs.clear()
    greedy(model, **left_padded(), num_beams=3)
    assert body_runs == [(6, 7)] * num_passes + [(6, 1)] * (NEW_TOKENS - 1)


def test_continuous_batching_raises():
    """It logged an exception and returned requests with no tokens."""
    with pytest.raises(NotImplementedError, match=r"left-padded batch"):
        tiny_model("llama").generate_batch([[3, 4, 5]], GenerationConfig(max_new_tokens=3))


def test_an_unknown_option_of_generate_is_refused():
    with pytest.raises(ValueError, match="num_pases"):
        greedy(tiny_model("llama"), PROMPTS[0], num_pases=2)


def test_an_end_token_of_the_backbone_ends_the_text():
    """The special ids of the backbone's configuration reach `generate`."""
    model = tiny_model("llama", text={"eos_token_id": EOS})
    assert model.generation_config.eos_token_id == EOS
    assert model.generation_config.pad_token_id == PAD
    with torch.no_grad():
        model.lm_head.weight[EOS] = 0
    logits = model(PROMPTS[0]).logits
    assert (logits[..., EOS].abs() < TOLERANCE).all()
    model.lm_head.weight.data[EOS] = 10 * model.model(PROMPTS[0]).last_hidden_state[0, -1].detach()
    assert greedy(model, PROMPTS[0])[0, 7:].tolist() == [EOS]
