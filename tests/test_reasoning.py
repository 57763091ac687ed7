"""The commands, words and tables of the study of answers and rewards; the study itself is too long for the suite."""

import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from unspoken import cli
from unspoken.data.problem_specs import parse
from unspoken.rl.recipe import RLRecipe
from unspoken.train.recipe_file import load_recipe

FOLDER = Path(__file__).parent.parent / "recipes" / "reasoning"
sys.path.insert(0, str(FOLDER))
import outcome  # noqa: E402
import settings  # noqa: E402

_spec = importlib.util.spec_from_file_location("reasoning_run", FOLDER / "run.py")
assert _spec is not None and _spec.loader is not None
study = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(study)

SIZES = {**settings.STUDIES, **{f"{name} quick": size for name, size in settings.QUICK.items()}}


@pytest.mark.parametrize("name", SIZES)
def test_every_command_is_valid_and_follows_what_it_needs(name):
    seen: set[str] = set()
    for stage in study.stages(Path("out"), SIZES[name], [0, 1], 1):
        made = {command.name for lane in stage.lanes for command in lane} | seen
        for lane in stage.lanes:
            for command in lane:
                assert set(command.needs) <= made and command.name not in seen
                seen.add(command.name)
                args, overrides = cli.build_parser().parse_known_args(command.words)
                if command.words[0] in ("train", "sft", "rl"):
                    schema = [RLRecipe] if command.words[0] == "rl" else []
                    recipe = load_recipe(FOLDER.parents[1] / args.recipe, overrides, *schema)
                    assert recipe.run.out == command.output and recipe.run.seed in (0, 1)
                else:
                    assert not overrides and Path(args.out) == command.output


@pytest.mark.parametrize("name", settings.STUDIES)
def test_what_is_compared_differs_in_what_it_must_alone(name):
    """Same rows, batches, rates and seed; the plain model of equal compute reads twice as much."""
    lanes = [lane for stage in study.stages(Path("out"), settings.STUDIES[name], [0], 1) for lane in stage.lanes]
    recipes = {}
    for command in (command for lane in lanes for command in lane if command.words[0] == "sft"):
        args, overrides = cli.build_parser().parse_known_args(command.words)
        recipes[command.name] = load_recipe(FOLDER.parents[1] / args.recipe, overrides).plain()
    plain = recipes.pop("sft-plain-s0")
    for arm, recipe in recipes.items():
        assert recipe["data"] == plain["data"] and recipe["optim"].keys() == plain["optim"].keys()
        assert {key for key in recipe["optim"] if recipe["optim"][key] != plain["optim"][key]} <= {
            "adapter_warmup_fraction"
        }
        differing = {key for key in recipe["train"] if recipe["train"][key] != plain["train"][key]}
        assert differing == ({"num_epochs" if name == "smollm2" else "max_steps"} if "2x" in arm else set())
        for key in ("max_steps", "num_epochs"):
            if plain["train"][key] and "2x" in arm:
                assert recipe["train"][key] == 2 * plain["train"][key]
        assert recipe["model"]["backbone"] == plain["model"]["backbone"]


def test_specs_are_data_sets_with_labels():
    for size in settings.STUDIES.values():
        assert [spec.label for spec in parse(size.specs)] == [spec.partition("=")[0] for spec in size.specs]


def test_tables_by_hand(tmp_path):
    """Two arms, two seeds, four problems of two tasks."""
    size = settings.replace(
        settings.SMALL, arms=settings.SMALL.arms[:1] + settings.SMALL.arms[2:3], specs=("a=x", "b=x")
    )
    answers = {
        "sft-plain-s0": [1, 0, 0, 0], "sft-plain-s1": [1, 1, 0, 0],
        "sft-recycler-s0": [1, 1, 1, 0], "sft-recycler-s1": [1, 1, 0, 0],
    }  # fmt: skip
    for name, rewards in answers.items():
        folder = tmp_path / "evals" / name
        folder.mkdir(parents=True)
        shares = {"a": sum(rewards[:2]) / 2, "b": sum(rewards[2:]) / 2}
        scores = {
            "tasks": {task: {"accuracy": share, "majority": 0.5} for task, share in shares.items()},
            "all": {"accuracy": sum(rewards) / 4, "majority": 0.5},
            "data": {"sha256": "of the file"},
        }
        (folder / "eval_problems.json").write_text(json.dumps(scores))
        rows = [{"place": f"val.jsonl:{i}", "reward": float(reward)} for i, reward in enumerate(rewards)]
        (folder / "eval_problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = tmp_path / name
        run.mkdir()
        (run / "summary.json").write_text(json.dumps({"train_flops": 2.0e9}))
    outcome.write_outcome(tmp_path, size, [0, 1], Console(file=io.StringIO()))
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert "| majority | 50.0 | 50.0 | 50.0 |  |  |" in lines
    assert "| plain | 75.0 (50.0, 100.0) | 0.0 (0.0, 0.0) | 37.5 (25.0, 50.0) | 2.00e09 | 2 |" in lines
    assert "| recycler | 100.0 (100.0, 100.0) | 25.0 (50.0, 0.0) | 62.5 (75.0, 50.0) | 2.00e09 | 2 |" in lines
    assert any(line.startswith("| recycler - plain | +25.0 [") and line.endswith("| +50.0, +0.0 |") for line in lines)
    assert "recycler - plain" in (tmp_path / "report.html").read_text()


def test_nothing_finished_is_no_table(tmp_path):
    outcome.write_outcome(tmp_path, settings.SMALL, [0], Console(file=io.StringIO()))
    assert not list(tmp_path.iterdir())
