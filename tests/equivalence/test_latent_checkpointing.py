"""Activation checkpointing of whole latent steps, their keys handed on; and models that come back from a folder."""

import gc
import json

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from tests.equivalence.test_latent_decoding import Runs, greedy, thinking
from tests.equivalence.test_latent_training import LOUD, assert_same, gradients
from tests.equivalence.test_training import batch_of_rows
from tests.families import ALL, REPRESENTATIVE, plain_model, random_ids
from tests.models.test_save_load import assert_same_weights, reload
from unspoken import AdaptiveLatentForCausalLM, AdaptiveLatentModel
from unspoken.latent import active

KINDS = ["linear", "mlp", "multi_linear", "multi_mlp", "none"]


def checkpointing(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.parametrize("name", ALL)
def test_checkpointing_changes_nothing(name):
    """B50: a layer that checkpoints drops its cache, and with it the keys of earlier steps: the step saw nothing."""
    fields = {"text": {"output_router_logits": True}} if "moe" in name else {}
    model, batch = thinking(name, **LOUD, **fields).train(), batch_of_rows((7, 4))
    outputs = model(**batch)
    outputs.loss.backward()
    expected, num_runs = gradients(model), len(outputs.latents.taken)
    assert num_runs > 2
    checkpointing(model)
    runs = []
    model.model.backbone.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    again = model(**batch)
    assert len(runs) == num_runs
    again.loss.backward()
    assert len(runs) == 2 * num_runs, "each step ran again, and once"
    assert torch.equal(again.loss, outputs.loss)
    assert_same(gradients(model), expected, tolerance=1e-12)
    assert model.is_gradient_checkpointing
    assert model.config.text_config.use_cache  # B52
    model.gradient_checkpointing_disable()
    runs.clear()
    model(**batch).loss.backward()
    assert len(runs) == num_runs


class Saved:
    """Bytes that a forward keeps for its backward: what autograd saves, and what a checkpoint is handed."""

    def __init__(self, monkeypatch):
        self.storages: dict[int, int] = {}
        self.tensors: list[Tensor] = []  # alive, so that no address comes twice
        original = active.checkpoint

        def checkpoint(function, *args, **kwargs):
            for tensor in args:
                self.add(tensor)
            return original(function, *args, **kwargs)

        monkeypatch.setattr(active, "checkpoint", checkpoint)

    def add(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        self.storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def of(self, model, batch: dict) -> int:
        self.storages.clear()
        with torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor):
            loss = model(**batch).loss
        total = sum(self.storages.values())
        self.tensors.clear()
        loss.backward()
        gc.collect()
        return total


def test_checkpointing_keeps_less(monkeypatch):
    """Weights aside, a step leaves its keys, values and inputs alone."""
    model = thinking("llama", exit_threshold=0.0, text={"num_hidden_layers": 4}).train()
    ids, saved = random_ids(8, 64), Saved(monkeypatch)
    batch = {"input_ids": ids, "labels": ids}
    weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
    whole = saved.of(model, batch) - weights
    less = saved.of(checkpointing(model), batch)
    assert less < 0.35 * whole


@pytest.mark.parametrize("enable", ["head", "base", "older name"])
def test_who_asks_for_checkpointing(enable):
    model = thinking("llama").train()
    if enable == "older name":
        model.gradient_checkpointing_enable()
    else:
        (model if enable == "head" else model.model).activation_checkpointing_enable()
    assert model.model.gradient_checkpointing
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.model.backbone.modules())
    ids = random_ids(2, 5)
    model(ids, labels=ids).loss.backward()
    gradients(model)


def test_the_layers_of_a_model_without_latent_steps_checkpoint_themselves():
    """One run checkpointed as a whole would save nothing."""
    model = checkpointing(thinking("llama", max_latent_steps=0).train())
    assert all(layer.gradient_checkpointing for layer in model.model.backbone.layers)
    runs, ids = [], random_ids(2, 5)
    model.model.backbone.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    model(ids, labels=ids).loss.backward()
    assert len(runs) == 2


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_generation_from_a_model_that_checkpoints(name):
    """B51, in training mode too."""
    model, prompt = thinking(name), random_ids(1, 6)
    expected, runs = greedy(model, prompt, 4), Runs(checkpointing(model))
    for training in (True, False):
        runs.shapes.clear()
        assert torch.equal(greedy(model.train(training), prompt, 4), expected)
        assert [columns for _, columns in runs.shapes[-3:]] == [1, 1, 1]


def test_dropout_is_the_same_in_the_second_run():
    """Drawn anew, the gradient would be of another loss than the one reported."""
    model, ids = thinking("llama", text={"attention_dropout": 0.3}).train(), random_ids(2, 7)
    found = []
    for prepare in (lambda m: m, checkpointing):
        torch.manual_seed(1)
        loss = prepare(model)(ids, labels=ids).loss
        loss.backward()
        found.append((loss, gradients(model)))
    assert torch.equal(found[0][0], found[1][0])
    assert_same(found[1][1], found[0][1], tolerance=1e-12)


@pytest.mark.parametrize("name", ["llama_tied", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_survives_its_folder(kind, name, tmp_path):
    """Every field of the configuration at a value that is no default, and every weight of the router."""
    fields = {
        "max_latent_steps": 2,
        "exit_threshold": 0.2,
        "router_bias": 0.7,
        "adaptive_loss": "C",
        "adaptive_loss_weight": 0.3,
        "adaptive_loss_exponent": 2.0,
        "penalize_cuts": True,
        "step_loss_weight": 0.1,
        "embedding_scale": 1.5,
    }
    model, ids = thinking(name, torch.float32, router=kind, **fields), random_ids(2, 7)
    model.save_pretrained(tmp_path)
    loaded = reload(tmp_path)
    assert type(loaded) is AdaptiveLatentForCausalLM
    assert_same_weights(model, loaded)
    for field, value in fields.items():
        assert getattr(loaded.config, field) == value, field
    assert loaded.config.router == kind
    expected, outputs = model(ids, labels=ids), loaded(ids, labels=ids)
    assert torch.equal(outputs.logits, expected.logits)
    assert torch.equal(outputs.loss, expected.loss)
    assert torch.equal(outputs.latents.lengths, expected.latents.lengths)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is AdaptiveLatentModel
    assert torch.equal(base.eval()(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_names_of_the_router_s_parameters_are_the_contract(tmp_path):
    model = thinking("llama", torch.float32, router="multi_mlp", max_latent_steps=2)
    model.save_pretrained(tmp_path)
    names = {n.removeprefix("model.router.") for n in model.state_dict() if "router" in n}
    assert names == {f"gates.{i}.{j}.{kind}" for i in (0, 1) for j in (0, 2) for kind in ("weight", "bias")}
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "unspoken_adaptive"


def test_a_router_that_a_checkpoint_lacks_starts_blind(tmp_path):
    """B82: a base model's folder loaded with a router of random weights would decide at random from the start."""
    from unspoken import convert

    plain_model("llama_tied", torch.float32).save_pretrained(tmp_path)
    model = convert(tmp_path, method="adaptive", router="mlp", router_bias=-1.5)
    last = model.model.router.gates[0][2]
    assert not last.weight.any()
    assert last.bias.item() == -1.5
    assert model.model.router.gates[0][0].weight.std() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, tmp_path):
    model, ids = thinking("llama_tied", torch.float32), random_ids(1, 5)
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    assert {p.dtype for p in half.parameters()} == {dtype}
    assert_same_weights(half, model.to(dtype))
    outputs = half(ids, labels=ids)
    assert outputs.logits.dtype == dtype
    assert outputs.loss.dtype == torch.float32
    assert greedy(half, ids, 3).shape == (1, 8)
