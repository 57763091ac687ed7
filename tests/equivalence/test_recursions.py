"""Mixture-of-Recursions: who goes on, what is computed for whom, and what its routers are taught.

That forward and decoding equal the oracle: test_baselines.py.
"""

import math

import pytest
import torch

from tests.baselines import baseline, oracle
from tests.families import random_ids, text_config
from tests.oracle import close
from unspoken import RecursionsConfig
from unspoken.train.norms import state_norms

BY_EXPERTS = ["mor by experts", "mor by experts with shared keys"]
FOUR = {"num_hidden_layers": 4}


def widths(model, run) -> list[int]:
    """Entries that the first of the middle layers is given, run by run."""
    seen = []
    hook = model.model.blocks()[1].register_forward_pre_hook(lambda layer, given: seen.append(given[0].shape[1]))
    run()
    hook.remove()
    return seen


@pytest.mark.parametrize("kind", ["mor", *BY_EXPERTS])
@torch.no_grad()
def test_only_tokens_that_go_on_are_computed(kind):
    model, ids = baseline(kind), random_ids(1, 12, seed=7)
    lengths = model(ids, use_cache=False).latents.lengths
    assert 0 < lengths.float().mean() < 2
    expected = [12, int((lengths >= 1).sum()), int((lengths >= 2).sum())]
    assert widths(model, lambda: model(ids, use_cache=False)) == [width for width in expected if width]


@torch.no_grad()
def test_a_row_that_is_done_is_left_out():
    model, ids = baseline("mor"), random_ids(6, 1, seed=7)
    lengths, rows = model(ids, use_cache=False).latents.lengths, []
    hook = model.model.blocks()[1].register_forward_pre_hook(lambda layer, given: rows.append(len(given[0])))
    model(ids, use_cache=False)
    hook.remove()
    assert rows == [6, int((lengths >= 1).sum()), int((lengths >= 2).sum())] and rows[2] < 6


@pytest.mark.parametrize("kind", BY_EXPERTS)
def test_in_training_each_recursion_takes_its_share(kind):
    model, ids = baseline(kind).train(), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    latents = model(ids, attention_mask=mask, use_cache=False).latents
    assert [int((latents.lengths[0] >= r).sum()) for r in (1, 2)] == [6, 3]
    assert [int((latents.lengths[1] >= r).sum()) for r in (1, 2)] == [4, 2]
    assert not latents.lengths[1, 6:].any()
    uneven = model(random_ids(1, 8), use_cache=False).latents
    assert [int((uneven.lengths >= r).sum()) for r in (1, 2)] == [5, 2], "shares are rounded down"
    assert uneven.sums(7)["latent_length"] == (7, 8)
    total, count = latents.sums(13)["latent_length"]
    assert (int(total), int(count)) == (15, 15), "of the real tokens"


@pytest.mark.parametrize("kind", BY_EXPERTS)
@torch.no_grad()
def test_choice_by_capacity_knows_what_comes_and_choice_by_gate_does_not(kind):
    """Which is why the one has no cache."""
    model, ids = baseline(kind), random_ids(1, 9)
    model.config.selects_by_capacity = True
    before = model(ids, use_cache=False)
    edited = [torch.cat([ids[:, :4], random_ids(1, 5, seed=seed)], dim=1) for seed in range(1, 9)]
    depths = [model(other, use_cache=False).latents.lengths[:, :4] for other in edited]
    assert any(not torch.equal(found, before.latents.lengths[:, :4]) for found in depths)
    with pytest.raises(ValueError, match="not causal: it has no cache"):
        model(ids, use_cache=True)
    with pytest.raises(ValueError, match="not causal"):
        model.generate(ids, max_new_tokens=2)
    model.config.selects_by_capacity = False
    before = model(ids, use_cache=False)
    for other in edited:
        close(model(other, use_cache=False).logits[:, :4], before.logits[:, :4], 1e-12)


def test_decoding_in_training_mode_is_refused():
    model = baseline("mor by experts").train()
    with pytest.raises(ValueError, match="not causal"), torch.no_grad():
        model(random_ids(1, 4), use_cache=True)


def test_token_choices_losses_by_hand():
    model, ids = baseline("mor").train(), random_ids(2, 7)
    output = model(ids, labels=ids)
    plain = baseline("mor")(ids, labels=ids, use_cache=False).loss
    logits = output.latents.choices._logits.flatten(0, 1)
    depths, probabilities = logits.argmax(-1), logits.softmax(-1)
    shares = [sum(int(depth) == n for depth in depths) / 14 for n in range(3)]
    balance = 3 * sum(share * probabilities[:, n].mean() for n, share in enumerate(shares))
    size = sum(math.log(sum(math.exp(x) for x in row)) ** 2 for row in logits.tolist()) / 14
    close(output.loss - plain, 0.1 * balance + 1e-5 * size, 1e-6)
    halves = [model(ids[i : i + 1], labels=ids[i : i + 1], num_items_in_batch=12) for i in range(2)]
    own = [half.latents.choices.loss() for half in halves]
    together = sum(half.loss for half in halves)
    close(together, plain + sum(own) / 2, 1e-6)


def test_gates_are_taught_who_was_taken():
    model, ids = baseline("mor by experts").train(), random_ids(2, 9)
    model.config.selection_weight = 1.0
    output = model(ids, labels=ids)
    model.config.selection_weight = 0.0
    losses = []
    for logits, taken in output.latents.choices._asked:
        right = [torch.sigmoid(x if is_taken else -x).log() for x, is_taken in zip(logits, taken)]
        losses.append(-sum(right) / len(right))
    assert [len(logits) for logits, _ in output.latents.choices._asked] == [18, 12]
    close(output.loss - model(ids, labels=ids).loss, sum(losses) / 2, 1e-6)


def test_gates_that_are_not_asked_are_in_the_graph():
    model, ids = baseline("mor by experts"), random_ids(1, 3)
    with torch.no_grad():
        for gate in model.model.router.gates[1:]:
            gate.weight.zero_()  # no gate is above a half
    output = model(ids, labels=ids, use_cache=False)
    assert not output.latents.lengths.any()
    output.loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_recursions": 0}, "num_recursions must be a whole number of at least 1"),
        ({"recursion_router": "experts"}, "recursion_router must be one of token_choice, expert_choice"),
        ({"kv_mode": "both"}, "kv_mode must be one of own, shared"),
        ({"capacities": [1.0, 0.5]}, "are for recursion_router 'expert_choice'"),
        ({"recursion_router": "expert_choice", "capacities": [1.0, 0.5]}, "4 shares above 0, from 1 falling"),
        ({"recursion_router": "expert_choice", "capacities": [0.9, 0.5, 0.4, 0.3]}, "from 1 falling"),
        ({"recursion_router": "expert_choice", "capacities": [1, 0.5, 0.6, 0.3]}, "from 1 falling"),
        ({"balance_weight": -1.0}, "balance_weight must be a number of at least 0"),
        ({"router_scale": 0.0}, "router_scale must be a number above 0"),
        ({"text_config": text_config("llama")}, "a first, a middle and a last layer; got 2 layers"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RecursionsConfig(**{"text_config": text_config("llama", **FOUR), **fields})


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_what_has_no_shape_is_refused(name):
    with pytest.raises(ValueError, match=name):
        baseline("mor")(random_ids(1, 4), **{name: True})


def middle_runs(model, ids) -> int:
    """How often the first of the middle layers runs in a training step."""
    seen = []
    hook = model.model.blocks()[1].input_layernorm.register_forward_pre_hook(lambda layer, given: seen.append(1))
    model(ids, labels=ids).loss.backward()
    hook.remove()
    return len(seen)


@pytest.mark.parametrize("kind", ["mor", *BY_EXPERTS])
def test_checkpointing_computes_the_middle_layers_anew(kind):
    model, ids = baseline(kind).train(), random_ids(2, 9, seed=7)
    plain = middle_runs(model, ids)
    model.gradient_checkpointing_enable()
    assert middle_runs(model, ids) == 2 * plain > 2


def test_experts_are_balanced_over_who_took_part_also_where_nobody_goes_on():
    """Each run by itself, of real tokens; a recursion that only another process's tokens need counts for nothing."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as balance

    model, ids = baseline("mor", "mixtral", output_router_logits=True).train(), random_ids(2, 7, seed=7)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    output = model(ids, attention_mask=mask, labels=ids)
    latents, logits = output.latents, list(output.router_logits)
    runs = [(logits[:1], mask.bool()), (logits[-1:], mask.bool())]
    runs += [(logits[1 + 2 * i : 3 + 2 * i], taken) for i, taken in enumerate(latents.taken)]
    assert len(latents.taken) == 3 and len(logits) == 2 + 2 * 3
    expected = torch.stack([balance(tuple(one), 4, 2, taken) for one, taken in runs]).mean()
    close(output.aux_loss, expected, 1e-10)
    with torch.no_grad():
        model.model.router.depth.weight.zero_()  # all depths alike: the first is chosen
    model.model.goes_on_anywhere = lambda goes_on: True
    alone = model(ids, labels=ids)
    assert not alone.latents.lengths.any() and len(alone.latents.taken) == 3
    assert alone.aux_loss.isfinite()
    alone.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["mor", "mor by experts"])
def test_rows_of_pads_have_no_loss(kind):
    model, ids = baseline(kind).train(), random_ids(2, 5)
    output = model(ids, attention_mask=torch.zeros_like(ids), labels=torch.full_like(ids, -100), num_items_in_batch=10)
    assert output.loss == 0.0
    output.loss.backward()


def test_the_weight_of_an_output_is_the_configurations_now():
    """Of a model that goes on with another setting, as a recipe may say."""
    model, ids = baseline("mor"), random_ids(1, 6)
    before = model(ids, use_cache=False).logits
    model.config.router_scale = 0.3
    changed = model(ids, use_cache=False).logits
    assert not torch.allclose(before, changed)
    close(changed, oracle(model, ids), 1e-10)


def test_what_is_proposed_and_refused_is_rolled_back_in_windows_too():
    model, ids = baseline("mor", "mistral"), torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])
    alike = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        expected = model.generate(ids, **alike)
        assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **alike), expected)


def test_the_first_runs_experts_are_logged():
    model = baseline("mor", "qwen3_moe").train()
    model.model.backbone.config.output_router_logits = True
    batch = {"input_ids": random_ids(1, 9, seed=7), "position_ids": torch.arange(9)[None]}
    row = state_norms(model, batch, 1)
    assert 0 <= row["expert_load_min_pass_1"] <= 1 <= row["expert_load_max_pass_1"] <= 4
