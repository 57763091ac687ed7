"""`generate` of transformers, unmodified, over latent steps equals the oracle, token for token, in every mode."""

import copy

import pytest
import torch
from torch import Tensor

from tests.equivalence.test_generate import Collector, left_padded
from tests.families import ALL, PAD, REPRESENTATIVE, adaptive_model, random_ids
from tests.oracle import adaptive_oracle, close
from unspoken import AdaptiveLatentForCausalLM

PROMPTS = (random_ids(1, 7, seed=1), random_ids(1, 4, seed=2))
NEW_TOKENS = 7  # longer than the sliding windows
SCORE_TOLERANCE = 1e-4  # scores are float32 in generate, whatever the model
WIDE = {"return_dict_in_generate": True, "output_logits": True}


def thinking(name: str, dtype: torch.dtype = torch.float64, **fields) -> AdaptiveLatentForCausalLM:
    return adaptive_model(name, dtype, **{"exit_threshold": 0.15, "router_bias": 0.3, **fields})


def greedy(model, input_ids=None, max_new_tokens=NEW_TOKENS, **options):
    return model.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=False, **options)


def check_greedy(model, prompt: Tensor, sequence: Tensor, logits=None, **knobs) -> list[int]:
    """Each new token of a sequence [1, T] is the oracle's choice, given those before it: by induction, the sequence is
    the oracle's. Returns the latent steps of all tokens but the last, which none has taken in."""
    length = prompt.shape[1]
    assert torch.equal(sequence[:, :length], prompt)
    expected, lengths = adaptive_oracle(model, sequence[:, :-1], **knobs)
    assert torch.equal(expected[:, length - 1 :].argmax(-1), sequence[:, length:])
    if logits is not None:
        close(torch.stack(logits, dim=1), expected[:, length - 1 :].float(), SCORE_TOLERANCE)
    return lengths


@pytest.mark.parametrize("name", ALL)
def test_greedy(name):
    model = thinking(name)
    for prompt in PROMPTS:
        outputs = greedy(model, prompt, **WIDE)
        lengths = check_greedy(model, prompt, outputs.sequences, outputs.logits)
        assert outputs.cache.layers[-1].latent_steps.tolist() == [sum(lengths)], "what a user is told of the usage"
    if name in REPRESENTATIVE:
        assert 0 < sum(lengths) < len(lengths) * model.config.max_latent_steps, "no decision was tested"
        assert len(set(outputs.sequences[0, 4:].tolist())) > 1  # text that varies, or it tests little


@pytest.mark.parametrize("name", ALL)
def test_a_left_padded_batch(name):
    dtype = torch.float32 if name == "gemma2" else torch.float64  # see test_padding.py
    model, prompts = thinking(name), (*PROMPTS, random_ids(1, 10))
    ids = greedy(copy.deepcopy(model).to(dtype), **left_padded(prompts))
    for row, prompt in enumerate(prompts):
        check_greedy(model, prompt, ids[row : row + 1, -NEW_TOKENS - prompt.shape[1] :])


def test_streaming():
    model, streamer = thinking("llama"), Collector()
    ids = greedy(model, PROMPTS[0], streamer=streamer)
    assert streamer.ended
    assert streamer.tokens == ids[0].tolist()
    check_greedy(model, PROMPTS[0], ids)


class Runs:
    """Rows and columns that enter the backbone, run by run."""

    def __init__(self, model):
        self.shapes: list[tuple[int, int]] = []
        model.model.backbone.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs):
        self.shapes.append(tuple(kwargs["inputs_embeds"].shape[:2]))


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_row_that_has_exited_does_not_run_because_another_goes_on(name):
    """The work of a batch is that of its rows alone, counted; a prefill's deeper runs hold its active tokens only."""
    model, prompts = thinking(name), (*PROMPTS, random_ids(1, 6, seed=5))
    runs = Runs(model)
    outputs = greedy(model, **left_padded(prompts), return_dict_in_generate=True)
    shapes = list(runs.shapes)
    rows, longest = len(prompts), max(p.shape[1] for p in prompts)
    lengths = []
    for row, prompt in enumerate(prompts):
        ids = outputs.sequences[row : row + 1, -NEW_TOKENS - prompt.shape[1] :]
        found = check_greedy(model, prompt, ids)
        lengths.append([0] * (longest - prompt.shape[1]) + found)
    depths = torch.tensor(lengths)
    expected = []
    for part in (depths[:, :longest], *depths[:, longest:].split(1, dim=1)):
        expected.append((rows, part.shape[1]))
        for step in range(1, 1 + int(part.max())):
            active = (part >= step).sum(-1)
            expected.append((int((active > 0).sum()), int(active.max())))
    assert shapes == expected
    assert any(shape[0] < rows for shape in shapes), "no row exited before another"


def test_a_row_that_met_its_end_token_leaves_the_others_as_they_were():
    model = thinking("llama_tied")
    alone = [greedy(model, prompt)[0, -NEW_TOKENS:] for prompt in PROMPTS]
    end = alone[0][2].item()
    ids = greedy(model, **left_padded(PROMPTS), eos_token_id=end, pad_token_id=PAD)[:, PROMPTS[0].shape[1] :]
    for row, text in enumerate(alone):
        stop = text.tolist().index(end) + 1 if end in text else NEW_TOKENS
        assert torch.equal(ids[row, :stop], text[:stop])
        assert not ids[row, stop:].any()


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_neox"])
def test_bfloat16_with_and_without_a_cache(name):
    """Bounded by eight bits of a logit; decisions near the threshold may differ, so everybody takes all steps."""
    model = thinking(name, torch.bfloat16, exit_threshold=0.0)
    cached, uncached = (greedy(model, PROMPTS[0], 5, use_cache=u, **WIDE) for u in (True, False))
    for a, b in zip(cached.logits, uncached.logits):
        close(a, b, tolerance=0.06)
    exact = adaptive_oracle(thinking(name, exit_threshold=0.0), PROMPTS[0])[0][:, -1]
    close(cached.logits[0].double(), exact, tolerance=0.06)
    assert {layer.keys.dtype for layer in cached.cache.layers[:-1]} == {torch.bfloat16}


def test_continuous_batching_raises():
    with pytest.raises(NotImplementedError, match="left-padded batch"):
        thinking("llama").generate_batch([[3, 4, 5]])
