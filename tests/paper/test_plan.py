"""The commands of every shipped study, and the control that freezes the adapter."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.families import random_ids, tiny_model
from unspoken import cli
from unspoken.paper.arms import Arms
from unspoken.paper.command import Record
from unspoken.paper.plan import Plan
from unspoken.paper.study import known_studies, load_study
from unspoken.train.optim import build_optimizer, set_learning_rate
from unspoken.train.recipe import OptimSection
from unspoken.train.recipe_file import load_recipe
from unspoken.train.schedule import LearningRate


@pytest.mark.parametrize("is_quick", [False, True], ids=["full", "quick"])
@pytest.mark.parametrize("name", known_studies())
def test_every_command_is_valid_and_needs_what_comes_before(name, is_quick, tmp_path):
    study = load_study(name)
    arms = Arms(study, tmp_path / name, is_quick=is_quick)
    plan = Plan(arms, arms.runs(list(study.file.arms), study.file.seeds))
    plan.write_recipes()
    seen: set[str] = set()
    for stage in plan.stages(2):
        for lane in stage.lanes:
            for one in lane:
                assert set(one.needs) <= seen, f"{one.name} runs before what it needs"
                seen.add(one.name)
                args, overrides = cli.build_parser().parse_known_args(one.words)
                assert not overrides and one.cpu_seconds > 0
                if one.words[0] == "train":
                    assert load_recipe(Path(args.recipe), []).run.out == one.output
                else:
                    assert Path(args.out) == one.output


def test_the_seeds_of_a_study_differ_in_the_seed_alone(values, make_plan):
    plan = make_plan(values)
    pairs = [[run.values for run in plan.runs if run.arm == arm] for arm in values["arms"]]
    for first, second in pairs:
        assert first["run"].pop("seed") + 1 == second["run"].pop("seed")
        assert first["run"].pop("out") != second["run"].pop("out")
        if "from_pretrained" in first["model"]:
            assert first["model"].pop("from_pretrained") != second["model"].pop("from_pretrained")
        assert first == second


def test_a_rate_of_zero_freezes_the_adapter_whole():
    """The control `adapter-zero`: no decay moves it either, and the second pass stays the first."""
    model = tiny_model("llama_tied", dtype=torch.float32).train()
    torch.nn.init.zeros_(model.model.adapter.proj.weight)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optim = OptimSection(learning_rate=1e-2, weight_decay=0.5, adapter_learning_rate_factor=0.0)
    optimizer = build_optimizer(dict(model.named_parameters()), optim)
    for step in range(3):
        set_learning_rate(optimizer, LearningRate(optim, 3), step)
        output = model(random_ids(2, 9, seed=step), labels=random_ids(2, 9, seed=step), num_passes=2)
        output.loss.backward()
        assert output.pass_losses[0] == output.pass_losses[1]
        assert model.model.adapter.proj.weight.grad.any()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved and not any("adapter" in name for name in moved) and len(moved) == len(before) - 2


@pytest.mark.slow
def test_a_study_is_stopped_goes_on_and_is_reported(tmp_path):
    out = tmp_path / "out"
    words = [sys.executable, "-m", "unspoken.cli", "paper", "recycler-fig8", "--quick", "--arms", "ct-recycler"]
    words += ["--out", str(out), "--jobs", "2"]
    study = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log, deadline = out / "commands" / "pt-plain-s0.log", time.monotonic() + 300
    while not (log.exists() and "step" in log.read_text()):
        assert time.monotonic() < deadline and study.poll() is None
        time.sleep(0.05)
    study.send_signal(signal.SIGTERM)
    assert "stopped" in study.communicate(timeout=120)[0] and study.returncode == 130
    assert not (out / "results.json").exists()
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done before: data" in done.stdout and "introduced at continued pretraining" not in done.stdout
    for name in ("pt-plain-s0", "ct-recycler-s0", "ct-recycler-s0-eval"):
        assert Record.read(out / "commands" / f"{name}.json").status == "done"
    assert "ct-recycler" in (out / "table.md").read_text() and (out / "report.html").is_file()
