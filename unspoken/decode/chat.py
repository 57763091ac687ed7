"""`unspoken chat`: a conversation in the terminal, or one message a line from standard input.

Ctrl-C ends the answer and keeps the conversation; /reset begins a new one; /quit or the end of the input leaves.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from rich.console import Console

from unspoken.decode.sampling import Sampling, require_tokenizer
from unspoken.decode.session import ChatSession
from unspoken.errors import UnspokenError
from unspoken.models.load import load_model

COMMANDS = {"/reset": "begin a new conversation", "/quit": "leave"}


def main(args: argparse.Namespace) -> int:
    sampling = Sampling.from_args(args)
    model, tokenizer = load_model(args.model, args.device, args.dtype)
    sampling.options(model)  # what the model cannot do is refused before the first message
    session = ChatSession(model, require_tokenizer(tokenizer, args.model), sampling, args.system)
    torch.manual_seed(args.seed)
    console = Console(highlight=False)
    if not is_interactive():
        return _answer_all(session, console, _piped_lines())
    mode = "" if session.has_template else " It has no chat template: your text is continued as it stands."
    commands = ", ".join(f"{command} to {what}" for command, what in COMMANDS.items())
    console.print(f"{args.model}.{mode} {commands}; Ctrl-C stops an answer.", style="dim", soft_wrap=True)
    _answer_all(session, console, _typed_lines(console))
    return 0


def is_interactive() -> bool:
    return sys.stdin.isatty()


def _answer_all(session: ChatSession, console: Console, lines: Iterator[str]) -> int:
    """Answer every line; 1 if one could not be."""
    status = 0
    for line in lines:
        message = line.strip()
        if message == "/quit":
            break
        if message == "/reset":
            session.reset()
        elif message.startswith("/") and message[1:].isalpha():
            print(f"unspoken: no command {message}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        elif message:
            try:
                with _stoppable() as should_stop:
                    session.ask(message, lambda text: console.out(text, end="", highlight=False), should_stop)
            except UnspokenError as error:
                print(f"unspoken: error: {error}", file=sys.stderr)
                status = 1
            except KeyboardInterrupt:
                if not is_interactive():
                    raise
            console.out("")
    return status


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", errors="replace")


def _typed_lines(console: Console) -> Iterator[str]:
    with suppress(ImportError):
        importlib.import_module("readline")  # gives `input` line editing and a history
    while True:
        try:
            line = console.input("[bold]>[/] ")
        except KeyboardInterrupt:
            console.print("\n/quit leaves", style="dim")
            continue
        except EOFError:
            console.out("")
            return
        yield line


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """In a terminal Ctrl-C, meanwhile, asks the answer to end after the current token; a second one breaks it off."""
    if not is_interactive():
        yield lambda: False
        return
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
