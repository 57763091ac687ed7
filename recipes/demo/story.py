"""The demo's report: what was found first, then the plots behind it, then every setting."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from findings import QUICK_SIZES, Comparison

from unspoken.analysis.compare import Difference, Outcome, verdict
from unspoken.analysis.figures import Estimate, Frame, interval_plot
from unspoken.analysis.numbers import signed
from unspoken.analysis.page import Block, Cards, Cell, Code, Figures, Finding, Folded, Section, Table, Text, page
from unspoken.analysis.report import checks, curves, depths, gap, loss_table, machine, samples, settings, text_sources
from unspoken.analysis.runs import VERIFICATION, Run, read_run
from unspoken.paper.command import Command, Record
from unspoken.paper.pipeline import Pipeline, duration

QUESTION = (
    "A language model hands one sampled token to its next step and throws its hidden state away. "
    "Recycler adds that state to the next token's input. What is it worth, and at what price?"
)
READ_WITH_CARE = (
    "One seed and little text: a larger run may come out otherwise. The interval tells how far the difference "
    "depends on the pieces of held-out text, not on seed or corpus. At equal compute the plain model has read text "
    "that the recycling one has not; where no more text is to be had, equal tokens is the fair comparison."
)


def write_report(out: Path, comparisons: Sequence[Comparison], pipeline: Pipeline, is_quick: bool) -> Path:
    """Write OUT/report.html and return its path."""
    small, smollm2 = comparisons
    verified = read_run(out, "SmolLM2", wanted=(VERIFICATION,))
    quick = [Text(QUICK_SIZES, "note")] if is_quick else []
    sections = [
        Section("", [*quick, *_notes(pipeline), *map(_finding, comparisons), _cards(comparisons, verified)]),
        _from_scratch(small),
        _continued(smollm2),
        Section("Does it compute what it should?", [Text(CHECKED), *checks(verified)]),
        Section("What they write", _written(out)),
        Section("How this was made", _made(out, comparisons, pipeline)),
    ]
    path = out / "report.html"
    path.write_text(page("Does keeping the hidden state help?", QUESTION, sections), encoding="utf-8")
    return path


CHECKED = (
    "What the command verify finds on the converted SmolLM2: generation against a slow sequential reference, batches "
    "against single prompts, padded, packed and cached rows against plain ones, and its logits against the source's."
)


def _finding(comparison: Comparison) -> Finding:
    text = f"{comparison.title}: {verdict(comparison.equal_tokens, comparison.equal_compute)}"
    outcomes = {comparison.equal_tokens.outcome, comparison.equal_compute.outcome}
    outcome = outcomes.pop() if len(outcomes) == 1 else Outcome.UNCLEAR
    unit = comparison.equal_tokens
    small = (
        f"In nats per token, with 95 % intervals over {unit.num_units} {unit.unit} of held-out text, paired. What the "
        f"recycled state itself does (the recycler as it decodes minus its own first pass): {comparison.feedback}."
    )
    return Finding(text, outcome.value, small)


def _cards(comparisons: Sequence[Comparison], verified: Run) -> Cards:
    cards = []
    for comparison in comparisons:
        name = comparison.title.split(",")[0]
        for what, found in (
            ("at equal tokens, nats per token", comparison.equal_tokens),
            ("at equal compute, nats per token", comparison.equal_compute),
        ):
            cards.append((signed(found.mean), f"{name}, {what}", found.outcome.value))
    results = [
        check["passed"] for check in (verified.verification or {}).get("checks", []) if check["passed"] is not None
    ]
    passed = f"{sum(results)} of {len(results)}" if results else "not run"
    cards.append((passed, "checks of the converted model passed", "better" if results and all(results) else "worse"))
    return Cards(cards)


def _from_scratch(comparison: Comparison) -> Section:
    runs = _runs(comparison)
    plots = [_differences(comparison)]
    if (plot := gap(runs[1], runs[0])) is not None:
        plots.append((plot, "At the same number of tokens. Solid: the second pass; dashed: the first."))
    blocks: list[Block] = [
        Text(
            "The same model, tokens and order, once plain and once recycling; recycling runs two passes over each "
            "token in training, so a second plain run gets twice the tokens. In decoding all take one run a token."
        ),
        _table(comparison),
        Figures([*plots, *curves(runs), *depths(_evaluated(comparison))]),
        Text(READ_WITH_CARE, "soft"),
    ]
    return Section(comparison.title, blocks)


def _continued(comparison: Comparison) -> Section:
    runs = _runs(comparison)
    plots = [_differences(comparison)]
    if (plot := gap(runs[1], runs[0], kind="train")) is not None:
        plots.append((plot, "Loss on each batch before it is learned from; both see the same batches."))
    blocks: list[Block] = [
        Text(
            "A pretrained model, converted: its adapter starts at zero, so before the first step it computes what it "
            "always did. Then a short stretch of new text, with and without recycling: the plain model on as many "
            "tokens, and on twice as many, which is what the two passes cost."
        ),
        _table(comparison),
        Figures([*plots, *curves(runs, kind="train")[:1], *depths(_evaluated(comparison))]),
    ]
    return Section(comparison.title, blocks)


def _table(comparison: Comparison) -> Block:
    lines = []
    for cells, found in comparison.rows():
        lines.append([*cells, Cell(str(found), found.outcome.value) if found else ""])
    headers = ["method", "tokens", "FLOPs", "CPU seconds", *comparison.passes, "recycler minus this"]
    unit = comparison.equal_tokens
    caption = (
        f"Loss in nats per token on held-out text. k=n: n parallel passes; exact: the recurrence that decoding runs. "
        f"[a, b]: 95 % interval over {unit.num_units} {unit.unit}. FLOPs: 6 × parameters × tokens × passes."
    )
    return Table(headers, lines, caption)


def _differences(comparison: Comparison) -> tuple[str, str]:
    def row(name: str, found: Difference, colour: int) -> Estimate:
        return Estimate(name, found.mean, found.interval, colour)

    estimates = [
        row("recycler minus plain,\nequal tokens", comparison.equal_tokens, 1),
        row("recycler minus plain,\nequal compute", comparison.equal_compute, 1),
        row("recycler, as it decodes,\nminus its own first pass", comparison.feedback, 3),
    ]
    plot = interval_plot(estimates, Frame("Is it better?", "nats per token (below zero: better)"))
    return plot, "Points left of zero are better; bars are 95 % intervals."


def _runs(comparison: Comparison) -> list[Run]:
    return [replace(arm.run, name=arm.label) for arm in comparison.arms]


def _evaluated(comparison: Comparison) -> list[Run]:
    return [replace(arm.run, name=arm.label, evaluation=arm.evaluation) for arm in comparison.arms]


def _written(out: Path) -> list[Block]:
    names = {
        "plain": "small, plain",
        "recycler": "small, recycling",
        "smollm2-plain": "SmolLM2, plain",
        "smollm2-recycler": "SmolLM2, recycling",
    }
    blocks: list[Block] = [Text("Sampled at temperature 0.8. The prompt is in grey.", "soft")]
    for pair in (("plain", "recycler"), ("smollm2-plain", "smollm2-recycler")):
        runs = [Run(names[name], out, generations=_generations(out / f"generations-{name}.jsonl")) for name in pair]
        blocks.append(samples(runs))
    return blocks


def _generations(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _notes(pipeline: Pipeline) -> list[Block]:
    """Where another text had to do, say so at the top."""
    notes = []
    for command, record in _records(pipeline):
        if record.note:
            notes.append(
                Text(
                    f"{command.name}: `{shlex.join(record.words)}` ran in place of the first choice. {record.note}",
                    "note",
                )
            )
    return notes


def _records(pipeline: Pipeline) -> list[tuple[Command, Record]]:
    commands = [command for stage in pipeline.stages for lane in stage.lanes for command in lane]
    return [(command, record) for command in commands if (record := pipeline.record(command.name))]


def _made(out: Path, comparisons: Sequence[Comparison], pipeline: Pipeline) -> list[Block]:
    records = _records(pipeline)
    lines = [
        [name.name, duration(r.wall_seconds), f"{r.cpu_seconds:.0f}", f"{r.peak_memory_bytes / 2**30:.1f} GiB"]
        for name, r in records
    ]
    total = sum(record.cpu_seconds for _, record in records)
    versions = comparisons[0].recycler.evaluation["versions"]
    typed = "\n".join(pipeline.typed(record.words) for _, record in records)
    arms = [arm for comparison in comparisons for arm in (comparison.plain, comparison.recycler, comparison.plain_2x)]
    recipes = {arm.run.folder: replace(arm.run, name=arm.run.folder.name) for arm in arms}
    return [
        Text(machine(versions), "soft"),
        text_sources(out / "data"),
        Folded("The commands, in order", [Code(typed)]),
        Folded(
            "What each cost",
            [Table(["command", "wall", "CPU seconds", "peak memory"], lines, f"{total:.0f} CPU seconds in all.")],
        ),
        Folded("Every loss", [loss_table(_evaluated(comparison)) for comparison in comparisons]),
        *settings(list(recipes.values())),
    ]
