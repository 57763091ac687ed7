"""What was made before: runs of this study with other settings are kept, runs of other studies with the same are used.

Two studies of one folder (runs/paper/recycler-claim, runs/paper/recycler-fig3) often share an arm. A finished run with
the same recipe on the same text is copied instead of trained again; its record says where it came from.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from unspoken.analysis.runs import read_run
from unspoken.data.tokens import TokenShards
from unspoken.errors import UsageError
from unspoken.paper.arms import Run
from unspoken.paper.command import Record
from unspoken.paper.pipeline import FOLDER, Pipeline
from unspoken.paper.plan import Plan
from unspoken.train.recipe_file import dotted

PLACES = ("run.out", "data.path")  # what two equal runs may differ in
CHECKPOINTS = "checkpoints"


def refuse_other_settings(plan: Plan) -> None:
    """Raise UsageError if a run folder was made with another recipe: running on would delete it."""
    for run in plan.runs:
        path = plan.recipe_path(run)
        if not path.is_file() or not (plan.out / "runs" / run.name).exists():
            continue
        before, now = _read(path), yaml.safe_load(plan.recipe_text(run))
        changed = [key for key in {**before, **dict(dotted(now))} if before.get(key) != dict(dotted(now)).get(key)]
        if changed:
            key = changed[0]
            raise UsageError(
                f"{plan.out / 'runs' / run.name} was made with other settings ({key}: {before.get(key)!r}, now "
                f"{dict(dotted(now)).get(key)!r}); give another --out, or --overwrite to make it again"
            )


def adopt(plan: Plan, pipeline: Pipeline) -> list[str]:
    """Copy finished runs with the same recipe and text from the studies beside this one; returns their names."""
    adopted = []
    for run in plan.runs:
        command = plan.train(run)
        if run.after is not None or command.output.exists() or "path" not in run.values["data"]:
            continue
        source = next(_finished_elsewhere(run, plan), None)
        if source is None:
            continue
        folder, record = source
        shutil.copytree(folder, command.output, ignore=shutil.ignore_patterns(CHECKPOINTS))
        note = record.note or f"copied from {folder}"
        cost = record.wall_seconds, record.cpu_seconds, record.peak_memory_bytes
        made = Record("done", list(command.words), *cost, time.time(), note, command.recipe_sha256)
        made.write(pipeline.out / FOLDER / f"{run.name}.json")
        adopted.append(run.name)
    return adopted


def _finished_elsewhere(run: Run, plan: Plan) -> Iterator[tuple[Path, Record]]:
    """Run folders of other studies that hold this run, with their records."""
    wanted = _settings(dict(dotted(yaml.safe_load(plan.recipe_text(run)))))
    fingerprint = TokenShards.open(Path(run.values["data"]["path"]), "train").fingerprint
    for path in sorted(plan.out.parent.glob("*/recipes/*.yaml")):
        other = path.parent.parent
        if other.resolve() == plan.out.resolve() or _settings(_read(path)) != wanted:
            continue
        folder, record = other / "runs" / path.stem, Record.read(other / FOLDER / f"{path.stem}.json")
        if record is None or record.status != "done" or not folder.is_dir():
            continue
        found = read_run(folder, wanted=())
        made_with = (found.recipe or {}).get("made_with") or {}
        if (found.summary or {}).get("status") == "finished" and made_with.get("data_fingerprint") == fingerprint:
            yield folder, record


def _settings(values: dict[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.items() if key not in PLACES}


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(dotted(yaml.safe_load(path.read_text(encoding="utf-8"))))
    except (OSError, yaml.YAMLError, AttributeError):
        return {}
