"""`unspoken data problems`: problems with one right answer, as rows that `unspoken sft`, `rl` and `eval` read.

A SPEC is a data set of reasoning-gym with settings, or `written_sum`, which is ours (`problem_specs.py` says how it is
written, `written_sum.py` what it makes).

    OUT/train.jsonl OUT/val.jsonl      {"prompt": ..., "completion": ..., "answer": "7", "task": "easy", "entry": ...}
    OUT/problems.json                  specs, seed, versions, and what each task's rows and answers are
    OUT/tokenizer/                     with --format plain: one token for each character of these rows

`entry` is what reasoning-gym's own scorer needs, as JSON text. Every answer of reasoning-gym is given to that scorer
first, as it will be when a model is scored; what it does not give in full is left out and counted. No question is in
both files, or twice in one. Equal specs, seeds and versions give equal rows.
"""

import argparse
import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unspoken.data.cache import check_folder, whole_folder
from unspoken.data.problem_specs import Spec, parse
from unspoken.data.reasoning import NUM_DRAWS, DataSet, Entry, Scorers, as_json, distinct, library_version
from unspoken.data.tokenizer import character_tokenizer
from unspoken.data.written_sum import WrittenSum
from unspoken.errors import UnspokenError, UsageError, nearest

MANIFEST, TOKENIZER, SPLITS = "problems.json", "tokenizer", ("train", "val")
EXAMPLES = ("example_answer", "example_correct_answer", "possible_answer")  # of several right ones, in `metadata`
HOPELESS = 50  # problems that cannot be used, before one that can


@dataclass(frozen=True)
class Options:
    """What decides the rows, beside the specs. `num`: of each spec, in `train` and in `val`."""

    num: dict[str, int]
    seed: int = 0
    instruction: str = ""
    chat: bool = True


@dataclass
class Task:
    """The rows of one spec, by split, and what there is to say about them."""

    spec: Spec
    seed: int
    rows: dict[str, list[dict[str, Any]]]
    left_out: Counter[str] = field(default_factory=Counter)
    notices: list[str] = field(default_factory=list)


def main(args: argparse.Namespace) -> None:
    out = Path(args.out)
    if out.exists() and not (args.overwrite and (out / MANIFEST).is_file()):
        raise UsageError(f"{out} exists; --overwrite replaces a folder that this command made")
    for name in ("num_train", "num_val"):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 0")
    if not args.num_train and not args.num_val:
        raise UsageError("--num-train and --num-val are both 0")
    check_folder("--out", out.absolute().parent)
    specs = parse(args.specs)
    options = Options(
        dict(zip(SPLITS, (args.num_train, args.num_val))), args.seed, args.instruction, args.format == "chat"
    )
    tasks = make(specs, options, Console(stderr=True))
    with whole_folder(out, replace=args.overwrite) as folder:
        manifest = write(tasks, options, folder)
    print_table(manifest, Console())
    reward = " --reward last_number" if all(spec.name == WrittenSum.name for spec in specs) else ""
    hint = f"; unspoken eval MODEL --problems {out / 'val.jsonl'}{reward}" if args.num_val else ""
    print(f"written: {out}{hint}")


def make(specs: Sequence[Spec], options: Options, console: Console | None = None) -> list[Task]:
    """The rows of every spec. A question belongs to the first spec that asks it.

    Raises:
        UsageError: no reasoning-gym, no such data set or setting; problems that have no one answer to learn from.
        UnspokenError: a spec without a row for each split.
    """
    num = sum(options.num.values())
    seeds = [random.Random(f"{options.seed} {spec.label}").getrandbits(31) for spec in specs]
    sources = [_source(spec, NUM_DRAWS * num, seed) for spec, seed in zip(specs, seeds)]
    seen: set[str] = set()
    tasks = []
    with (console or Console(quiet=True)).status("") as status:
        for spec, seed, source in zip(specs, seeds, sources):
            status.update(f"{escape(spec.label)}: {num} problems")
            task = Task(spec, seed, {})
            found = _found(source, num, seen, task)
            random.Random(f"{options.seed} {spec.label}").shuffle(found)
            start = 0
            for split, count in _shares(len(found), options, task).items():
                task.rows[split] = [row_of(entry, spec, options) for entry in found[start : start + count]]
                start += count
            tasks.append(task)
    return tasks


def _source(spec: Spec, size: int, seed: int) -> Iterable[Entry]:
    """Seeds are drawn, since neighbouring ones of reasoning-gym share most of their problems."""
    if spec.name != WrittenSum.name:
        return DataSet(spec.name, size, seed, spec.settings, spec.text, [WrittenSum.name])
    names = [field.name for field in fields(WrittenSum)]
    if unknown := next((name for name in spec.settings if name not in names), None):
        close = nearest(unknown, names) or f"; there are {', '.join(names)}"
        raise UsageError(f"{spec.text}: {spec.name} has no setting {unknown!r}{close}")
    return WrittenSum(**spec.settings).draw(size, seed)


def _found(source: Iterable[Entry], num: int, seen: set[str], task: Task) -> list[Entry]:
    """At most so many problems, each with the answer that is to be learned."""
    scorers = Scorers(task.spec.text) if isinstance(source, DataSet) else None
    found: list[Entry] = []
    for entry in distinct(source, seen):
        one = entry if scorers is None else _checked(entry, scorers, task)
        if one is not None:
            found.append(one)
        if len(found) == num or (not found and sum(task.left_out.values()) >= HOPELESS):
            break
    return found


def _checked(entry: Entry, scorers: Scorers, task: Task) -> Entry | None:
    """With its answer and as the text that rows hold; None if the scorer, which will read that text, does not give the
    answer in full."""
    spec = task.spec
    answer = entry["answer"]
    if answer is None:
        answer = next((entry["metadata"][name] for name in EXAMPLES if name in entry["metadata"]), None)
        if answer is None:
            raise UsageError(f"{spec.text}: problems of {spec.name} come without an answer to learn from")
        answer = answer if isinstance(answer, str) else json.dumps(answer)
    entry["metadata"].setdefault("source_dataset", spec.name)
    answer, text = str(answer), as_json(entry)
    if not answer.strip():
        task.left_out["the answer is empty"] += 1
    elif scorers.score(answer, json.loads(text)) < 1:
        task.left_out["their data set's own scorer, given them as JSON, does not score the answer in full"] += 1
    else:
        return {"question": entry["question"], "completion": answer, "answer": answer, "entry": text}
    return None


def _shares(num_found: int, options: Options, task: Task) -> dict[str, int]:
    """Rows of each split: as asked for, or in the same proportion where there are fewer problems.

    Raises:
        UnspokenError: fewer problems than splits.
    """
    label, num = task.spec.label, sum(options.num.values())
    left_out = [f"{count} left out: {reason}" for reason, count in task.left_out.items()]
    what = f"{num_found} different problems where {num} were asked for"
    if num_found < sum(map(bool, options.num.values())):
        raise UnspokenError("; ".join([f"{task.spec.text}: {what}", *left_out]))
    task.notices += [f"{label}: {reason}" for reason in left_out]
    if num_found == num:
        return options.num
    task.notices.append(f"{label}: {what}, among {NUM_DRAWS * num} drawn")
    val = min(max(round(num_found * options.num["val"] / num), bool(options.num["val"])), num_found)
    val = num_found - max(num_found - val, bool(options.num["train"]))
    return {"train": num_found - val, "val": val}


def row_of(entry: Entry, spec: Spec, options: Options) -> dict[str, Any]:
    """A problem as a row: prompt and completion are messages, or texts."""
    prompt: Any = f"{entry['question']} {options.instruction}" if options.instruction else entry["question"]
    completion: Any = entry["completion"]
    if options.chat:
        prompt = [{"role": "user", "content": prompt}]
        completion = [{"role": "assistant", "content": completion}]
    row = {"prompt": prompt, "completion": completion, "answer": entry["answer"], "task": spec.label}
    return row | ({"entry": entry["entry"]} if "entry" in entry else {})


def write(tasks: Sequence[Task], options: Options, folder: Path) -> dict[str, Any]:
    """Write the files into `folder`, tasks mixed; return the manifest."""
    for split, num in options.num.items():
        rows = [row for task in tasks for row in task.rows[split]]
        random.Random(f"{options.seed} {split}").shuffle(rows)
        if num:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    if not options.chat:
        texts = (row["prompt"] + row["completion"] for task in tasks for rows in task.rows.values() for row in rows)
        character_tokenizer(texts).save_pretrained(folder / TOKENIZER)
    is_ours = all(task.spec.name == WrittenSum.name for task in tasks)
    manifest = {
        "versions": {"unspoken": version("unspoken")} | ({} if is_ours else {"reasoning-gym": library_version()}),
        "options": {
            **{f"num_{split}": num for split, num in options.num.items()},
            "seed": options.seed,
            "instruction": options.instruction,
            "format": "chat" if options.chat else "plain",
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED"),  # which some data sets follow
        },
        "tasks": {task.spec.label: _described(task) for task in tasks},
        "notices": [notice for task in tasks for notice in task.notices],
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return manifest


def _described(task: Task) -> dict[str, Any]:
    whole = [row for rows in task.rows.values() for row in rows]
    return {
        "spec": task.spec.text,
        "data_set": task.spec.name,
        "settings": task.spec.settings,
        "seed": task.seed,
        "left_out": dict(task.left_out),
        **{split: _answers(rows) for split, rows in {**task.rows, "all": whole}.items()},
    }


def _answers(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many rows and answers there are, and what giving the most frequent one would be worth."""
    counts = Counter(row["answer"] for row in rows)
    answer, count = counts.most_common(1)[0] if rows else (None, 0)
    share = count / len(rows) if rows else None
    return {"rows": len(rows), "answers": len(counts), "majority": answer, "majority_share": share}


def print_table(manifest: dict[str, Any], console: Console) -> None:
    table = Table()
    for name in ("task", *SPLITS, "answers", "majority"):
        table.add_column(name, justify="left" if name == "task" else "right", overflow="fold")
    for label, task in manifest["tasks"].items():
        found = task["all"]
        counts = (f"{number:,}" for number in (*(task[split]["rows"] for split in SPLITS), found["answers"]))
        table.add_row(escape(label), *counts, f"{100 * found['majority_share']:.1f} %")
    table.caption = "rows, their distinct answers, and the share of the most frequent one"
    console.print(table)
    for notice in manifest["notices"]:
        console.print(f"note: {notice}", highlight=False, markup=False, soft_wrap=True)
