"""Classes of runs that must agree, and runs that must stop."""

import contextlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from unspoken.errors import UnspokenError
from unspoken.train.build import build_model, model_like, open_data
from unspoken.train.checkpoint import checkpoints
from unspoken.train.heldout import held_out_losses
from unspoken.train.loop import TrainingLoop
from unspoken.train.metrics import read_metrics
from unspoken.train.parallel import Engine, Ranks
from unspoken.train.recipe import Recipe
from unspoken.train.step import forward_backward

# Sums in another order, in float32, of numbers near 6: a few units in the last place.
ROUNDING = 2e-6
TIMES = {"tokens_per_second", "tokens_per_cpu_second", "wall_seconds", "cpu_seconds"}


def _changed(values: dict[str, Any], section: str, **fields: Any) -> Recipe:
    return Recipe.model_validate({**values, section: {**values[section], **fields}})


def _loop(recipe: Recipe, resume: bool = False) -> TrainingLoop:
    """What `unspoken train` sets up, without the files around it."""
    recipe.run.out.mkdir(exist_ok=True)
    data = open_data(recipe)
    checkpoint = checkpoints(recipe.run.out)[0] if resume else None
    torch.manual_seed(recipe.run.seed)
    model = build_model(recipe, data) if checkpoint is None else model_like(checkpoint)
    return TrainingLoop(recipe, model, data, checkpoint=checkpoint)


def _stop_after(loop: TrainingLoop, num_steps: int) -> None:
    """Pretend that a signal comes in step `num_steps`."""
    step = loop._step

    def stepping():
        if loop.progress.step + 1 == num_steps:
            loop.stop.number = 2
        return step()

    loop._step = stepping  # type: ignore[method-assign]


def _gradients(recipe: Recipe, micro_batch_rows: int, k: int, checkpointing: bool = False):
    data = open_data(recipe)
    torch.manual_seed(0)
    model = build_model(recipe, data)
    torch.nn.init.normal_(model.model.adapter.proj.weight, std=0.1)
    engine = Engine(model, recipe.train.model_copy(update={"gradient_checkpointing": checkpointing}), Ranks())
    batch = data.train.global_batch(0, 8)
    batch["labels"][1, 3:] = -100  # rows of unequal numbers of targets
    batch["labels"][5] = -100
    loss, pass_losses, num_targets, *_ = forward_backward(engine, batch, micro_batch_rows, k, contextlib.nullcontext())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss, pass_losses, num_targets, gradients


@pytest.mark.parametrize("k", [1, 2, 3])
def test_accumulation_1_and_8_agree(recipe, k):
    """Bug of many loops: a mean for each part makes the loss depend on the split."""
    loss, pass_losses, num_targets, gradients = _gradients(recipe, 8, k)
    loss8, pass_losses8, num_targets8, gradients8 = _gradients(recipe, 1, k)
    assert num_targets == num_targets8 < 8 * 32
    torch.testing.assert_close(loss8, loss, rtol=ROUNDING, atol=0)
    torch.testing.assert_close(pass_losses8, pass_losses, rtol=ROUNDING, atol=0)
    norm, norm8 = (torch.nn.utils.get_total_norm(g.values()) for g in (gradients, gradients8))
    torch.testing.assert_close(norm8, norm, rtol=ROUNDING, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients8[name], gradient, rtol=1e-4, atol=1e-7)


def test_gradient_checkpointing_changes_nothing(recipe):
    loss, _, _, gradients = _gradients(recipe, 4, 2)
    loss2, _, _, gradients2 = _gradients(recipe, 4, 2, checkpointing=True)
    assert torch.equal(loss, loss2)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients2[name])


def test_resume_is_as_if_there_had_been_no_pause(values, tmp_path):
    """7 steps against 3 + 4: equal bits, with dropout, third passes, evaluations and logged means across the seam."""
    values["model"]["backbone"]["attention_dropout"] = 0.1
    whole = _loop(_changed(values, "run", out=str(tmp_path / "whole")))
    assert whole.run()
    first = _loop(_changed(values, "run", out=str(tmp_path / "parts")))
    _stop_after(first, 3)
    assert not first.run()
    second = _loop(first.recipe, resume=True)
    assert second.progress.step == 3
    assert second.run()
    for name, parameter in whole.model.state_dict().items():
        assert torch.equal(parameter, second.model.state_dict()[name]), name
    rows = [[_without_times(row) for row in read_metrics(tmp_path / folder)] for folder in ("whole", "parts")]
    assert rows[0] == rows[1]
    assert [(row["step"], row["kind"]) for row in rows[0]] == [
        *[(0, "eval"), (2, "train"), (3, "eval"), (4, "train"), (6, "train"), (6, "eval"), (7, "train"), (7, "eval")]
    ]
    assert whole.progress.pass_tokens == second.progress.pass_tokens


def _without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in TIMES}


def test_rows_after_the_checkpoint_are_dropped_at_resume(values, recipe):
    """A run killed at step 5 resumes at 4 and logs step 4's evaluation and step 5 once."""
    recipe = _changed(values, "train", save_every=2, log_every=1)
    loop = _loop(recipe)
    with pytest.raises(ZeroDivisionError):
        _raise_in_step(loop, 6)
        loop.run()
    assert [path.name for path in checkpoints(recipe.run.out)] == ["step-00000004", "step-00000002"]
    resumed = _loop(recipe, resume=True)
    assert resumed.run()
    steps = [row["step"] for row in read_metrics(recipe.run.out) if row["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert (recipe.run.out / "metrics.csv").read_text().count("\n") == 1 + len(read_metrics(recipe.run.out))


def _raise_in_step(loop: TrainingLoop, step: int) -> None:
    original = loop._step
    loop._step = lambda: original() if loop.progress.step + 1 < step else 1 // 0  # type: ignore[method-assign]


def test_training_lowers_both_losses_and_counts_its_compute(values):
    recipe = Recipe.model_validate({**values, "train": {"max_steps": 40, "batch_size": 8, "eval_every": 40}})
    loop = _loop(recipe)
    assert loop.run()
    first, last = (row for row in read_metrics(recipe.run.out) if row["kind"] == "eval")
    assert first["loss_pass_1"] == first["loss_pass_2"] == first["loss_pass_3"]  # the adapter starts at zero
    assert all(last[f"loss_pass_{i}"] < first[f"loss_pass_{i}"] - 0.5 for i in (1, 2, 3))
    assert loop.progress.tokens == 40 * 8 * 33
    assert loop.progress.pass_tokens == 2 * loop.progress.tokens
    assert 0 < loop.progress.target_tokens < loop.progress.tokens
    logged = [row for row in read_metrics(recipe.run.out) if row["kind"] == "train"]
    assert logged[0]["adapter_to_embedding"] > 0
    assert logged[0]["embedding_rms"] == pytest.approx(1.0, abs=0.3)


def test_a_plain_model_trains_in_the_same_loop(values):
    recipe = Recipe.model_validate(
        {**values, "model": {"method": "vanilla", "backbone": values["model"]["backbone"]}}
        | {"train": {"max_steps": 3, "batch_size": 4, "eval_every": 3}}
    )
    loop = _loop(recipe)
    assert loop.run()
    assert loop.progress.pass_tokens == loop.progress.tokens
    assert set(loop.last_rows["eval"]) == {"step", "kind", "tokens", "loss_pass_1", "wall_seconds", "cpu_seconds"}


def test_an_adapter_that_swamps_the_embedding_is_reported_once(values, capsys):
    """B61: recycled states much larger than embeddings, unseen until the loss is lost."""
    values["train"] |= {"max_steps": 2, "log_every": 1, "eval_every": 0, "third_pass_fraction": 0}
    for std, num_warnings in ((0.01, 0), (10.0, 1)):
        loop = _loop(Recipe.model_validate(values))
        torch.nn.init.normal_(loop.model.model.adapter.proj.weight, std=std)
        loop.run()
        assert capsys.readouterr().err.count("times as large as the token embeddings") == num_warnings


@pytest.mark.parametrize("poison", ["weights", "gradient"])
def test_a_value_that_is_not_finite_stops_before_the_weights_move(recipe, poison):
    loop = _loop(recipe)
    weight = loop.model.model.backbone.norm.weight
    if poison == "weights":
        with torch.no_grad():
            weight[0] = float("nan")
    else:
        weight.register_hook(lambda gradient: gradient * float("inf"))
    before = loop.model.lm_head.weight.detach().clone()
    with pytest.raises(UnspokenError, match=r"step 1: not a finite number") as error:
        loop.run()
    assert error.value.exit_code == 1
    saved = load_file(recipe.run.out / "not-finite-step-1.safetensors")
    expected = loop.data.train.global_batch(0, 4)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    assert torch.equal(loop.model.lm_head.weight, before)


def test_held_out_losses_equal_one_window_at_a_time(recipe):
    data = open_data(recipe)
    torch.manual_seed(0)
    model = build_model(recipe, data)
    torch.nn.init.normal_(model.model.adapter.proj.weight, std=0.1)
    losses = held_out_losses(model, data.held_out, num_sequences=5, batch_size=2, num_passes=3)
    assert model.training
    for k in (1, 2, 3):
        total = count = 0.0
        for i in range(5):
            window = {name: row[None] for name, row in data.held_out[i].items()}
            with torch.no_grad():
                logits = model.eval()(window["input_ids"], position_ids=window["position_ids"], num_passes=k).logits
            targets = window["labels"][0, 1:]
            keep = targets != -100
            nats = torch.nn.functional.cross_entropy(logits[0, :-1][keep], targets[keep], reduction="sum")
            total, count = total + float(nats), count + int(keep.sum())
        assert losses[f"loss_pass_{k}"] == pytest.approx(total / count, rel=1e-5)
    assert losses.keys() == {"loss_pass_1", "loss_pass_2", "loss_pass_3"} and len(set(losses.values())) == 3


def test_two_passes_with_a_frozen_adapter_are_the_plain_model(values, tmp_path):
    """The control of every comparison: the mean of two equal losses, and no gradient of the adapter in the clipping."""
    values["train"] |= {"max_steps": 5, "third_pass_fraction": 0.0, "eval_every": 5, "autocast": "none"}
    losses = {}
    for method in ("recycler", "vanilla"):
        model = {"method": method, "backbone": values["model"]["backbone"]}
        model |= {"pass_loss_reduction": "mean"} if method == "recycler" else {}
        optim = {**values["optim"], "adapter_learning_rate_factor": 0, "max_grad_norm": 0.1}
        loop = _loop(
            Recipe.model_validate({**values, "model": model, "optim": optim, "run": {"out": tmp_path / method}})
        )
        assert loop.run()
        losses[method] = loop.last_rows["eval"]
    assert losses["recycler"]["loss_pass_2"] == losses["recycler"]["loss_pass_1"]
    assert losses["recycler"]["loss_pass_1"] == pytest.approx(losses["vanilla"]["loss_pass_1"], rel=1e-5)
