"""What a study found: every run with its settings, cost and losses, and every comparison; the content of results.json.

A run that failed or was not run yet is listed as such, and the rest is compared.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Any

from unspoken.analysis.compare import Evaluation, deployed
from unspoken.analysis.flops import RunFlops, run_flops
from unspoken.analysis.runs import EVALUATION, RESOLVED, SUMMARY, read_run, read_task_scores
from unspoken.analysis.runs import Run as RunFolder
from unspoken.analysis.seeds import SeedDifference, seed_difference
from unspoken.analysis.solved import Gain, Solved, gain, read_solved
from unspoken.errors import UnspokenError
from unspoken.eval.perplexity import EXACT
from unspoken.paper.arms import Run
from unspoken.paper.command import Record
from unspoken.paper.pipeline import Pipeline
from unspoken.paper.plan import Plan
from unspoken.paper.study import PROBLEMS, Comparison, Study, Term


@dataclass(frozen=True)
class Result:
    """One run: its folder, the evaluation of its model, and those on text of another kind, on tasks and on problems
    where the study asks for them; the records of its commands. `missing`: why there is none."""

    run: Run
    folder: RunFolder | None = None
    evaluation: Evaluation | None = None
    records: Sequence[Record] = ()
    missing: str = ""
    other: Evaluation | None = None
    tasks: dict[str, Any] | None = None
    solved: Solved | None = None

    @property
    def is_done(self) -> bool:
        return not self.missing

    def total(self, key: str) -> Any:
        """A count of summary.json, or `counted_flops`: those of `analysis/flops.py` (nan: they cannot be counted)."""
        if key == COUNTED:
            return self.flops.counted if self.flops else math.nan
        return ((self.folder.summary if self.folder else None) or {}).get(key, 0)

    @cached_property
    def flops(self) -> RunFlops | None:
        try:
            return run_flops(self.folder.folder) if self.folder else None
        except UnspokenError:
            return None

    @cached_property
    def losses(self) -> dict[str, dict[str, Any]]:
        return (self.evaluation or {}).get("results", {})

    @property
    def curve(self) -> list[float]:
        """The depth curve's losses, if it was asked for."""
        return ((self.evaluation or {}).get("depth_curve") or {}).get("losses", [])


@dataclass(frozen=True)
class Found:
    """A comparison at one budget; `difference` None where it could not be made, for the reason `missing`."""

    comparison: Comparison
    budget: int | None
    difference: SeedDifference | None
    missing: str = ""


@dataclass(frozen=True)
class FoundGain:
    """A comparison of arms that learn problems; `gain` None where it could not be made, for the reason `missing`."""

    comparison: Comparison
    gain: Gain | None
    missing: str = ""


class Results:
    """The results of a plan's runs, as far as they are finished."""

    def __init__(self, study: Study, plan: Plan, pipeline: Pipeline):
        self.study, self.plan = study, plan
        self.all = [_read(run, plan, pipeline) for run in plan.runs]
        self.by_name = {result.run.name: result for result in self.all}

    @property
    def arms(self) -> list[str]:
        """Arms with a finished run, in the study's order."""
        return [arm for arm in self.study.file.arms if any(r.run.arm == arm and r.is_done for r in self.all)]

    @property
    def budgets(self) -> list[int | None]:
        return self.plan.arms.budgets

    def of(self, arm: str, budget: int | None) -> dict[int, Result]:
        """The finished runs of an arm at a budget, by seed."""
        return {
            result.run.seed: result
            for result in self.all
            if result.is_done and (result.run.arm, result.run.budget) == (arm, budget)
        }

    def cumulative(self, result: Result, key: str) -> Any:
        """A count of summary.json, of this run and of all that it went on from."""
        before = self.by_name.get(result.run.after or "")
        return result.total(key) + (self.cumulative(before, key) if before else 0)

    @cached_property
    def loss_names(self) -> list[str]:
        """`k=1`, `k=2`, ..., `exact`: those that any run has."""
        names = list(dict.fromkeys(name for result in self.all for name in result.losses))
        return sorted(names, key=lambda name: (name == EXACT, 0 if name == EXACT else int(name[2:])))

    @cached_property
    def found(self) -> list[Found]:
        """Of the arms that read text."""
        losses = [c for c in self.study.comparisons if not self.study.file.learns_problems(c.of.arm)]
        return [self._compare(c, budget) for budget in self.budgets for c in losses]

    @cached_property
    def gains(self) -> list[FoundGain]:
        """Of the arms that learn problems."""
        return [self._gain(c) for c in self.study.comparisons if self.study.file.learns_problems(c.of.arm)]

    def solved(self, arm: str) -> dict[int, Solved]:
        """The problems that an arm's finished runs have answered, by seed."""
        return {seed: run.solved for seed, run in self.of(arm, None).items() if run.solved is not None}

    def _gain(self, comparison: Comparison) -> FoundGain:
        of, minus = (self.solved(term.arm) for term in comparison)
        for term, runs in zip(comparison, (of, minus)):
            if not runs:
                return FoundGain(comparison, None, f"{term.arm} has no finished run")
        try:
            found = gain(of, minus)
        except UnspokenError as error:
            return FoundGain(comparison, None, str(error))
        return FoundGain(comparison, found, "" if found else "the two arms share no seed")

    def as_dict(self) -> dict[str, Any]:
        study = self.study.file
        return {
            "study": self.study.name,
            "title": study.title,
            "question": study.question,
            "figure": study.figure,
            "is_quick": self.plan.arms.is_quick,
            "overrides": dict(self.plan.arms.overrides),
            "eval": self.plan.eval.model_dump(),
            "runs": [self._run_dict(result) for result in self.all],
            "arms": [self._arm_dict(arm, budget) for budget in self.budgets for arm in self.arms],
            "comparisons": [_comparison_dict(found) for found in self.found],
            "gains": [_gain_dict(found) for found in self.gains],
            "paper": study.paper,
        }

    def _compare(self, comparison: Comparison, budget: int | None) -> Found:
        sides = []
        for term in comparison:
            runs = self.of(term.arm, budget)
            if not runs:
                return Found(comparison, budget, None, f"{term.arm} has no finished run")
            evaluations = {seed: result.evaluation or {} for seed, result in runs.items()}
            sides.append((evaluations, {seed: self._loss(term, one) for seed, one in evaluations.items()}))
        try:
            difference = seed_difference(*sides[0], *sides[1])
        except UnspokenError as error:
            return Found(comparison, budget, None, str(error))
        return Found(comparison, budget, difference, "" if difference else "the two arms share no seed")

    def _loss(self, term: Term, evaluation: Evaluation) -> str:
        """The loss that a term means; with --quick no deeper than was measured."""
        if term.loss is None:
            return deployed(evaluation)
        if self.plan.arms.is_quick and term.loss != EXACT:
            return f"k={min(int(term.loss[2:]), max(self.plan.eval.num_passes, self.plan.eval.depth))}"
        return term.loss

    def _run_dict(self, result: Result) -> dict[str, Any]:
        run = result.run
        recipe = dict((result.folder.recipe if result.folder else None) or run.values)
        values = {"run": run.name, "arm": run.arm, "seed": run.seed, "budget": run.budget, "after": run.after}
        if not result.is_done:
            return {**values, "status": result.missing, "recipe": recipe}
        counts = {key: _finite(result.total(key)) for key in COUNTS}
        return {
            **values,
            "status": "finished",
            "note": "; ".join(record.note for record in result.records if record.note),
            **counts,
            "decode_flops_per_token": result.flops.decode_per_token if result.flops else None,
            "cumulative": {key: _finite(self.cumulative(result, key)) for key in SUMMED},
            "command_cpu_seconds": sum(record.cpu_seconds for record in result.records),
            "losses": result.losses,
            "depth_curve": (result.evaluation or {}).get("depth_curve"),
            "task": (result.evaluation or {}).get("task"),
            "other_text": (result.other or {}).get("results"),
            "tasks": (result.tasks or {}).get("rows"),
            "problems": result.solved and {"all": result.solved.whole, **result.solved.tasks},
            "made_with": recipe.pop("made_with", None),
            "recipe": recipe,
        }

    def _arm_dict(self, arm: str, budget: int | None) -> dict[str, Any]:
        runs = self.of(arm, budget)
        return {
            "arm": arm,
            "budget": budget,
            "seeds": list(runs),
            **{key: _finite(mean(self.cumulative(run, key) for run in runs.values())) for key in SUMMED if runs},
            "losses": {name: loss for name in self.loss_names if (loss := mean_loss(runs, name))},
        }


COUNTED = "counted_flops"
SUMMED = ("tokens", "pass_tokens", "train_flops", COUNTED, "train_cpu_seconds")
COUNTS = (*SUMMED, "num_parameters", "compute_parameters")


def mean_loss(runs: Mapping[int, Result], name: str) -> dict[str, float] | None:
    """Mean, smallest and largest loss over the seeds; None where a run has not that loss, or diverged."""
    losses = [result.losses.get(name, {}).get("loss") for result in runs.values()]
    found = [loss for loss in losses if loss is not None]
    if not found or len(found) < len(losses):
        return None
    return {"mean": mean(found), "min": min(found), "max": max(found)}


def mean_curve(runs: Mapping[int, Result]) -> list[float]:
    """The depth curve averaged over the seeds; a plain model's is one loss."""
    curves = [result.curve for result in runs.values() if result.curve and None not in result.curve]
    return [mean(losses) for losses in zip(*curves)]


def decoding_loss(runs: Mapping[int, Result]) -> float | None:
    """The loss of the model as it decodes, averaged over the seeds."""
    losses = [result.losses[deployed(result.evaluation or {})]["loss"] for result in runs.values()]
    return None if not losses or None in losses else mean(losses)


def _read(run: Run, plan: Plan, pipeline: Pipeline) -> Result:
    commands = plan.commands(run)
    for command in commands:
        if reason := pipeline.failed.get(command.name):
            return Result(run, missing=f"failed: {reason}")
        if not pipeline.is_done(command):
            record = pipeline.record(command.name)
            return Result(run, missing=record.status if record and record.status != "done" else "not run")
    folder = read_run(commands[0].output, run.arm, wanted=(RESOLVED, SUMMARY))
    evaluated = read_run(commands[1].output, wanted=(EVALUATION,))
    if folder.summary is None or evaluated.evaluation is None:
        return Result(run, missing="; ".join(folder.missing + evaluated.missing))
    records = [record for command in commands if (record := pipeline.record(command.name))]
    other = read_run(commands[2].output, wanted=(EVALUATION,)).evaluation if plan.has_other_text else None
    by_name = {command.name: command.output for command in commands}
    tasks = read_task_scores(by_name[f"{run.name}-tasks"]) if plan.has_tasks else None
    try:
        solved = read_solved(by_name[f"{run.name}-{PROBLEMS}"]) if run.learns_problems else None
    except UnspokenError as error:
        return Result(run, missing=str(error))
    return Result(run, folder, evaluated.evaluation, records, other=other, tasks=tasks, solved=solved)


def _finite(value: float) -> float | None:
    """JSON has no word for what is not a number."""
    return value if math.isfinite(value) else None


def _comparison_dict(found: Found) -> dict[str, Any]:
    values = {"name": found.comparison.name, "comparison": str(found.comparison), "budget": found.budget}
    if found.difference is None:
        return {**values, "missing": found.missing}
    difference = found.difference
    return {
        **values,
        "difference": difference.mean.mean,
        "interval": difference.mean.interval,
        "unit": difference.mean.unit,
        "num_units": difference.mean.num_units,
        "outcome": difference.outcome.value,
        "by_seed": {
            str(seed): {"difference": one.mean, "interval": one.interval} for seed, one in difference.by_seed.items()
        },
        "seed_range": difference.range,
        "seed_deviation": difference.deviation,
    }


def _gain_dict(found: FoundGain) -> dict[str, Any]:
    values = {"name": found.comparison.name, "comparison": str(found.comparison)}
    if found.gain is None:
        return {**values, "missing": found.missing}
    return {
        **values,
        "percentage_points": found.gain.mean,
        "interval": found.gain.interval,
        "outcome": found.gain.outcome.value,
        "by_seed": {str(seed): value for seed, value in found.gain.by_seed.items()},
    }
