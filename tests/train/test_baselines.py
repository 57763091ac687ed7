"""The models that ours are compared with, from a recipe to an evaluated, verified and resumed model."""

import json

import pytest
import torch
import yaml

from unspoken import cli
from unspoken.analysis.flops import run_flops
from unspoken.models.load import load_model
from unspoken.train.metrics import read_metrics
from unspoken.train.schedule import drawn_at

METHODS = {
    "looped": ("num_loops", 3),
    "pause": ("num_pauses", 2),
    "ponder": ("num_ponder_steps", 2),
    "mor": ("num_recursions", 3),
    "ponder2": ("num_latent_thoughts", 1),
}


@pytest.mark.parametrize("method", list(METHODS))
def test_a_run_from_recipe_to_evaluation(values, tmp_path, capsys, method):
    field, number = METHODS[method]
    values["model"] = {"method": method, "backbone": values["model"]["backbone"], field: number}
    if method == "looped":
        values["model"] |= {"norm_between_loops": True, "exit_gate": True}
    if method == "mor":
        values["model"]["backbone"] |= {"num_hidden_layers": 3}
    values["train"] |= {"third_pass_fraction": 0.0, "autocast": "none", "save_every": 3, "keep_last": 5}
    path, out = tmp_path / "recipe.yaml", tmp_path / "whole"
    path.write_text(yaml.safe_dump(values))
    train = ["train", str(path), "--run.out", str(out)]
    assert cli.main(train) == 0
    summary = json.loads((out / "summary.json").read_text())
    if method == "ponder2":  # seven steps of one run over tokens, three or four over tokens and thoughts
        each = [1 + 2 * (drawn_at(step, 0, [2, 3]) + 1) for step in range(7)]
        assert len(set(each)) == 2
        assert summary["pass_tokens"] == sum(each) * summary["tokens"] // 7
    elif method == "mor":
        assert summary["tokens"] < summary["pass_tokens"] == summary["tokens"] + summary["latent_steps"]
        assert summary["gates"] == summary["tokens"]
    else:
        assert summary["pass_tokens"] == (number if method == "looped" else number + 1) * summary["tokens"]
    assert run_flops(out).counted > 0
    rows = [row for row in read_metrics(out) if row["kind"] == "eval"]
    assert rows[-1]["loss_pass_1"] < rows[0]["loss_pass_1"]
    weights = load_model(out / "model")[0].state_dict()
    for name in ("step-00000006", "step-00000007"):  # as if it had been stopped after the third step
        for file in (out / "checkpoints" / name).iterdir():
            file.unlink()
        (out / "checkpoints" / name).rmdir()
    (out / "summary.json").unlink()
    assert cli.main([*train, "--resume"]) == 0
    again = load_model(out / "model")[0].state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    evaluated = ["eval", str(out / "model"), "--data", str(values["data"]["path"]), "--sequence-length", "32"]
    assert cli.main([*evaluated, "--max-sequences", "4", "--out", str(tmp_path / "eval")]) == 0
    results = json.loads((tmp_path / "eval" / "eval.json").read_text())["results"]
    assert list(results) == (["k=1", "exact"] if method == "ponder2" else ["k=1"])
    capsys.readouterr()
    assert cli.main(["generate", str(out / "model"), "--prompt", "The", "--max-new-tokens", "4"]) == 0
    assert cli.main(["verify", str(out / "model")]) == 0
