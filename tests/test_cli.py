"""The command line's frame: help, versions, usage errors. What the commands do is tested beside their modules."""

import argparse
import os
import subprocess
import sys
import types

import pytest

from unspoken import cli
from unspoken.errors import UnspokenError

HELP_SECONDS = 2.0


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command and subcommand, the program itself included."""
    found = [path]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                found += commands(child, (*path, name))
    return found


COMMANDS = commands(cli.build_parser())


def test_the_commands_are_frozen():
    """Scripts rely on them; change this list on purpose or not at all."""
    assert {" ".join(command) for command in COMMANDS} >= {
        "",
        "convert",
        "data",
        "data prepare",
        "data validate",
        "data questions",
        "data problems",
        "train",
        "launch",
        "export",
        "eval",
        "generate",
        "chat",
        "verify",
        "paper",
    }


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command, capsys):
    """B110: a percent sign in a help text crashed it."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("usage: unspoken")


@pytest.mark.parametrize("command", [(), ("data", "prepare"), ("train",)], ids=" ".join)
def test_help_answers_at_once_and_loads_nothing_heavy(command):
    code = f"""
import sys
from unspoken.cli import main
try:
    main({[*command, "--help"]!r})
finally:
    assert not {{"torch", "transformers", "numpy"}} & set(sys.modules)
"""
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert after.children_user + after.children_system - before.children_user - before.children_system < HELP_SECONDS


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["convert"],
        ["convert", "--model", "x", "--out", "y", "--methd", "recycler"],
        ["convert", "--model", "x", "--out", "y", "--method", "looped"],
        ["generate", "x"],
        ["generate", "x", "--prompt", "a", "--max-new-tokens", "many"],
        ["generate", "x", "--prompt", "a", "--exit-threshold", "0.1", "--exit-at-step", "last"],
        ["convert", "--model", "x", "--out", "y", "--router-bias", "low"],
        ["chat"],
        ["data"],
        ["eval"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert "usage:" in captured.err
    assert "Traceback" not in captured.err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("unspoken 0.")


@pytest.mark.parametrize(
    ("error", "status"), [(UnspokenError("it failed"), 1), (ValueError("oh"), 1), (KeyboardInterrupt(), 130)]
)
def test_errors_are_one_line_and_an_exit_status(monkeypatch, capsys, error, status):
    def fail(args):
        raise error

    monkeypatch.setitem(sys.modules, "unspoken.decode.chat", types.SimpleNamespace(main=fail))
    assert cli.main(["chat", "folder"]) == status
    err = capsys.readouterr().err
    assert err.startswith("unspoken: ")
    assert "Traceback" not in err
    if status == 1:
        with pytest.raises(type(error)):
            cli.main(["chat", "folder", "--debug"])


def test_a_failure_of_the_disk_names_the_file(monkeypatch, capsys):
    def fail(args):
        raise OSError(28, "No space left on device", "out/train.bin")

    monkeypatch.setitem(sys.modules, "failing", types.SimpleNamespace(main=fail))
    monkeypatch.setattr(cli, "_verify", lambda commands: cli._command(commands, "verify", "failing:main", "x"))
    assert cli.main(["verify"]) == 1
    assert capsys.readouterr().err == "unspoken: error: No space left on device: out/train.bin\n"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("convert", "--model a --out b"),
        ("data prepare", "--corpus core --out x"),
        ("generate", "m --prompt a"),
        ("launch", ""),
    ],
)
def test_an_unknown_option_shows_the_usage_of_its_command(command, arguments, capsys):
    """It was that of `unspoken`, which names no option."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command.split(), "--nope", *arguments.split()])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: unspoken {command} ") and "unrecognized arguments: --nope" in error


def test_unknown_options_go_to_recipes_alone(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["eval", "x", "--data", "y", "--optimizer.lr", "3"])
    assert stopped.value.code == 2
    assert "--optimizer.lr" in capsys.readouterr().err
    assert cli.build_parser().parse_known_args(["train", "r.yaml", "--optimizer.lr", "3"])[1] == ["--optimizer.lr", "3"]
