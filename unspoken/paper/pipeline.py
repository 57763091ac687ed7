"""Stages of commands: shown before they run, side by side in lanes, skipped when done, gone on with when stopped.

    OUT/commands/NAME.json   what ran, how it ended and what it cost
    OUT/commands/NAME.log    what it printed

A command is done when its record says so, its words and its recipe are those of the record, its output is there, and
nothing it needs was made after it. Anything else is run again; a stopped training run goes on from its checkpoint.
The demo and the studies of `unspoken paper` are pipelines.
"""

import shlex
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.rule import Rule
from rich.text import Text

from unspoken.errors import UnspokenError, UsageError
from unspoken.paper.command import RESUME, Command, Record, Running

POLL_SECONDS = 0.2
LINE_EVERY_SECONDS = 20  # without a terminal
STOP_SECONDS = 120  # a training step and its checkpoint
FOLDER = "commands"


@dataclass(frozen=True)
class Stage:
    """Commands of one lane run one after the other; `at_once` lanes (None: all) side by side, the first ones first."""

    title: str
    purpose: str
    lanes: Sequence[Sequence[Command]]
    at_once: int | None = None

    def seconds(self, lanes: Sequence[float]) -> float:
        """What lanes of such lengths take together."""
        return max([*lanes, sum(lanes) / (self.at_once or len(lanes) or 1)])


class CommandFailed(UnspokenError):
    """A command ended with an exit status that is not 0."""


class Pipeline:
    """Runs stages into `out`. `program` is what stands before a command's words.

    keep_going: after a failure only what needs its output is left out; `failed` has a reason for each command that
    failed or was left out.

    Raises:
        UsageError: `out` holds something else.
    """

    def __init__(
        self, out: Path, stages: Sequence[Stage], program: Sequence[str], console: Console, keep_going: bool = False
    ):
        self.out, self.stages, self.program, self.console = out, stages, program, console
        self.keep_going = keep_going
        self.failed: dict[str, str] = {}
        self.began = time.monotonic()
        self.ran: set[str] = set()
        self.notes: dict[str, str] = {}
        if out.exists() and not (out / FOLDER).is_dir() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} holds other things; give a new or empty folder with --out")

    def prepare(self) -> None:
        """Make the folders."""
        (self.out / FOLDER).mkdir(parents=True, exist_ok=True)

    def run(self, only: Sequence[Stage] | None = None) -> None:
        """Run what is not done, of some of the stages or of all.

        Raises:
            CommandFailed: says which command, and the end of what it printed; not where it keeps going.
            KeyboardInterrupt: once the running commands have saved what they can.
        """
        self.prepare()
        for number, stage in enumerate(self.stages):
            if only is not None and stage not in only:
                continue
            self.console.print()
            self.console.print(Rule(f"[bold]{number + 1}/{len(self.stages)}  {escape(stage.title)}[/]", align="left"))
            times = self._times(self._left(stage) + sum(map(self._left, self.stages[number + 1 :])))
            self.console.print(f"{escape(stage.purpose)} [dim]({times})[/]", highlight=False)
            self._run_stage(stage, later=sum(map(self._left, self.stages[number + 1 :])))

    def forget(self) -> None:
        """Delete what earlier runs of these stages made, and nothing else."""
        for stage in self.stages:
            for command in _commands(stage):
                _delete(command.output)
        _delete(self.out / FOLDER)

    def record(self, name: str) -> Record | None:
        return Record.read(self._record_path(name))

    def is_done(self, command: Command) -> bool:
        record = self.record(command.name)
        if record is None or record.status != "done" or not command.output.exists():
            return False
        return self._is_current(record, command)

    def typed(self, words: Sequence[str]) -> str:
        """A command as a person would type it."""
        program, here = Path(sys.executable).with_name("unspoken"), Path.cwd()
        if not program.is_file():
            return shlex.join(["unspoken", *words])
        return shlex.join([str(program.relative_to(here) if program.is_relative_to(here) else program), *words])

    def _run_stage(self, stage: Stage, later: float) -> None:
        queues = [deque(lane) for lane in stage.lanes]
        running: dict[int, Running] = {}
        done = {command.name for command in _commands(stage) if self.is_done(command)}
        live = Live(console=self.console, refresh_per_second=4, transient=True)
        try:
            if self.console.is_terminal:
                live.start()
            while any(queues) or running:
                for lane in [lane for lane, one in running.items() if one.has_ended()]:
                    self._finish(running.pop(lane), queues[lane])
                self._begin(queues, running, stage.at_once or len(queues))
                self._show(live, running, later + _stage_left(stage, queues, running, done))
                time.sleep(POLL_SECONDS if running else 0)
        finally:  # nothing is running where all went well
            live.stop()
            self._stop(running)

    def _begin(self, queues: list[deque[Command]], running: dict[int, Running], at_once: int) -> None:
        """Start what can start, in the order of the lanes."""
        was_idle, num_left = not running, sum(map(len, queues))
        to_come = {command.name for queue in queues for command in queue}
        to_come |= {one.command.name for one in running.values()}
        for lane, queue in enumerate(queues):
            if not queue or lane in running or len(running) >= at_once:
                continue
            if lost := [need for need in queue[0].needs if need in self.failed]:
                self.failed |= {command.name: f"not run, as it needs {lost[0]}" for command in queue}
                queue.clear()
            elif to_come.isdisjoint(queue[0].needs) and all(map(self._is_made, queue[0].needs)):
                self._take(queue.popleft(), lane, running)
        if was_idle and not running and num_left and num_left == sum(map(len, queues)):
            command = next(queue[0] for queue in queues if queue)
            raise UnspokenError(f"{command.name} waits for {', '.join(command.needs)}, which nothing here makes")

    def _is_made(self, name: str) -> bool:
        record = self.record(name)
        return record is not None and record.status == "done"

    def _take(self, command: Command, lane: int, running: dict[int, Running]) -> None:
        if self.is_done(command):
            self.console.print(f"  [dim]done before: {command.name}[/]", highlight=False)
            return
        words = self._words(command)
        self.console.print(f"  [cyan]$ {escape(self.typed(words))}[/]", soft_wrap=True, highlight=False)
        path = self._record_path(command.name)
        running[lane] = Running(command, words, self.program, path.with_suffix(".log"), self.record(command.name))
        running[lane].record("stopped").write(path)  # true if neither it nor we are heard of again

    def _words(self, command: Command) -> list[str]:
        """The words to run now: with `--resume` if they can go on, else with the place for them cleared."""
        record, words = self.record(command.name), list(command.words)
        can_go_on = command.can_resume and command.output.exists()
        if record is not None and record.status != "done" and can_go_on and self._is_current(record, command):
            return [*words, RESUME]
        _delete(command.output)
        _delete(self._record_path(command.name))
        return words

    def _finish(self, one: Running, queue: deque[Command]) -> None:
        """Record how a command ended; if it has another form for this failure, that one is next in the lane."""
        command, path = one.command, self._record_path(one.command.name)
        if one.status == 0 and command.output.exists():
            record = one.record("done", self.notes.get(command.name, ""))
            record.write(path)
            self.ran.add(command.name)
            cost = f"{duration(record.wall_seconds)}, {record.cpu_seconds:.0f} CPU seconds"
            self.console.print(f"  [green]done[/]  {command.name} [dim]({cost})[/]", highlight=False)
            return
        printed = one.tail(12)
        if command.instead and command.instead[0] in printed:
            self.notes[command.name] = f"`unspoken {shlex.join(command.words)}` failed: {printed}"
            self.console.print(f"  [yellow]{command.name} failed, so another form of it runs:[/] {escape(printed)}")
            queue.appendleft(replace(command, words=command.instead[1], instead=None))
            return
        one.record("failed").write(path)
        missing = f", but left no {command.output}" if one.status == 0 else ""
        how = f"{command.name} ended with exit status {one.status}{missing}. The end of {one.log}:\n\n{printed}"
        if self.keep_going:
            self.failed[command.name] = printed.splitlines()[-1] if printed else f"exit status {one.status}{missing}"
            self.console.print(f"  [red]failed[/]  {escape(how)}", highlight=False)
            return
        raise CommandFailed(
            f"{how}\n\nTo try it again by itself:\n  {self.typed(one.words)}\n"
            "What is finished is kept: run the whole again, and it goes on from there."
        )

    def _stop(self, running: dict[int, Running]) -> None:
        """Let running commands end by themselves, as at a Ctrl-C, and note that they were stopped."""
        if not running:
            return
        self.console.print("  stopping; training runs save a checkpoint first (once more: do not wait)")
        deadline = time.monotonic() + STOP_SECONDS
        for one in running.values():
            one.send(signal.SIGINT)
        try:
            while not all([one.has_ended() for one in running.values()]) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        finally:
            for one in running.values():
                one.send(signal.SIGKILL)
                one.record("stopped").write(self._record_path(one.command.name))

    def _show(self, live: Live, running: dict[int, Running], left_seconds: float) -> None:
        if live.is_started:
            lines = [_line(one) for one in running.values()]
            live.update(Group(*lines, Text(f"  {self._times(left_seconds)}", style="dim")))
            return
        for one in running.values():
            if time.monotonic() - one.shown_at >= LINE_EVERY_SECONDS:
                one.shown_at = time.monotonic()
                self.console.print(_line(one), no_wrap=True, overflow="ellipsis")

    def _is_current(self, record: Record, command: Command) -> bool:
        """Whether it was made with this command's words and recipe, and from the newest of what it needs."""
        if not _is_same(record, command):
            return False
        needs = [self.record(name) for name in command.needs]
        return all(need is not None and need.status == "done" and need.ended <= record.ended for need in needs)

    def _record_path(self, name: str) -> Path:
        return self.out / FOLDER / f"{name}.json"

    def _left(self, stage: Stage) -> float:
        """Seconds that a stage should still take."""
        return stage.seconds([sum(c.cpu_seconds for c in lane if not self.is_done(c)) for lane in stage.lanes])

    def _times(self, left_seconds: float) -> str:
        """Elapsed time, and what is left at the pace that was seen so far."""
        elapsed = time.monotonic() - self.began
        expected = sum(
            stage.seconds([sum(c.cpu_seconds for c in lane if c.name in self.ran) for lane in stage.lanes])
            for stage in self.stages
        )
        pace = min(5.0, max(0.5, elapsed / expected)) if expected > 10 else 1.0
        return f"{duration(elapsed)} elapsed, about {duration(left_seconds * pace)} to go"


def duration(seconds: float) -> str:
    """63 -> 1:03."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02}"


def _is_same(record: Record, command: Command) -> bool:
    forms = [command.words, *([command.instead[1]] if command.instead else [])]
    return tuple(record.words) in forms and record.recipe_sha256 == command.recipe_sha256


def _commands(stage: Stage) -> list[Command]:
    return [command for lane in stage.lanes for command in lane]


def _stage_left(stage: Stage, queues: list[deque[Command]], running: dict[int, Running], done: set[str]) -> float:
    left = [sum(command.cpu_seconds for command in queue if command.name not in done) for queue in queues]
    for lane, one in running.items():
        left[lane] += max(0.0, one.command.cpu_seconds - one.elapsed_seconds)
    return stage.seconds(left)


def _line(one: Running) -> Text:
    text = f"  {one.command.name:<20} {duration(one.elapsed_seconds):>5}  {one.tail(1).strip()}"
    return Text(text, style="dim", no_wrap=True, overflow="ellipsis")


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
