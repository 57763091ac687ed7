"""Losses, latent lengths and prune ratios of each threshold, against one row at a time; the command that tells them."""

import json
import shlex

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import texts
from tests.oracle import TOLERANCE
from unspoken import cli
from unspoken.analysis.compare import deployed, difference
from unspoken.data.task_windows import evaluation_samples, task_tokenizer
from unspoken.data.tasks import parse_task
from unspoken.eval.perplexity import prepare_scores, score, work
from unspoken.eval.rows import cut_rows
from unspoken.eval.settings import settings_of
from unspoken.eval.tasks import evaluate_task
from unspoken.models.knobs import LatentKnobs

METHODS = ["adaptive", "adaptive_recycler"]
SMALL = ["--sequence-length", "24", "--max-sequences", "12"]
TASK = parse_task({"name": "running_sum", "modulus": 3, "min_length": 2, "max_length": 6})


@torch.no_grad()
def by_hand(model, row, **options) -> tuple[float, int]:
    ids = torch.from_numpy(row.ids)[None]
    outputs = model(ids, use_cache=False, **options)
    nats = F.cross_entropy(outputs.logits[0, :-1], ids[0, 1:], reduction="sum")
    return nats.item(), int(outputs.latents.lengths.sum())


@pytest.mark.parametrize("method", ["adaptive", pytest.param("adaptive_recycler", marks=pytest.mark.slow)])
def test_losses_and_latent_lengths_of_each_threshold(shards, method):
    """Of padded batches, against rows alone; of the recycling model, each pass and the exact recurrence."""
    model, rows = texts.text_model(method, torch.float64), cut_rows(shards, 24, 9)
    settings = settings_of(model, [LatentKnobs(), LatentKnobs(0.0), LatentKnobs(0.4)])
    scores = prepare_scores(model, rows, 2, settings=settings)
    reported: list[int] = []
    score(model, scores, 4, reported.append)
    assert sum(reported) == work(scores)
    names = {"k=1": 1, "k=2": 2, "exact": "exact"} if method == "adaptive_recycler" else {"k=1": 1}
    assert scores.names == [name + suffix for suffix in ("", " tau=0.0", " tau=0.4") for name in names]
    num_tokens = sum(len(row.ids) for row in rows)
    for setting in settings:
        for name, num_passes in names.items():
            found = [by_hand(model, row, num_passes=num_passes, **setting.options) for row in rows]
            loss = scores.loss(name + setting.suffix)
            nats, steps = map(sum, zip(*found))
            assert loss.loss == pytest.approx(nats / loss.num_targets, abs=TOLERANCE)
            assert loss.latent_length == steps / num_tokens
            assert loss.prune_ratio == pytest.approx(1 - steps / num_tokens / 3)
    lengths = [scores.loss(f"k=1{setting.suffix}").latent_length for setting in settings]
    assert lengths[1] == 3 > lengths[0] > lengths[2] > 0
    assert scores.loss("k=1").difference == 0 != scores.loss("k=1 tau=0.4").difference


def test_what_may_not_be_pruned_has_no_ratio(shards):
    model, rows = texts.text_model("adaptive"), cut_rows(shards, 24, 3)
    for knobs, latent_length, prune_ratio in [({"max_latent_steps": 0}, 0, None), ({"exit_at_step": 3}, 2, 0)]:
        scores = prepare_scores(model, rows, 1, settings=settings_of(model, [LatentKnobs(**knobs)]))
        score(model, scores)
        assert (scores.loss("k=1").latent_length, scores.loss("k=1").prune_ratio) == (latent_length, prune_ratio)
    plain = prepare_scores(texts.text_model(), rows, 1)
    score(texts.text_model(), plain)
    assert plain.loss("k=1").latent_length is None and not plain.latent_steps


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_task_s_latent_lengths_are_those_of_its_samples_alone(method):
    model = texts.text_model(method, torch.float64, text={"vocab_size": len(task_tokenizer(TASK))})
    settings = settings_of(model, [LatentKnobs(), LatentKnobs(0.4)])
    result = evaluate_task(model, TASK, 5, num_samples=11, num_passes=2, batch_size=4, settings=settings)
    lines = {"k=1": 1, "k=2": 2, "exact": "exact"} if method == "adaptive_recycler" else {"k=1": 1}
    assert list(result.answers) == [name + suffix for suffix in ("", " tau=0.4") for name in lines]
    samples = evaluation_samples(TASK, 5, 11)
    for setting in settings:
        for name, num_passes in lines.items():
            options = {"num_passes": num_passes, "use_cache": False, **setting.options}
            found = [model.model(torch.from_numpy(s.tokens)[None], **options).latents.lengths.sum() for s in samples]
            np.testing.assert_array_equal(result.scores.latent_steps[name + setting.suffix], found)


@pytest.fixture(params=METHODS)
def folder(request, tmp_path, shards):
    return texts.save(tmp_path / request.param, texts.text_model(request.param), shards.load_tokenizer())


def test_the_command(folder, data_folder, capsys):
    command = ["eval", str(folder), "--data", str(data_folder), *SMALL, "--num-passes", "2"]
    assert cli.main([*command, "--exit-threshold", "0.05", "--exit-threshold", "0.5", "--max-latent-steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("latent steps/token", "pruned", "k=1 tau=0.05", "k=1 tau=0.5"))
    report = json.loads((folder / "eval.json").read_text())
    for name, result in report["results"].items():
        latent_steps, tokens = report["rows"]["latent_steps"][name], report["rows"]["tokens"]
        assert result["latent_length"] == pytest.approx(sum(latent_steps) / sum(tokens))
        assert f"{result['latent_length']:.2f}" in printed and f"{100 * result['prune_ratio']:.1f}%" in printed
        threshold = float(name.partition("tau=")[2] or 0.15)
        assert report["knobs"][name] == {"max_latent_steps": 2, "exit_threshold": threshold, "exit_at_step": None}
    again = shlex.split(report["command"])
    assert cli.main([*again[1:], "--out", str(folder / "again")]) == 0
    repeated = json.loads((folder / "again" / "eval.json").read_text())
    assert repeated["results"] == report["results"]
    assert deployed(report) == ("exact" if folder.name == "adaptive_recycler" else "k=1")
    assert difference(report, "k=1 tau=0.5", repeated, "k=1").mean == report["results"]["k=1 tau=0.5"]["difference"]


def test_the_command_on_a_task(tmp_path, capsys):
    model = texts.text_model("adaptive", text={"vocab_size": len(task_tokenizer(TASK))})
    folder = texts.save(tmp_path / "model", model, task_tokenizer(TASK))
    assert cli.main(["eval", str(folder), "--samples", "20", "--exit-threshold", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("latent steps/token at 6", "k=1 tau=0.5", "majority"))
    report = json.loads((folder / "eval.json").read_text())
    lengths = report["task"]["lengths"]
    assert lengths["6"]["latent_length"]["k=1"] == report["results"]["k=1"]["latent_length"]
    assert 0 < lengths["24"]["latent_length"]["k=1 tau=0.5"] < lengths["24"]["latent_length"]["k=1"]
    assert "--exit-threshold 0.5" in report["command"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--exit-threshold", "2"], "--exit-threshold must be a probability"),
        (["--exit-threshold", "0.1", "--exit-at-step", "2"], "--exit-threshold would have no effect"),
        (["--exit-threshold", "0.1", "--depth", "3"], "leave --exit-threshold out"),
    ],
)
def test_wrong_options_exit_with_2(folder, data_folder, capsys, more, message):
    assert cli.main(["eval", str(folder), "--data", str(data_folder), *SMALL, *more]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_latent_steps_is_told(model_folder, data_folder, capsys):
    for option in ("--exit-threshold", "--max-latent-steps", "--exit-at-step"):
        assert cli.main(["eval", str(model_folder), "--data", str(data_folder), *SMALL, option, "1"]) == 2
        assert f"{option}: a model of type unspoken_recycler takes no latent steps" in capsys.readouterr().err
