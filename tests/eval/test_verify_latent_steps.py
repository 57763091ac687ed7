"""Verification of latent steps: sound models pass, and each kind of fault turns the row red that is there for it."""

import json

import pytest
import torch

from tests import texts
from tests.families import adaptive_model, plain_model
from unspoken import cli, convert, export_backbone
from unspoken.eval.checks import BASE_CHECK, CHECKS, DRIFT_CHECK
from unspoken.eval.verify import verify
from unspoken.latent import active, visibility
from unspoken.latent.slots import SlotTable
from unspoken.models import latent_lm, latent_steps

ONE_BY_ONE = "latent steps = one by one"
DECODE = "decode = sequential reference"


def failed(verification) -> list[str]:
    return [result.name for result in verification.results if result.passed is False]


@pytest.fixture
def model():
    return texts.text_model("adaptive", torch.float64)


@pytest.mark.parametrize("name", ["llama_tied", "gemma3_text", "granite"])
def test_a_sound_model_passes(name):
    verification = verify(adaptive_model(name, torch.float32, exit_threshold=0.15, router_bias=0.3), seed=3)
    assert failed(verification) == []
    assert [result.name for result in verification.results if result.passed is None] == ["k >= length = exact"]
    assert not verification.router_was_blind


def test_a_model_that_recycles_too_passes_every_check():
    """In float64: a random recurrence through random depths makes thousands of a rounding."""
    verification = verify(texts.text_model("adaptive_recycler", torch.float64), seed=3)
    assert [(result.name, result.passed) for result in verification.results] == [(name, True) for name in CHECKS]


@pytest.mark.parametrize("fields", [{"exit_at_step": 3}, {"router": "none"}, {"router": "multi_mlp"}], ids=str)
def test_models_of_a_fixed_depth_and_of_other_routers_pass(fields):
    model = texts.text_model("adaptive", torch.float64, **fields)
    assert failed(verify(model, names=[DECODE, "padded = unpadded", ONE_BY_ONE])) == []


def nobody_is_cut(monkeypatch, model):
    halt = latent_steps.halt
    monkeypatch.setattr(latent_steps, "halt", lambda reach, gate, threshold: halt(reach, gate, 0.0))


def states_weigh_alike(monkeypatch, model):
    add = latent_steps._Mixture.add
    monkeypatch.setattr(
        latent_steps._Mixture,
        "add",
        lambda self, hidden, weight, *rest, **more: add(self, hidden, 0.5 + 0 * weight, *rest, **more),
    )


def sees_deeper_steps(monkeypatch, model):
    visible = visibility.visible
    monkeypatch.setattr(
        visibility, "visible", lambda entries, queries, step, window=None: visible(entries, queries, 99)
    )


def forgets_deeper_steps(monkeypatch, model):
    store = latent_steps.store
    monkeypatch.setattr(
        latent_steps, "store", lambda cache, table, parts, num_tokens: store(cache, table, parts[:1], num_tokens)
    )


def table_not_reordered(monkeypatch, model):
    monkeypatch.setattr(SlotTable, "reorder_cache", lambda self, beam_idx: None)


def pads_think(monkeypatch, model):
    monkeypatch.setattr(latent_lm, "real_positions", lambda attention_mask, num_tokens: None)


def documents_mixed(monkeypatch, model):
    starts = latent_steps.document_starts
    monkeypatch.setattr(latent_steps, "document_starts", lambda position_ids, real: 0 * starts(position_ids, real))


def steps_have_positions(monkeypatch, model):
    of = active.Active.of
    monkeypatch.setattr(active.Active, "of", lambda self, tensor: of(self, tensor) + (tensor.dtype == torch.long) * 1)


BROKEN = [
    (nobody_is_cut, ONE_BY_ONE),
    (states_weigh_alike, ONE_BY_ONE),
    (steps_have_positions, ONE_BY_ONE),
    (sees_deeper_steps, DECODE),
    (sees_deeper_steps, "cached = uncached"),
    (forgets_deeper_steps, DECODE),
    (forgets_deeper_steps, "prefill in chunks = whole"),
    (table_not_reordered, "beam score = rescored"),
    (pads_think, "padded = unpadded"),
    (documents_mixed, "packed = separate"),
]


@pytest.mark.parametrize(("breaks", "row"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_model_fails_the_row_that_is_there_for_it(monkeypatch, model, breaks, row):
    breaks(monkeypatch, model)
    assert failed(verify(model, names=[row])) == [row]


@pytest.mark.parametrize("bias", [-4.0, -20.0], ids=["as converted", "collapsed"])
def test_faults_show_where_the_router_tells_no_tokens_apart(monkeypatch, bias):
    """One latent step that weighs 0.018, or none at all, would hide every wrong decision and every wrong state."""
    model = texts.text_model("adaptive")
    torch.nn.init.zeros_(model.model.router.gates[0].weight)
    torch.nn.init.constant_(model.model.router.gates[0].bias, bias)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    verification = verify(model, names=[ONE_BY_ONE])
    assert verification.router_was_blind and verification.passed
    nobody_is_cut(monkeypatch, model)
    assert failed(verify(model, names=[ONE_BY_ONE])) == [ONE_BY_ONE]
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("router", ["linear", "mlp", "multi_linear", "multi_mlp"])
def test_the_router_that_stands_in_tells_tokens_apart(router):
    from unspoken.eval.standins import awake_router

    model = convert(plain_model("llama", torch.float32), "adaptive", router=router)
    ids = torch.arange(3, 39).view(4, 9)
    with torch.no_grad(), awake_router(model, ids, seed=0) as was_blind:
        assert was_blind
        lengths = model.model(ids, use_cache=False).latents.lengths
        assert len(lengths.unique()) >= 3 and 0.5 < lengths.float().mean() < 2.5
    assert model.model(ids, use_cache=False).latents.lengths.unique().tolist() == [1]


@pytest.mark.parametrize("method", ["adaptive", "adaptive_recycler"])
def test_a_converted_model_stays_near_its_base(method):
    def base():
        return plain_model("granite", torch.float32)

    model = convert(base(), method)
    verification = verify(model, base=base(), names=[ONE_BY_ONE])
    assert [result.name for result in verification.results] == [ONE_BY_ONE, BASE_CHECK, DRIFT_CHECK]
    near = verification.results[-1]
    assert verification.passed and 0 < near.deviation <= near.tolerance * 1.01
    assert near.note.startswith("1.00 latent steps a token, which weigh 0.018 at most")

    torch.nn.init.normal_(model.model.router.gates[0].weight)  # trained, over an untouched body
    verification = verify(model, base=base(), names=[])
    assert verification.passed and verification.results[-1].deviation > near.deviation

    torch.nn.init.normal_(model.lm_head.weight)
    assert [(result.name, result.passed) for result in verify(model, base=base(), names=[]).results] == [
        (BASE_CHECK, False)
    ]


def test_the_command_on_a_converted_model(tmp_path, capsys):
    base, converted, report = tmp_path / "base", tmp_path / "converted", tmp_path / "report.json"
    export_backbone(texts.text_model("vanilla")).save_pretrained(base)
    texts.save(converted, convert(base, "adaptive"))
    assert cli.main(["verify", str(converted), "--base", str(base), "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("pass") == len(CHECKS) - 1 + 2 + 1 and "FAIL" not in printed  # "has one pass"
    assert "tells no tokens apart" in printed and "except against the base" in printed
    found = json.loads(report.read_text())
    assert found["passed"] and found["router_was_blind"]
    assert [check["name"] for check in found["checks"]] == [*CHECKS, BASE_CHECK, DRIFT_CHECK]
