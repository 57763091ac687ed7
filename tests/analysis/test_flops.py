"""FLOPs in closed form against torch's own counter, on every family; and what runs and plans make of them."""

import json

import pytest
import torch
import yaml
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, MixtralConfig

from tests.families import ALL, MOE, SLIDING, random_ids, text_config, tiny_model
from unspoken import RecyclerConfig, VanillaConfig, VanillaForCausalLM
from unspoken.analysis.flops import Attention, model_flops, run_flops, training_flops
from unspoken.errors import UnspokenError

LENGTH = 11  # longer than the windows of the tiny families


def counted(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def eager_model(name: str, **fields):
    """In float64 experts run one by one; eager attention is matrix products: both are what the counter sees."""
    return tiny_model(name, text={"attn_implementation": "eager"}, **fields)


@pytest.mark.parametrize("num_passes", [1, 2, 3])
@pytest.mark.parametrize("name", ALL)
def test_passes_are_what_torch_counts(name, num_passes):
    model, ids = eager_model(name), random_ids(2, LENGTH)
    with torch.no_grad():
        seen = counted(lambda: model.model(ids, num_passes=num_passes, use_cache=False))
    assert seen == 2 * model_flops(model).passes(LENGTH, num_passes, is_dense=True)


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe", "gpt_oss", "gemma3_text"])
def test_head_and_plain_model_are_what_torch_counts(name):
    model, ids = eager_model(name), random_ids(1, LENGTH)
    plain = VanillaForCausalLM(VanillaConfig(text_config=model.config.text_config)).double()
    for one, num_passes in ((model, 2), (plain, 1)):
        flops = model_flops(one)
        with torch.no_grad():
            seen = counted(lambda: one(ids, num_passes=num_passes, use_cache=False))  # noqa: B023
        assert seen == flops.passes(LENGTH, num_passes, is_dense=True) + LENGTH * flops.head
    assert model_flops(plain).adapter == 0 and flops.layers == model_flops(model).layers


@pytest.mark.parametrize("num_passes", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_neox"])
def test_backward_is_twice_forward(name, num_passes):
    """The backward goes through every pass, and through the states that are handed from pass to pass."""
    model, ids = eager_model(name).train(), random_ids(1, LENGTH)

    def step():
        outputs = model.model(ids, num_passes=num_passes, use_cache=False)
        torch.stack(outputs.pass_hidden_states).sum().backward()

    first_pass_only = 3 * model_flops(model).adapter if num_passes == 1 else 0  # kept in the graph, on one zero state
    expected = 3 * model_flops(model).passes(LENGTH, num_passes, is_dense=True) + first_pass_only
    assert counted(step) == pytest.approx(expected, rel=0.002)


def test_checkpointing_runs_the_layers_once_more():
    model, ids = eager_model("llama").train(), random_ids(1, LENGTH)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    flops = model_flops(model)

    def step():
        outputs = model.model(ids, num_passes=2, use_cache=False)
        torch.stack(outputs.pass_hidden_states).sum().backward()

    expected = 4 * 2 * flops.passes(LENGTH, is_dense=True) + 3 * flops.adapter * LENGTH
    assert 0.95 * expected < counted(step) < expected
    with set_checkpoint_early_stop(False):  # then it stops at nothing
        assert counted(step) == expected
    without = flops.training(LENGTH, 2)
    assert flops.training(LENGTH, 2, True) - without == pytest.approx(2 * flops.passes(LENGTH) / LENGTH)


@pytest.mark.parametrize("name", SLIDING)
def test_windows_are_those_of_the_mask(name):
    """The keys that a position may see, counted one by one."""
    config = text_config(name)
    for layer in model_flops(RecyclerConfig(text_config=config)).attention:
        keys = sum(min(t + 1, layer.window or t + 1) for t in range(LENGTH))
        assert layer.over(LENGTH) == layer.flops_per_key * keys
        assert layer.at(LENGTH) == layer.over(LENGTH) - layer.over(LENGTH - 1)
    assert {layer.window for layer in model_flops(RecyclerConfig(text_config=config)).attention} >= {5}
    assert Attention(4, None).over(3) == 4 * (1 + 2 + 3) and Attention(4, 7).over(3) == 4 * (1 + 2 + 3)


def test_decoding_is_one_run_and_the_adapter():
    model = eager_model("llama")
    flops = model_flops(model)
    cache = model(random_ids(1, LENGTH - 1), use_cache=True).cache
    with torch.no_grad():
        seen = counted(lambda: model(random_ids(1, 1), cache=cache, use_cache=True))
    assert seen == flops.decode(LENGTH)
    assert flops.decode(LENGTH) == flops.passes(LENGTH, 1) - flops.passes(LENGTH - 1, 1) + flops.adapter + flops.head


@pytest.mark.parametrize("name", MOE)
def test_only_active_experts_count(name):
    """Twice the experts at the same number a token: the router alone grows."""
    few = model_flops(RecyclerConfig(text_config=text_config(name)))
    key = "num_experts" if name == "qwen3_moe" else "num_local_experts"
    many = model_flops(RecyclerConfig(text_config=text_config(name, **{key: 8})))
    assert many.layers - few.layers == 2 * 2 * 4 * 32 and many.compute_parameters > 1.5 * few.compute_parameters


def test_a_billion_parameters_cost_no_memory():
    dense = model_flops(RecyclerConfig(text_config=LlamaConfig(hidden_size=2048, num_hidden_layers=24)))
    assert dense.compute_parameters > 1e9
    assert dense.training(2048, 2) / (6 * dense.compute_parameters * 2) == pytest.approx(1.09, abs=0.05)
    sparse = model_flops(RecyclerConfig(text_config=MixtralConfig()))
    assert sparse.compute_parameters > 4e10 and sparse.layers < 0.6 * sparse.compute_parameters


def test_a_runs_total_is_its_passes(tmp_path):
    """Mixed passes: half of the steps ran three."""
    config = RecyclerConfig(text_config=text_config("llama_tied"))
    flops = model_flops(config)
    summary = {"tokens": 1000, "pass_tokens": 2500, "target_tokens": 900}
    expected = 3 * (
        flops.passes(10) / 10 * 2500 + flops.adapter * 1500 + flops.head * 900 * 2.5
    )  # fmt: skip
    assert training_flops(flops, summary, 10, False) == pytest.approx(expected)
    even = {"tokens": 1000, "pass_tokens": 2000, "target_tokens": 1000}
    assert training_flops(flops, even, 10, True) == pytest.approx(1000 * flops.training(10, 2, True))
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    resolved = {"data": {"sequence_length": 10}, "train": {"gradient_checkpointing": False}}
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(resolved))
    found = run_flops(tmp_path)
    assert found.counted == pytest.approx(expected) and found.six_nd == 6 * flops.compute_parameters * 2500
    (tmp_path / "summary.json").unlink()
    with pytest.raises(UnspokenError, match=r"FLOPs cannot be counted: FileNotFoundError.*summary.json"):
        run_flops(tmp_path)
