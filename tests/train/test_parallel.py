"""Two processes against one: gradients, exchanges, checkpoints. The cases run in parallel_cases.py, in one start."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.train.conftest import BACKBONE
from tests.train.parallel_cases import (
    ENGINES,
    adaptive_cases,
    baseline_cases,
    compiled_cases,
    gradient_cases,
    run_until,
    without_dropout,
)
from unspoken.data.prepare import PrepareOptions, prepare
from unspoken.errors import UsageError
from unspoken.train.loop import TrainingLoop
from unspoken.train.parallel import Ranks
from unspoken.train.recipe import Recipe, TrainSection

ROOT = Path(__file__).parents[2]
EXACT = 3e-6  # float32, sums in another order
WEIGHTS = 2e-5  # after eleven steps of Adam, which turns rounding of a small gradient into a step of its own
STEPS = 11


@pytest.fixture(scope="module")
def values(data_folder, tmp_path_factory) -> dict[str, Any]:
    """Windows for four steps an epoch: a run of eleven steps ends in the third."""
    from unspoken.data.tokens import TokenShards

    text = tmp_path_factory.mktemp("text") / "text.txt"
    shards = TokenShards.open(data_folder)
    tokenizer = shards.load_tokenizer()
    text.write_text("\n\n".join(tokenizer.decode(shards.document(i)) for i in range(4)))
    folder = tmp_path_factory.mktemp("little") / "data"
    prepare(PrepareOptions((str(text),), tokenizer=str(data_folder / "tokenizer")), folder)
    length = max(9, TokenShards.open(folder).num_tokens // 17)
    return {
        "model": {
            "method": "recycler",
            "backbone": {**BACKBONE, "attention_dropout": 0.1, "max_position_embeddings": length},
            "pass_loss_reduction": "mean",
        },
        "data": {"path": str(folder), "sequence_length": length},
        "optim": {"learning_rate": 3e-3},
        "train": {
            "max_steps": STEPS, "batch_size": 4, "micro_batch_size": 1, "third_pass_fraction": 0.3, "log_every": 2,
            "eval_every": 0, "autocast": "none",
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(values, tmp_path_factory) -> Path:
    """What two processes found."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "values.json").write_text(json.dumps(values))
    for engine in ("ddp", "fsdp", "fsdp-segmented"):
        _alone(values, folder / engine / "begun-alone", stop=3)
    _in_two_processes(folder)
    return folder


def _in_two_processes(folder: Path, *options: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.train.parallel_cases", str(folder), *options]
    processes = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=900)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)[-4000:]


@pytest.fixture(scope="module")
def found(folder) -> dict[str, Any]:
    return json.loads((folder / "found-0.json").read_text())


@pytest.mark.parametrize("case", gradient_cases())
def test_gradients_equal_one_process(found, case):
    result = found["gradients"][case]
    assert result["largest"] > 1e-3
    assert result["worst"] < EXACT
    assert result["passes"] == gradient_cases()[case]["k"]


@pytest.mark.parametrize("case", adaptive_cases())
def test_gradients_equal_one_process_where_ranks_go_to_other_depths(found, case):
    """A sharded step that one rank takes alone would wait for the others for ever."""
    result = found["gradients"][case]
    assert result["largest"] > 1e-3
    assert result["worst"] < EXACT
    one, other = result["latent steps"]
    assert one != other and min(one, other) > 0


@pytest.mark.parametrize("case", baseline_cases())
def test_gradients_of_baselines_equal_one_process(found, case):
    result = found["gradients"][case]
    assert result["largest"] > 1e-3
    assert result["worst"] < EXACT


@pytest.mark.slow
def test_compiled_gradients_equal_one_process(tmp_path):
    (tmp_path / "values.json").write_text("{}")
    _in_two_processes(tmp_path, "--compiled")
    gradients = json.loads((tmp_path / "found-0.json").read_text())["gradients"]
    assert gradients.keys() == compiled_cases().keys()
    assert all(result["largest"] > 1e-3 and result["worst"] < EXACT for result in gradients.values()), gradients


@pytest.mark.parametrize("k", [1, 2, 3])
def test_what_is_exchanged_in_a_step(found, k):
    """One reduction for each unit, whatever k is; gathering grows with k, unless what is gathered is kept."""
    num_units = found["exchanges"]["fsdp, k=1"][2] + 1
    gathers, reduces, _ = found["exchanges"][f"fsdp, k={k}"]
    assert reduces == num_units
    assert gathers >= k * (num_units - 1) + 1
    gathers, reduces, _ = found["exchanges"][f"fsdp gathered, k={k}"]
    assert (gathers, reduces) == (num_units, num_units)
    _, reduces, _ = found["exchanges"][f"fsdp segmented, k={k}"]
    assert reduces >= k * (num_units - 1)


def test_the_self_test_sees_another_wrapper_and_a_missing_pass(found):
    assert "should run as ddp, but it is wrapped as fsdp" in found["disagreements"]["wrapper"]
    assert "ran 2 times in the first step; 3 passes over 1 parts" in found["disagreements"]["passes"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "fsdp segmented"])
def test_two_resumes_change_no_bit(found, engine):
    """At odd steps, in the middle of the first and in the second epoch, with dropout, stopped by one process alone."""
    result = found["training"][engine]
    assert result["tensors"] > 30
    assert result["parts are equal"]


def _alone(values: dict, out: Path, stop: int | None = None) -> TrainingLoop:
    """A run, or what is left of it, in one process."""
    out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe.model_validate({**without_dropout(values), "run": {"out": str(out)}})
    return run_until(recipe, Ranks(), stop)


@pytest.fixture(scope="module")
def whole(values, tmp_path_factory) -> TrainingLoop:
    return _alone(values, tmp_path_factory.mktemp("whole"))


def _assert_same_weights(model, whole: TrainingLoop) -> None:
    for (name, one), (_, other) in zip(model.named_parameters(), whole.model.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=WEIGHTS, msg=name)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_one_process_goes_on_where_two_stopped(folder, values, whole, engine):
    """No sample is lost or repeated: the weights are those of one process throughout, up to the order of sums."""
    resumed = _alone(values, folder / engine / "third")
    assert resumed.progress.step == STEPS
    assert resumed.progress.target_tokens == whole.progress.target_tokens
    _assert_same_weights(resumed.model, whole)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_go_on_where_one_stopped(folder, whole, engine):
    _assert_same_weights(AutoModelForCausalLM.from_pretrained(folder / engine / "begun-alone" / "model"), whole)


def test_a_sharded_run_s_model_loads_like_any_other(folder):
    """B88: a sharded run ended without loadable weights."""
    import unspoken  # noqa: F401

    loaded = AutoModelForCausalLM.from_pretrained(folder / "fsdp" / "model")
    assert type(loaded).__name__ == "RecyclerForCausalLM"
    assert loaded.config.architectures == ["RecyclerForCausalLM"]
    same = AutoModelForCausalLM.from_pretrained(folder / "ddp" / "model")
    for (name, one), (_, other) in zip(loaded.named_parameters(), same.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=WEIGHTS, msg=name)


def test_an_engine_that_cannot_be_is_refused():
    with pytest.raises(UsageError, match="fsdp needs several processes: `unspoken launch"):
        TrainSection(max_steps=1, parallel="fsdp").engine(1)
    with pytest.raises(UsageError, match=r"segmented_backward: give `train.parallel: fsdp`"):
        TrainSection(max_steps=1, segmented_backward=True).engine(2)
    with pytest.raises(ValueError, match="keep_gathered is for `parallel: fsdp`"):
        TrainSection(max_steps=1, keep_gathered=True)
    with pytest.raises(ValueError, match="not a multiple of the 3 processes"):
        TrainSection(max_steps=1, batch_size=4).share(3)
    with pytest.raises(ValueError, match="micro_batch_size 4 does not divide batch_size 12 over 2 processes"):
        TrainSection(max_steps=1, batch_size=12, micro_batch_size=4).share(2)
    assert TrainSection(max_steps=1, batch_size=8, micro_batch_size=8).share(2) == (4, 4)
    assert {TrainSection(max_steps=1, **options).engine(2) for options in ENGINES.values()} == {"ddp", "fsdp"}
