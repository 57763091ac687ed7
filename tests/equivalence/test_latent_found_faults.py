"""Faults of latent steps that were found by hand, each with what it did."""

import pytest
import torch
from transformers import DynamicCache

from tests.equivalence.test_latent_decoding import thinking
from tests.families import adaptive_recycler_model, random_ids
from tests.oracle import close
from unspoken import RecyclerConfig, convert
from unspoken.errors import UsageError

LOUD = {"adaptive_loss_weight": 5.0, "adaptive_loss_exponent": 0.5, "step_loss_weight": 0.3}


def both(name: str = "llama", **fields):
    return adaptive_recycler_model(name, exit_threshold=0.15, router_bias=0.3, **fields)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_exact_recurrence_has_the_whole_loss(name):
    """Its tokens' steps were left out one by one, and with them the penalty, the steps' losses and most of the router
    logits. As many passes as tokens have the same states in their last one."""
    fields = {"pass_loss_weights": [0.0] * 4 + [1.0], **LOUD}
    model, ids = both(name, **fields).train(), random_ids(2, 5)
    if name == "qwen3_moe":
        model.config.text_config.output_router_logits = True
    exact, parallel = model(ids, labels=ids, num_passes="exact"), model(ids, labels=ids, num_passes=5)
    close(exact.latents.penalty, parallel.latents.penalty, 1e-10)
    assert exact.latents.penalty > 0.1
    routers = (exact.aux_loss, parallel.aux_loss) if name == "qwen3_moe" else (0.0, 0.0)
    weight = getattr(model.config.text_config, "router_aux_loss_coef", 0.0)
    close(exact.loss - weight * routers[0], parallel.loss - weight * routers[1], 1e-10)
    found, expected = (output.latents.sums(8)["latent_length"] for output in (exact, parallel))
    assert [int(value) for value in found] == [int(value) for value in expected]


@torch.no_grad()
def test_experts_under_the_exact_recurrence():
    """Rows that had exited were missing from a token's router logits, and joining the tokens' failed."""
    model, ids = both("qwen3_moe"), random_ids(3, 9)
    model.config.text_config.output_router_logits = True
    exact, parallel = model(ids, labels=ids, num_passes="exact"), model(ids, labels=ids, num_passes=9)
    runs = exact.latents.taken
    num_layers = model.config.num_hidden_layers
    assert len(exact.router_logits) == num_layers * len(runs)
    last = parallel.router_logits[-num_layers * len(runs) :]  # of the last pass, filled up otherwise
    for step, taken in enumerate(runs):
        kept = parallel.latents.taken[step].flatten()
        for layer in range(num_layers):
            ours, theirs = (logits[step * num_layers + layer] for logits in (exact.router_logits, last))
            close(ours[taken[0]].sort(0).values, theirs[kept].sort(0).values, 1e-9)
    assert exact.aux_loss.isfinite()
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False), expected)


@pytest.mark.parametrize("depth", [{}, {"max_latent_steps": 0}], ids=["deep", "flat"])
@torch.no_grad()
def test_a_mask_over_cached_tokens_is_obeyed_at_any_depth(depth):
    """It was while no token had gone deeper, and then no more."""
    model, ids = thinking("llama"), random_ids(3, 10)
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[:, 2] = 0
    cache, other = DynamicCache(), DynamicCache()
    model(ids[:, :9], cache=cache, **depth)
    model(ids[:, :9], cache=other, **depth)
    hidden = model(ids[:, 9:], cache=cache, attention_mask=mask).logits
    seen = model(ids[:, 9:], cache=other).logits
    assert (hidden - seen).abs().max() > 1e-3
    # The same as if the token's entries had never been written.
    table = other.layers[-1]
    other.crop(-1)
    table.entries.steps[table.entries.times == 2] = 0
    close(model(ids[:, 9:], cache=other).logits, hidden, 1e-10)


@pytest.mark.parametrize("depth", [{}, {"max_latent_steps": 0}], ids=["deep", "flat"])
@torch.no_grad()
def test_pads_of_a_prompt_stay_hidden_without_a_mask(depth):
    model, ids = thinking("llama"), random_ids(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    logits = []
    for given in (mask, None):
        cache = DynamicCache()
        model(ids[:, :6], cache=cache, attention_mask=mask[:, :6], **depth)
        logits.append(model(ids[:, 6:], cache=cache, attention_mask=given, **depth).logits)
    close(logits[1], logits[0], 1e-10)


@torch.no_grad()
def test_a_mask_of_the_new_tokens_alone_is_refused():
    model, ids = thinking("llama"), random_ids(2, 7)
    cache = model(ids[:, :5], use_cache=True).cache
    with pytest.raises(ValueError, match="attention_mask has 2 columns; the cache's 5 tokens and the 2 new ones"):
        model(ids[:, 5:], cache=cache, attention_mask=torch.ones(2, 2, dtype=torch.long))


def test_form_c_divides_by_the_steps_of_the_call():
    """By the configuration's: infinite for 0, and twice too much for a call that doubles them."""
    ids = random_ids(2, 7)
    fields = {"adaptive_loss": "C", **LOUD}
    expected = thinking("llama", max_latent_steps=4, **fields)(ids, labels=ids)
    for configured in (0, 2):
        found = thinking("llama", max_latent_steps=configured, **fields)(ids, labels=ids, max_latent_steps=4)
        close(found.loss, expected.loss, 1e-12)


def test_labels_bring_the_penalty_whatever_is_kept():
    model, ids = thinking("llama", **LOUD), random_ids(2, 7)
    assert torch.equal(model(ids, labels=ids, keeps_steps=False).loss, model(ids, labels=ids).loss)


def test_what_cannot_be_returned_or_cut_is_refused():
    model, ids = thinking("llama"), random_ids(2, 7)
    with pytest.raises(ValueError, match="output_attentions: the maps of latent steps"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="segmented: a graph with latent steps"):
        both()(ids, labels=ids, segmented=True)


def test_a_trained_router_is_not_lost_without_a_word():
    """Converting to fewer steps made new gates in place of trained ones."""
    source = thinking("llama", max_latent_steps=3, router="multi_linear")
    with pytest.raises(UsageError, match=r"the model's router .* would be lost"):
        convert(source, "adaptive_recycler", max_latent_steps=2)


def test_the_weight_of_the_last_pass_is_the_recurrences():
    """With the first pass's loss at zero, that of the exact recurrence was zero too."""
    config = RecyclerConfig(pass_loss_weights=[0.0, 1.0])
    assert config.loss_weights(1) == [1.0]
    assert config.loss_weights(2) == [0.0, 1.0]
    assert RecyclerConfig(pass_loss_weights=[0.0, 2.0], pass_loss_reduction="mean").loss_weights(1) == [1.0]
