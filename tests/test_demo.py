"""The demo's commands, words and numbers; the demo itself is too long for the suite."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.analysis.conftest import evaluation, write_run
from unspoken import cli
from unspoken.errors import UnspokenError
from unspoken.paper.command import Command, Record
from unspoken.paper.pipeline import Pipeline, Stage
from unspoken.train.recipe_file import load_recipe

DEMO = Path(__file__).parent.parent / "recipes" / "demo"
sys.path.insert(0, str(DEMO))
import findings  # noqa: E402
import run as demo  # noqa: E402
import story  # noqa: E402


@pytest.mark.parametrize("size", [demo.FULL, demo.QUICK], ids=["full", "quick"])
def test_every_command_of_the_demo_is_valid(size):
    """The command line parses it; a recipe's overrides too; and it needs only what comes before it."""
    seen: set[str] = set()
    for stage in demo.stages(Path("runs/demo"), size):
        for lane in stage.lanes:
            names = set(seen)
            for one in lane:
                assert set(one.needs) <= names, f"{one.name} runs before what it needs"
                names.add(one.name)
                args, overrides = cli.build_parser().parse_known_args(one.words)
                if one.words[0] == "train":
                    recipe = load_recipe(DEMO.parents[1] / args.recipe, overrides)
                    assert recipe.run.out == one.output
                else:
                    assert not overrides
        seen |= {one.name for lane in stage.lanes for one in lane}


def test_the_arms_of_a_comparison_differ_in_what_they_must_and_no_more():
    """Same tokens and batches, or same compute; recipes that drift apart would compare something else."""
    words = {c.name: c.words for s in demo.stages(Path("o"), demo.FULL) for lane in s.lanes for c in lane}
    recipes = {}
    for name, given in words.items():
        if given[0] == "train":
            recipes[name] = load_recipe(DEMO.parents[1] / given[1], list(given[2:])).plain()
    for prefix in ("", "smollm2-"):
        plain, recycler, twice = (recipes[prefix + name] for name in ("plain", "recycler", "plain-2x"))
        tokens = recycler["train"]["total_tokens"]
        assert (plain["train"]["total_tokens"], twice["train"]["total_tokens"]) == (tokens, 2 * tokens)
        for arm in (plain, twice):
            assert arm["model"].get("backbone") == recycler["model"].get("backbone") and arm["data"] == recycler["data"]
            for key in ("learning_rate", "weight_decay", "schedule", "warmup_steps", "warmup_fraction", "betas"):
                assert arm["optim"][key] == recycler["optim"][key]
            assert arm["train"]["batch_size"] == recycler["train"]["batch_size"]
            assert arm["run"]["seed"] == recycler["run"]["seed"]


@pytest.fixture
def arms(tmp_path):
    """Run and evaluation folders of one comparison, in which recycling wins by 0.1 nats."""
    for name, method in (("plain", "vanilla"), ("recycler", "recycler"), ("plain-2x", "vanilla")):
        write_run(tmp_path / name, method)
        loss = {"plain": 5.0, "recycler": 4.9, "plain-2x": 4.6}[name]
        names = ["k=1", "k=2", "exact"] if method == "recycler" else ["k=1"]
        nats = {key: [10 * loss + piece % 2 for piece in range(12)] for key in names}
        (tmp_path / f"eval-{name}").mkdir()
        text = json.dumps(evaluation(name, nats) | {"versions": {"torch": "2"}})
        (tmp_path / f"eval-{name}" / "eval.json").write_text(text)
    return tmp_path


def test_the_closing_table_and_sentence_follow_the_numbers(arms):
    comparison = findings.Comparison.read(arms, "Small")
    assert comparison.equal_tokens.mean == pytest.approx(-0.1) and comparison.equal_compute.mean == pytest.approx(0.3)
    console = Console(file=io.StringIO(), width=80)
    console.print(findings.closing_table(comparison))
    for text in ("recycler minus this", "-0.100 [-0.100, -0.100]", "+0.300 [+0.300, +0.300]", "1.8e10", "4.950"):
        assert text in console.file.getvalue()
    before = findings.Comparison.read(arms, "Small", before="plain")
    assert before.rows()[0][0][0] == "before" and before.rows()[0][1] == comparison.equal_tokens
    (sentence,) = findings.sentences([comparison], is_quick=False)
    assert sentence.startswith("Small: recycling beat the plain model at equal tokens") and "lost to it" in sentence
    assert findings.QUICK_SIZES in findings.sentences([comparison], is_quick=True)


def test_a_missing_result_is_named(arms):
    (arms / "eval-plain" / "eval.json").unlink()
    with pytest.raises(UnspokenError, match=r"eval-plain/eval.json is not there"):
        findings.Comparison.read(arms, "Small")


def test_the_report_says_where_another_text_had_to_do(arms):
    (arms / "data").mkdir()
    manifest = {"sources": [{"name": "stdlib", "licence": "PSF-2.0"}], "counts": {}, "splits": {"val": {"tokens": 5}}}
    (arms / "data" / "manifest.json").write_text(json.dumps(manifest))
    for name in ("plain", "recycler", "smollm2-plain", "smollm2-recycler"):
        line = {"prompt": "Once", "completions": [{"text": f" upon <{name}>"}]}
        (arms / f"generations-{name}.jsonl").write_text(json.dumps(line) + "\n")
    comparison = findings.Comparison.read(arms, "Small")
    (arms / "commands").mkdir()
    stage = Stage("T", "W", [[Command("data", ("data",), arms / "data", 1.0)]])
    pipeline = Pipeline(arms, [stage], ["unspoken"], Console(quiet=True))
    Record("done", ["data", "stdlib"], note="no network: <pip>").write(arms / "commands" / "data.json")
    html = story.write_report(arms, [comparison, comparison], pipeline, is_quick=False).read_text()
    assert "ran in place of the first choice. no network: &lt;pip&gt;" in html
    assert "upon &lt;smollm2-recycler&gt;" in html and "stdlib" in html and "lost to it" in html
    assert "was not verified" in html and "<script" not in html


def test_the_command_line_of_the_demo(tmp_path, monkeypatch):
    (tmp_path / "thesis.txt").touch()
    command_line = [sys.executable, str(DEMO / "run.py"), "--out", str(tmp_path)]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "holds other things" in done.stdout and "Traceback" not in done.stderr
