"""Prompts from the command line or a JSONL file, checked and turned into token ids."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from unspoken.data.rows import message_fault
from unspoken.errors import UnspokenError, UsageError

STDIN = "-"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Request:
    """One thing to continue: `row` holds `prompt` or `messages` and is given back with the answer; `place` names it."""

    row: dict[str, Any]
    place: str


def requests_of(prompts: Iterable[str]) -> list[Request]:
    return [Request({"prompt": prompt}, f"--prompt {number}") for number, prompt in enumerate(prompts, start=1)]


def read_requests(path: str) -> list[Request]:
    """Read a JSONL file (`-` is standard input): objects with `prompt`, a text, or `messages`, a conversation.

    Blank lines are skipped; other fields are kept. Raises UnspokenError that names file, line and reason.
    """
    name = "standard input" if path == STDIN else path
    try:
        data = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"--input {path}: {error.strerror}") from error
    lines = data.removeprefix(_BOM).split(b"\n")
    requests = [
        Request(_parsed(line, f"{name}:{number}"), f"{name}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not requests:
        raise UnspokenError(f"{name} has no rows; each line is an object with `prompt` or `messages`")
    return requests


def encode(request: Request, tokenizer: PreTrainedTokenizerBase, num_embeddings: int, chat: bool = False) -> list[int]:
    """Token ids of a request, at least one. With `chat` a prompt becomes the user's message of a conversation.

    Raises UnspokenError for a request that cannot be encoded, UsageError when there is no chat template.
    """
    messages = request.row.get("messages")
    if messages is None and chat:
        messages = [{"role": "user", "content": request.row["prompt"]}]
    if messages is None:
        ids = list(tokenizer(request.row["prompt"], verbose=False).input_ids)
    else:
        text = render(messages, tokenizer, request.place)
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    if not ids:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise UnspokenError(f"{request.place}: the prompt is empty and the tokenizer has no token to begin with")
        ids = [start]
    if max(ids) >= num_embeddings:
        raise UnspokenError(
            f"{request.place}: token id {max(ids)} has no embedding, the model has {num_embeddings}; "
            "the tokenizer is not this model's"
        )
    return ids


def render(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, place: str) -> str:
    """The text of a conversation that the assistant is to continue; `place` is for errors."""
    if not tokenizer.chat_template:
        raise UsageError(f"{place}: the model's tokenizer has no chat template; give plain prompts")
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except (jinja2.TemplateError, KeyError, TypeError) as error:
        raise UnspokenError(f"{place}: the chat template refuses the conversation: {error}") from error


def batches(items: list, size: int) -> Iterator[list]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UnspokenError(f"{place}: invalid UTF-8 at byte {error.start + 1} of the line") from error
    except json.JSONDecodeError as error:
        raise UnspokenError(f"{place}: broken JSON at column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise UnspokenError(f"{place}: JSON that cannot be read ({type(error).__name__})") from error
    if reason := _fault(row):
        raise UnspokenError(f"{place}: {reason}")
    return row


def _fault(row: Any) -> str | None:
    """What is wrong with a row, without its content."""
    if not isinstance(row, dict):
        return f"not a JSON object but {type(row).__name__}"
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair in a text"
    if ("prompt" in row) == ("messages" in row):
        fields = ", ".join(map(repr, list(row)[:8])) or "none"
        return f"a row needs one of 'prompt' and 'messages' (it has: {fields})"
    if "prompt" in row:
        return None if isinstance(row["prompt"], str) else f"'prompt' is {type(row['prompt']).__name__}, not a text"
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        return "'messages' is not a list of messages" if not isinstance(messages, list) else "'messages' is empty"
    return message_fault(messages)
