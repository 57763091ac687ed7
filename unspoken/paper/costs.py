"""What each arm of a study costs, in training and in decoding: a table. Empty unless the study asks for it."""

import math
from collections.abc import Sequence
from statistics import mean

from unspoken.analysis.numbers import short_count
from unspoken.analysis.page import Cell
from unspoken.paper.results import COUNTED, Result, Results

HEADERS = ("arm", "parameters", "training FLOPs", "wall s", "CPU s", "peak GiB", "decode FLOPs", "cache bytes")
CAPTION = (
    "Averaged over seeds. Training: FLOPs counted from the modules and the runs that were made, of all stages; wall "
    "and CPU seconds without evaluation; the peak memory of the process (on CUDA, of the device). Of one token in "
    "decoding, at half the sequence length and the trained model's mean latent length: FLOPs, and bytes of keys and "
    "values in bfloat16."
)


def cost_tables(results: Results) -> list[tuple[list[str], list[list[str | Cell]]]]:
    """A table, if the study wants one, as headers and rows."""
    rows: list[list[str | Cell]] = []
    for budget in results.budgets if results.study.file.costs else []:
        for arm in results.arms:
            if runs := list(results.of(arm, budget).values()):
                name = arm if budget is None else f"{arm}, {short_count(budget)}"
                rows.append([name, *_cells(results, runs)])
    return [(list(HEADERS), rows)] if rows else []


def _cells(results: Results, runs: Sequence[Result]) -> list[str | Cell]:
    def average(values: Sequence[float | None], form: str) -> str:
        known = [value for value in values if value is not None and math.isfinite(value)]
        return form.format(mean(known)) if known else ""

    peaks = [run.total("peak_memory_bytes") or None for run in runs]
    return [
        average([run.total("num_parameters") for run in runs], "{:,.0f}"),
        average([results.cumulative(run, COUNTED) for run in runs], "{:.2e}"),
        average([results.cumulative(run, "train_seconds") for run in runs], "{:,.0f}"),
        average([results.cumulative(run, "train_cpu_seconds") for run in runs], "{:,.0f}"),
        average([None if peak is None else peak / 2**30 for peak in peaks], "{:.2f}"),
        average([run.flops.decode_per_token if run.flops else None for run in runs], "{:.3g}"),
        average([run.flops.cache_bytes_per_token if run.flops else None for run in runs], "{:,.0f}"),
    ]
