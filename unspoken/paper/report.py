"""A study's table.md, plots and report.html from its results."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from unspoken.analysis.figures import Estimate, Frame, Series, interval_plot, line_plot
from unspoken.analysis.numbers import number, scientific, short_count, signed
from unspoken.analysis.page import Block, Cell, Code, Figures, Finding, Folded, Section, Table, Text, page
from unspoken.analysis.report import SMALL_SPAN, curves, machine, settings, text_sources
from unspoken.paper.answers import CAPTION, answer_tables, lengths, plot_answers
from unspoken.paper.arms import DATA
from unspoken.paper.costs import CAPTION as COST_CAPTION
from unspoken.paper.costs import cost_tables
from unspoken.paper.domains import CAPTION as DOMAIN_CAPTION
from unspoken.paper.domains import domain_tables
from unspoken.paper.latent import CAPTION as LATENT_CAPTION
from unspoken.paper.latent import latent_tables, plot_latent_lengths
from unspoken.paper.pipeline import Pipeline, duration
from unspoken.paper.results import COUNTED, Found, Results, decoding_loss, mean_curve, mean_loss
from unspoken.paper.solved import CAPTION as SOLVED_CAPTION
from unspoken.paper.solved import GAIN_CAPTION, gain_tables, plot_solved, solved_tables
from unspoken.paper.tasks import CAPTION as TASK_CAPTION
from unspoken.paper.tasks import task_tables

RESULTS, TABLE, REPORT = "results.json", "table.md", "report.html"
MAX_FINDINGS = 6  # sentences at the top of a report
QUICK = "These are the sizes of --quick: they show that all works, not what it is worth."
READ_WITH_CARE = (
    "Each interval says how far a difference depends on the pieces of held-out text; how far it depends on the seed is "
    "seen beside it, seed by seed. A difference counts as better or worse where the interval leaves out zero and all "
    "seeds agree on the sign."
)
Plot = tuple[str, str, str]  # file name, SVG, caption
Rows = tuple[Sequence[str], Sequence[Sequence[str | Cell]]]  # headers and rows


def write_results(results: Results, pipeline: Pipeline, out: Path) -> list[Path]:
    """Write results.json, table.md, the plots and report.html into `out`; return their paths."""
    drawn = plots(results)
    paths = [out / RESULTS, out / TABLE, *(out / f"{name}.svg" for name, _, _ in drawn), out / REPORT]
    texts = [json.dumps(results.as_dict(), indent=1) + "\n", markdown(results), *(svg for _, svg, _ in drawn)]
    for path, text in zip(paths, [*texts, _html(results, drawn, pipeline)], strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def plots(results: Results) -> list[Plot]:
    """The plots that the study asks for, where there is something to draw."""
    makers = {
        "differences": _differences,
        "depth": _depth,
        "cost": _cost,
        "curves": _curves,
        "budgets": _budgets,
        "answers": _answers,
        "latent": _latent,
        "solved": _solved,
    }
    return [plot for kind in results.study.file.plots for plot in makers[kind](results)]


def loss_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the table of arms: cost and losses, averaged over seeds."""
    headers = ["arm", "tokens", "FLOPs", "6ND", "CPU s", *results.loss_names, "bits per byte", "seeds"]
    rows = []
    for budget in results.budgets:
        for arm in results.arms:
            if not (runs := results.of(arm, budget)):
                continue
            first = next(iter(runs.values()))
            losses = [mean_loss(runs, name) for name in results.loss_names]
            bits = [bits for run in runs.values() if (bits := list(run.losses.values())[-1].get("bits_per_byte"))]
            seconds = sum(results.cumulative(run, "train_cpu_seconds") for run in runs.values()) / len(runs)
            rows.append([
                arm,
                short_count(results.cumulative(first, "tokens")),
                scientific(results.cumulative(first, COUNTED)),
                scientific(results.cumulative(first, "train_flops")),
                f"{seconds:.0f}",
                *(number(loss["mean"]) if loss else "" for loss in losses),
                number(sum(bits) / len(bits)) if bits else "",
                str(len(runs)),
            ])  # fmt: skip
    return headers, rows


def comparison_rows(results: Results, only_found: bool = False) -> tuple[list[str], list[list[str | Cell]]]:
    """Headers and rows of the table of differences. only_found: without those that could not be made."""
    headers = ["", "comparison", "difference [95 % over text]", "by seed", "deviation"]
    rows: list[list[str | Cell]] = []
    for found in results.found:
        what: list[str | Cell] = [found.comparison.name, Cell(_with_budget(found), "text")]
        if found.difference is None:
            if not only_found:
                rows.append([*what, Cell(found.missing, "text"), "", ""])
            continue
        difference = found.difference
        seeds = ", ".join(f"{one.mean:+.4f}" for one in difference.by_seed.values())
        deviation = "" if difference.deviation is None else f"{difference.deviation:.4f}"
        rows.append([*what, Cell(str(difference.mean), difference.outcome.value), seeds, deviation])
    return headers, rows


def markdown(results: Results) -> str:
    """Both tables for a lab log."""
    study = results.study.file
    lines = [f"# {study.title}", "", study.question, ""]
    if results.plan.arms.is_quick:
        lines += [QUICK, ""]
    tables: list[Rows] = [
        loss_rows(results),
        *answer_tables(results),
        *latent_tables(results),
        *domain_tables(results),
        *task_tables(results),
        *solved_tables(results),
        *gain_tables(results),
        *cost_tables(results),
        comparison_rows(results),
    ]
    for headers, rows in tables:
        lines += [_line(headers), "|" + "---|" * len(headers), *map(_line, rows), ""]
    missing = [f"- {result.run.name}: {result.missing}" for result in results.all if not result.is_done]
    lines += ["Not among the results:", *missing, ""] if missing else []
    return "\n".join([*lines, _caption(results), ""])


def _line(cells: Sequence[str | Cell]) -> str:
    texts = [cell.text if isinstance(cell, Cell) else cell for cell in cells]
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"


def _caption(results: Results) -> str:
    found = next((one.difference.mean for one in results.found if one.difference), None)
    text = f"95 % intervals, paired, over {found.num_units} {found.unit} of held-out text. " if found else ""
    return (
        "Loss in nats per token, averaged over seeds. k=n: n parallel passes; exact: the recurrence that decoding "
        f"runs. {text}FLOPs of all stages of training, counted from the modules and the passes that ran; 6ND: 6 × "
        "parameters × tokens × passes. CPU s: of training."
    )


def _html(results: Results, drawn: Sequence[Plot], pipeline: Pipeline) -> str:
    study = results.study.file
    absent = "; ".join(f"{result.run.name} {result.missing}" for result in results.all if not result.is_done)
    missing = [Text(f"Not among the results: {absent}.", "note")] if absent else []
    quick = [Text(QUICK, "note")] if results.plan.arms.is_quick else []
    headers, rows = loss_rows(results)
    gains = [Table(*rows, GAIN_CAPTION) for rows in gain_tables(results)]
    arms: list[Block] = [
        Table(headers, rows, _caption(results)),
        *(Text(f"{arm}: {note}", "soft") for arm in study.arms if (note := (study.arms[arm] or {}).get("note"))),
    ]
    sections = [
        Section("", [*quick, *_findings(results)]),
        Section("Arms", arms),
        *(Section("Right answers", [Table(*answers, CAPTION)]) for answers in answer_tables(results)),
        *(Section("Latent steps", [Table(*steps, LATENT_CAPTION)]) for steps in latent_tables(results)),
        *(Section("Text of another kind", [Table(*rows, DOMAIN_CAPTION)]) for rows in domain_tables(results)),
        *(Section("Tasks", [Table(*rows, TASK_CAPTION)]) for rows in task_tables(results)),
        *(Section("Problems", [Table(*solved, SOLVED_CAPTION), *gains]) for solved in solved_tables(results)),
        *(Section("Costs", [Table(*costs, COST_CAPTION)]) for costs in cost_tables(results)),
        Section("Differences", [Table(*comparison_rows(results)), Text(READ_WITH_CARE, "soft")]),
        Section("Plots", [Figures([(svg, caption) for _, svg, caption in drawn])]),
        Section("In the paper", [Code(_yaml(study.paper))] if study.paper else [Text("Nothing recorded.", "soft")]),
        Section("How this was made", [*missing, *_made(results, pipeline)]),
    ]
    return page(study.title, study.question, sections)


def _findings(results: Results) -> list[Block]:
    """The named comparisons, a sentence each."""
    words = {"better": "is better than", "worse": "is worse than", "unclear": "cannot be told from"}
    named = [found for found in results.found if found.comparison.name and found.difference]
    blocks: list[Block] = []
    for found in named[:MAX_FINDINGS]:
        assert found.difference is not None
        outcome = found.difference.outcome.value
        of, minus = found.comparison
        at = f" at {short_count(found.budget)} tokens" if found.budget else ""
        text = f"{found.comparison.name}{at}: {of} {words[outcome]} {minus}, {found.difference.mean} nats per token."
        seeds = ", ".join(signed(one.mean) for one in found.difference.by_seed.values())
        blocks.append(Finding(text, outcome, f"Seed by seed: {seeds}." if len(found.difference.by_seed) > 1 else ""))
    for made in [made for made in results.gains if made.comparison.name and made.gain][:MAX_FINDINGS]:
        assert made.gain is not None
        outcome = made.gain.outcome.value
        of, minus = made.comparison
        text = f"{made.comparison.name}: {of} {words[outcome]} {minus}, {made.gain} points of right answers."
        seeds = ", ".join(f"{one:+.1f}" for one in made.gain.by_seed.values())
        blocks.append(Finding(text, outcome, f"Seed by seed: {seeds}." if len(made.gain.by_seed) > 1 else ""))
    return blocks


def _made(results: Results, pipeline: Pipeline) -> list[Block]:
    commands = [command for stage in pipeline.stages for lane in stage.lanes for command in lane]
    records = [(command, record) for command in commands if (record := pipeline.record(command.name))]
    lines: list[list[str | Cell]] = [
        [command.name, duration(record.wall_seconds), f"{record.cpu_seconds:.0f}", Cell(record.note, "text")]
        for command, record in records
    ]
    typed = "\n".join(pipeline.typed(record.words) for _, record in records)
    firsts = [next(iter(runs.values())) for arm in results.arms if (runs := results.of(arm, results.budgets[0]))]
    total = sum(record.cpu_seconds for _, record in records)
    versions: list[dict] = [one.evaluation.get("versions", {}) for one in firsts if one.evaluation]
    return [
        Text(machine(versions[0] if versions else {}), "soft"),
        *([text_sources(results.plan.out / DATA)] if results.plan.arms.makes_text else []),
        Folded("The commands", [Code(typed)]),
        Folded("What each cost", [Table(["command", "wall", "CPU seconds", ""], lines, f"{total:.0f} CPU seconds.")]),
        *settings([replace(one.folder, name=one.run.name) for one in firsts if one.folder]),
    ]


def _differences(results: Results) -> list[Plot]:
    estimates = []
    for found in results.found:
        if found.difference is not None:
            name = found.comparison.name or str(found.comparison.of)
            name = name if found.budget is None else f"{name}, {short_count(found.budget)}"
            colour = {"better": 2, "worse": 1, "unclear": 4}[found.difference.outcome.value]
            estimates.append(Estimate(name, found.difference.mean.mean, found.difference.mean.interval, colour))
    if not estimates:
        return []
    baseline = results.study.file.baseline
    title = f"Minus {baseline}" if baseline and not results.study.file.compare else "Differences"
    plot = interval_plot(estimates, Frame(title, "nats per token (below zero: better)"))
    return [("differences", plot, "Averaged over seeds; bars are 95 % intervals over text.")]


def _depth(results: Results) -> list[Plot]:
    made = []
    for budget in results.budgets:
        series, marks = [], []
        for colour, arm in enumerate(results.arms):
            runs = results.of(arm, budget)
            curve = mean_curve(runs)
            if len(curve) > 1:
                series.append(Series(arm, list(range(1, len(curve) + 1)), curve, colour, markers=len(curve) <= 16))
                marks = [(next(iter(runs.values())).run.num_passes, "passes in training")]
            elif runs and (loss := decoding_loss(runs)) is not None:
                series.append(Series(arm, level=loss, colour=colour, dashed=True))
        if any(one.level is None for one in series):
            title = "Loss by recycle depth" + (f", {short_count(budget)} tokens" if budget else "")
            frame = Frame(title, "passes k", "nats per token", whole_x=True, marks=marks, min_y_span=SMALL_SPAN)
            name = "depth" if budget is None else f"depth-{short_count(budget)}"
            made.append((name, line_plot(series, frame), "Averaged over seeds. Dashed: one pass is all it has."))
    return made


def _cost(results: Results) -> list[Plot]:
    """The loss of decoding against all training compute, each named comparison an arrow from one arm to the other."""
    series = []
    for colour, found in enumerate(one for one in results.found if one.comparison.name):
        ends = [
            (results.of(term.arm, found.budget), term.arm) for term in (found.comparison.minus, found.comparison.of)
        ]
        losses = [decoding_loss(runs) for runs, _ in ends]
        if None in losses:
            continue
        flops = [results.cumulative(next(iter(runs.values())), COUNTED) for runs, _ in ends]
        name = f"{found.comparison.name}: {ends[0][1]} to {ends[1][1]}"
        series.append(Series(name, flops, [loss for loss in losses if loss is not None], colour, markers=True))
    if not series:
        return []
    frame = Frame("Loss against all training compute", "cumulative training FLOPs", "nats per token", x_counts=True)
    return [
        (
            "cost",
            line_plot(series, frame),
            "Each line leads from the arm after the minus sign to the one before.",
        )
    ]


def _curves(results: Results) -> list[Plot]:
    runs = [runs for arm in results.arms if (runs := results.of(arm, results.budgets[-1]))]
    folders = [next(iter(one.values())).folder for one in runs]
    drawn = curves([folder for folder in folders if folder])
    return [(f"curve-{i + 1}", svg, caption or "The first seed.") for i, (svg, caption) in enumerate(drawn)]


def _budgets(results: Results) -> list[Plot]:
    """Each named comparison against the training tokens of the base."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for found in results.found:
        if found.budget and found.difference and found.comparison.name:
            by_name.setdefault(found.comparison.name, []).append((found.budget, found.difference.mean.mean))
    if not any(len(points) > 1 for points in by_name.values()):
        return []
    series = [
        Series(name, [x for x, _ in points], [y for _, y in points], colour, markers=True)
        for colour, (name, points) in enumerate(by_name.items())
    ]
    frame = Frame("Difference by training tokens", "tokens", "nats per token (below zero: better)", x_counts=True)
    return [("budgets", line_plot([Series("", level=0.0), *series], frame), "")]


def _answers(results: Results) -> list[Plot]:
    return [("answers", plot_answers(results), CAPTION)] if lengths(results) else []


def _latent(results: Results) -> list[Plot]:
    plot = plot_latent_lengths(results)
    return [("latent", plot, "The first seed of each arm.")] if plot else []


def _solved(results: Results) -> list[Plot]:
    plot = plot_solved(results)
    return [("solved", plot, "Each line leads from the arm after the minus sign to the one before.")] if plot else []


def _with_budget(found: Found) -> str:
    return str(found.comparison) + (f" at {short_count(found.budget)} tokens" if found.budget else "")


def _yaml(values: object) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100).strip()
