"""`unspoken rl`: a run from its recipe to its report, stopped and resumed bit for bit, and what it refuses."""

import json
import os
import shutil
import signal

import pytest
import torch
import yaml
from transformers import TrainerState

from tests import texts
from unspoken import cli
from unspoken.data.tokenizer import character_tokenizer
from unspoken.errors import UnspokenError
from unspoken.models.load import load_model
from unspoken.rl.checkpoints import SealedCheckpoints
from unspoken.train.metrics import read_metrics

REWARDS = '''
import math

def length(completions, **columns):
    """Rewards that differ within a group."""
    return [len(text if isinstance(text, str) else text[0]["content"]) / 10 for text in completions]

def broken(completions, **columns):
    return [math.nan] * len(completions)
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Sums of digits, and a small plain, recycler and adaptive model of their characters."""
    home = tmp_path_factory.mktemp("rl")
    rows = [
        {"prompt": f"{a}+{b}=", "completion": str(a + b), "answer": str(a + b), "task": "odd" if a % 2 else "even"}
        for a in range(6)
        for b in range(6)
    ]
    (home / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "rewards_of_test.py").write_text(REWARDS)
    tokenizer = character_tokenizer(row["prompt"] + row["completion"] for row in rows)
    for method in ("vanilla", "recycler", "adaptive"):
        texts.save(home / method, texts.text_model(method, text={"vocab_size": len(tokenizer)}), tokenizer)
    return home


@pytest.fixture(autouse=True)
def on_path(home, monkeypatch):
    monkeypatch.syspath_prepend(str(home))


def recipe_of(home, out, method="recycler", **sections) -> dict:
    recipe = {
        "run": {"out": str(out)},
        "model": {"from_pretrained": str(home / method)},
        "data": {"files": [str(home / "sums.jsonl")], "validation_fraction": 0.3},
        "reward": {"functions": ["rewards_of_test:length", "exact"], "weights": [1.0, 0.5]},
        "rollout": {"num_prompts": 2, "num_generations": 4, "max_new_tokens": 12},
        "policy": {"gap_limit": None},
        "optim": {"learning_rate": 0.01, "warmup_steps": 2},
        "train": {"num_rollouts": 4, "updates_per_rollout": 2, "micro_batch_size": 2, "eval_every": 2,
                  "save_every": 2, "eval_problems": 4},
    }  # fmt: skip
    for name, values in sections.items():
        recipe[name] = {**recipe[name], **values}
    return recipe


def rl(recipe: dict, tmp_path, *words: str) -> int:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return cli.main(["rl", str(path), *words])


def weights(run) -> dict:
    return load_model(run / "model")[0].state_dict()


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory):
    """A run to its end."""
    folder = tmp_path_factory.mktemp("finished")
    import sys

    sys.path.insert(0, str(home))
    assert rl(recipe_of(home, folder / "run"), folder) == 0
    return folder / "run"


def test_a_run_leaves_what_it_did(finished, home):
    rows = read_metrics(finished)
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4)
    ]  # fmt: skip
    train = [row for row in rows if row["kind"] == "train"]
    assert all(row["reward"] > 0 and row["tokens_per_second"] > 0 for row in train)
    assert all(row["gap/mean_abs"] > 0 and row["groups/all_truncated"] <= 1 for row in train)
    assert any(row["grad_norm"] > 0 for row in train)
    assert [row["learning_rate"] for row in train] == [0.01] * 4
    length, exact = (train[0][f"rewards/{name}/mean"] for name in ("length", "exact"))
    assert train[0]["reward"] == pytest.approx(length + 0.5 * exact, rel=1e-4)
    assert {"accuracy", "accuracy/even", "accuracy/odd"} <= rows[0].keys() and rows[0]["num_problems"] == 4
    samples = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert len({sample["prompt"] for sample in samples[:4]}) == 1
    assert samples[0]["rewards"]["length"] == pytest.approx(len(samples[0]["completion"]) / 10)
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["completions"] == 32 and summary["updates"] == 8
    assert summary["completion_tokens"] == round(sum(8 * row["completions/mean_length"] for row in train))
    page = (finished / "report.html").read_text()
    assert "Held-out problems, answered greedily" in page and "Gap to the rollout" in page
    before = load_model(home / "recycler")[0].state_dict()
    assert any(not torch.equal(before[name], weight) for name, weight in weights(finished).items())


def test_no_file_is_a_pickle(finished):
    for path in finished.rglob("*"):
        if path.is_file():
            assert path.suffix in (".safetensors", ".json", ".jsonl", ".csv", ".yaml", ".html", ".md", ".lock", "")


def test_a_resumed_run_ends_with_the_same_weights(finished, home, tmp_path):
    """From the second rollout of four; rows and samples of what came after it are written anew."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    shutil.rmtree(run / "model")
    (run / "summary.json").unlink()
    assert rl(recipe_of(home, run), tmp_path, "--resume") == 0
    expected = weights(finished)
    assert all(torch.equal(expected[name], weight) for name, weight in weights(run).items())
    ours, theirs = read_metrics(run), read_metrics(finished)
    timed = ("tokens_per_second", "wall_seconds", "cpu_seconds")
    assert [{k: v for k, v in row.items() if k not in timed} for row in ours] == [
        {k: v for k, v in row.items() if k not in timed} for row in theirs
    ]
    assert (run / "samples.jsonl").read_text() == (finished / "samples.jsonl").read_text()


def test_a_finished_run_is_left_alone(finished, home, tmp_path, capsys):
    assert rl(recipe_of(home, finished), tmp_path, "--resume") == 0
    assert "is finished" in capsys.readouterr().out


def test_a_signal_ends_it_between_rollouts(finished, home, tmp_path, monkeypatch, capsys):
    """SIGTERM in the third rollout's updates: its checkpoint is saved, and the resumed run ends as the whole one."""
    from unspoken.rl.run import PolicyTrainer

    original = PolicyTrainer.training_step

    def step(self, *args, **kwargs):
        if self.state.global_step == 5 and not self.journal.stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(PolicyTrainer, "training_step", step)
    run = tmp_path / "run"
    assert rl(recipe_of(home, run), tmp_path) == 130
    assert "stopped after rollout 3; go on with" in capsys.readouterr().out
    assert (run / "checkpoints" / "step-00000003").is_dir() and not (run / "model").exists()
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(home))
    assert rl(recipe_of(home, run), tmp_path, "--resume") == 0
    expected = weights(finished)
    assert all(torch.equal(expected[name], weight) for name, weight in weights(run).items())


@pytest.mark.parametrize("method", ["vanilla", "adaptive"])
def test_other_methods(method, home, tmp_path):
    sections = {"train": {"num_rollouts": 1, "save_every": 2, "eval_every": 0}, "policy": {"beta": 0.1}}
    assert rl(recipe_of(home, tmp_path / "run", method, **sections), tmp_path) == 0
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [
        "step-00000001"
    ]  # the last one is kept
    row = read_metrics(tmp_path / "run")[0]
    assert row["gap/max_abs"] < 1e-4 and ("gap/flipped" in row) == (method == "adaptive")
    assert (tmp_path / "run" / "reference" / "config.json").is_file() and row["kl"] >= 0


def test_a_broken_reward_ends_the_run_with_its_name(home, tmp_path, capsys):
    recipe = recipe_of(home, tmp_path / "run", reward={"functions": "rewards_of_test:broken", "weights": None})
    assert rl(recipe, tmp_path) == 1
    assert "reward rewards_of_test:broken returned nan for row 0" in capsys.readouterr().err


def test_a_gap_above_its_limit_stops_the_run(home, tmp_path, capsys):
    recipe = recipe_of(home, tmp_path / "run", policy={"gap_limit": 1e-9}, train={"num_rollouts": 1})
    assert rl(recipe, tmp_path) == 1
    assert "above its limit of 1e-09" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("train", {"updates_per_rollout": 3}, "3 does not divide the 8 completions"),
        ("train", {"micro_batch_size": 3}, "3 does not divide the 4 completions of an update"),
        ("rollout", {"num_generations": 1}, "rollout.num_generations"),
        ("rollout", {"top_p": 0.9}, "rollout.top_p: unknown key"),
        ("reward", {"weights": [1.0]}, "1 weights for 2 functions"),
        ("reward", {"functions": ["nowhere:at_all"], "weights": None}, "reward nowhere:at_all: No module named"),
        ("model", {"from_pretrained": None, "method": "recycler", "backbone": {"model_type": "llama"}},
         "model.from_pretrained: required"),
        ("policy", {"epsilon": 0}, "policy.epsilon"),
        ("data", {"validation_fraction": 0.0}, "no problem is held out"),
        ("rollout", {"max_new_tokens": 5000}, "together more than the model's context"),
        ("reward", {"functions": ["rewards_of_test:length", "other:length"]}, "length is twice among `functions`"),
        ("policy", {"num_scoring_passes": "exact"}, "train.gradient_checkpointing"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_sampled(section, values, message, home, tmp_path, capsys):
    recipe = recipe_of(home, tmp_path / "run", **{section: values})
    recipe["train"]["gradient_checkpointing"] = section == "policy"
    status = rl(recipe, tmp_path)
    error = capsys.readouterr().err
    assert status in (1, 2) and message in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_another_seed_is_another_run(finished, home, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "summary.json").unlink()
    assert rl(recipe_of(home, run), tmp_path, "--resume", "--run.seed", "1") == 2
    assert "run.seed is 1" in capsys.readouterr().err


def test_reports_of_both_kinds_are_not_mixed(finished, home, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert cli.main(["report", str(finished), "--out", str(out)]) == 0
    assert "Reinforcement learning" in out.read_text()
    (tmp_path / "other").mkdir()
    assert cli.main(["report", str(finished), str(tmp_path / "other"), "--out", str(out)]) == 2
    assert "a page of their own" in capsys.readouterr().err


def test_no_checkpoint_is_written_among_a_rollouts_updates():
    class Trainer(SealedCheckpoints):
        def __init__(self):
            self.state, self.updates_per_step = TrainerState(global_step=3), 2

    with pytest.raises(UnspokenError, match="1 updates into a rollout"):
        Trainer()._save_checkpoint(None, None)


def test_where_text_ends_outlives_a_checkpoint(home, tmp_path):
    """The source ends at another token than the tokenizer: both end text from then on. A sample holds a line separator
    that is no line feed."""
    from unspoken.analysis.policy_report import read_samples

    model, tokenizer = load_model(home / "recycler")
    model.generation_config.eos_token_id = 8
    assert tokenizer.eos_token_id == 0
    texts.save(tmp_path / "source", model, tokenizer)
    whole, run = tmp_path / "whole", tmp_path / "run"
    recipe = recipe_of(home, whole, model={"from_pretrained": str(tmp_path / "source")})
    assert rl(recipe, tmp_path) == 0
    at_checkpoint = json.loads((whole / "checkpoints" / "step-00000004" / "generation_config.json").read_text())
    assert at_checkpoint["eos_token_id"] == [0, 8]
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    (run / "summary.json").unlink()
    lines = (run / "samples.jsonl").read_text().split("\n")
    sample = json.loads(lines[0])
    (run / "samples.jsonl").write_text(
        "\n".join([json.dumps({**sample, "completion": "\u2028"}, ensure_ascii=False), *lines[1:]])
    )
    recipe["run"]["out"] = str(run)
    recipe["train"]["eval_every"] = 0
    assert rl(recipe, tmp_path, "--resume") == 0
    assert all(torch.equal(weights(whole)[name], weight) for name, weight in weights(run).items())
    ends = [load_model(folder / "model")[0].generation_config.eos_token_id for folder in (whole, run)]
    assert ends == [[0, 8], [0, 8]]
    assert read_samples(run / "samples.jsonl")[0]["completion"] == "\u2028"
    assert load_model(run / "model")[0].config.text_config.pad_token_id is None


def test_a_run_without_its_reference_cannot_go_on(home, tmp_path, capsys):
    recipe = recipe_of(home, tmp_path / "run", policy={"beta": 0.1}, train={"num_rollouts": 2, "save_every": 1})
    assert rl(recipe, tmp_path) == 0
    shutil.rmtree(tmp_path / "run" / "reference")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
    (tmp_path / "run" / "summary.json").unlink()
    assert rl(recipe, tmp_path, "--resume") == 1
    assert "reference is gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "", "answer": "1"}, "the prompt is empty"),
        ({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}, "all be texts or all be messages"),
        ({"prompt": "1+1=", "answer": "2", "images": "x"}, "'images' means something else to TRL"),
    ],
)
def test_a_row_that_cannot_be_asked_is_named(row, message, home, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text((home / "sums.jsonl").read_text() + json.dumps(row) + "\n")
    assert rl(recipe_of(home, tmp_path / "run", data={"files": [str(path)]}), tmp_path) == 1
    error = capsys.readouterr().err
    assert "rows.jsonl:37: " in error and message in error


@pytest.fixture(scope="module")
def short(home, tmp_path_factory):
    """What a short run leaves, by the keys that its recipe sets otherwise: its weights."""
    folder, known = tmp_path_factory.mktemp("short"), {}

    def run(**sections) -> dict:
        name = json.dumps(sections)
        if name not in known:
            out = folder / str(len(known))
            usual = {
                "train": {"num_rollouts": 2, "eval_every": 0, "save_every": 0},
                "optim": {"learning_rate": 0.03, "warmup_steps": 0},
                "rollout": {"num_generations": 8},
            }
            merged = {key: {**usual.get(key, {}), **sections.get(key, {})} for key in usual | sections}
            assert rl(recipe_of(home, out, **merged), folder) == 0
            known[name] = weights(out)
        return known[name]

    return run


@pytest.mark.parametrize(
    "change",
    [
        {"rollout": {"temperature": 0.5}},
        {"policy": {"epsilon": 10.0, "epsilon_high": 10.0}},
        {"policy": {"epsilon_high": 10.0}},
        {"policy": {"importance_sampling_level": "token"}},
        {"policy": {"scale_rewards": "none"}},
        {"policy": {"scale_rewards": "batch"}},
        {"policy": {"num_scoring_passes": 3}},
        {"policy": {"num_scoring_passes": "exact"}},
        {"policy": {"mask_truncated_completions": True}},
        {"policy": {"gap_limit": 1e-6, "on_gap": "correct"}},
        {"policy": {"gap_limit": 1e-6, "on_gap": "correct", "correction_limit": 1.0001}},
        {"policy": {"beta": 1.0}},
        {"train": {"num_iterations": 2}},
        {"train": {"updates_per_rollout": 4}},
        {"optim": {"max_grad_norm": 0.001}},
        {"optim": {"weight_decay": 0.5}},
        {"reward": {"weights": [-1.0, 0.5]}},
    ],
    ids=json.dumps,
)
def test_each_key_reaches_the_policy(change, short):
    """Another value is another policy, the seed the same."""
    before, after = short(), short(**change)
    assert any(not torch.equal(before[name], weight) for name, weight in after.items())
    if "correction_limit" in change.get("policy", {}):
        looser = short(policy={"gap_limit": 1e-6, "on_gap": "correct"})
        assert any(not torch.equal(looser[name], weight) for name, weight in after.items())
