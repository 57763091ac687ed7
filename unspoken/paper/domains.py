"""How well a study's models predict text of the kind they read, and of another kind: a table, where it asks for it."""

from collections.abc import Sequence
from statistics import mean

from unspoken.analysis.compare import Evaluation, deployed
from unspoken.analysis.numbers import number, short_count
from unspoken.analysis.page import Cell
from unspoken.paper.results import Results

HEADERS = ("arm", "perplexity", "bits per byte", "other text: perplexity", "bits per byte")
CAPTION = (
    "As the models decode, averaged over seeds (perplexities: of the mean loss's exponentials). Other text: of corpora "
    "that no run has read, in the same tokens; only bits per byte can be held against other tokenizers."
)


def domain_tables(results: Results) -> list[tuple[list[str], list[list[str | Cell]]]]:
    """A table, if the study asks for other text, as headers and rows."""
    rows: list[list[str | Cell]] = []
    for budget in results.budgets if results.study.file.other_text else []:
        for arm in results.arms:
            runs = results.of(arm, budget).values()
            own = [result.evaluation for result in runs if result.evaluation]
            other = [result.other for result in runs if result.other]
            if own and len(other) == len(own):
                name = arm if budget is None else f"{arm}, {short_count(budget)}"
                rows.append([name, *_cells(own), *_cells(other)])
    return [(list(HEADERS), rows)] if rows else []


def _cells(evaluations: Sequence[Evaluation]) -> list[str]:
    losses = [evaluation["results"][deployed(evaluation)] for evaluation in evaluations]
    return [_mean([loss.get(key) for loss in losses]) for key in ("perplexity", "bits_per_byte")]


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return number(mean(known)) if len(known) == len(values) else ""
