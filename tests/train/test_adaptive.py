"""Adaptive latent CoT in the training loop: what is logged, counted and resumed; and both methods in one."""

from typing import Any

import pytest
import torch
import yaml

from unspoken import cli
from unspoken.analysis.flops import run_flops
from unspoken.errors import UsageError
from unspoken.train.build import build_model, open_data
from unspoken.train.loop import TrainingLoop
from unspoken.train.metrics import read_metrics
from unspoken.train.recipe import Recipe
from unspoken.train.recipe_file import check_recipe
from unspoken.train.schedule import is_uncut


@pytest.fixture
def adaptive(values) -> dict[str, Any]:
    values["model"] = {"method": "adaptive", "backbone": values["model"]["backbone"], "max_latent_steps": 2}
    values["train"] |= {"third_pass_fraction": 0.0, "log_every": 1, "autocast": "none"}
    return values


def _loop(values: dict[str, Any], **changes: Any) -> TrainingLoop:
    recipe = Recipe.model_validate({**values, **changes})
    recipe.run.out.mkdir(exist_ok=True)
    data = open_data(recipe)
    torch.manual_seed(0)
    return TrainingLoop(recipe, build_model(recipe, data), data)


def test_a_run_logs_how_deep_its_tokens_go(adaptive):
    """Every token takes both steps at first: the router is blind, its gates sigmoid(2)."""
    loop = _loop(adaptive)
    assert loop.run()
    rows = read_metrics(loop.folder)
    first = next(row for row in rows if row["kind"] == "eval")
    assert first["latent_length"] == 2.0
    logged = [row for row in rows if row["kind"] == "train"]
    assert all(0 <= row["latent_length"] <= 2 and row["adaptive_loss"] >= 0 for row in logged)
    assert all(row["loss"] == pytest.approx(row["loss_pass_1"] + row["adaptive_loss"], rel=1e-5) for row in logged)
    steps = sum(row["latent_length"] for row in logged) * loop.recipe.step_tokens
    progress = loop.progress
    assert progress.pass_tokens == progress.tokens + progress.latent_steps
    assert progress.latent_steps == pytest.approx(steps) and 0 < progress.latent_targets < progress.latent_steps


def test_what_its_steps_cost_is_counted(adaptive):
    """Every token takes both steps: step k reads k entries of each token up to its own."""
    adaptive["train"] |= {"no_cut_fraction": 1.0, "eval_every": 0}
    adaptive["model"] |= {"router_bias": -6.0}
    loop = _loop(adaptive)
    assert loop.run()
    progress, length = loop.progress, loop.recipe.data.sequence_length
    assert progress.latent_steps == progress.gates == 2 * progress.tokens
    assert progress.latent_targets == 2 * progress.target_tokens
    keys = (1 + 2 + 3) * length * (length + 1) // 2 * loop.model.config.num_hidden_layers
    assert progress.attention_keys == keys * progress.tokens // length


def test_a_router_that_lets_go_makes_the_steps_cheaper(adaptive):
    """Its gates are below the cut: no token takes a step, but for the first steps, which are not cut."""
    adaptive["model"] |= {"router_bias": -6.0, "exit_threshold": 0.01}
    adaptive["train"] |= {"no_cut_fraction": 0.3}
    loop = _loop(adaptive)
    assert loop.run()
    lengths = [row["latent_length"] for row in read_metrics(loop.folder) if row["kind"] == "train"]
    assert lengths == [2.0, 2.0, *[0.0] * 5]
    cuts = [row.get("gate_at_cut") for row in read_metrics(loop.folder) if row["kind"] == "train"]
    assert cuts[0] is None and cuts[-1] == pytest.approx(0.0025, abs=5e-4)


def test_the_first_steps_are_uncut():
    assert [is_uncut(step, 10, 0.25) for step in range(4)] == [True, True, False, False]
    assert not is_uncut(0, 10, 0.0)


def test_accumulation_changes_nothing(adaptive):
    loops = [_loop(adaptive, run={"out": f"{adaptive['run']['out']}-{rows}"}) for rows in (4, 1)]
    for rows, loop in zip((4, 1), loops, strict=True):
        loop.rows_at_once = rows
        loop._step()
    whole, parts = (loop.model.state_dict() for loop in loops)
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["adaptive", "adaptive_recycler"])
def test_a_run_from_recipe_to_model_and_its_resumption(adaptive, tmp_path, method):
    adaptive["model"] |= {"method": method, "router_bias": 0.0}
    adaptive["model"]["backbone"]["attention_dropout"] = 0.1
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(adaptive))
    whole = ["train", str(path), "--run.out", str(tmp_path / "whole")]
    assert cli.main([*whole, "--train.save_every", "3", "--train.keep_last", "5"]) == 0
    rows = read_metrics(tmp_path / "whole")
    for checkpoint in ("step-00000006", "step-00000007"):  # as if it had been stopped after the third step
        for file in (tmp_path / "whole" / "checkpoints" / checkpoint).iterdir():
            file.unlink()
        (tmp_path / "whole" / "checkpoints" / checkpoint).rmdir()
    counted = run_flops(tmp_path / "whole").counted
    (tmp_path / "whole" / "summary.json").unlink()
    assert cli.main([*whole, "--resume"]) == 0
    times = {"tokens_per_second", "tokens_per_cpu_second", "wall_seconds", "cpu_seconds"}
    again = read_metrics(tmp_path / "whole")
    assert [{k: v for k, v in row.items() if k not in times} for row in again] == [
        {k: v for k, v in row.items() if k not in times} for row in rows
    ]
    assert run_flops(tmp_path / "whole").counted == counted > 0


@pytest.mark.parametrize(
    ("method", "section", "key", "value", "message"),
    [
        ("recycler", "model", "router_bias", 1.0, "`router_bias` is for `method: adaptive`, and this is `method: rec"),
        ("adaptive", "model", "num_train_passes", 2, "`num_train_passes` is for `method: recycler`"),
        ("vanilla", "train", "no_cut_fraction", 0.1, "train.no_cut_fraction is for `method: adaptive`"),
        ("adaptive", "model", "exit_threshold", 2, "exit_threshold"),
        ("adaptive", "model", "router", "lstm", "router"),
    ],
)
def test_what_is_of_another_method_is_refused(adaptive, method, section, key, value, message):
    adaptive["model"] = {"method": method, "backbone": adaptive["model"]["backbone"]}
    adaptive[section][key] = value
    with pytest.raises(UsageError, match=message):
        check_recipe(adaptive, "recipe.yaml", {}, Recipe)


@pytest.fixture
def blind(adaptive, tmp_path):
    """A folder with an adaptive model, and a recipe that goes on from it."""
    recipe = Recipe.model_validate(adaptive)
    data = open_data(recipe)
    model = build_model(recipe, data)
    model.save_pretrained(tmp_path / "blind")
    data.tokenizer.save_pretrained(tmp_path / "blind")
    adaptive["model"] = {"from_pretrained": str(tmp_path / "blind")}
    return adaptive


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"router": "mlp"}, "model.router: .* has its part already, made with 'linear'"),
        ({"router_bias": 1.0}, "model.router_bias: .* has its part already, made with 2.0"),
        ({"exit_threshold": 0.9}, "model.exit_threshold: 0.9 cuts every token, as the new router's gates are all 0.88"),
    ],
    ids=str,
)
def test_what_an_adaptive_model_cannot_become_is_refused(blind, fields, message):
    """It trained, and wrote a model that nothing could load, or whose router had learned nothing."""
    blind["model"] |= fields
    recipe = Recipe.model_validate(blind)
    with pytest.raises(UsageError, match=message):
        build_model(recipe, open_data(recipe))


def test_more_gates_than_were_made_are_refused(adaptive, tmp_path):
    adaptive["model"] |= {"router": "multi_linear"}
    recipe = Recipe.model_validate(adaptive)
    data = open_data(recipe)
    build_model(recipe, data).save_pretrained(tmp_path / "two")
    data.tokenizer.save_pretrained(tmp_path / "two")
    adaptive["model"] = {"from_pretrained": str(tmp_path / "two"), "max_latent_steps": 5}
    recipe = Recipe.model_validate(adaptive)
    with pytest.raises(UsageError, match=r"model.max_latent_steps: .* has other weights than such a model"):
        build_model(recipe, data)


def test_a_new_router_that_cuts_everybody_is_refused_unless_nobody_is_cut_at_first(adaptive):
    adaptive["model"] |= {"exit_threshold": 0.95}
    recipe = Recipe.model_validate(adaptive)
    with pytest.raises(UsageError, match="cuts every token"):
        build_model(recipe, open_data(recipe))
    adaptive["train"] |= {"no_cut_fraction": 0.2}
    recipe = Recipe.model_validate(adaptive)
    assert build_model(recipe, open_data(recipe)).config.exit_threshold == 0.95
