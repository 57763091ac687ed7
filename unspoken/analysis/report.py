"""Run folders as sections of a report: curves, losses by pass, depth, checks, samples, settings.

Each function takes what was read by `runs.py` and leaves out what is not there, with a line that says so. Colours
follow the order of the runs.
"""

import argparse
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from unspoken.analysis.figures import Frame, Series, line_plot
from unspoken.analysis.inspect import Reading, read_text
from unspoken.analysis.numbers import number, scientific
from unspoken.analysis.page import Block, Cell, Code, Figures, Folded, Samples, Section, Table, Text, page
from unspoken.analysis.policy_report import is_policy_run, policy_report
from unspoken.analysis.runs import Run, read_run
from unspoken.data.cache import check_file
from unspoken.errors import UnspokenError, UsageError
from unspoken.models.knobs import takes_latent_steps
from unspoken.models.load import load_model
from unspoken.train.folder import MODEL

Plot = tuple[str, str]  # SVG and caption
SMALL_SPAN = 0.01  # nats
STEEP_START = (0.0, 0.85)  # quantiles of a training curve that a plot shows


def main(args: argparse.Namespace) -> int:
    """`unspoken report RUN...`: one page of all of them."""
    check_file("--out", args.out)
    if args.max_tokens < 1:
        raise UsageError(f"--max-tokens is {args.max_tokens}; it must be at least 1")
    folders = [Path(folder).resolve() for folder in args.runs]
    names = [folder.name for folder in folders]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two of the runs are named {twice}; a report tells them apart by their folders' names")
    out = Path(args.out)
    if policies := [folder for folder in folders if is_policy_run(folder)]:
        _write_policies(policies, folders, args)
        return 0
    for run in map(read_run, folders):
        is_model = (run.folder / "config.json").is_file()
        if not is_model and not any((run.recipe, run.summary, run.metrics, run.evaluation)):
            raise UnspokenError(f"{run.folder} holds nothing of a run; give folders that `unspoken train` has written")
    reading = None
    if args.text is not None:
        reading = Reading(Path(args.text), read_text(Path(args.text)), args.max_tokens)
    _write(out, run_report(folders, args.title, reading), len(folders))
    return 0


def _write_policies(policies: list[Path], folders: list[Path], args: argparse.Namespace) -> None:
    if len(policies) < len(folders):
        raise UsageError("runs of `unspoken rl` have a page of their own; leave the others out")
    if args.text is not None:
        raise UsageError("--text: the page of runs of `unspoken rl` shows no depth")
    _write(Path(args.out), policy_report(folders, args.title), len(folders))


def _write(out: Path, text: str, num_runs: int) -> None:
    out.write_text(text, encoding="utf-8")
    print(f"{out}: {num_runs} run{'s' if num_runs != 1 else ''}")


def run_report(folders: Sequence[Path], title: str = "Runs", reading: Reading | None = None) -> str:
    """The report of run folders as HTML. reading: a text, of which models with latent steps show where they think.

    Raises:
        UnspokenError: a folder is not there.
    """
    runs = [read_run(folder) for folder in folders]
    sections = [
        Section("Training", [Figures(curves(runs)), cost_table(runs)]),
        Section("Evaluation", [loss_table(runs), Figures(depths(runs))]),
    ]
    sections += [Section(f"Checks of {run.name}", checks(run)) for run in runs if run.verification]
    if any(run.generations for run in runs):
        sections.append(Section("Samples", [samples(runs)]))
    sections += depth_sections(runs, reading) if reading else []
    sections.append(Section("Settings", [*settings(runs), *absent(runs)]))
    return page(
        title, f"{len(runs)} run{'s' if len(runs) != 1 else ''}: {', '.join(run.name for run in runs)}", sections
    )


def depth_sections(runs: Sequence[Run], reading: Reading) -> list[Section]:
    """Where models with latent steps think in a text: one section for each of them, none for others."""
    sections = []
    for run in runs:
        folder = run.folder / MODEL if (run.folder / MODEL).is_dir() else run.folder
        if not (folder / "config.json").is_file():
            sections.append(Section(f"Depth of {run.name}", [Text(f"{folder} holds no model.", "note")]))
            continue
        model, tokenizer = load_model(folder)
        if takes_latent_steps(model):
            view = reading.view(run.name, model, tokenizer)
            sections.append(Section(f"Depth of {run.name}", [*view.summary(), *view.relations(), *view.tokens()]))
    return sections


def curves(runs: Sequence[Run], kind: str = "eval") -> list[Plot]:
    """Loss during training against tokens and against compute: on held-out text, or that of the `train` rows."""
    by_tokens, by_flops = [], []
    for colour, run in enumerate(runs):
        for i in sorted({1, run.num_passes}):
            tokens, losses = run.curve(i, kind)
            name = f"{run.name}, pass {i}" if run.num_passes > 1 else run.name
            style: dict[str, Any] = {"colour": colour, "dashed": i < run.num_passes}
            if tokens:
                by_tokens.append(Series(name, tokens, losses, **style))
            if tokens and i == run.num_passes and (flops := run.flops_per_token):
                by_flops.append(Series(name, [t * flops for t in tokens], losses, **style))
    figures = []
    title = "Held-out loss while it learns" if kind == "eval" else "Training loss"
    frame = Frame(title, "tokens", "nats per token", y_focus=STEEP_START, x_counts=True)
    if by_tokens:
        figures.append((line_plot(by_tokens, frame), ""))
    if by_flops:
        frame = replace(frame, title="The same against compute", x_label="training FLOPs")
        figures.append((line_plot(by_flops, frame), ""))
    return figures


def gap(run: Run, baseline: Run, kind: str = "eval", colour: int = 1) -> str | None:
    """How far each pass is from the plain model at the same number of tokens, as a plot; None without common rows.

    kind: rows to use; those of `train` are fair where both runs log every step and see the same batches.
    """
    base = dict(zip(*baseline.curve(1, kind), strict=True))
    series = []
    for i in range(1, run.num_passes + 1):
        losses = dict(zip(*run.curve(i, kind), strict=True))
        common = [tokens for tokens in losses if tokens in base]
        gaps = [losses[tokens] - base[tokens] for tokens in common]
        if len(common) > 1:
            series.append(Series(f"pass {i}", common, gaps, colour, dashed=i < run.num_passes, markers=True))
    if not series:
        return None
    zero = Series(baseline.name, level=0.0, colour=0)
    frame = Frame(f"{run.name} minus {baseline.name}", "tokens", "nats per token", x_counts=True)
    return line_plot([zero, *series], frame)


def cost_table(runs: Sequence[Run]) -> Block:
    rows = []
    for run in runs:
        if summary := run.summary:
            rows.append(
                [
                    run.name,
                    f"{summary['num_parameters']:,}",
                    f"{summary['tokens']:,}",
                    f"{summary['pass_tokens']:,}",
                    scientific(summary["train_flops"]),
                    f"{summary['train_cpu_seconds']:,.0f}",
                    f"{summary['tokens'] / max(1e-9, summary['train_cpu_seconds']):,.0f}",
                ]
            )
    if not rows:
        return Text("No run has a summary.json.", "note")
    headers = ["run", "parameters", "tokens", "tokens × passes", "FLOPs", "CPU seconds", "tokens per CPU second"]
    convention = next(run.summary["flops_convention"] for run in runs if run.summary)
    return Table(headers, rows, f"FLOPs: {convention}.")


def loss_table(runs: Sequence[Run]) -> Block:
    """Loss of every pass and of the exact recurrence, one row a run."""
    evaluated = [(run, run.evaluation["results"]) for run in runs if run.evaluation and run.evaluation.get("results")]
    if not evaluated:
        return Text("No run has an evaluation (eval.json).", "note")
    names = list(dict.fromkeys(name for _, results in evaluated for name in results))
    names.sort(key=_place)
    rows = [
        [run.name, *(number(results[name]["loss"]) if name in results else "" for name in names), _bits(results)]
        for run, results in evaluated
    ]
    first = evaluated[0][0].evaluation or {}
    result = next(iter(first["results"].values()))
    caption = (
        f"Nats per token on {result['num_targets']:,} tokens of {result['num_documents']} held-out documents; k=n is "
        "n parallel passes, exact is the recurrence that decoding runs. Bits per byte are those of the last column."
    )
    return Table(["run", *names, "bits per byte"], rows, caption)


def depths(runs: Sequence[Run]) -> list[Plot]:
    """Loss against recycle depth, one plot a run: their losses lie too far apart for one."""
    figures = []
    for colour, run in enumerate(runs):
        curve = (run.evaluation or {}).get("depth_curve")
        if not curve or len(curve["losses"]) < 2:
            continue
        xs = list(range(1, len(curve["losses"]) + 1))
        losses = [math.nan if loss is None else loss for loss in curve["losses"]]
        series = [Series("k parallel passes", xs, losses, colour, markers=True)]
        if curve["exact"] is not None:
            series.append(Series("exact recurrence", level=curve["exact"], colour=2, dashed=True))
        mark = [(curve["num_train_passes"], "passes in training")]
        title = f"{run.name}: loss by recycle depth"
        frame = Frame(title, "passes k", "nats per token", whole_x=True, marks=mark, min_y_span=SMALL_SPAN)
        drift = number(curve["drift"], sign="+")
        caption = f"Best at k={curve['best_depth']}; {drift} from the depth of training to the last."
        figures.append((line_plot(series, frame), caption))
    return figures


def checks(run: Run) -> list[Block]:
    """The table of `unspoken verify`."""
    if not run.verification:
        return [Text(f"{run.name} was not verified.", "note")]
    rows = []
    for check in run.verification["checks"]:
        words = {True: Cell("pass", "better"), False: Cell("FAIL", "worse"), None: Cell("does not apply")}
        deviation = "" if check["deviation"] is None else f"{check['deviation']:.1e}"
        limit = "bit for bit" if check["tolerance"] == 0 else f"{check['tolerance']:.0e}"
        rows.append([check["name"], words[check["passed"]], deviation, limit, Cell(check["note"], "text")])
    caption = f"In {run.verification['dtype']}; deviations are relative to the largest logit."
    if run.verification.get("adapter_was_zero"):
        caption += " The adapter was all zero; random weights stood in for it, except in the comparison with the base."
    return [Table(["check", "result", "largest deviation", "tolerance", ""], rows, caption)]


def samples(runs: Sequence[Run]) -> Block:
    """Continuations, prompt by prompt, the runs side by side."""
    prompts = list(dict.fromkeys(line["prompt"] for run in runs for line in run.generations if "prompt" in line))
    return Samples(
        [
            (run.name, prompt, str(completion.get("text", "")))
            for prompt in prompts
            for run in runs
            for line in run.generations
            if line.get("prompt") == prompt
            for completion in line.get("completions", [])
        ]
    )


def settings(runs: Sequence[Run]) -> list[Block]:
    """Each run's resolved recipe, folded."""
    return [
        Folded(f"{run.name}: every setting", [Code(_yaml(run.recipe)), Text(f"Run folder: {run.folder}", "soft")])
        for run in runs
        if run.recipe
    ]


def machine(versions: dict[str, Any]) -> str:
    """What an evaluation ran on, with its packages' versions."""
    processor = torch.cpu.get_capabilities().get("cpu_name", platform.machine())
    packages = [f"{name} {version}" for name, version in versions.items() if name != "torch_threads"]
    return ", ".join([f"{processor}, {os.cpu_count()} cores, {platform.system()}; one thread a command", *packages])


def text_sources(folder: Path) -> Block:
    """What a folder of prepared text was made of."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Text(f"{folder / 'manifest.json'} cannot be read: {error}", "note")
    lines: list[list[str | Cell]] = []
    for source in manifest["sources"]:
        counts = manifest["counts"].get(source["name"], {})
        num_bytes = sum(split["bytes"] for split in counts.values())
        what = f"{source.get('package', 'this Python')} {source.get('version', '')}"
        lines.append(
            [source["name"], Cell(what, "text"), Cell(source.get("licence", ""), "text"), f"{num_bytes / 1e6:.1f}"]
        )
    splits = ", ".join(f"{name} {counts['tokens']:,}" for name, counts in manifest["splits"].items())
    return Table(["text", "package", "licence", "MB"], lines, f"Tokens of its own tokenizer: {splits}.")


def absent(runs: Sequence[Run]) -> list[Block]:
    """A line for each file that should have been there, and each run of another version."""
    lines = [line for run in runs for line in run.missing]
    for run in runs:
        made_with = ((run.recipe or {}).get("made_with") or {}).get("unspoken")
        if made_with not in (None, here := version("unspoken")):
            lines.append(
                f"{run.folder} was made with unspoken {made_with}, this is {here}: what it lacks was not written then. "
                "Its model can be evaluated anew (unspoken eval)."
            )
    return [Text(line, "note") for line in lines]


def _place(name: str) -> tuple[str, bool, int]:
    """k=1, k=2, ..., exact; then the same of another threshold (`k=1 tau=0.1`)."""
    first, _, setting = name.partition(" ")
    return setting, first == "exact", 0 if first == "exact" else int(first[2:])


def _bits(results: dict[str, Any]) -> str:
    result = list(results.values())[-1]
    return number(result["bits_per_byte"]) if "bits_per_byte" in result else ""


def _yaml(values: dict[str, Any] | None) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None).strip()
