"""A report as one HTML file: no script, no font, nothing fetched; light or dark as the reader's system is.

A page is blocks in sections. Every text is escaped where it becomes HTML; the only markup taken as it is comes from
`figures.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

_CSS = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6675; --line: #d9dee6; --card: #ffffff; --page: #f4f6f9;
  --accent: #4c8dd6; --good: #2f8f66; --bad: #c4553b; --open: #9a7b13; --code: #eef1f5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e9f0; --soft: #9aa5b5; --line: #323a47; --card: #1c222c;
  --page: #12161d; --good: #5cc294; --bad: #ee8a70; --open: #d9b94a; --code: #252c38; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; }
.lead { font-size: 1.15rem; color: var(--soft); margin: 0 0 1.4rem; max-width: 48rem; }
p { margin: .5rem 0; max-width: 48rem; }
.soft, figcaption, caption { color: var(--soft); font-size: .9rem; }
.finding { background: var(--card); border-left: 5px solid var(--accent); border-radius: 6px; padding: .9rem 1.2rem;
  margin: 1rem 0; font-size: 1.1rem; box-shadow: 0 1px 3px rgb(0 0 0 / .08); }
.finding p { max-width: none; margin: 0; }
.finding.better { border-color: var(--good); } .finding.worse { border-color: var(--bad); }
.finding.unclear { border-color: var(--open); }
.finding .soft { margin-top: .3rem; }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 12rem), 1fr)); gap: .8rem;
  margin: 1rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .95rem; }
.card b { display: block; font-size: 1.45rem; line-height: 1.25; font-weight: 650; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: .85rem; line-height: 1.35; display: block; }
.card.better b { color: var(--good); } .card.worse b { color: var(--bad); } .card.unclear b { color: var(--open); }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem;
  margin: 1rem 0; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { margin-top: .4rem; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem; }
caption { caption-side: bottom; text-align: left; padding: .5rem .8rem; }
th, td { padding: .42rem .8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; font-size: .82rem; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child, td.text { text-align: left; } td.text { white-space: normal; }
tbody tr:last-child td { border-bottom: 0; }
td.better { color: var(--good); font-weight: 600; } td.worse { color: var(--bad); font-weight: 600; }
td.unclear { color: var(--open); }
pre { background: var(--code); border-radius: 6px; padding: .7rem .9rem; overflow-x: auto; font-size: .83rem;
  line-height: 1.5; margin: .6rem 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.sample { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; margin: 0;
  white-space: pre-wrap; overflow-wrap: anywhere; font-family: Georgia, "Times New Roman", serif; }
.sample b { font: 600 .8rem system-ui, sans-serif; color: var(--soft); display: block; }
.sample i { color: var(--soft); }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--soft); }
.note { color: var(--open); font-size: .92rem; }
@media print { body { background: #fff; } .card, figure, .finding { break-inside: avoid; } }
"""


class Block(Protocol):
    def html(self) -> str: ...


@dataclass(frozen=True)
class Text:
    """A paragraph. `kind`: `soft` for the small print, `note` for what is missing or doubtful."""

    text: str
    kind: str = ""

    def html(self) -> str:
        return f'<p class="{escape(self.kind)}">{escape(self.text)}</p>' if self.kind else f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Finding:
    """What was found, in a sentence that stands out. `outcome`: `better`, `worse`, `unclear` or nothing."""

    text: str
    outcome: str = ""
    small: str = ""

    def html(self) -> str:
        small = f'<p class="soft">{escape(self.small)}</p>' if self.small else ""
        return f'<div class="finding {escape(self.outcome)}"><p>{escape(self.text)}</p>{small}</div>'


@dataclass(frozen=True)
class Cards:
    """Large numbers side by side: (number, what it is, outcome or "")."""

    cards: Sequence[tuple[str, str, str]]

    def html(self) -> str:
        made = (
            f'<div class="card {escape(outcome)}"><b>{escape(number)}</b><span>{escape(what)}</span></div>'
            for number, what, outcome in self.cards
        )
        return f'<div class="row">{"".join(made)}</div>'


@dataclass(frozen=True)
class Cell:
    """A cell of a table with an outcome's colour, or with running text."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Table:
    headers: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    caption: str = ""

    def html(self) -> str:
        head = "".join(f"<th>{escape(header)}</th>" for header in self.headers)
        body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in self.rows)
        caption = f"<caption>{escape(self.caption)}</caption>" if self.caption else ""
        table = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div class="scroll">{table}</div>'


@dataclass(frozen=True)
class Figures:
    """Plots side by side: (SVG of `figures.py`, caption)."""

    figures: Sequence[tuple[str, str]]

    def html(self) -> str:
        made = (
            f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
            if caption
            else f"<figure>{svg}</figure>"
            for svg, caption in self.figures
        )
        return f'<div class="figures">{"".join(made)}</div>'


@dataclass(frozen=True)
class Samples:
    """Generated texts side by side: (who wrote it, prompt, continuation)."""

    samples: Sequence[tuple[str, str, str]]

    def html(self) -> str:
        made = (
            f'<div class="sample"><b>{escape(who)}</b><i>{escape(prompt)}</i>{escape(text)}</div>'
            for who, prompt, text in self.samples
        )
        return f'<div class="figures">{"".join(made)}</div>'


@dataclass(frozen=True)
class Code:
    text: str

    def html(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


@dataclass(frozen=True)
class Folded:
    """Blocks that open on a click."""

    summary: str
    blocks: Sequence[Block]

    def html(self) -> str:
        inside = "".join(block.html() for block in self.blocks)
        return f"<details><summary>{escape(self.summary)}</summary>{inside}</details>"


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]

    def html(self) -> str:
        title = f"<h2>{escape(self.title)}</h2>" if self.title else ""
        return f"<section>{title}{''.join(block.html() for block in self.blocks)}</section>"


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole HTML document."""
    body = "\n".join(section.html() for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n{body}\n</main>\n</body>\n</html>\n'
    )


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    return f'<td class="{escape(cell.kind)}">{escape(cell.text)}</td>'
