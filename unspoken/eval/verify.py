"""`unspoken verify`: the checks of `checks.py` as a table of pass and fail. Exit status 1 if one fails."""

import argparse
import json
import math
import platform
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from unspoken.data.cache import check_file
from unspoken.errors import UnspokenError, first_line
from unspoken.eval.checks import (
    BASE_CHECK,
    BIT_FOR_BIT,
    CHECKS,
    DRIFT_CHECK,
    IN_CHUNKS,
    OF_LATENT_STEPS,
    OF_RECYCLING,
    base_check,
    base_drift,
)
from unspoken.eval.standins import awake_adapter, awake_router, neutral_generation
from unspoken.eval.subject import Subject
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.load import check_model, load_model, load_source

PROBE = (4, 9)  # rows and tokens that a router must tell apart
DTYPE = "float32"  # unless asked otherwise: in half precision rounding hides what is looked for
# Rounding over a few dozen layers stays below; in float32 a lost or misplaced state is off by 1e-2 and more.
TOLERANCES = {torch.float64: 2e-5, torch.float32: 2e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}


@dataclass(frozen=True)
class Result:
    """One line of the table. `passed` is None when the check does not apply to the model; `note` says why.

    `deviation` is relative to the largest logit; None when the check did not come to an end.
    """

    name: str
    passed: bool | None
    deviation: float | None
    tolerance: float
    note: str = ""


@dataclass(frozen=True)
class Verification:
    """`adapter_was_zero`, `router_was_blind`: a random one stood in for it, except where a base was compared."""

    results: list[Result]
    adapter_was_zero: bool
    router_was_blind: bool

    @property
    def passed(self) -> bool:
        return all(result.passed is not False for result in self.results)


def main(args: argparse.Namespace) -> int:
    if args.json:
        check_file("--json", args.json)
    if args.base:
        check_model(args.base)
    dtype = DTYPE if args.dtype == "auto" else args.dtype
    model, _ = load_model(args.model, args.device, dtype)
    base = load_source(args.base, dtype)[0].to(model.device).eval() if args.base else None  # type: ignore[arg-type]
    with Console(stderr=True).status("verifying") as status:
        verification = verify(model, args.seed, base, lambda name: status.update(f"verifying: {name}"))
    _print(Console(), args, model, verification)
    if args.json:
        report = _as_dict(args, model, verification)
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if verification.passed else 1


@torch.no_grad()
def verify(
    model: LatentForCausalLM,
    seed: int = 0,
    base: PreTrainedModel | None = None,
    on_check: Callable[[str], None] = lambda name: None,
    names: Collection[str] = tuple(CHECKS),
) -> Verification:
    """Run the named checks; with `base`, in the same dtype, also that the model's logits without latent steps are that
    one's bit for bit, and with them no further away than the steps' weights allow.

    The model is in evaluation mode meanwhile and is left as it was. A check that raises has failed.
    """
    was_training = model.training
    model.eval()
    subject, results = Subject(model, seed), []
    with neutral_generation(model):
        with (
            awake_adapter(model, seed) as adapter_was_zero,
            awake_router(model, subject.ids(*PROBE), seed) as router_was_blind,
        ):
            for name in names:
                on_check(name)
                results.append(_run(name, CHECKS[name], subject))
        if base is not None:
            on_check(BASE_CHECK)
            results.append(_run(BASE_CHECK, base_check(base), subject))
            if subject.takes_steps and results[-1].passed:
                results.append(_drift(subject, base))
    model.train(was_training)
    return Verification(results, adapter_was_zero, router_was_blind)


def _run(name: str, check: Callable[[Subject], float], subject: Subject) -> Result:
    tolerance = 0.0 if name in BIT_FOR_BIT else TOLERANCES[subject.model.dtype]
    if name in OF_RECYCLING and not subject.recycles:
        return Result(name, None, None, tolerance, "a model that does not recycle has one pass")
    if name in OF_LATENT_STEPS and not subject.takes_steps:
        return Result(name, None, None, tolerance, "the model takes no latent steps")
    if name in IN_CHUNKS and subject.has_thoughts:
        return Result(name, None, None, tolerance, "a prompt in chunks would be approximated otherwise, and is refused")
    try:
        worst = check(subject)
    except Exception as error:
        kind = "" if isinstance(error, UnspokenError) else f"{type(error).__name__}: "
        return Result(name, False, None, tolerance, kind + first_line(error))
    if not math.isfinite(worst):
        return Result(name, False, None, tolerance, "not a finite number")
    passed = worst <= tolerance
    is_trained = name == BASE_CHECK and not passed
    return Result(name, passed, worst, tolerance, "differs too once a model is trained" if is_trained else "")


def _drift(subject: Subject, base: PreTrainedModel) -> Result:
    """The deviation is not relative here, and its tolerance is the bound and what rounding may do."""
    found = base_drift(subject, base)
    note = (
        f"{found.latent_length:.2f} latent steps a token, which weigh {found.weight:.2g} at most; logits, not relative"
    )
    return Result(DRIFT_CHECK, found.holds, found.measured, found.bound + found.rounding, note)


def _print(console: Console, args: argparse.Namespace, model: LatentForCausalLM, verification: Verification) -> None:
    table = Table()
    for column in ("check", "result", "largest deviation", "tolerance"):
        table.add_column(column, justify="right" if column in ("largest deviation", "tolerance") else "left")
    words = {True: "[green]pass[/]", False: "[red]FAIL[/]", None: "-"}
    for result in verification.results:
        deviation = "" if result.deviation is None else f"{result.deviation:.1e}"
        limit = "bit for bit" if result.tolerance == 0 else f"{result.tolerance:.0e}"
        table.add_row(result.name, words[result.passed], deviation, limit if result.passed is not None else "")
    dtype = str(model.dtype).removeprefix("torch.")
    console.print(f"{args.model} in {dtype}; deviations are relative to the largest logit", highlight=False)
    console.print(table)
    for result in verification.results:
        if result.note:
            console.print(f"{result.name}: {result.note}", highlight=False, markup=False, soft_wrap=True)
    what = "a random one stood in for it" + (", except against the base" if args.base else "")
    if verification.adapter_was_zero:
        console.print(f"the adapter is all zero, and with it no state could go wrong: {what}", soft_wrap=True)
    if verification.router_was_blind:
        console.print(f"the router tells no tokens apart, so no decision could go wrong: {what}", soft_wrap=True)


def _as_dict(args: argparse.Namespace, model: LatentForCausalLM, verification: Verification) -> dict:
    return {
        "passed": verification.passed,
        "model": str(args.model),
        "base": args.base,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "seed": args.seed,
        "adapter_was_zero": verification.adapter_was_zero,
        "router_was_blind": verification.router_was_blind,
        "checks": [asdict(result) for result in verification.results],
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("unspoken", "torch", "transformers")},
        },
    }
