"""A study from its first command to its report."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unspoken.analysis.page import Cell
from unspoken.errors import UnspokenError
from unspoken.paper.answers import answer_tables
from unspoken.paper.arms import Arms, Run
from unspoken.paper.environment import PROGRAM, interrupt_on_signals, prepare_environment
from unspoken.paper.latent import latent_tables
from unspoken.paper.pipeline import Pipeline
from unspoken.paper.plan import Plan
from unspoken.paper.report import comparison_rows, loss_rows, write_results
from unspoken.paper.results import Results
from unspoken.paper.reuse import adopt, refuse_other_settings
from unspoken.paper.solved import gain_tables, solved_tables


@dataclass(frozen=True)
class Options:
    """jobs: runs side by side. overwrite: make runs again that had other settings. report_only: run nothing."""

    jobs: int = 1
    overwrite: bool = False
    report_only: bool = False


def run_study(arms: Arms, runs: Sequence[Run], selected: Sequence[str], options: Options, console: Console) -> int:
    """Run those of `runs` that are `selected` by name, and report all that are finished. Returns the exit status.

    Raises:
        UnspokenError: nothing is finished.
        UsageError: a run folder was made with other settings.
        KeyboardInterrupt: once the running commands have saved what they can.
    """
    prepare_environment()
    interrupt_on_signals()
    plan = Plan(arms, runs)
    pipeline = Pipeline(plan.out, plan.stages(options.jobs), PROGRAM, console, keep_going=True)
    if not options.report_only:
        if not options.overwrite:
            refuse_other_settings(plan)
        for note in plan.notes():
            console.print(f"note: {note}", highlight=False, soft_wrap=True)
        _run(pipeline, plan, selected, options.jobs, console)
    results = Results(arms.study, plan, pipeline)
    if not results.arms:
        first = next((f": {name}: {reason}" for name, reason in pipeline.failed.items()), "")
        raise UnspokenError(f"{plan.out} has no finished run{first}")
    paths = write_results(results, pipeline, plan.out)
    _show(results, console)
    console.print(f"report: {paths[-1]}", highlight=False, soft_wrap=True)
    for name, reason in pipeline.failed.items():
        console.print(f"[red]failed[/] {escape(f'{name}: {reason}')}", highlight=False, soft_wrap=True)
    return 1 if pipeline.failed else 0


def _run(pipeline: Pipeline, plan: Plan, selected: Sequence[str], jobs: int, console: Console) -> None:
    """The text first, as it decides which runs of other studies are the same; then the selected runs."""
    every = pipeline.stages
    pipeline.stages = plan.stages(jobs, [run for run in plan.runs if run.name in selected])
    pipeline.prepare()
    plan.write_recipes()
    *text, last = pipeline.stages
    pipeline.run(text)
    if not pipeline.failed:
        for name in adopt(plan, pipeline):
            console.print(f"  [dim]{name} is copied from another study[/]", highlight=False)
    pipeline.run([last])
    pipeline.stages = every


def _show(results: Results, console: Console) -> None:
    """The tables in short; table.md has them whole."""
    _print(console, *loss_rows(results), skip=("6ND", "bits per byte"))
    tables = (*answer_tables(results), *latent_tables(results), *solved_tables(results), *gain_tables(results))
    for headers, rows in tables:
        _print(console, headers, rows, skip=())
    headers, found = comparison_rows(results, only_found=True)
    named = [[row[0] or row[1], *row[1:]] for row in found]
    _print(console, headers, named, skip=("comparison", "deviation"))


def _print(console: Console, headers: Sequence[str], rows: Sequence[Sequence[str | Cell]], skip: Sequence[str]) -> None:
    kept = [i for i, header in enumerate(headers) if header not in skip]
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for i in kept:
        table.add_column(f"{headers[i]} ", justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        texts = [cell.text if isinstance(cell, Cell) else cell for cell in row]
        table.add_row(*(f"{escape(texts[i])} " for i in kept))
    if rows:
        console.print(table)
