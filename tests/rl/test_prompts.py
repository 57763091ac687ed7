"""The order of prompts, which sides they fall on, and what is checked before anything is sampled."""

import json

import pytest

from tests import texts
from unspoken.data.tokenizer import character_tokenizer
from unspoken.errors import UnspokenError
from unspoken.eval.problems import Problem
from unspoken.eval.rewards import find
from unspoken.rl.prompts import Rollouts, read_prompts
from unspoken.rl.recipe import RLRecipe

PROBLEMS = [Problem({"prompt": f"{i}+1=", "answer": str(i + 1), "completion": "x"}, "t", f"f:{i}") for i in range(5)]


def recipe(seed: int = 0, **data) -> RLRecipe:
    return RLRecipe.model_validate({
        "run": {"out": "run", "seed": seed},
        "model": {"from_pretrained": "m"},
        "data": {"files": ["none"], **data},
        "reward": {"functions": "exact"},
        "rollout": {"num_prompts": 4, "num_generations": 2, "max_new_tokens": 4},
        "optim": {"learning_rate": 1e-3},
        "train": {"num_rollouts": 5, "eval_problems": 3},
    })  # fmt: skip


def test_problems_are_gone_through_in_a_new_order_each_time():
    rollouts = Rollouts(PROBLEMS, recipe())
    assert len(rollouts) == 20
    asked = [rollouts[i]["prompt"] for i in range(20)]
    rounds = [asked[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(one) == sorted(problem.prompt for problem in PROBLEMS) for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1
    assert asked == [Rollouts(PROBLEMS, recipe())[i]["prompt"] for i in range(20)]
    assert asked != [Rollouts(PROBLEMS, recipe(seed=1))[i]["prompt"] for i in range(20)]
    assert set(rollouts[0]) == {"prompt", "answer"}, "a completion is for fine-tuning"


@pytest.fixture
def files(tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "val.jsonl").write_text(json.dumps({"prompt": "1+1+1=", "answer": "3"}) + "\n")
    return tmp_path


def read(files, functions=("exact",), **data):
    tokenizer = character_tokenizer(["0123456789+="])
    model = texts.text_model("vanilla", text={"vocab_size": len(tokenizer)})
    section = {"files": [files / "train.jsonl"], **data}
    return read_prompts(recipe(**section), tokenizer, model, [find(name) for name in functions])


def test_the_fingerprint_is_of_both_sides(files):
    first = read(files, validation_files=[files / "val.jsonl"])
    assert len(first.train) == 25 and len(first.held_out) == 1
    (files / "val.jsonl").write_text(json.dumps({"prompt": "1+1+2=", "answer": "4"}) + "\n")
    assert read(files, validation_files=[files / "val.jsonl"]).fingerprint != first.fingerprint


def test_an_equal_prompt_falls_on_the_same_side(files):
    parted = read(files, validation_fraction=0.4)
    assert 0 < len(parted.train) < 25 and not {p.prompt for p in parted.train} & {p.prompt for p in parted.held_out}
    lines = (files / "train.jsonl").read_text().splitlines()
    (files / "train.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    again = read(files, validation_fraction=0.4)
    assert {p.prompt for p in again.train} == {p.prompt for p in parted.train}


def test_a_held_out_row_that_a_reward_cannot_read_is_named(files):
    (files / "val.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    with pytest.raises(UnspokenError, match=r"val.jsonl:1: reward exact: the row has no 'answer'"):
        read(files, validation_files=[files / "val.jsonl"])
