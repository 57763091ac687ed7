"""The running of commands: order, skipping, resuming, failing and stopping, with stub commands."""

import io
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from unspoken.errors import UnspokenError, UsageError
from unspoken.paper import pipeline as pipelines
from unspoken.paper.command import Command, Record, Running

STUB = """
import pathlib, signal, sys, time
what, out, *more = sys.argv[1:]
out = pathlib.Path(out)
with (out.parent / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if what == "make":
    out.mkdir()
elif what == "fail":
    print("first line\\nno such thing as [bold] " + " ".join(more))
    sys.exit(1)
elif what == "train":
    out.mkdir(exist_ok=True)
    if "--resume" in more:
        sys.exit(0)
    def stop(*_):
        (out / "checkpoint").touch()
        sys.exit(130)
    signal.signal(signal.SIGINT, stop)
    print("training", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def stub(tmp_path):
    path = tmp_path / "stub.py"
    path.write_text(STUB)
    return [sys.executable, str(path)]


@pytest.fixture
def make(tmp_path, stub, monkeypatch):
    """Makes a pipeline of lanes of commands over `tmp_path/out`; `.console.file` is what it printed."""
    monkeypatch.setattr(pipelines, "POLL_SECONDS", 0.01)

    def build(*lanes):
        console = Console(file=io.StringIO(), width=200)
        return pipelines.Pipeline(tmp_path / "out", [pipelines.Stage("Title", "Why.", lanes)], stub, console)

    return build


def command(tmp_path, name: str, what: str = "make", *more: str, **fields) -> Command:
    output = tmp_path / "out" / name
    return Command(name, (what, str(output), *more), output, 1.0, **fields)


def with_more(one: Command) -> Command:
    return replace(one, words=(*one.words, "more"))


def calls(tmp_path) -> list[str]:
    path = tmp_path / "out" / "calls"
    return [line.replace(str(tmp_path / "out") + "/", "") for line in path.read_text().splitlines()]


def printed(pipeline) -> str:
    return pipeline.console.file.getvalue()


def test_commands_are_shown_run_and_recorded(make, tmp_path):
    pipeline = make([command(tmp_path, "a"), command(tmp_path, "b")], [command(tmp_path, "c")])
    pipeline.run()
    assert sorted(calls(tmp_path)) == ["make a", "make b", "make c"] and (tmp_path / "out" / "b").is_dir()
    for name in "abc":
        assert f"unspoken make {tmp_path}/out/{name}" in printed(pipeline)
        record = pipeline.record(name)
        assert record.status == "done" and record.cpu_seconds > 0 and record.peak_memory_bytes > 2**20
    assert "1/1  Title" in printed(pipeline) and "elapsed, about" in printed(pipeline)


def test_what_is_done_is_skipped(make, tmp_path):
    lane = [command(tmp_path, "a"), command(tmp_path, "b", needs=("a",))]
    make(lane).run()
    again = make(lane)
    again.run()
    assert calls(tmp_path) == ["make a", "make b"] and printed(again).count("done before") == 2


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda out, lane: (out / "b").rmdir(), ["make b"]),
        (lambda out, lane: (out / "a").rmdir(), ["make a", "make b"]),
        (lambda out, lane: (out / "commands" / "b.json").write_text("{"), ["make b"]),
        (lambda out, lane: lane.__setitem__(1, with_more(lane[1])), ["make b more"]),
        (lambda out, lane: lane.__setitem__(0, with_more(lane[0])), ["make a more", "make b"]),
    ],
    ids=["output gone", "need's output gone", "record damaged", "other words", "need has other words"],
)  # fmt: skip
def test_what_is_not_done_any_more_is_run_again(make, tmp_path, spoil, expected):
    lane = [command(tmp_path, "a"), command(tmp_path, "b", needs=("a",))]
    make(lane).run()
    spoil(tmp_path / "out", lane)
    make(lane).run()
    assert calls(tmp_path)[2:] == expected


def test_another_recipe_is_another_command(make, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("a: 1")
    lane = [command(tmp_path, "a", recipe=recipe)]
    make(lane).run()
    make(lane).run()
    assert calls(tmp_path) == ["make a"]
    recipe.write_text("a: 2")
    make(lane).run()
    assert calls(tmp_path) == ["make a", "make a"]


def test_a_failure_says_what_to_repeat_and_the_rest_is_kept(make, tmp_path):
    lanes = [command(tmp_path, "a"), command(tmp_path, "b", "fail", "by design")], [command(tmp_path, "slow", "train")]
    with pytest.raises(pipelines.CommandFailed) as failed:
        make(*lanes).run()
    assert "no such thing as [bold] by design" in str(failed.value) and "exit status 1" in str(failed.value)
    assert f"unspoken fail {tmp_path}/out/b 'by design'" in str(failed.value)
    pipeline = make(*lanes)
    assert [pipeline.record(name).status for name in ("a", "b", "slow")] == ["done", "failed", "stopped"]
    assert (tmp_path / "out" / "slow" / "checkpoint").exists()  # the other lane was asked to stop, not killed


def test_an_output_that_is_not_there_is_a_failure(make, tmp_path):
    with pytest.raises(pipelines.CommandFailed, match="but left no"):
        make([replace(command(tmp_path, "a"), output=tmp_path / "out" / "elsewhere")]).run()


def test_another_form_runs_where_the_first_cannot_and_the_record_says_so(make, tmp_path):
    other = ("make", str(tmp_path / "out" / "a"))
    lane = [command(tmp_path, "a", "fail", "check the network", instead=("check the network", other))]
    pipeline = make(lane)
    pipeline.run()
    assert "check the network" in pipeline.record("a").note and pipeline.record("a").words == list(other)
    make(lane).run()
    assert [line.split()[0] for line in calls(tmp_path)] == ["fail", "make"]
    with pytest.raises(pipelines.CommandFailed):
        make([command(tmp_path, "b", "fail", "disk full", instead=("check the network", other))]).run()


def test_an_interrupt_reaches_the_command_and_the_next_run_resumes_it(tmp_path, stub):
    code = f"""
import signal
from pathlib import Path
from rich.console import Console
from unspoken.paper.command import Command
from unspoken.paper.pipeline import Pipeline, Stage
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, and hands that on
out = Path({str(tmp_path / "out")!r})
lane = [Command("t", ("train", str(out / "t")), out / "t", 1.0, can_resume=True)]
Pipeline(out, [Stage("Title", "Why.", [lane])], {stub!r}, Console()).run()
"""
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: "training" in read(tmp_path / "out" / "commands" / "t.log"))
    first.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in first.communicate(timeout=60)[1]
    record = Record.read(tmp_path / "out" / "commands" / "t.json")
    assert record.status == "stopped" and (tmp_path / "out" / "t" / "checkpoint").exists()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    again = Record.read(tmp_path / "out" / "commands" / "t.json")
    assert calls(tmp_path) == ["train t", "train t --resume"]
    assert again.status == "done" and again.words == record.words
    assert again.cpu_seconds > record.cpu_seconds and again.wall_seconds > record.wall_seconds  # both tries


def test_a_signal_to_a_command_that_has_just_ended(tmp_path, stub):
    """Popen's own methods fetch the exit status, after which it could not be had with its cost."""
    (tmp_path / "out").mkdir()
    one = command(tmp_path, "a")
    running = Running(one, list(one.words), stub, tmp_path / "log", None)
    wait_for(one.output.exists)
    time.sleep(0.5)
    running.send(signal.SIGINT)
    wait_for(running.has_ended)
    assert running.status == 0 and running.record("done").cpu_seconds > 0


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_changed_need_starts_a_stopped_run_anew(make, tmp_path):
    lane = [command(tmp_path, "a"), command(tmp_path, "t", "train", needs=("a",), can_resume=True)]
    pipeline = make(lane)
    pipeline.out.mkdir()
    (pipeline.out / "commands").mkdir()
    (pipeline.out / "t").mkdir()
    Record("stopped", list(lane[1].words), ended=time.time()).write(pipeline.out / "commands" / "t.json")
    Record("done", list(lane[0].words), ended=time.time() - 9).write(pipeline.out / "commands" / "a.json")
    assert pipeline._words(lane[1])[-1] == "--resume"
    Record("done", list(lane[0].words), ended=time.time() + 9).write(pipeline.out / "commands" / "a.json")
    assert pipeline._words(lane[1]) == list(lane[1].words) and not (pipeline.out / "t").exists()


def test_other_peoples_folders_are_left_alone(make, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    with pytest.raises(UsageError, match="holds other things"):
        make([command(tmp_path, "a")])


def test_fresh_deletes_what_the_stages_made_and_nothing_else(make, tmp_path):
    pipeline = make([command(tmp_path, "a")])
    pipeline.run()
    (tmp_path / "out" / "notes.txt").touch()
    pipeline.forget()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["calls", "notes.txt"]


def test_so_many_lanes_at_once_and_the_first_ones_first(make, tmp_path):
    lanes = [[command(tmp_path, f"{lane}{i}") for i in range(2)] for lane in "abc"]
    pipeline = make(*lanes)
    pipeline.stages[0] = replace(pipeline.stages[0], at_once=1)
    pipeline.run()
    assert calls(tmp_path) == ["make a0", "make a1", "make b0", "make b1", "make c0", "make c1"]


def test_a_lane_waits_for_what_it_needs_of_another(make, tmp_path):
    lanes = [[command(tmp_path, "b", needs=("a",))], [command(tmp_path, "a")]]
    make(*lanes).run()
    assert calls(tmp_path) == ["make a", "make b"]
    lanes[1][0] = with_more(lanes[1][0])  # the need is made anew, so its old output will not do
    make(*lanes).run()
    assert calls(tmp_path)[2:] == ["make a more", "make b"]
    with pytest.raises(UnspokenError, match="c waits for nobody, which nothing here makes"):
        make([command(tmp_path, "c", needs=("nobody",))]).run()


def test_going_on_after_a_failure_leaves_out_what_needs_it(make, tmp_path):
    lanes = (
        [command(tmp_path, "a", "fail", "by design"), command(tmp_path, "b", needs=("a",))],
        [command(tmp_path, "c")],
        [command(tmp_path, "d", needs=("b",))],
    )
    pipeline = make(*lanes)
    pipeline.keep_going = True
    pipeline.run()
    assert sorted(calls(tmp_path)) == ["fail a by design", "make c"]
    assert list(pipeline.failed) == ["a", "b", "d"] and "no such thing as [bold] by design" in pipeline.failed["a"]
    assert "needs a" in pipeline.failed["b"] and "needs b" in pipeline.failed["d"]
    assert pipeline.record("a").status == "failed" and pipeline.record("c").status == "done"
