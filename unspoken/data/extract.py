"""Plain paragraphs out of HTML, reStructuredText and POD: markup, code, tables and navigation go.

The aim is running prose for training, not a faithful rendering; `clean.clean_manual` drops what slips
through.
"""

import re
from html.parser import HTMLParser

_HTML_DROPPED = {
    "script",
    "style",
    "pre",
    "nav",
    "table",
    "head",
    "svg",
    "math",
    "footer",
    "select",
    "button",
}
_HTML_INLINE = {
    "a", "abbr", "acronym", "b", "bdi", "big", "cite", "code", "dfn", "em", "font", "i", "kbd", "q", "s", "samp",
    "small", "span", "strong", "sub", "sup", "tt", "u", "var",
}  # fmt: skip
_HTML_VOID = {"br", "hr", "img", "input", "link", "meta", "col", "wbr", "area", "base", "source"}

# Directives whose body is prose; the body of every other one is dropped.
_RST_PROSE = {
    "note", "warning", "caution", "tip", "hint", "important", "attention", "danger", "admonition", "topic", "seealso",
    "versionadded", "versionchanged", "deprecated", "function", "class", "method", "module", "data", "attribute",
    "exception", "decorator", "classmethod", "staticmethod", "describe", "option", "cmdoption", "envvar", "opcode",
    "impl-detail", "container", "sidebar", "glossary", "rubric",
}  # fmt: skip
_RST_DIRECTIVE = re.compile(r"(\s*)\.\. (?:([\w-]+(?::[\w-]+)?)::|\S)")
_RST_BULLET = re.compile(r"(\s*)(?:[-*+•]|#\.|\(?[0-9a-zA-Z]{1,2}[.)])\s+(?=\S)")
_RST_UNDERLINE = re.compile(r"\s*([=\-~^\"'`#*+.:_])\1{2,}\s*")
_RST_INLINE = [
    (re.compile(r"``(.+?)``"), r"\1"),
    (re.compile(r":[\w:+-]+:`[!~]?([^`<]+?)\s*(?:<[^`>]*>)?`"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?"), r"\1"),
    (re.compile(r"`([^`]+)`_{0,2}"), r"\1"),
    (re.compile(r"(?<!\w)\*\*(\S(?:.*?\S)?)\*\*"), r"\1"),
    (re.compile(r"(?<![\w*\\])\*([^\s*](?:[^*]*[^\s*\\])?)\*(?!\w)"), r"\1"),
    (re.compile(r"\s?\[(?:#\w*|\*|\d+|\w+)\]_"), ""),
    (re.compile(r"\|(\S[^|]*\S)\|"), r"\1"),
    (re.compile(r"\b(\w+)__?(?=[\s.,;:)]|$)"), r"\1"),
    (re.compile(r"\\(.)"), r"\1"),
]
_POD_CODE = re.compile(r"([A-Z])(?:<<+\s+(.*?)\s+>>+|<([^<>]*)>)", re.DOTALL)
_POD_ESCAPES = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/", "amp": "&", "quot": '"'}


def html_text(data: bytes) -> str:
    """Return the paragraphs of an HTML page, blank lines between."""
    parser = _HTMLText()
    parser.feed(_decoded(data))
    parser.close()
    return "\n\n".join(parser.paragraphs())


class _HTMLText(HTMLParser):
    """Collects text outside dropped elements; any element that is not inline ends a paragraph."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._pieces: list[str] = []
        self._dropped: list[str] = []

    def handle_starttag(self, tag: str, attrs) -> None:
        if tag in _HTML_DROPPED:
            self._dropped.append(tag)
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._dropped:
            while self._dropped.pop() != tag:
                pass
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._dropped:
            self._pieces.append(data.replace("\n", " "))

    def _break(self, tag: str) -> None:
        if tag == "br":
            self._pieces.append(" ")
        elif tag not in _HTML_INLINE:
            self._pieces.append("\n")

    def paragraphs(self) -> list[str]:
        lines = "".join(self._pieces).split("\n")
        return [text for line in lines if (text := " ".join(line.split()))]


def rst_text(data: bytes) -> str:
    """Return the paragraphs of a reStructuredText file, blank lines between."""
    lines = _decoded(data).expandtabs(8).split("\n")
    paragraphs = _rst_paragraphs(_without_rst_blocks(lines))
    return "\n\n".join(_rst_inline(" ".join(paragraph)) for paragraph in paragraphs)


def _without_rst_blocks(lines: list[str]) -> list[str]:
    """Drop comments, targets, directives that are not prose, literal blocks, and the options of directives."""
    kept: list[str] = []
    skip_beyond: int | None = None  # drop lines indented more than this
    in_options = False
    for line in lines:
        if not line.strip():
            in_options = False
            kept.append("")
            continue
        indent = len(line) - len(line.lstrip())
        if skip_beyond is not None and indent > skip_beyond:
            continue
        skip_beyond = None
        directive = _RST_DIRECTIVE.match(line)
        if directive:
            name = (directive[2] or "").rpartition(":")[2]
            in_options = name in _RST_PROSE
            skip_beyond = None if in_options else indent
            kept.append("")
            continue
        if in_options and (line.lstrip().startswith(":") or line.rstrip().endswith("\\")):
            continue
        in_options = False
        if line.rstrip().endswith("::"):
            skip_beyond = indent
            line = line.rstrip()[:-1]  # noqa: PLW2901
        kept.append(line)
    return kept


def _rst_paragraphs(lines: list[str]) -> list[list[str]]:
    """Group lines: a blank line, an underline, a bullet, or a change of indentation starts a new paragraph."""
    paragraphs: list[list[str]] = [[]]
    indent = 0
    for raw in lines:
        line = raw.rstrip()
        bullet = _RST_BULLET.match(line)
        if bullet:
            line = " " * bullet.end() + line[bullet.end() :]
        here = len(line) - len(line.lstrip())
        if not line or bullet or here != indent or _RST_UNDERLINE.fullmatch(line):
            paragraphs.append([])
        indent = here
        if line and not _is_rst_code(line):
            paragraphs[-1].append(line.strip())
    return [paragraph for paragraph in paragraphs if paragraph]


def _is_rst_code(line: str) -> bool:
    start = line.lstrip()
    return bool(_RST_UNDERLINE.fullmatch(line)) or start.startswith((">>>", "...", "$ ", "|", "+-", "+="))


def _rst_inline(text: str) -> str:
    text = re.sub(r"^:[^:`]+:\s+", "", text)
    for pattern, replacement in _RST_INLINE:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())


def pod_text(data: bytes) -> str:
    """Return the paragraphs of a POD file, blank lines between."""
    paragraphs = []
    in_pod, in_block = False, False
    for block in re.split(r"\n[ \t]*\n", _decoded(data)):
        text = block.strip("\n")
        if text.startswith("="):
            command = text.split(None, 1)[0]
            in_block = command in ("=begin", "=for") or (in_block and command != "=end")
            in_pod = command != "=cut"
            if command == "=for":
                in_block = False
        elif in_pod and not in_block and text and not text[0].isspace():
            paragraphs.append(_pod_inline(" ".join(text.split())))
    return "\n\n".join(paragraphs)


def _pod_inline(text: str) -> str:
    """Unwrap formatting codes from the inside out."""
    while (unwrapped := _POD_CODE.sub(_pod_code, text)) != text:
        text = unwrapped
    return text.replace("\x01", "<").replace("\x02", ">")


def _pod_code(match: re.Match) -> str:
    code, body = match[1], match[2] if match[2] is not None else match[3]
    if code == "E":
        # Kept out of the way of the codes around it until all are unwrapped.
        return {"lt": "\x01", "gt": "\x02"}.get(body, _POD_ESCAPES.get(body, ""))
    if code in "XZ":
        return ""
    if code == "L":
        return body.partition("|")[0] if "|" in body else body.lstrip("/").replace('"', "")
    return body


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")
