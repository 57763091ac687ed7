"""`unspoken data questions`: a folder of small tasks for lm-eval, out of a prepared folder's text and of reasoning-gym.

    local-cloze local-choice local-text    questions of the validation and test splits; see `questions.py`
    local-NAME                             problems whose answer is generated; see `reasoning.py`
    local                                  all of them

    NAME.yaml                   lm-eval's task files, which name the rows by their place: make the folder where it stays
    NAME.jsonl                  the questions
    NAME.examples.jsonl         rows of the training split, for the examples in front of a question
    questions.json              where they came from

Equal data, options and seed give equal rows. `unspoken eval MODEL --include-path FOLDER --tasks local` runs them, and
so does lm-eval by itself.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from unspoken.data import questions
from unspoken.data.cache import check_folder, whole_folder
from unspoken.data.questions import KnownWords, Rows
from unspoken.data.reasoning import fresh_problems, shipped_problems
from unspoken.data.tokens import read_manifest
from unspoken.errors import UnspokenError, UsageError

MANIFEST, GROUP = "questions.json", "local"
HELD_OUT = ("val", "test")
NUM_EXAMPLES = 20
MAX_TRAINING_TOKENS = 5_000_000  # that are looked through for words and examples


@dataclass
class Questions:
    """The rows of a task and of its examples; `template` is its task file in `question_files/`."""

    template: str
    rows: Rows
    examples: Rows = field(default_factory=list)


def main(args: argparse.Namespace) -> None:
    out = Path(args.out)
    if out.exists() and not (args.overwrite and (out / MANIFEST).is_file()):
        raise UsageError(f"{out} exists; --overwrite replaces a folder that this command made")
    if args.num < 1:
        raise UsageError(f"--num is {args.num}; it must be at least 1")
    check_folder("--out", out.absolute().parent)
    tasks = make(args.data, args.num, args.seed, args.reasoning or [])
    with whole_folder(out, replace=args.overwrite) as folder:
        counts = write(tasks, folder, out.absolute())
        manifest = {
            "unspoken": version("unspoken"),
            "data": {"folder": str(args.data), "fingerprint": read_manifest(args.data)["fingerprint"]},
            "options": {"num": args.num, "seed": args.seed, "reasoning": args.reasoning},
            "questions": counts,
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for name, count in counts.items():
        print(f"{name}: {count} questions")
    print(f"written: {out}; unspoken eval MODEL --include-path {out} --tasks {GROUP}")


def make(data: str | Path, num: int, seed: int = 0, reasoning: Sequence[str] = ()) -> dict[str, Questions]:
    """At most `num` questions of each task. reasoning: data sets of reasoning-gym, instead of the problems that come
    with the package.

    Raises UnspokenError where the held-out text gives not one question of a kind.
    """
    shown = questions.documents(data, "train", MAX_TRAINING_TOKENS)
    asked = [text for split in HELD_OUT for text in questions.documents(data, split)]
    known = KnownWords.of(shown)
    cloze = Questions("cloze", questions.cloze(asked, known, num, seed))
    cloze.examples = questions.cloze(shown, known, NUM_EXAMPLES, seed, are_known=True)
    choice = Questions("choice", questions.choices(asked, num, seed))
    choice.examples = questions.choices(shown, NUM_EXAMPLES, seed)
    tasks = {"cloze": cloze, "choice": choice, "text": Questions("text", questions.whole_texts(asked, num, seed))}
    if empty := [name for name, task in tasks.items() if not task.rows]:
        raise UnspokenError(f"the val and test splits of {data} hold too little prose for {', '.join(empty)}")
    problems = fresh_problems(reasoning, num + NUM_EXAMPLES, seed) if reasoning else shipped_problems()
    for name, rows in problems.items():
        tasks[name] = Questions("reasoning", rows[NUM_EXAMPLES:][:num], rows[:NUM_EXAMPLES])
    return tasks


def write(tasks: dict[str, Questions], folder: Path, place: Path) -> dict[str, int]:
    """Write rows and task files into `folder`, which will stand at `place`; return the questions of each task."""
    counts = {}
    for name, task in tasks.items():
        paths = {"test": f"{name}.jsonl"}
        _write_rows(folder / paths["test"], task.rows)
        if task.examples:
            paths["train"] = f"{name}.examples.jsonl"
            _write_rows(folder / paths["train"], task.examples)
        template = files("unspoken.data").joinpath("question_files", f"{task.template}.yaml")
        sources = json.dumps({"data_files": {split: str(place / path) for split, path in paths.items()}})
        task_file = template.read_text(encoding="utf-8").replace("@FILES@", sources).replace("@NAME@", name)
        (folder / f"{name}.yaml").write_text(task_file, encoding="utf-8")
        counts[f"{GROUP}-{name}"] = len(task.rows)
    group = {"group": GROUP, "task": list(counts), "metadata": {"version": 1.0}}
    (folder / f"{GROUP}.yaml").write_text(json.dumps(group) + "\n", encoding="utf-8")  # which is YAML
    return counts


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
