"""Each parameter in exactly one group, with the right decay and rate."""

import pytest
import torch
from transformers import AutoConfig

from unspoken import RecyclerConfig, RecyclerForCausalLM
from unspoken.errors import UnspokenError
from unspoken.train.optim import build_optimizer, parameter_groups, set_learning_rate
from unspoken.train.recipe import OptimSection
from unspoken.train.schedule import LearningRate

OPTIM = OptimSection(learning_rate=1e-2, weight_decay=0.1, adapter_learning_rate_factor=0.3, warmup_steps=0)


def _model(model_type: str = "llama", tied: bool = True) -> RecyclerForCausalLM:
    config = AutoConfig.for_model(
        model_type,
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return RecyclerForCausalLM(RecyclerConfig(text_config=config))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt_neox"])
def test_every_parameter_is_in_one_group(model_type, tied):
    model = _model(model_type, tied)
    groups = parameter_groups(dict(model.named_parameters()), 0.1)
    names = [name for group in groups for name, _ in group["params"]]
    ids = [id(parameter) for group in groups for _, parameter in group["params"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert sorted(ids) == sorted({id(p) for p in model.parameters()})
    assert ("lm_head.weight" in names) is not tied


def test_who_is_decayed():
    by_group = {g["group"]: g for g in parameter_groups(dict(_model("qwen2", tied=False).named_parameters()), 0.1)}
    decayed = {name for name, _ in by_group["decayed"]["params"]}
    assert {"model.backbone.embed_tokens.weight", "lm_head.weight"} <= decayed
    assert not any("norm" in name or name.endswith("bias") or "adapter" in name for name in decayed)
    assert {name for name, _ in by_group["adapter"]["params"]} == {
        "model.adapter.norm.weight",
        "model.adapter.proj.weight",
    }
    assert [by_group[name]["weight_decay"] for name in ("decayed", "plain", "adapter")] == [0.1, 0.0, 0.0]


def test_frozen_parameters_are_left_out():
    model = _model()
    model.model.backbone.requires_grad_(False)
    names = [name for group in parameter_groups(dict(model.named_parameters()), 0.1) for name, _ in group["params"]]
    assert names == ["model.adapter.norm.weight", "model.adapter.proj.weight"]
    with pytest.raises(UnspokenError, match="no trainable parameter"):
        parameter_groups(dict(model.requires_grad_(False).named_parameters()), 0.1)


def test_decay_and_rates_in_a_step():
    """With zero gradients a step of AdamW is the decay alone: p *= 1 - lr * decay."""
    model = _model()
    optimizer = build_optimizer(dict(model.named_parameters()), OPTIM)
    set_learning_rate(optimizer, LearningRate(OPTIM, 10), 0)
    assert {g["group"]: g["lr"] for g in optimizer.param_groups} == {"decayed": 1e-2, "plain": 1e-2, "adapter": 3e-3}
    torch.nn.init.ones_(model.model.adapter.proj.weight)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1.0 if parameter.ndim == 1 or "adapter" in name else 1 - 1e-2 * 0.1
        torch.testing.assert_close(parameter.detach(), before[name] * factor)
