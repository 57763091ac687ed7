"""What a study's models scored on tasks of lm-eval: a table. Empty without tasks."""

from statistics import mean

from unspoken.analysis.numbers import number, short_count
from unspoken.analysis.page import Cell
from unspoken.paper.results import Results

CAPTION = (
    "Averaged over seeds, each seed's in brackets; made of held-out text by `unspoken data questions`, scored as the "
    "models decode prompts. Small tasks: differences of a few hundredths are within their error."
)


def task_tables(results: Results) -> list[tuple[list[str], list[list[str | Cell]]]]:
    """A table, if the study asks for tasks, as headers and rows: a column for each task and metric."""
    scores = {result.run.name: _scores(result.tasks) for result in results.all if result.tasks}
    columns = list(dict.fromkeys(name for one in scores.values() for name in one))
    rows: list[list[str | Cell]] = []
    for budget in results.budgets if columns else []:
        for arm in results.arms:
            found = [scores[run.run.name] for run in results.of(arm, budget).values() if run.run.name in scores]
            if found:
                name = arm if budget is None else f"{arm}, {short_count(budget)}"
                rows.append([name, *(_cell([one[column] for one in found if column in one]) for column in columns)])
    return [(["arm", *columns], rows)] if rows else []


def _scores(tasks: dict) -> dict[str, float]:
    """By task and metric."""
    return {f"{row['task']}: {row['metric'].removesuffix(',none')}": row["value"] for row in tasks["rows"]}


def _cell(values: list[float]) -> str:
    if len(values) < 2:
        return "".join(map(number, values))
    return f"{number(mean(values))} ({', '.join(map(number, values))})"
