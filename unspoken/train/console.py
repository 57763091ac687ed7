"""What a run shows: a progress bar in a terminal, plain lines elsewhere; never both."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from unspoken.train.metrics import Row


class RunConsole:
    """Use as a context manager around the loop. Without a terminal a line is printed for each logged row.

    describe: a row in a few words. unit: what a step of it is called.
    """

    def __init__(
        self,
        num_steps: int,
        first_step: int,
        console: Console | None = None,
        is_quiet: bool = False,
        describe: Callable[[Row], str] | None = None,
        unit: str = "step",
    ):
        self.describe, self.unit = describe or _losses, unit
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True, quiet=is_quiet)
        self.num_steps = num_steps
        self.first_step = first_step
        self.progress: Progress | None = None
        self.task = TaskID(0)

    def __enter__(self) -> "RunConsole":
        if self.console.is_terminal and not self.console.quiet:
            self.progress = Progress(
                TextColumn(self.unit),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[what]}"),
                TimeElapsedColumn(),
                console=self.console,
                refresh_per_second=2,
            )
            self.task = self.progress.add_task("", total=self.num_steps, completed=self.first_step, what="")
            self.progress.start()
        return self

    def __exit__(self, *_) -> None:
        if self.progress:
            self.progress.stop()

    def advance(self) -> None:
        if self.progress:
            self.progress.advance(self.task)

    def show(self, row: Row, remaining_seconds: float | None = None) -> None:
        """A logged row: in the bar, or as a line. Evaluations are a line in both."""
        text = self.describe(row)
        if row["kind"] == "eval":
            self.say(f"{self.unit} {row['step']:>6}  held out  {text}")
            return
        text += f"  {row['tokens_per_second']:,.0f} tok/s"
        if remaining_seconds is not None:
            text += f"  ETA {_duration(remaining_seconds)}"
        if self.progress:
            self.progress.update(self.task, what=text)
        else:
            self.say(f"{self.unit} {row['step']:>6}/{self.num_steps}  {text}")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)


def _losses(row: Row) -> str:
    """`loss 5.123` for one pass, `loss 5.123 / 5.101` for two: pass by pass, not the training loss over all. Then the
    latent length, where there is one."""
    passes = [f"{row[name]:.3f}" for i in range(1, 100) if (name := f"loss_pass_{i}") in row]
    length = f"  latent length {row['latent_length']:.2f}" if "latent_length" in row else ""
    return "loss " + " / ".join(passes) + length


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
