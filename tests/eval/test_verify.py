"""Sound models pass every check; each kind of broken model turns the row red that is there for it."""

import json

import pytest
import torch

from tests import texts
from tests.families import REPRESENTATIVE, tiny_model
from unspoken import cli, convert, export_backbone
from unspoken.eval.checks import BASE_CHECK, CHECKS
from unspoken.eval.verify import TOLERANCES, verify
from unspoken.latent.cache import RecycledStateLayer
from unspoken.models import recycler


def failed(verification) -> list[str]:
    return [result.name for result in verification.results if result.passed is False]


@pytest.fixture
def model():
    return texts.text_model(dtype=torch.float64)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_sound_model_passes(name):
    verification = verify(tiny_model(name, torch.float32), seed=3)
    assert failed(verification) == []
    assert [result.name for result in verification.results] == list(CHECKS)
    assert verification.passed and not verification.adapter_was_zero


def test_a_plain_model_passes_what_applies_to_it():
    verification = verify(texts.text_model("vanilla"))
    assert verification.passed
    not_run = ["k >= length = exact", "latent steps = one by one"]
    assert [result.name for result in verification.results if result.passed is None] == not_run
    assert verification.results[0].tolerance == TOLERANCES[torch.float32]


def applied_at_document_starts(monkeypatch, model):
    monkeypatch.setattr(recycler, "receiving_positions", lambda real, position_ids, prompt_mask: None)


def pads_recycled(monkeypatch, model):
    monkeypatch.setattr(recycler, "real_positions", lambda attention_mask, num_tokens: None)


def state_not_reordered(monkeypatch, model):
    monkeypatch.setattr(RecycledStateLayer, "reorder_cache", lambda self, beam_idx: None)


def wrong_state_recycled(monkeypatch, model):
    """The state of two positions ago, after a prefill."""
    monkeypatch.setattr(RecycledStateLayer, "read", lambda self: None if self.is_empty else self.states[:, -2:][:, :1])


def state_lost(monkeypatch, model):
    monkeypatch.setattr(RecycledStateLayer, "read", lambda self: None if self.is_empty else 0 * self.states[:, -1:])


def shifted_twice(monkeypatch, model):
    once = recycler.shift
    monkeypatch.setattr(
        recycler, "shift", lambda states, receives, previous=None: once(once(states, receives), receives, previous)
    )


def peeks_at_the_future(monkeypatch, model):
    for layer in model.model.backbone.layers:
        layer.self_attn.register_forward_hook(
            lambda module, inputs, output: (output[0] + 0.1 * output[0].roll(-1, dims=1), *output[1:])
        )


def mixes_rows(monkeypatch, model):
    model.model.adapter.register_forward_hook(lambda module, inputs, output: output.mean(0, keepdim=True) + 0 * output)


def weight_not_saved(monkeypatch, model):
    model._keys_to_ignore_on_save = ["model.adapter.norm.weight"]


def not_a_number(monkeypatch, model):
    model.model.adapter.register_forward_hook(lambda module, inputs, output: output * float("nan"))


BROKEN = [
    (applied_at_document_starts, "packed = separate"),
    (pads_recycled, "padded = unpadded"),
    (state_not_reordered, "beam score = rescored"),
    (wrong_state_recycled, "decode = sequential reference"),
    (wrong_state_recycled, "cached = uncached"),
    (state_lost, "decode = sequential reference"),
    (shifted_twice, "k >= length = exact"),
    (peeks_at_the_future, "causality"),
    (mixes_rows, "batch = single"),
    (weight_not_saved, "save/load"),
    (not_a_number, "causality"),
]


@pytest.mark.parametrize(("breaks", "row"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_model_fails_the_row_that_is_there_for_it(monkeypatch, model, breaks, row):
    breaks(monkeypatch, model)
    assert failed(verify(model, names=[row])) == [row]


def test_what_is_not_a_number_is_no_deviation(monkeypatch, model):
    not_a_number(monkeypatch, model)
    result = verify(model, names=["causality"]).results[0]
    assert result.deviation is None and result.note == "not a finite number"


def test_a_fault_that_only_one_row_sees_leaves_the_others_green(monkeypatch, model):
    state_not_reordered(monkeypatch, model)
    assert failed(verify(model)) == ["beam score = rescored"]


def test_faults_show_in_a_freshly_converted_model(monkeypatch, model):
    """A zero adapter hides every lost state: a verify that trusted it would pass whatever the code did."""
    torch.nn.init.zeros_(model.model.adapter.proj.weight)
    row = "decode = sequential reference"
    verification = verify(model, names=[row])
    assert verification.adapter_was_zero and verification.passed
    state_lost(monkeypatch, model)
    assert failed(verify(model, names=[row])) == [row]
    assert not model.model.adapter.proj.weight.any()


def test_the_model_is_left_as_it_was(model):
    model.train()
    model.generation_config.repetition_penalty = 3.0
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert verify(model, names=list(CHECKS)[:3]).passed, "settings saved with a model must not enter the comparison"
    assert model.training and model.generation_config.repetition_penalty == 3.0
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.fixture
def base_folder(tmp_path):
    export_backbone(texts.text_model("vanilla")).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_the_command_on_a_converted_model(base_folder, tmp_path, capsys):
    converted, report = tmp_path / "converted", tmp_path / "report.json"
    texts.save(converted, convert(base_folder))
    arguments = ["verify", str(converted), "--base", str(base_folder), "--json", str(report)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    num_run = len(CHECKS) - 1 + 1  # without that of latent steps, with that of the base
    assert printed.count("pass") == num_run and "FAIL" not in printed and "stood in for it" in printed
    checks = json.loads(report.read_text())["checks"]
    assert checks[-1] == {"name": BASE_CHECK, "passed": True, "deviation": 0.0, "tolerance": 0.0, "note": ""}

    model = convert(base_folder)
    torch.nn.init.normal_(model.model.adapter.proj.weight, std=0.01)
    texts.save(converted, model)
    assert cli.main(arguments) == 1
    result = json.loads(report.read_text())
    assert not result["passed"] and not result["adapter_was_zero"]
    assert [check["name"] for check in result["checks"] if check["passed"] is False] == [BASE_CHECK]
    assert "FAIL" in capsys.readouterr().out


def test_the_command_on_a_broken_model(monkeypatch, model_folder, capsys):
    monkeypatch.setattr(RecycledStateLayer, "reorder_cache", lambda self, beam_idx: None)
    assert cli.main(["verify", str(model_folder)]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_bfloat16_is_checked_with_its_own_tolerance(model_folder, capsys):
    assert cli.main(["verify", str(model_folder), "--dtype", "bfloat16"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "in bfloat16" in printed and "1e-01" in printed


def test_wrong_use_is_told_before_the_model_is_loaded(tmp_path, capsys):
    assert cli.main(["verify", str(tmp_path), "--json", str(tmp_path / "no" / "x.json")]) == 2
    assert "its folder does not exist" in capsys.readouterr().err
    assert cli.main(["verify", str(tmp_path), "--json", str(tmp_path)]) == 2
    assert "is a folder; give a file" in capsys.readouterr().err
    assert cli.main(["verify", str(tmp_path), "--base", str(tmp_path / "none")]) == 2
    assert f"no such folder: {tmp_path / 'none'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "difference"),
    [
        ({"vocab_size": 200}, "its embed_tokens.weight is 320 x 32, the base's 200 x 32"),
        ({"num_hidden_layers": 3}, "its layers.2.self_attn.q_proj.weight is absent, the base's 32 x 32"),
        ({"num_hidden_layers": 1}, "its layers.1.self_attn.q_proj.weight is 32 x 32, the base's absent"),
    ],
)
def test_a_base_of_other_shapes_is_told_with_the_first_of_them(model, text, difference):
    """It was `IndexError: index out of range in self`, or a difference as a trained model has it."""
    base = export_backbone(texts.text_model("vanilla", dtype=torch.float64, text=text))
    result = verify(model, base=base, names=[]).results[0]
    assert result.name == BASE_CHECK and result.passed is False
    assert result.note == f"another model than the base: {difference}"
