"""`unspoken paper NAME`, `unspoken compare NAME`: run a study's arms with our own commands, then write what was found.

    OUT/results.json table.md report.html *.svg      the findings
    OUT/recipes OUT/runs OUT/evals OUT/commands      what they stand on (see plan.py)

What is finished is skipped; a run that was stopped goes on from its checkpoint; a run that fails is named, and the
rest goes on. Here are the command's options; `execution.py` does the work.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from unspoken.errors import UsageError
from unspoken.paper.arms import Arms
from unspoken.paper.study import Study, known_studies, load_study, nearest_or_all

INTERRUPTED = 130


def compare(args: argparse.Namespace) -> int:
    """`unspoken compare`: the comparisons of methods in recipes/compare are studies too."""
    return main(args, comparisons=True)


def main(args: argparse.Namespace, comparisons: bool = False) -> int:
    console = Console()
    if args.list:
        return _list(console, comparisons)
    if args.study is None:
        raise UsageError("give the name of a study, or --list")
    if args.jobs < 1:
        raise UsageError(f"--jobs is {args.jobs}; it must be at least 1")
    study = load_study(args.study)
    home = Path("runs/compare" if comparisons else "runs/paper")
    out = Path(args.out or home / (f"{study.name}-quick" if args.quick else study.name))
    arms = Arms(study, out, args.overrides, args.quick)
    seeds = args.seeds or _study_seeds(args, study)
    if any(seed < 0 for seed in seeds):
        raise UsageError("--seeds: a seed is a whole number of at least 0")
    selected = arms.runs(_selected_arms(args, study), seeds)
    runs = arms.runs(list(study.file.arms), sorted({*_study_seeds(args, study), *seeds, *_earlier_seeds(out)}))

    from unspoken.paper.execution import Options, run_study

    options = Options(args.jobs, args.overwrite, args.report_only)
    try:
        return run_study(arms, runs, [run.name for run in selected], options, console)
    except KeyboardInterrupt:
        console.print("\nstopped; the same command goes on from here, --report-only shows what is finished")
        return INTERRUPTED


def _selected_arms(args: argparse.Namespace, study: Study) -> list[str]:
    arms = list(study.file.arms)
    for name in args.arms or []:
        if name not in arms:
            raise UsageError(f"--arms: {study.name} has no arm {name!r}{nearest_or_all(name, arms)}")
    return args.arms or (study.file.quick_arms if args.quick and study.file.quick_arms else arms)


def _study_seeds(args: argparse.Namespace, study: Study) -> list[int]:
    return list(study.file.seeds[:1] if args.quick else study.file.seeds)


def _earlier_seeds(out: Path) -> list[int]:
    """Seeds that were asked for before: their runs are among the results too."""
    return [int(path.stem.rpartition("-s")[2]) for path in (out / "recipes").glob("*-s[0-9]*.yaml")]


def _list(console: Console, comparisons: bool) -> int:
    known = known_studies(comparisons)
    if not known:
        raise UsageError(
            f"no recipes/{'compare' if comparisons else 'paper'} folder here; run this where the repository is"
        )
    for name in known:
        file = load_study(str(known[name])).file
        figure = f" ({file.figure})" if file.figure else ""
        console.print(f"[bold]{name}[/]  {escape(file.question + figure)}", highlight=False, soft_wrap=True)
    return 0
