"""Metric files and trackers."""

import csv

import pytest
import torch

from unspoken.errors import UnspokenError, UsageError
from unspoken.train.metrics import (
    CSV,
    JSONL,
    MeanWindow,
    MetricFiles,
    check_trackers,
    columns,
    loss_names,
    open_trackers,
    read_metrics,
    track,
)
from unspoken.train.parallel import Ranks


def test_both_files_hold_the_same_rows(tmp_path):
    files = MetricFiles(tmp_path, columns(2))
    files.write({"step": 0, "kind": "eval", "loss_pass_1": 6.5, "loss_pass_2": 6.25})
    files.write({"step": 10, "kind": "train", "loss": 5.5, "grad_norm": 0.1})
    with (tmp_path / CSV).open() as file:
        rows = list(csv.DictReader(file))
    for row, expected in zip(rows, read_metrics(tmp_path), strict=True):
        assert {name: value for name, value in row.items() if value} == {k: str(v) for k, v in expected.items()}


def test_a_row_with_an_unknown_column_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="los"):
        MetricFiles(tmp_path, columns(2)).write({"step": 0, "kind": "eval", "los": 1})


def test_a_last_line_cut_short_is_left_out_and_one_before_it_named(tmp_path):
    (tmp_path / JSONL).write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    (tmp_path / JSONL).write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(UnspokenError, match=r"jsonl:2: not JSON"):
        read_metrics(tmp_path)


def test_the_window_weighs_steps_by_their_targets():
    window = MeanWindow(loss_names(3), torch.device("cpu"))
    for losses, targets in (([4.0, 5.0, 3.0], 10), ([2.0, 3.0, 2.0, 1.0], 30)):
        pairs = zip(window.names, losses, strict=False)
        window.add({name: (torch.tensor(loss * targets), targets) for name, loss in pairs})
    record = window.record(Ranks())
    assert window.read(Ranks()) == {"loss": 2.5, "loss_pass_1": 3.5, "loss_pass_2": 2.25, "loss_pass_3": 1.0}
    window.add({"loss": (torch.tensor(1.0), 1)})
    assert window.read(Ranks()) == {"loss": 1.0}
    window.restore(record)
    assert window.read(Ranks())["loss_pass_2"] == 2.25


@pytest.mark.parametrize("are_own", [False, True])
def test_other_processes_go_on_with_nothing_of_the_main_one_s(are_own):
    window = MeanWindow(["loss"], torch.device("cpu"), counts_are_own=are_own)
    window.restore({"sums": [6.0], "counts": [3.0]}, is_main=False)
    assert window.record(Ranks()) == {"sums": [0.0], "counts": [0.0 if are_own else 3.0]}


def test_a_missing_tracker_says_what_to_install():
    check_trackers([])
    with pytest.raises(UsageError, match="pip install no_such_tracker"):
        check_trackers(["no_such_tracker"])


def test_rows_reach_a_tracker_under_their_kind(tmp_path, monkeypatch):
    calls = []

    class Tracker:
        requires_logging_directory = True

        def __init__(self, run_name, logging_dir):
            calls.append(("made", run_name, logging_dir))

        def start(self):
            calls.append("started")

        def store_init_configuration(self, values):
            calls.append(values)

        def log(self, values, step):
            calls.append((values, step))

    monkeypatch.setattr("accelerate.tracking.LOGGER_TYPE_TO_CLASS", {"tensorboard": Tracker})
    trackers = open_trackers(["tensorboard"], tmp_path, {"optim.betas": [0.9, 0.95], "run.seed": 0})
    track(trackers, {"step": 3, "kind": "train", "loss": 2.5})
    assert calls == [
        ("made", "unspoken", tmp_path / "tensorboard"),
        "started",
        {"optim.betas": "[0.9, 0.95]", "run.seed": 0},
        ({"train/loss": 2.5}, 3),
    ]
