"""From a study to each run's recipe: what an arm changes, what it leaves out, and what an override may change."""

from pathlib import Path

import pytest

from unspoken.errors import UsageError
from unspoken.paper.arms import Arms
from unspoken.train.recipe_file import load_recipe


@pytest.fixture
def make_arms(write_study, tmp_path):
    return lambda values, *overrides, **more: Arms(write_study(values), tmp_path / "out", overrides, **more)


def test_an_arm_is_the_base_and_its_own_keys(values, make_arms):
    run = make_arms(values).run("recycler", 7, None)
    model, train = run.values["model"], run.values["train"]
    assert model["pass_loss_reduction"] == "mean" and train["third_pass_fraction"] == 0.1
    assert run.name == "recycler-s7" and run.values["run"]["seed"] == 7 and run.total_tokens == 1_000_000
    assert run.values["run"]["out"].endswith("out/runs/recycler-s7") and run.num_passes == 2


def test_a_plain_arm_leaves_out_what_is_recyclers(values, make_arms):
    run = make_arms(values).run("plain", 0, None)
    assert "num_train_passes" not in run.values["model"] and "third_pass_fraction" not in run.values["train"]
    assert run.values["model"]["backbone"] == values["base"]["model"]["backbone"] and run.num_passes == 1
    values["arms"]["plain"]["model.num_train_passes"] = 2  # what the arm itself says is not left out, but refused
    with pytest.raises(UsageError, match=r"`num_train_passes` is for `method: recycler`.*in arm 'plain'"):
        make_arms(values).run("plain", 0, None)


def test_an_arm_that_goes_on_starts_from_the_others_model_and_reads_on(values, make_arms, tmp_path):
    arms = make_arms(values)
    first, later = arms.runs(["later"], [3])
    assert (first.name, later.name, later.after) == ("plain-s3", "later-s3", "plain-s3")
    model = later.values["model"]
    assert model["from_pretrained"] == str(tmp_path / "out" / "runs" / "plain-s3" / "model")
    assert "backbone" not in model and model["num_train_passes"] == 2
    assert later.values["run"]["seed"] == 1003 and later.total_tokens == 250_000


def test_overrides_change_every_arm_and_keep_their_differences(values, make_arms):
    arms = make_arms(values, "--train.total_tokens", "2e6", "--optim.learning_rate=1e-3")
    plain, twice = arms.run("plain", 0, None), arms.run("plain-2x", 0, None)
    assert (plain.total_tokens, twice.total_tokens) == (2_000_000, 4_000_000)
    assert twice.values["optim"]["learning_rate"] in ("1e-3", 0.001)


def test_a_budget_changes_the_base_and_has_runs_of_its_own(values, make_arms):
    arms = make_arms({**values, "budgets": [100_000, 400_000]})
    runs = arms.runs(["plain-2x"], [0])
    assert [run.name for run in runs] == ["plain-2x-100k-s0", "plain-2x-400k-s0"]
    assert [run.total_tokens for run in runs] == [200_000, 800_000]


def test_factors_need_a_number_to_multiply(values, make_arms):
    values["arms"]["recycler"] = {"optim.learning_rate": "x0.5", "train.batch_size": "x2"}
    run = make_arms(values).run("recycler", 0, None)
    assert run.values["optim"]["learning_rate"] == 0.0015 and run.values["train"]["batch_size"] == 8
    values["arms"]["recycler"] = {"optim.weight_decay": "x2"}
    with pytest.raises(UsageError, match=r"optim.weight_decay: x2 of what"):
        make_arms(values).run("recycler", 0, None)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"optim.learning_rat": 1}, r"study.yaml:\d+: optim.learning_rat: unknown key \(did you mean"),
        ({"learning_rate": 1}, r"study.yaml:\d+: arm 'recycler': learning_rate .*did you mean 'optim.learning_rate'"),
        ({"afer": "plain"}, r"did you mean 'after'"),
        ({"train.batch_size": 0}, r"study.yaml:\d+: train.batch_size: expected greater than 0"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_arm_is_named_with_its_line(values, make_arms, keys, message):
    values["arms"]["recycler"] = keys
    with pytest.raises(UsageError, match=message):
        make_arms(values).runs(["recycler"], [0])


def test_a_base_may_be_a_recipe_file(values, make_arms, tmp_path):
    values["base"] = str(Path(__file__).parents[2] / "recipes" / "demo" / "recycler.yaml")
    arms = make_arms(values)
    assert arms.makes_text and arms.run("plain", 0, None).values["data"]["path"] == str(tmp_path / "out" / "data")
    assert arms.run("plain-2x", 0, None).total_tokens == 2_400_000
    values["base"] = "nowhere.yaml"
    with pytest.raises(UsageError, match=r"cannot read the base recipe .*nowhere.yaml"):
        make_arms(values).run("plain", 0, None)


def test_data_of_ones_own(values, make_arms):
    """An inline base's data.path is meant; of a recipe file's it is another experiment's folder."""
    arms = make_arms(values)
    assert not arms.makes_text and arms.run("plain", 0, None).values["data"]["path"] == "elsewhere"
    del values["base"]["data"]["path"]
    assert make_arms(values).makes_text and not make_arms(values, "--data.path", "mine").makes_text


def test_quick_keeps_the_proportions(values, make_arms):
    arms = make_arms(values, is_quick=True)
    plain, twice = arms.run("plain", 0, None), arms.run("plain-2x", 0, None)
    assert twice.total_tokens == 2 * plain.total_tokens <= 20_000


def test_a_written_recipe_is_a_recipe(values, make_plan):
    plan = make_plan(values)
    plan.write_recipes()
    run = plan.runs[-1]
    recipe = load_recipe(plan.recipe_path(run), [])
    assert recipe.run.seed == run.values["run"]["seed"] and recipe.train.save_every == 200
