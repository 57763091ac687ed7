"""Where a run's numbers go: `metrics.jsonl` and `metrics.csv` in the run folder, and trackers on request.

One row for each logged step (`kind: train`) and each evaluation (`kind: eval`). Losses of a train row are means over
the steps since the row before it, weighted by target tokens; the rest are that step's own.
"""

import csv
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unspoken.errors import UnspokenError, UsageError
from unspoken.train.parallel import Ranks

JSONL, CSV = "metrics.jsonl", "metrics.csv"
LATENT_COLUMNS = ("latent_length", "adaptive_loss", "gate_at_cut", "routing_loss")  # means, see `sums` of the records
Row = dict[str, Any]


def columns(max_passes: int) -> list[str]:
    """The CSV's columns. JSONL rows hold those that apply."""
    passes = range(1, max_passes + 1)
    return [
        "step",
        "kind",
        "tokens",
        "loss",
        *(f"loss_pass_{i}" for i in passes),
        "learning_rate",
        "grad_norm",
        "num_passes",
        "adapter_to_embedding",
        "embedding_rms",
        *LATENT_COLUMNS,
        *(f"state_rms_pass_{i}" for i in passes),
        *(f"expert_load_{end}_pass_{i}" for i in passes for end in ("min", "max")),
        "tokens_per_second",
        "tokens_per_cpu_second",
        "wall_seconds",
        "cpu_seconds",
    ]


def loss_names(max_passes: int) -> list[str]:
    return ["loss", *(f"loss_pass_{i}" for i in range(1, max_passes + 1))]


class MeanWindow:
    """Named sums (this process's part) and what they are means over, since the last logged step; kept on the device:
    adding waits for nothing. Part of a checkpoint, so that a resumed run logs the same means.

    counts_are_own: what is counted is this process's part too; otherwise it is of all processes, as targets are.
    """

    def __init__(self, names: Sequence[str], device: torch.device, counts_are_own: bool = False):
        self.names, self.counts_are_own = list(names), counts_are_own
        self.sums = torch.zeros(len(names), device=device)
        self.counts = torch.zeros(len(names), device=device)

    def add(self, sums: Mapping[str, tuple[Tensor, Tensor | float]]) -> None:
        """(sum, count) by name."""
        index = [self.names.index(name) for name in sums]
        for whole, values in zip((self.sums, self.counts), zip(*sums.values(), strict=True), strict=False):
            whole[index] += torch.stack([torch.as_tensor(value).to(whole) for value in values])

    def read(self, ranks: Ranks) -> Row:
        """The means, of what was counted; then start anew. All processes call it."""
        record = self.record(ranks)
        pairs = zip(record["sums"], record["counts"], strict=True)
        row = {name: total / count for name, (total, count) in zip(self.names, pairs, strict=True) if count}
        self.sums.zero_()
        self.counts.zero_()
        return row

    def record(self, ranks: Ranks) -> dict[str, list[float]]:
        counts = self.counts.tolist()
        return {"sums": ranks.sum(self.sums.tolist()), "counts": ranks.sum(counts) if self.counts_are_own else counts}

    def restore(self, record: dict[str, list[float]], is_main: bool = True) -> None:
        """The main process carries on what all have summed up."""
        if is_main:
            self.sums.copy_(torch.tensor(record["sums"]))
        if is_main or not self.counts_are_own:
            self.counts.copy_(torch.tensor(record["counts"]))


class MetricFiles:
    """Appends rows to both files, each at once, so that a killed run leaves what it had.

    `resume_step`: rows of later steps, written after the checkpoint that a run resumes from, are dropped first;
    `kept` are the others.
    """

    def __init__(self, folder: Path, names: list[str], resume_step: int | None = None):
        self.jsonl, self.csv, self.names = folder / JSONL, folder / CSV, names
        rows = read_metrics(folder) if resume_step is not None and self.jsonl.exists() else []
        self.kept = kept = [row for row in rows if row["step"] <= (resume_step or 0)]
        self.jsonl.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        with self.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(kept)

    def write(self, row: Row) -> None:
        with self.jsonl.open("a", encoding="utf-8") as file:
            file.write(_line(row))
        with self.csv.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.names).writerow(row)


def read_metrics(folder: Path) -> list[Row]:
    """The rows of a run folder; a last line cut short by a kill is left out.

    Raises:
        UnspokenError: a line that is not JSON, elsewhere.
    """
    lines = (folder / JSONL).read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise UnspokenError(f"{folder / JSONL}:{number}: not JSON") from None
    return rows


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def check_trackers(names: Iterable[str]) -> None:
    """Raise UsageError if the package of a `report_to` entry is missing: before training, not after an hour of it."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"run.report_to: {name} is not installed; run `pip install {name}`, or leave it out")


def open_trackers(names: Sequence[str], folder: Path, values: dict[str, Any]) -> list[Any]:
    """accelerate's trackers, started. `values` (flat) are stored as the run's configuration."""
    if not names:
        return []
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # accelerate's logger asks for it
    trackers = []
    for name in names:
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        where = {"logging_dir": folder / name} if tracker_class.requires_logging_directory else {}
        tracker = tracker_class("unspoken", **where)
        tracker.start()
        tracker.store_init_configuration(
            {k: v if isinstance(v, int | float | str) else str(v) for k, v in values.items()}
        )
        trackers.append(tracker)
    return trackers


def track(trackers: list[Any], row: Row) -> None:
    """Send a row as `train/loss`, `eval/loss_pass_2`, ..."""
    values = {f"{row['kind']}/{name}": value for name, value in row.items() if name not in ("step", "kind")}
    for tracker in trackers:
        tracker.log(values, step=row["step"])
