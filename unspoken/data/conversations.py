"""Rows to answer: conversations, prompts with completions, and texts, as ids that say which are to be learned.

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...]}      the assistant's turns
    {"prompt": ..., "completion": ...}                                                     the completion
    {"text": ...}                                                                          all of it

`prompt` and `completion` are texts, or messages both. What is learned ends with the token that ends an answer, which is
looked for by its place, never by its id: a tokenizer may pad with the same one.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from unspoken.data.frozen_random import hash_share
from unspoken.data.rows import BadRow, find_files, message_fault, read_objects
from unspoken.errors import UnspokenError, UsageError

KINDS = (("messages",), ("prompt", "completion"), ("text",))
GENERATION = "{% generation %}"  # what a template marks an assistant's words with
Span = tuple[str, bool]  # a piece of a row's text, and whether it is learned


@dataclass(frozen=True)
class Example:
    """A row as the model reads it: `ids`, and of each whether it is learned. `place` names it in messages."""

    ids: np.ndarray
    is_target: np.ndarray
    place: str

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Examples:
    """The usable rows of some files. `dropped` counts others by reason, `cut` those whose end did not fit, `endless`
    those that fit and teach no end token."""

    rows: list[Example] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    bad: list[BadRow] = field(default_factory=list)
    cut: int = 0
    endless: int = 0

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(row.ids.tobytes() + row.is_target.tobytes())
        return digest.hexdigest()

    def notes(self) -> list[str]:
        """What a person should know of rows that were left out or cut."""
        notes = [f"{count:,} rows left out: {reason}" for reason, count in self.dropped.items()]
        if self.cut:
            notes.append(f"{self.cut:,} rows are longer than a window: their ends are cut off")
        if self.endless:
            notes.append(
                f"{self.endless:,} rows never teach the tokenizer's end token: unless the model's generation config "
                "names what does end them, answers will not stop. Let the chat template end an answer with eos_token, "
                "inside its generation marks if it has some"
            )
        return notes


def read_examples(files: Iterable[str | Path], tokenizer: Any, max_length: int, on_bad_line: str = "error") -> Examples:
    """Every row of the files (and of folders of such), each of at most `max_length` tokens.

    Raises:
        UsageError: no such file; rows of a kind that the tokenizer has no template for.
        UnspokenError: a row that cannot be used, named with file and line (`on_bad_line` "skip": counted), or none that
            can.
    """
    found = Examples()
    for path in find_files(files):
        for row in read_objects(path):
            fault = row if isinstance(row, BadRow) else _fault(path, *row)
            if not isinstance(row, BadRow) and fault is None:
                number, values = row
                try:
                    example = encode(values, tokenizer, f"{path}:{number}")
                except UnspokenError as error:
                    if isinstance(error, UsageError) or on_bad_line == "error":
                        raise
                    found.bad.append(BadRow(path, number, "template", str(error).removeprefix(f"{path}:{number}: ")))
                    found.dropped["the chat template refuses them"] += 1
                else:
                    _add(found, example, max_length, tokenizer.eos_token_id)
            elif fault is not None and on_bad_line == "error":
                raise UnspokenError(f"{fault} (data.conversations.on_bad_line: skip leaves such rows out)")
            elif fault is not None:
                found.bad.append(fault)
                found.dropped[fault.reason] += 1
    if not found.rows:
        reasons = "; ".join(found.notes()) or "the files hold none"
        raise UnspokenError(f"no row to learn from: {reasons}")
    return found


def _add(found: Examples, example: Example, max_length: int, end: int | None = None) -> None:
    is_cut = len(example) > max_length
    if is_cut:
        example = Example(example.ids[:max_length], example.is_target[:max_length], example.place)
    if not example.is_target[1:].any():  # the first token is nobody's target
        found.dropped["nothing to learn in them, or nothing left of it in a window"] += 1
        return
    found.cut += is_cut
    found.endless += end is not None and not is_cut and end not in example.ids[example.is_target]
    found.rows.append(example)


def encode(row: dict[str, Any], tokenizer: Any, place: str) -> Example:
    """The ids of a row and which of them are learned.

    Raises:
        UsageError: messages, and a tokenizer without a chat template.
        UnspokenError: a template that refuses the conversation, or that shows no assistant's words apart.
    """
    if "messages" in row:
        return _conversation(row["messages"], tokenizer, place)
    if "text" in row:
        ids = [*tokenizer(row["text"], verbose=False).input_ids, *_end(tokenizer)]
        return _example([(ids, True)], place)
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list):
        return _conversation([*prompt, *completion], tokenizer, place, first=len(prompt))
    pieces = _encoded([(prompt, False), (completion, True)], tokenizer, begins=True)
    return _example([*pieces, (_end(tokenizer), True)], place)


def _conversation(messages: list[dict[str, str]], tokenizer: Any, place: str, first: int = 0) -> Example:
    """The assistant's messages from the number `first` on are learned."""
    if not tokenizer.chat_template:
        raise UsageError(f"{place}: messages need a chat template, and the model's tokenizer has none")
    try:
        if GENERATION in tokenizer.chat_template.replace("{%-", "{%").replace("-%}", "%}") and first == 0:
            spans = _marked(messages, tokenizer)
        else:
            spans = _spans(messages, tokenizer, place, first)
    except (jinja2.TemplateError, KeyError, TypeError, ValueError) as error:
        raise UnspokenError(f"{place}: the chat template refuses the conversation: {error}") from error
    return _example(_encoded(spans, tokenizer, begins=False), place)


def _encoded(spans: Sequence[Span], tokenizer: Any, begins: bool) -> list[tuple[list[int], bool]]:
    """The ids of a text's pieces, so that what stands before an answer is read as `generate` reads it: by itself. Where
    the text as a whole begins with those ids, the answer has what follows them there; where a token would straddle the
    seam, it is encoded by itself too. begins: with the special tokens that a text begins with."""

    def encoded(text: str, begins: bool) -> list[int]:
        return list(tokenizer(text, add_special_tokens=begins, verbose=False).input_ids)

    text = "".join(piece for piece, _ in spans)
    whole, num_read, place = encoded(text, begins), 0, 0
    pieces = []
    for piece, is_learned in spans:
        place += len(piece)
        head = whole if place == len(text) else encoded(text[:place], begins)
        if whole[: len(head)] != head:
            return [(encoded(own, begins and number == 0), learned) for number, (own, learned) in enumerate(spans)]
        pieces.append((head[num_read:], is_learned))
        num_read = len(head)
    return pieces


def _marked(messages: list[dict[str, str]], tokenizer: Any) -> list[Span]:
    """The conversation's text in pieces, what the template marks apart."""
    rendered: Any = render_jinja_template(
        [messages],
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    ((text,), (places,)), done = rendered, 0
    spans: list[Span] = []
    for start, end in places:
        spans += [(text[done:start], False), (text[start:end], True)]
        done = end
    return [span for span in [*spans, (text[done:], False)] if span[0]]


def _spans(messages: list[dict[str, str]], tokenizer: Any, place: str, first: int) -> list[Span]:
    """The conversation's text in pieces, those of an assistant's answers apart: what the template adds to a prompt that
    asks for the answer, up to the token that ends it.

    Raises:
        UnspokenError: the text with an answer does not begin with the text that asks for it.
    """

    def rendered(count: int, asks: bool) -> str:
        return str(tokenizer.apply_chat_template(messages[:count], add_generation_prompt=asks, tokenize=False))

    spans: list[Span] = []
    whole, done = rendered(len(messages), False), 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < first:
            continue
        head, tail = rendered(number, True), rendered(number + 1, False)
        if not (tail.startswith(head) and whole.startswith(tail)):
            raise UnspokenError(
                f"{place}: the chat template writes a conversation's beginning differently once it goes on, so the "
                "assistant's words cannot be told apart; mark them in the template with {% generation %}"
            )
        end = tail
        if tokenizer.eos_token and tokenizer.eos_token in tail[len(head) :]:
            end = tail[: tail.rindex(tokenizer.eos_token) + len(tokenizer.eos_token)]
        spans += [(whole[done : len(head)], False), (whole[len(head) : len(end)], True)]
        done = len(end)
    return [span for span in [*spans, (whole[done:], False)] if span[0]]


def _example(pieces: Sequence[tuple[Sequence[int], bool]], place: str) -> Example:
    ids = np.array([i for piece, _ in pieces for i in piece], dtype=np.int64)
    is_target = np.array([is_learned for piece, is_learned in pieces for _ in piece], dtype=bool)
    return Example(ids, is_target, place)


def _end(tokenizer: Any) -> list[int]:
    """What an answer or a text ends with."""
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _fault(path: Path, number: int, row: dict[str, Any]) -> BadRow | None:
    """What is wrong with a row, without its content."""
    kind = next((kind for kind in KINDS if set(kind) <= row.keys()), None)
    if kind is None:
        fields = ", ".join(map(repr, list(row)[:8])) or "none"
        reason = f"a row has messages, or prompt and completion, or text; this one has {fields}"
        return BadRow(path, number, "missing_field", reason)
    if len([one for one in KINDS if set(one) <= row.keys()]) > 1:
        return BadRow(path, number, "ambiguous", "a row is one of messages, prompt and completion, and text")
    for name in kind:
        if fault := _part_fault(name, row[name]):
            return BadRow(path, number, "wrong_type", fault)
    if kind == KINDS[1] and isinstance(row["prompt"], list) != isinstance(row["completion"], list):
        return BadRow(path, number, "wrong_type", "prompt and completion must both be texts or both be messages")
    messages = row.get("messages") or (row["completion"] if isinstance(row.get("completion"), list) else None)
    if messages and not any(message["role"] == "assistant" for message in messages):
        return BadRow(path, number, "no_answer", "no message is the assistant's")
    return None


def _part_fault(name: str, value: Any) -> str | None:
    if isinstance(value, str) and name != "messages":
        return None if value.strip() or name == "prompt" else f"{name!r} is empty or white space"
    if name == "text" or not isinstance(value, list):
        wanted = {"text": "a text", "messages": "a list of messages"}.get(name, "a text or a list of messages")
        return f"{name!r} is {type(value).__name__}, not {wanted}"
    if not value:
        return f"{name!r} is empty"
    fault = message_fault(value)
    return f"{name!r}: {fault}" if fault else None


def split(examples: Examples, fraction: float) -> tuple[Examples, Examples]:
    """Those to train on and those held out, drawn by a hash of their ids: an equal row falls on the same side."""
    held_out = [hash_share(row.ids.tobytes()) < fraction for row in examples.rows]
    sides = [[row for row, out in zip(examples.rows, held_out) if out == side] for side in (False, True)]
    return replace(examples, rows=sides[0]), Examples(sides[1])
