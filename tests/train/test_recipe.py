"""Recipes are strict: what cannot be meant is refused with its place, its name and what is valid."""

from pathlib import Path

import pytest
import yaml

from unspoken.errors import UsageError
from unspoken.rl.recipe import RLRecipe
from unspoken.train.recipe import Recipe
from unspoken.train.recipe_file import compact, dotted, load_recipe

TEXT = """\
run: {out: runs/x}
model:
  method: recycler
  backbone: {model_type: llama, hidden_size: 128}
data: {path: data/x}
optim:
  learning_rate: 1e-4
train:
  total_tokens: 1.2e6
  batch_size: 8
"""
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def load(tmp_path):
    def load(text: str = TEXT, *overrides: str) -> Recipe:
        path = tmp_path / "r.yaml"
        path.write_text(text)
        return load_recipe(path, list(overrides))

    return load


def test_numbers_that_yaml_reads_as_text(load):
    recipe = load()
    assert recipe.optim.learning_rate == 1e-4
    assert recipe.train.total_tokens == 1_200_000
    assert recipe.num_steps == 1_200_000 // (8 * 256)


def test_overrides_win_in_both_spellings(load):
    recipe = load(
        TEXT,
        *("--optim.learning_rate=2e-3", "--train.compile", "true", "--optim.betas", "[0.8, 0.9]"),
        *("--model.backbone.num_hidden_layers", "3", "--run.report_to", "wandb", "--train.batch_size=4"),
    )
    assert recipe.optim.learning_rate == 2e-3
    assert recipe.optim.betas == (0.8, 0.9)
    assert recipe.train.compile is True
    assert recipe.train.batch_size == 4
    assert recipe.model.backbone == {"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 3}
    assert recipe.run.report_to == ["wandb"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "learning_rate",
            "learnign_rate",
            r"r.yaml:7: optim.learnign_rate: unknown key \(did you mean 'learning_rate'",
        ),
        ("batch_size", "warmup_steps", r"r.yaml:10: train.warmup_steps: .*did you mean 'optim.warmup_steps'"),
        ("train:", "trian:", r"r.yaml:8: trian: unknown key \(did you mean 'train'"),
        ("batch_size: 8", "batch_size: -1", r"r.yaml:10: train.batch_size: expected greater than 0, got -1"),
        ("batch_size: 8", "batch_size: 2.5", r"train.batch_size: .*integer.* got 2.5"),
        ("batch_size: 8", "batch_size: true", r"train.batch_size: a number is expected"),
        ("1e-4", ".nan", r"optim.learning_rate: .*finite number"),
        ("1e-4", "fast", r"optim.learning_rate: .*valid number.* got 'fast'"),
        ("method: recycler", "method: chained", r"model.method: expected 'recycler', .* or 'mor', got 'chained'"),
        ("learning_rate: 1e-4", "eps: 1e-8", r"r.yaml:6: optim.learning_rate: required"),
        ("batch_size: 8", "batch_size: 8\n  batch_size: 4", r"r.yaml:11: train.batch_size is given twice"),
        ("batch_size: 8", "max_steps: 8", r"train: give one of `total_tokens`, `max_steps` and `num_epochs`"),
        ("batch_size: 8", "micro_batch_size: 3", r"train: micro_batch_size 3 does not divide batch_size 8"),
        ("method: recycler", "num_train_passes: 2", r"model: give `from_pretrained`, or `method`"),
        ("method: recycler", "method: vanilla\n  num_train_passes: 2", r"model: `num_train_passes` is for"),
        ("method: recycler", "method: recycler\n  from_pretrained: x", r"brings its own backbone"),
        ("1.2e6", "2047", r"train.total_tokens 2047 is less than one step: 2048"),
        ("1e-4", "1e-4\n  warmup_steps: 3\n  warmup_fraction: 0.1", r"optim: give `warmup_steps` or"),
        ("{out: runs/x}", "{out: [", r"r.yaml:3: not valid YAML"),
        ("path: data/x", "path: x, sources: [{path: y}]", r"r.yaml:5: data: give one of `path`"),
        (
            "{path: data/x}",
            "\n  sources:\n  - {path: x}\n  - path: y\n    wieght: 2",
            r"r.yaml:9: data.sources.1.wieght: unknown key \(did you mean 'weight'\?\)",
        ),
    ],
)
def test_what_is_refused(load, old, new, message):
    assert old in TEXT
    with pytest.raises(UsageError, match=message):
        load(TEXT.replace(old, new))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--train.batch_sze", "3"], r"--train.batch_sze: unknown key \(did you mean 'batch_size'"),
        (["--learning_rate=3"], r"--learning_rate: unknown key \(did you mean 'optim.learning_rate'"),
        (["--optim.learning_rate", "-1"], r"--optim.learning_rate: expected greater than 0, got -1"),
        (["--train.batch_size"], r"--train.batch_size needs a value"),
        (["--train.batch_size", "--run.seed", "1"], r"--train.batch_size needs a value"),
        (["--run.out.x", "1"], r"--run.out.x: out is a value, not a section"),
        (["-x", "1"], r"unexpected argument '-x'"),
        (["stray"], r"unexpected argument 'stray'"),
        (
            ["--data.path", "null", "--data.sources", "[{path: x, pth: y}]"],
            r"--data.sources: data.sources.0.pth: unknown",
        ),
    ],
)
def test_overrides_that_are_refused(load, overrides, message):
    with pytest.raises(UsageError, match=message):
        load(TEXT, *overrides)


def test_a_replaced_list_is_blamed_on_the_option_not_on_the_file(load):
    text = TEXT.replace("{path: data/x}", "{sources: [{path: x, weight: 1}]}")
    with pytest.raises(UsageError, match=r"^--data.sources: data.sources.0.weight: expected greater than 0, got -1"):
        load(text, "--data.sources", "[{path: x, weight: -1}]")


@pytest.mark.parametrize("text", ["", "- a\n", "train", "a: [1\n"])
def test_not_a_recipe(load, text):
    with pytest.raises(UsageError, match=r"r\.yaml"):
        load(text)


def test_no_such_file(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read the recipe .*No such file"):
        load_recipe(tmp_path / "none.yaml", [])


def test_every_wrong_key_is_named_at_once(load):
    with pytest.raises(UsageError) as error:
        load(TEXT.replace("hidden_size", "x").replace("batch_size", "batch").replace("path", "pth"))
    assert "train.batch" in str(error.value) and "data.pth" in str(error.value)


def test_a_resolved_recipe_is_a_recipe_that_says_the_same(load, tmp_path):
    recipe = load(TEXT, "--optim.warmup_steps", "5", "--train.micro_batch_size", "2")
    path = tmp_path / "resolved.yaml"
    path.write_text(compact({**recipe.plain(), "made_with": {"torch": "2", "unspoken": "0.1.0"}}))
    assert load_recipe(path, []) == recipe.model_copy(update={"made_with": {"torch": "2", "unspoken": "0.1.0"}})
    assert len(path.read_text().splitlines()) == 6  # one line a section


STUDIES = {*RECIPES.rglob("study.yaml"), *(RECIPES / "compare").iterdir()}  # tests/paper has those
RL_FILES = sorted((RECIPES / "rl").glob("*.yaml"))
RECIPE_FILES = sorted({*RECIPES.rglob("*.yaml")} - STUDIES - {*RL_FILES})


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda p: str(p.relative_to(RECIPES)))
def test_the_recipes_of_the_repository_are_valid(path):
    recipe = load_recipe(path, [])
    assert recipe.train.num_epochs or recipe.num_steps > 0


@pytest.mark.parametrize("path", RL_FILES, ids=lambda p: p.name)
def test_the_recipes_for_reinforcement_learning_are_valid(path):
    assert load_recipe(path, [], RLRecipe).num_updates > 0


def test_arms_of_a_comparison_differ_in_the_method_alone():
    plain, recycler = (
        dict(dotted(yaml.safe_load((RECIPES / "demo" / f"{name}.yaml").read_text()))) for name in ("plain", "recycler")
    )
    differing = {key for key in plain.keys() | recycler.keys() if plain.get(key) != recycler.get(key)}
    assert differing == {
        "run.out",
        "model.method",
        "model.num_train_passes",
    }
