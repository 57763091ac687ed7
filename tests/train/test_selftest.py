"""The first step stops a run that would train something else than it says."""

import contextlib

import pytest
import torch

from tests.families import random_ids, tiny_model
from unspoken.errors import UnspokenError
from unspoken.train.parallel import Engine, Ranks
from unspoken.train.recipe import TrainSection
from unspoken.train.selftest import SelfTest
from unspoken.train.step import forward_backward

TRAIN = TrainSection(max_steps=1)


def _first_step(model, num_passes: int, asked: int | None = None, rows_at_once: int = 2) -> None:
    engine = Engine(model.train(), TRAIN, Ranks())
    test = SelfTest(engine, TRAIN)
    ids = random_ids(2, 9)
    forward_backward(engine, {"input_ids": ids, "labels": ids}, rows_at_once, num_passes, contextlib.nullcontext())
    test.check(asked or num_passes, 2 // rows_at_once)


@pytest.mark.parametrize("rows_at_once", [1, 2])
@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_a_sound_model_passes(num_passes, rows_at_once):
    model = tiny_model("llama_tied", torch.float32)
    torch.nn.init.zeros_(model.model.adapter.proj.weight)  # as at the start of training
    _first_step(model, num_passes, rows_at_once=rows_at_once)
    assert not model.model.backbone._forward_pre_hooks  # nothing stays behind


def test_a_parameter_outside_the_loss_is_named():
    model = tiny_model("llama_tied", torch.float32)
    model.model.adapter.forgotten = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UnspokenError, match=r"1 trainable parameters got no gradient .*model\.adapter\.forgotten"):
        _first_step(model, 2)


def test_a_frozen_backbone_is_no_fault():
    model = tiny_model("llama", torch.float32)
    model.model.backbone.requires_grad_(False)
    _first_step(model, 2)


def test_fewer_passes_than_asked():
    with pytest.raises(UnspokenError, match=r"ran 1 times .* 2 passes over 1 parts of the batch are 2"):
        _first_step(tiny_model("llama", torch.float32), 1, asked=2)


def test_a_model_that_does_not_recycle(monkeypatch):
    model = tiny_model("llama", torch.float32)
    recycled = model.model._recycled
    monkeypatch.setattr(model.model, "_recycled", lambda *args: torch.zeros_like(recycled(*args)))
    with pytest.raises(UnspokenError, match="the adapter's gradient is zero after the first step of 2 passes"):
        _first_step(model, 2)
