"""Mixtures of experts: the recipes' sizes, and what a training run says of its experts."""

from pathlib import Path

import pytest
import torch
import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from unspoken import RecyclerConfig, RecyclerForCausalLM
from unspoken.train.build import build_model, open_data
from unspoken.train.loop import TrainingLoop
from unspoken.train.metrics import read_metrics
from unspoken.train.recipe import Recipe

RECIPES = Path(__file__).parents[2] / "recipes" / "pretrain"
MOE = {
    "model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "norm_topk_prob": True, "router_aux_loss_coef": 0.05, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "vocab_size", "total", "active"), [("moe_1b", 49152, 1e9, 151e6), ("moe_small", 4096, 3.17e6, 1.4e6)]
)
def test_the_recipe_s_sizes(name, vocab_size, total, active):
    """On the meta device, so that a billion parameters cost nothing."""
    recipe = Recipe.model_validate(yaml.safe_load((RECIPES / f"{name}.yaml").read_text()))
    fields = dict(recipe.model.backbone)
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields, vocab_size=vocab_size)
    with torch.device("meta"):
        model = RecyclerForCausalLM(RecyclerConfig(text_config=config))
    num_parameters = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    idle = experts * (1 - config.num_experts_per_tok / config.num_experts)
    assert num_parameters == pytest.approx(total, rel=0.02)
    assert num_parameters - idle == pytest.approx(active, rel=0.02)


def test_a_small_one_trains_and_says_how_its_experts_are_used(values, tmp_path):
    """The balancing loss is on for a new model (transformers' own default is off)."""
    values["model"]["backbone"] = MOE
    values["train"] |= {"max_steps": 40, "batch_size": 8, "log_every": 20, "eval_every": 40, "third_pass_fraction": 0.0}
    recipe = Recipe.model_validate(values)
    recipe.run.out.mkdir()
    data = open_data(recipe)
    torch.manual_seed(0)
    model = build_model(recipe, data)
    assert model.config.text_config.output_router_logits
    loop = TrainingLoop(recipe, model, data)
    assert loop.run()
    rows = read_metrics(recipe.run.out)
    before, after = (row["loss_pass_2"] for row in rows if row["kind"] == "eval")
    assert after < before - 0.5
    logged = [row for row in rows if row["kind"] == "train"]
    for row in logged:
        assert row["loss"] > (row["loss_pass_1"] + row["loss_pass_2"]) / 2 + 0.04  # coefficient x at least 1, a pass
    for i in (1, 2):
        load_min, load_max = (logged[0][f"expert_load_{end}_pass_{i}"] for end in ("min", "max"))
        assert 0 <= load_min <= 1 <= load_max <= 2


def test_expert_loads_by_hand():
    """Two layers' logits of three tokens over four experts, top 1: loads 4/3 x (share of tokens) x 3."""
    from tests.families import tiny_model
    from unspoken.train.norms import _expert_loads

    model = tiny_model("mixtral", torch.float32)
    model.config.text_config.num_experts_per_tok = 1
    choice = torch.tensor([[0, 0, 1], [3, 3, 3]])
    logits = tuple(torch.nn.functional.one_hot(layer, 4).float() for layer in choice)
    assert _expert_loads(model, logits, 1) == {"expert_load_min_pass_1": 0.0, "expert_load_max_pass_1": 4.0}
    assert _expert_loads(model, logits, 2)["expert_load_max_pass_1"] == pytest.approx(4 * 2 / 3)
    assert _expert_loads(model, None, 2) == {}
