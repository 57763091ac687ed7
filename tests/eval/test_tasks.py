"""Right answers of a task, against one sample and one prefix at a time; the command that reports them."""

import json
import shlex

import numpy as np
import pytest
import torch

from tests import texts
from unspoken import cli
from unspoken.analysis.compare import difference
from unspoken.data.task_windows import evaluation_samples, task_tokenizer
from unspoken.data.tasks import NO_TARGET, parse_task
from unspoken.errors import UsageError
from unspoken.eval.task_run import PLOT
from unspoken.eval.tasks import Rate, default_lengths, evaluate_task

SUM = parse_task({"name": "running_sum", "modulus": 3, "min_length": 2, "max_length": 6})
ARITHMETIC = parse_task({"name": "arithmetic", "modulus": 100})


def task_model(task, method="recycler", dtype=torch.float32):
    return texts.text_model(method, dtype, text={"vocab_size": len(task_tokenizer(task))})


def naive(model, sample, num_passes) -> tuple[list[bool], float]:
    """Right or not at each target, and the summed loss; each prefix alone, so that nothing can come from later tokens,
    from pads or from other samples.
    """
    right, nats = [], 0.0
    for place in (sample.targets != NO_TARGET).nonzero()[0]:
        ids = torch.from_numpy(sample.tokens[None, : place + 1])
        states = model.model(ids, num_passes=num_passes, use_cache=False).last_hidden_state
        logits = model.lm_head(states[0, -1])
        right.append(int(logits.argmax()) == sample.targets[place])
        nats -= float(logits.log_softmax(-1)[sample.targets[place]])
    return right, nats


@pytest.mark.parametrize("task", [SUM, ARITHMETIC], ids=lambda task: task.name)
@torch.no_grad()
def test_rates_are_those_of_one_prefix_at_a_time(task):
    model = task_model(task, dtype=torch.float64)  # so that rounding decides no first choice
    samples = evaluation_samples(task, 5, 23)
    result = evaluate_task(model, task, 5, num_samples=23, num_passes=3, batch_size=7)
    assert list(result.answers) == ["k=1", "k=2", "k=3", "exact"]
    for name, num_passes in {"k=1": 1, "k=2": 2, "k=3": 3, "exact": "exact"}.items():
        found = [naive(model, sample, num_passes) for sample in samples]
        right = [row for row, _ in found]
        answers = [row[-1] if task is SUM else all(row) for row in right]
        assert result.answers[name] == Rate(sum(answers), 23)
        places = [[row[i] for row in right if len(row) > i] for i in range(max(map(len, right)))]
        assert result.positions[name] == [Rate(sum(place), len(place)) for place in places]
        np.testing.assert_allclose(result.scores.nats[name], [nats for _, nats in found], rtol=1e-9)
    assert sum(rate.num_right for rate in result.positions["k=3"]) > 0  # or this would compare nothing with nothing


def test_a_plain_model_has_one_pass():
    result = evaluate_task(task_model(SUM, "vanilla"), SUM, 4, num_samples=5)
    assert list(result.answers) == ["k=1"]
    assert len(result.positions["k=1"]) == 4


def test_the_majority_is_the_most_frequent_answer():
    answers = [int(sample.targets[-1]) for sample in evaluation_samples(SUM, 4, 50)]
    result = evaluate_task(task_model(SUM), SUM, 4, num_samples=50, num_passes=1, exact=False)
    assert result.majority == Rate(int(np.bincount(answers).max()), 50)


def test_the_model_keeps_its_mode():
    model = task_model(SUM).train()
    evaluate_task(model, SUM, 4, num_samples=3)
    assert model.training


@pytest.mark.parametrize(
    ("right", "num", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (8, 10, 0.4902, 0.9433),
        (1, 1, 0.2065, 1.0),
        (430, 500, 0.8269, 0.8877),
    ],
)
def test_wilson_intervals(right, num, low, high):
    """Values of the closed form, as statsmodels' `proportion_confint(method="wilson")` prints them."""
    assert Rate(right, num).interval == pytest.approx((low, high), abs=1e-4)


def test_lengths_within_and_beyond_training():
    assert default_lengths(parse_task({"name": "running_sum"})) == [16, 24, 32, 64]
    assert default_lengths(parse_task({"name": "running_sum", "min_length": 1, "max_length": 1})) == [1, 2, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "--length is 0"),
        ({"num_samples": 0}, "--samples is 0"),
        ({"num_passes": 0}, "--num-passes is 0"),
        ({"batch_size": -1}, "--batch-size is -1"),
        ({"length": 128}, "samples of length 128 take 129 tokens; the model's context is 128"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        evaluate_task(task_model(SUM), SUM, **{"length": 4, **options})


@pytest.fixture
def folder(tmp_path):
    return texts.save(tmp_path / "model", task_model(SUM), task_tokenizer(SUM))


def test_a_model_knows_its_task(folder, capsys):
    assert cli.main(["eval", str(folder), "--samples", "20", "--num-passes", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("running_sum", "length 6", "length 24", "k=2", "exact", "majority"))
    report = json.loads((folder / "eval.json").read_text())
    lengths = report["task"]["lengths"]
    assert list(lengths) == ["6", "9", "12", "24"]
    found = lengths["9"]["answer"]["exact"]
    assert found["num"] == 20 and found["low"] <= found["share"] == found["num_right"] / 20 <= found["high"]
    assert len(lengths["9"]["positions"]["k=1"]) == 9
    assert report["task"]["settings"] == SUM.settings() and report["model"]["weights_sha256"]
    assert (folder / PLOT).read_bytes().startswith(b"\x89PNG")
    again = shlex.split(report["command"])
    assert cli.main([*again[1:], "--out", str(folder / "again")]) == 0
    repeated = json.loads((folder / "again" / "eval.json").read_text())
    assert (repeated["results"], repeated["task"]) == (report["results"], report["task"])
    assert difference(report, "exact", repeated, "exact").mean == 0.0  # what reads a text's results reads these
    assert difference(report, "k=2", report, "k=1").unit == "documents"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sequence-length", "9"], "--sequence-length is for --data FOLDER"),
        (["--depth", "3"], "--depth is for --data"),
        (["--length", "0"], "--length is 0"),
        (["--data", "x", "--samples", "3"], "--samples is for the task"),
    ],
)
def test_options_that_would_do_nothing_are_refused(folder, more, message, capsys):
    assert cli.main(["eval", str(folder), *more]) == 2
    assert message in capsys.readouterr().err


def test_a_text_model_is_asked_for_text(model_folder, capsys):
    assert cli.main(["eval", str(model_folder)]) == 2
    assert "was not trained on a task; give text with --data FOLDER" in capsys.readouterr().err
