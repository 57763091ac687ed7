"""The README's Python example runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_python_example_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(README), "exec"), {})
    assert "hidden state of a language model" in capsys.readouterr().out


def test_every_command_shown_exists():
    from unspoken.cli import build_parser

    shown = re.findall(r"^unspoken (\w+)", README.read_text(), flags=re.MULTILINE)
    help_text = build_parser().format_help()
    assert len(shown) >= 6
    for command in shown:
        assert f"\n    {command} " in help_text
