"""FLOPs of models with latent steps, against torch's own counter, and what a run's counts make of them."""

import dataclasses
import json

import pytest
import torch
import yaml

from benchmarks.ceiling import counted_flops
from tests.families import ALL, adaptive_model, random_ids, randomise, text_config
from unspoken import AdaptiveRecyclerConfig, AdaptiveRecyclerForCausalLM
from unspoken.analysis.flops import model_flops, run_flops, training_flops
from unspoken.latent.counts import COUNTS

ROWS, LENGTH = 3, 11  # longer than the windows of the tiny families
EAGER = {"attn_implementation": "eager"}  # matrix products, which the counter sees


def eager_model(name: str, **fields):
    """Tokens of one row take different numbers of steps."""
    return adaptive_model(name, text=EAGER, **{"exit_threshold": 0.15, "router_bias": 0.3, **fields})


def measured(model, **options):
    """FLOPs of a forward without the head, and its latent steps by pass."""
    found = []
    seen = counted_flops(lambda: found.append(model.model(random_ids(ROWS, LENGTH), use_cache=False, **options)))
    return seen, [latents.lengths for latents in found[0].pass_latents]


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_steps_are_what_torch_counts(name):
    model = eager_model(name)
    seen, (lengths,) = measured(model)
    flops = model_flops(model)
    assert 0 < lengths.float().mean() < 3 and seen == flops.steps(lengths, is_dense=True)
    assert flops.steps(lengths) < seen


@pytest.mark.parametrize("router", ["mlp", "multi_linear", "multi_mlp", "none"])
@torch.no_grad()
def test_one_gate_a_step_is_counted(router):
    model = eager_model("llama", router=router)
    seen, (lengths,) = measured(model)
    assert seen == model_flops(model).steps(lengths, is_dense=True)


@torch.no_grad()
def test_no_step_is_the_plain_model_and_equal_steps_have_a_closed_form():
    flops = model_flops(eager_model("gemma3_text"))
    lengths = torch.zeros(1, LENGTH, dtype=torch.long)
    assert flops.steps(lengths) == flops.passes(LENGTH) + LENGTH * flops.latent.gate
    assert flops.decode_steps(lengths) == flops.decode(LENGTH) == flops.decode(LENGTH, 0.0)
    assert flops.decode_steps(lengths + 2) == flops.decode(LENGTH, 2.0)
    assert flops.decode(LENGTH, 1.0) < flops.decode(LENGTH, 1.5) < flops.decode(LENGTH, 2.0)


@torch.no_grad()
def test_decoding_a_token_is_what_torch_counts():
    """One row, all entries of which lie below the new token's steps: nothing is computed that is not seen."""
    model = eager_model("llama", exit_at_step=3)
    ids = random_ids(1, LENGTH)
    cache = model(ids[:, :-1], use_cache=True, exit_at_step=1).cache
    seen = counted_flops(lambda: model(ids[:, -1:], cache=cache, use_cache=True))
    lengths = torch.tensor([[0] * (LENGTH - 1) + [2]])
    assert seen == model_flops(model).decode_steps(lengths)


@pytest.mark.parametrize("num_passes", [1, 2])
@torch.no_grad()
def test_a_composed_models_adapter_runs_once_a_token(num_passes):
    config = AdaptiveRecyclerConfig(text_config=text_config("llama", **EAGER), exit_threshold=0.15, router_bias=0.3)
    model = randomise(AdaptiveRecyclerForCausalLM(config)).double().eval()
    seen, passes = measured(model, num_passes=num_passes)
    flops = model_flops(model)
    steps = sum(flops.steps(lengths, is_dense=True) for lengths in passes)
    assert len(passes) == num_passes and seen == steps + flops.adapter * ROWS * LENGTH * (num_passes - 1)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "fields", [{}, {"penalize_cuts": True, "step_loss_weight": 0.1}, {"adaptive_loss_weight": 0.0}]
)
def test_a_training_step_is_what_torch_counts(name, fields):
    """Loss and backward; then the same from the counts that the loop keeps, in place of what fills short rows."""
    model = eager_model(name, **fields).train()
    ids, outputs = random_ids(ROWS, LENGTH), []

    def step():
        outputs.append(model(ids, labels=ids, use_cache=False, output_router_logits=False))
        outputs[0].loss.backward()

    seen = counted_flops(step)
    flops, latents = model_flops(model), outputs[0].latents
    lengths, num_targets = latents.lengths, ROWS * (LENGTH - 1)
    has_target = torch.arange(LENGTH) < LENGTH - 1
    gates = int(((lengths + 1).clamp(max=3) * has_target).sum())
    priced = 0 if flops.latent.prices is None else gates if fields else int(lengths[:, :-1].sum())
    heads = num_targets + flops.latent.has_step_loss * (num_targets + int(lengths[:, :-1].sum()))
    as_run = flops.steps(lengths, is_dense=True, keeps_rows=True)
    assert seen == 3 * as_run + 3 * flops.head * heads + flops.head * priced

    found = flops._counts(lengths) | {"latent_targets": int(lengths[:, :-1].sum())}
    summary = {"tokens": ROWS * LENGTH, "pass_tokens": ROWS * LENGTH + found["latent_steps"]}
    summary |= {"target_tokens": num_targets, **found}
    without_filling = seen - 3 * (as_run - flops.steps(lengths))
    # Of gates priced beyond the steps taken, the share without a target is estimated.
    assert training_flops(flops, summary, LENGTH, False) == pytest.approx(without_filling, rel=2e-3 if priced else 0)


def test_a_runs_total_is_its_counts(tmp_path):
    """Two passes, of tokens that took two steps each in both."""
    config = AdaptiveRecyclerConfig(text_config=text_config("llama_tied"), max_latent_steps=2, router="mlp")
    flops = model_flops(config)
    lengths = torch.full((1, 10), 2)
    one_pass = dict(zip(COUNTS, [2000, 2000, 2000, 100 * flops._counts(lengths)["attention_keys"]], strict=True))
    counts = {name: 2 * count for name, count in one_pass.items()}
    final = {"eval": {"latent_length": 1.0}}
    summary = {"tokens": 1000, "pass_tokens": 6000, "target_tokens": 1000, "final": final, **counts}
    layers, gates = 200 * (flops.steps(lengths) - 20 * flops.latent.gate), 4000 * flops.latent.gate
    expected = 3 * (layers + gates + 1000 * flops.adapter + 2000 * flops.head) + 4000 * flops.head
    assert training_flops(flops, summary, 10, False) == expected
    assert training_flops(flops, summary, 10, True) == expected + layers
    free = dataclasses.replace(flops, latent=dataclasses.replace(flops.latent, prices=None))
    assert training_flops(free, summary, 10, False) == expected - 4000 * flops.head
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    resolved = {"data": {"sequence_length": 10}, "train": {"gradient_checkpointing": False}}
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(resolved))
    found = run_flops(tmp_path)
    assert found.counted == expected and found.six_nd == 6 * flops.compute_parameters * 6000
    assert found.decode_per_token == flops.decode(5, 1.0), "as deep as the trained model was at last"
