"""Assisted decoding and prompt lookup equal greedy decoding, whether candidates are taken or rejected."""

import pytest
import torch

from tests.families import EOS, REPRESENTATIVE, plain_model, random_ids, tiny_model
from tests.oracle import close, decoding_logits, naive_generate
from unspoken import VanillaConfig, VanillaForCausalLM, export_backbone

NEW_TOKENS = 14
# Repeated n-grams, so that prompt lookup proposes; the tail of the second is new, so that it does not at first.
PROMPTS = (torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]]), torch.tensor([[11, 12, 11, 12, 13]]))


class Counter:
    """Candidates that a model was given to verify, and tokens that its forwards took in."""

    def __init__(self, model):
        self.candidates, self.forwards = 0, 0
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs):
        self.forwards += 1
        self.candidates += max(kwargs.get("logits_to_keep", 1) - 1, 0)


def check(name: str, num_passes: int, speculation, prompts=PROMPTS) -> tuple[int, int]:
    """Assert equality to decoding without a cache; return how many candidates were taken, and how many rejected."""
    model = tiny_model(name, num_prefill_passes=num_passes)
    counter, new = Counter(model), 0
    for prompt in prompts:
        outputs = model.generate(
            prompt,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **speculation(model),
        )
        ids, logits = naive_generate(model, prompt, NEW_TOKENS, num_passes)
        assert torch.equal(outputs.sequences, ids)
        close(torch.stack(outputs.logits, dim=1), logits.float(), 1e-4)
        new += NEW_TOKENS
    taken = new - counter.forwards
    return taken, counter.candidates - taken


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_prompt_lookup(name, num_passes):
    """B27: states of rejected candidates stayed, and the text was not that of greedy decoding. The first forward holds
    prompt and candidates together, of which the prompt alone takes the prefill's passes."""
    _, rejected = check(name, num_passes, lambda model: {"prompt_lookup_num_tokens": 3})
    assert rejected > 0


def test_prompt_lookup_takes_candidates_too():
    taken = [check(name, 2, lambda model: {"prompt_lookup_num_tokens": 3})[0] for name in ("llama_tied", "qwen3_moe")]
    assert max(taken) > 0


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_draft_model_of_the_same_weights_without_recycling(name, num_passes):
    """The plain model inside, as one would use it: right sometimes, wrong sometimes."""
    model = tiny_model(name)
    draft = export_backbone(model)
    draft.generation_config.num_assistant_tokens = 4
    _, rejected = check(name, num_passes, lambda _: {"assistant_model": draft})
    assert rejected > 0


def test_a_draft_that_is_the_model_itself_is_always_right():
    taken, rejected = check("llama", 2, lambda model: {"assistant_model": drafting(tiny_model("llama"))})
    assert taken > NEW_TOKENS
    assert rejected <= 2 * len(PROMPTS)  # proposals cut off by the maximal length


def drafting(model):
    model.generation_config.num_assistant_tokens = 3
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


@pytest.mark.parametrize("kind", ["vanilla", "recycler", "plain"])
def test_a_draft_that_is_always_wrong(kind):
    drafts = {
        "vanilla": lambda: VanillaForCausalLM(VanillaConfig(text_config=tiny_model("llama").config.text_config)),
        "recycler": lambda: tiny_model("qwen3", seed=3),
        "plain": lambda: plain_model("llama", seed=5),
    }
    _, rejected = check("llama", 2, lambda model: {"assistant_model": drafting(drafts[kind]().double().eval())})
    assert rejected > NEW_TOKENS


def test_the_cache_after_speculation_goes_on():
    """B27: the state is that of the last accepted token."""
    model, prompt = tiny_model("llama_tied"), PROMPTS[0]
    options = {"do_sample": False, "return_dict_in_generate": True}
    first = model.generate(prompt, max_new_tokens=5, prompt_lookup_num_tokens=3, **options)
    mask = torch.ones_like(first.sequences)
    second = model.generate(first.sequences, attention_mask=mask, cache=first.cache, max_new_tokens=4, **options)
    assert torch.equal(second.sequences, naive_generate(model, prompt, 9, 2)[0])


@pytest.mark.parametrize("name", ["llama_tied", "gemma3_text"])
def test_speculation_ends_at_the_end_token(name):
    model, prompt = tiny_model(name), PROMPTS[0]
    text = naive_generate(model, prompt, NEW_TOKENS, 2)[0]
    end = text[0, prompt.shape[1] + 6].item()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": end}
    ids = model.generate(prompt, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(ids, model.generate(prompt, **options))
    assert ids[0, -1] == end != EOS


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_cache_that_cannot_be_rolled_back_is_refused(name):
    """A static cache overwrites windows, and its state has one place: refused after the prefill, not in mid-text."""
    with pytest.raises(ValueError, match="requires a cache that can be cropped"):
        tiny_model(name).generate(
            PROMPTS[0], max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3, cache_implementation="static"
        )


def test_speculation_without_a_cache_is_refused():
    with pytest.raises((ValueError, RuntimeError), match="cache"):
        tiny_model("llama").generate(PROMPTS[0], max_new_tokens=5, prompt_lookup_num_tokens=3, use_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lookup", "draft"])
def test_the_distribution_of_sampled_text_under_speculation(kind):
    """B26: lossless in greedy mode and not when sampling. The second token over 1500 draws, chi-square."""
    model, prompt, draws = tiny_model("llama"), PROMPTS[0], 1500
    draft = drafting(export_backbone(tiny_model("llama")))
    speculation = {"prompt_lookup_num_tokens": 3} if kind == "lookup" else {"assistant_model": draft}
    pairs = [
        model.generate(prompt, do_sample=True, top_k=0, max_new_tokens=2, **speculation)[0, -2:] for _ in range(draws)
    ]
    counts = torch.bincount(torch.stack(pairs)[:, -1], minlength=64)
    with torch.no_grad():
        first = decoding_logits(model, prompt, prompt.shape[1], 2)[0, -1].softmax(-1)
        every_first = torch.cat([prompt.repeat(64, 1), torch.arange(64).unsqueeze(1)], dim=1)
        second = decoding_logits(model, every_first, prompt.shape[1], 2)[:, -1].softmax(-1)
    expected = draws * (first.unsqueeze(1) * second).sum(0)
    common = expected >= 5
    statistic = ((counts - expected) ** 2 / expected)[common].sum().item()
    freedom = common.sum().item() - 1
    assert statistic < freedom + 3 * (2 * freedom) ** 0.5  # p of about 0.003


def test_random_prompts():
    for seed in range(3):
        check("llama", 2, lambda model: {"prompt_lookup_num_tokens": 2}, prompts=[random_ids(1, 9, seed=seed)])
