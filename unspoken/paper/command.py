"""One of our commands as a process: what it was asked, what it printed, how it ended, what it cost."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RESUME = "--resume"


@dataclass(frozen=True)
class Command:
    """`words` follow `unspoken`; `output` is there when it is done; `cpu_seconds` is what it should take.

    needs: names of commands whose output it reads. can_resume: stopped, it goes on with `--resume`.
    instead: (what the first form says when it cannot work, the words to run then). recipe: a file that it reads; with
    another content it is another command.
    """

    name: str
    words: tuple[str, ...]
    output: Path
    cpu_seconds: float
    needs: tuple[str, ...] = ()
    can_resume: bool = False
    instead: tuple[str, tuple[str, ...]] | None = None
    recipe: Path | None = None

    @property
    def recipe_sha256(self) -> str:
        return hashlib.sha256(self.recipe.read_bytes()).hexdigest() if self.recipe else ""


@dataclass(frozen=True)
class Record:
    """How a command went, all tries together. `status`: done, stopped or failed; `note`: why its other form ran."""

    status: str
    words: list[str]
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_bytes: int = 0
    ended: float = 0.0
    note: str = ""
    recipe_sha256: str = ""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> "Record | None":
        """None where there is none that can be read."""
        try:
            return Record(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


class Running:
    """A command that was started, in a session of its own: a Ctrl-C reaches it through us alone, and once."""

    def __init__(self, command: Command, words: list[str], program: Sequence[str], log: Path, before: Record | None):
        self.command, self.words, self.log = command, words, log
        self.recipe_sha256 = command.recipe_sha256
        is_resumed = words[-1] == RESUME
        self.before = before if is_resumed and before else Record("stopped", words)
        self.began = self.shown_at = time.monotonic()
        self.status: int | None = None
        self.usage = (0.0, 0)  # CPU seconds, bytes at the peak
        with self.log.open("ab" if is_resumed else "wb") as file:
            self.process = subprocess.Popen(
                [*program, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.began

    def has_ended(self) -> bool:
        if self.status is not None:
            return True
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if not pid:
            return False
        self.status = self.process.returncode = os.waitstatus_to_exitcode(status)
        self.usage = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return True

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended. Not through Popen, whose methods would fetch the exit status first."""
        if self.status is None:
            os.kill(self.process.pid, number)

    def record(self, status: str, note: str = "") -> Record:
        before = self.before
        return Record(
            status,
            [word for word in self.words if word != RESUME],
            before.wall_seconds + self.elapsed_seconds,
            before.cpu_seconds + self.usage[0],
            max(before.peak_memory_bytes, self.usage[1]),
            time.time(),
            note,
            self.recipe_sha256,
        )

    def tail(self, num_lines: int) -> str:
        """The last lines that it printed."""
        text = self.log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
        return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-num_lines:])
