"""`unspoken inspect MODEL --text FILE`: where a model thinks, token by token, in the terminal and as HTML."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.table import Table as TerminalTable
from rich.text import Text as TerminalText

from unspoken.analysis.figures import Frame, Series, line_plot
from unspoken.analysis.page import Block, Cards, Figures, Section, Table, Text, page
from unspoken.analysis.token_depth import (
    Bucket,
    TokenDepth,
    gain_by_right,
    length_by_loss,
    right_by_length,
    token_depth,
)
from unspoken.data.cache import check_file
from unspoken.data.tokenizer import document_end_id
from unspoken.errors import UsageError
from unspoken.models.knobs import LatentKnobs, takes_latent_steps
from unspoken.models.load import load_model

SEQUENCE_LENGTH = 256  # unless asked otherwise
SHOWN = 600  # tokens in the terminal; a page has all
COLOUR = (224, 118, 58)  # of the deepest token, over the page; others in proportion
TERMINAL = (70, 40, 20)  # added to a black background by the deepest token, times two


def main(args: argparse.Namespace) -> int:
    text = read_text(Path(args.text))
    for name in ("html", "json"):
        if getattr(args, name):
            check_file(f"--{name}", getattr(args, name))
    for name, least in (("sequence_length", 2), ("max_tokens", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    knobs = LatentKnobs.from_args(args)
    model, tokenizer = load_model(args.model, args.device, args.dtype)
    if not takes_latent_steps(model):
        raise UsageError(f"{args.model}: a model of type {model.config.model_type} takes no latent steps")
    reading = Reading(Path(args.text), text, args.max_tokens, args.sequence_length)
    view = reading.view(args.model, model, tokenizer, **knobs.options(model))
    view.show(Console(highlight=False))
    if args.html:
        Path(args.html).write_text(view.html(), encoding="utf-8")
        print(f"{args.html}: every token, with its steps")
    if args.json:
        Path(args.json).write_text(json.dumps(view.plain(), indent=1) + "\n", encoding="utf-8")
    return 0


@dataclass(frozen=True)
class Reading:
    """A text to be read by models with latent steps, so many of its tokens, `sequence_length` of them together."""

    path: Path
    text: str
    max_tokens: int
    sequence_length: int | None = None

    def view(self, name: str, model: Any, tokenizer: Any, **options: Any) -> "View":
        """options: of the model's forward.

        Raises:
            UsageError: there is nothing to read, nothing to read it with, or too much at once.
        """
        if tokenizer is None:
            raise UsageError(f"{name} has no tokenizer to read the text with")
        longest = getattr(model.config.text_config, "max_position_embeddings", None) or SEQUENCE_LENGTH
        length = self.sequence_length or min(SEQUENCE_LENGTH, longest)
        if length > longest:
            raise UsageError(f"--sequence-length is {length}; the model reads {longest} tokens at most")
        ids = tokenizer(self.text, add_special_tokens=False)["input_ids"][: self.max_tokens]
        if not ids:
            raise UsageError(f"--text: {self.path} has no token")
        start, window = document_end_id(tokenizer), length - 1
        depth = token_depth(model, ids, start, window, **options)
        uncut = depth
        if model.config.router != "none" and not {"exit_at_step", "exit_threshold"} & options.keys():
            uncut = token_depth(model, ids, start, window, **(options | {"exit_threshold": 0.0}))
        in_all = {"max_latent_steps": None, "exit_threshold": None, "exit_at_step": None, **options}
        max_latent_steps = model.model.knobs(**in_all).last_step - 1
        words = [str(tokenizer.decode([i])) for i in depth.ids]
        return View(name, self.path.name, words, depth, uncut, max_latent_steps)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


@dataclass(frozen=True)
class View:
    """A text as the model read it. `uncut`: the same, all steps taken, for what the next step would have given."""

    model: str
    name: str
    words: Sequence[str]
    depth: TokenDepth
    uncut: TokenDepth
    max_latent_steps: int

    @property
    def deepest(self) -> int:
        """Latent steps of the darkest colour."""
        return max(1, self.max_latent_steps)

    @property
    def pruned(self) -> float | None:
        """The share of latent steps that were not taken; None where none may be."""
        return 1 - float(self.depth.lengths.mean()) / self.max_latent_steps if self.max_latent_steps else None

    def show(self, console: Console) -> None:
        text = TerminalText()
        for word, length in list(zip(self.words, self.depth.lengths))[:SHOWN]:
            text.append(word, _terminal_style(int(length), self.deepest))
        console.print(text)
        if len(self.words) > SHOWN:
            console.print(f"... {len(self.words) - SHOWN} tokens more (--html has them all)", style="dim")
        legend = TerminalText("latent steps before a token: ")
        for n in range(self.deepest + 1):
            legend.append(f" {n} ", _terminal_style(n, self.deepest))
        console.print(legend)
        console.print(self._summary())
        for title, header, buckets in self._relations():
            table = TerminalTable("", "tokens", header, title=title, title_justify="left")
            for bucket in buckets:
                table.add_row(bucket.name, f"{bucket.count:,}", _number(bucket.mean))
            console.print(table)

    def _summary(self) -> str:
        mean = float(self.depth.lengths.mean())
        pruned = "" if self.pruned is None else f" ({self.pruned:.0%} of {self.max_latent_steps} pruned)"
        return (
            f"{len(self.depth):,} tokens, {self.depth.loss.mean():.3f} nats a token, {mean:.2f} latent steps a token"
            f"{pruned}"
        )

    def _relations(self) -> list[tuple[str, str, list[Bucket]]]:
        return [
            ("By latent steps", "probability of the right token", right_by_length(self.depth)),
            ("By cross-entropy (nats)", "latent steps", length_by_loss(self.depth)),
        ]

    def html(self) -> str:
        sections = [
            Section("", self.summary()),
            Section("Depth and difficulty", self.relations()),
            Section("The text", self.tokens()),
        ]
        return page("Where the model thinks", f"{self.model}, {self.name}", sections)

    def summary(self) -> list[Block]:
        mean = float(self.depth.lengths.mean())
        cards = Cards(
            [
                (f"{len(self.depth):,}", "tokens", ""),
                (f"{self.depth.loss.mean():.3f}", "nats a token", ""),
                (f"{mean:.2f}", f"latent steps a token, of {self.max_latent_steps}", ""),
                *([] if self.pruned is None else [(f"{self.pruned:.0%}", "of the steps pruned", "")]),
            ]
        )
        return [cards]

    def relations(self) -> list[Block]:
        """Depth against difficulty, as plots and tables."""
        tables: list[Block] = [
            Table([title, "tokens", header], [[b.name, f"{b.count:,}", _number(b.mean)] for b in buckets])
            for title, header, buckets in self._relations()
        ]
        return [Figures(self._plots()), *tables]

    def tokens(self) -> list[Block]:
        """The text, token by token."""
        return [Text("The darker a token, the more latent steps before it.", "soft"), _Words(self)]

    def _plots(self) -> list[tuple[str, str]]:
        by_length = [bucket for bucket in right_by_length(self.depth) if bucket.mean is not None]
        by_loss = [bucket for bucket in length_by_loss(self.depth) if bucket.mean is not None]
        gains = [
            Series(
                f"step {k + 1} after {k}",
                [(i + 0.5) / len(buckets) for i, bucket in enumerate(buckets) if bucket.mean is not None],
                [bucket.mean for bucket in buckets if bucket.mean is not None],
                colour=k - 1,
                markers=True,
            )
            for k, buckets in gain_by_right(self.uncut)
        ]
        plots = [
            (
                line_plot(
                    [Series("", [int(b.name) for b in by_length], [b.mean or 0.0 for b in by_length], markers=True)],
                    Frame("Right, by depth", "latent steps", "probability of the right token", whole_x=True),
                ),
                "As the paper's Figure 8, left: deep tokens should be the doubtful ones.",
            ),
            (
                line_plot(
                    [Series("", range(len(by_loss)), [b.mean or 0.0 for b in by_loss], markers=True)],
                    Frame(
                        "Depth, by difficulty",
                        f"cross-entropy, from {by_loss[0].name} to {by_loss[-1].name} nats",
                        "latent steps",
                        whole_x=True,
                    ),
                ),
                "As Figure 8, right; the points are the rows of the table below.",
            ),
        ]
        if gains:
            frame = Frame("What one more step gives", "probability of the right token", "change of it")
            plots.append((line_plot(gains, frame), "As Figure 2: all tokens take all steps."))
        return plots

    def plain(self) -> dict[str, Any]:
        """What was measured, as JSON can hold it."""
        return {
            "model": self.model,
            "text": self.name,
            "mean_latent_length": float(self.depth.lengths.mean()),
            "max_latent_steps": self.max_latent_steps,
            "prune_ratio": self.pruned,
            "tokens": [
                {
                    "token": self.words[i],
                    "latent_steps": int(self.depth.lengths[i]),
                    "loss": float(self.depth.loss[i]),
                    "reach": _finite(self.depth.reach[i]),
                    "p_target": _finite(self.depth.right[i]),
                }
                for i in range(len(self.depth))
            ],
            "right_by_length": [vars(bucket) for bucket in right_by_length(self.depth)],
            "length_by_loss": [vars(bucket) for bucket in length_by_loss(self.depth)],
            "gain_by_right": {str(k): [vars(b) for b in buckets] for k, buckets in gain_by_right(self.uncut)},
        }


@dataclass(frozen=True)
class _Words:
    """The text, each token on a ground as dark as it is deep, with its steps where the pointer rests."""

    view: View

    def html(self) -> str:
        depth, red, green, blue = self.view.depth, *COLOUR
        spans = []
        for i, word in enumerate(self.view.words):
            share = depth.lengths[i] / self.view.deepest
            steps = "\n".join(
                f"step {k + 1}: reach {reach:.3f}, right {right:.3f}"
                for k, (reach, right) in enumerate(zip(_finite(depth.reach[i]), _finite(depth.right[i]), strict=True))
            )
            title = f"{word!r}: {depth.lengths[i]} latent steps, {depth.loss[i]:.3f} nats\n{steps}"
            style = f"background: rgb({red} {green} {blue} / {0.7 * share:.2f})"
            spans.append(f'<span style="{style}" title="{escape(title)}">{escape(word)}</span>')
        return f'<div class="sample">{"".join(spans)}</div>'


def _terminal_style(length: int, deepest: int) -> Style:
    if length == 0:
        return Style()
    red, green, blue = (min(255, int(2.6 * part * length / deepest)) for part in TERMINAL)
    return Style(bgcolor=f"rgb({red},{green},{blue})", color="white")


def _finite(values: np.ndarray) -> list[float]:
    return [float(value) for value in values if not np.isnan(value)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
