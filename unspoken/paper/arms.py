"""From a study to the recipe of each run: base, command line, budget, arm, seed, in this order.

    base recipe  <-  --section.key value  <-  token budget  <-  the arm's own keys  <-  run.seed, run.out, data.path

An override changes every arm and leaves the arms' differences as they are, `x2` among them.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unspoken.analysis.numbers import short_count
from unspoken.errors import UsageError, nearest
from unspoken.paper.study import LEARNS, PROBLEMS, Study
from unspoken.train.recipe import FIELDS_OF, METHOD_FIELDS, Recipe
from unspoken.train.recipe_file import Origins, apply_override, check_recipe, dotted, parse_overrides, read_yaml

ARM_WORDS = ("after", "note", LEARNS)  # what an arm may say beside a recipe's keys
CONTINUED_SEED = 1000  # added for each arm that came before: the text goes on in another order, not from its start
DATA = "data"  # folder of prepared text
PROBLEM_FILES = {"files": "train.jsonl", "validation_files": "val.jsonl"}  # of the folder `problems`
CHECKPOINTS = {"save_every": 200, "keep_last": 1}  # of a run that is killed, so much is lost
QUICK_TOKENS = 5120  # of the first arm, with --quick
QUICK = {
    "data.sequence_length": 64,
    "train.batch_size": 4,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.save_every": 0,
}
_FACTOR = re.compile(r"x(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Run:
    """One arm with one seed, at one budget: its recipe's `values`, and the run whose model it starts from, if any."""

    name: str
    arm: str
    seed: int
    budget: int | None
    values: dict[str, Any]
    after: str | None = None

    @property
    def total_tokens(self) -> int:
        train = self.values["train"]
        if train.get("total_tokens"):
            return int(_number(train["total_tokens"]))
        return int(train["max_steps"]) * train.get("batch_size", 8) * self.values["data"].get("sequence_length", 256)

    @property
    def learns_problems(self) -> bool:
        return bool(self.values["data"].get("conversations"))

    @property
    def num_passes(self) -> int:
        model = self.values["model"]
        return model.get("num_train_passes") or (2 if "recycler" in str(model.get("method")) else 1)

    @property
    def runs_per_token(self) -> float:
        """Of the backbone, that a token costs in training: half of the latent steps that it may take, for a guess."""
        model, method = self.values["model"], str(self.values["model"].get("method"))
        if "adaptive" in method:
            latent_steps = model.get("max_latent_steps") or 3
            return self.num_passes * (1 + latent_steps * (1 if model.get("router") == "none" else 0.5))
        slots = 1 + (model.get("num_latent_thoughts") or 1)
        of_baselines = {
            "looped": model.get("num_loops") or 4,
            "pause": 1 + model.get("num_pauses", 3),
            "mor": (1 + (model.get("num_recursions") or 4)) / 2,
            "ponder": 1 + model.get("num_ponder_steps", 3),
            "ponder2": slots * (slots - 1) / 2 + slots * 3.5,
        }
        return self.num_passes * of_baselines.get(method, 1)


class Arms:
    """The recipes of a study's runs, in `out`. `overrides` are words of the command line."""

    def __init__(self, study: Study, out: Path, overrides: Sequence[str] = (), is_quick: bool = False):
        self.study, self.out, self.is_quick = study, out, is_quick
        self.overrides = list(parse_overrides(list(overrides)))
        for key, _ in self.overrides:
            if is_quick and key in (*QUICK, "train.total_tokens", "train.max_steps"):
                raise UsageError(f"--{key}: --quick says it itself; leave out one of the two")

    @cached_property
    def base(self) -> tuple[dict[str, Any], Origins]:
        """The base recipe with the command line's overrides, and where each of its keys was given."""
        base = self.study.file.base
        if isinstance(base, str):
            values, origins = read_yaml(self.study.path.parent / base, "base recipe")
            if isinstance(values.get("data"), dict):
                values["data"].pop("path", None)  # a study prepares its own text
        else:
            values, origins = copy.deepcopy(base), self._origins("base.")
        if isinstance(values.get("train"), dict):
            values["train"] = CHECKPOINTS | values["train"]
        for key, value in [*self.overrides, *(QUICK.items() if self.is_quick else ())]:
            apply_override(values, key, value)
            origins[key] = f"--{key}"
        return values, origins

    @property
    def makes_text(self) -> bool:
        """Whether text is to be prepared, as neither the study nor the command line names any data."""
        return not {"path", "sources", "task"} & (self.base[0].get("data") or {}).keys()

    @property
    def text_path(self) -> Path:
        """The folder of the text that runs read."""
        return self.out / DATA if self.makes_text else Path(self.base[0]["data"]["path"])

    @property
    def budgets(self) -> list[int | None]:
        return list(self.study.file.budgets) or [None]

    def runs(self, arms: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """The runs of those arms and seeds, and of the arms that they go on from; what a run needs comes before it."""
        names = [name for arm in arms for name in (*reversed(self.study.file.ancestors(arm)), arm)]
        return [
            self.run(arm, seed, budget) for budget in self.budgets for seed in seeds for arm in dict.fromkeys(names)
        ]

    def run(self, arm: str, seed: int, budget: int | None) -> Run:
        """One run.

        Raises:
            UsageError: the keys do not make a recipe.
        """
        base, origins = self.base
        values, own = copy.deepcopy(base), dict(self.study.file.arms[arm] or {})
        origins = origins | self._origins(f"arms.{arm}.")
        after = own.get("after")
        if budget is not None:
            apply_override(values, "train.total_tokens", budget)
        keys = {key: value for key, value in own.items() if key not in ARM_WORDS}
        for key, value in keys.items():
            self._check_key(arm, key, origins)
            apply_override(values, key, self._scaled(arm, key, value, values))
        _leave_out(values, keys, is_continued=after is not None)
        ancestors = self.study.file.ancestors(arm)
        fixed = {
            "run.out": str(self.out / "runs" / _run_name(arm, seed, budget)),
            "run.seed": seed + CONTINUED_SEED * len(ancestors),
        }
        if self.study.file.learns_problems(arm):
            values["data"].pop("path", None)
            for key, file in PROBLEM_FILES.items():
                fixed[f"data.conversations.{key}"] = [str(self.out / PROBLEMS / file)]
        elif self.makes_text:
            fixed["data.path"] = str(self.out / DATA)
        if after is not None:
            fixed["model.from_pretrained"] = str(self.out / "runs" / _run_name(after, seed, budget) / "model")
        for key, value in fixed.items():
            apply_override(values, key, value)
        try:
            check_recipe(values, str(self.study.path), origins, Recipe)
        except UsageError as error:
            raise UsageError(f"{error} (in arm {arm!r})") from None
        if self.is_quick:
            self._shrink(values)
        parent = _run_name(after, seed, budget) if after else None
        return Run(_run_name(arm, seed, budget), arm, seed, budget, values, parent)

    def _origins(self, prefix: str) -> Origins:
        """Where the keys under `prefix` of the study file were given, under their own names."""
        return {key.removeprefix(prefix): line for key, line in self.study.origins.items() if key.startswith(prefix)}

    def _check_key(self, arm: str, key: str, origins: Origins) -> None:
        if "." in key:
            return
        known = [*ARM_WORDS, *(name for name, _ in dotted(self.base[0]))]
        by_last = {name.rpartition(".")[2]: name for name in known}
        close = f" (did you mean {by_last[key]!r}?)" if key in by_last else nearest(key, known)
        where = origins.get(key, str(self.study.path))
        raise UsageError(
            f"{where}: arm {arm!r}: {key} is no `section.key` of a recipe, nor {', '.join(ARM_WORDS)}{close}"
        )

    def _scaled(self, arm: str, key: str, value: Any, values: dict[str, Any]) -> Any:
        """`x2` as twice what the base says; other values as they are."""
        match = _FACTOR.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        base = dict(dotted(values)).get(key)
        try:
            scaled = float(match[1]) * _number(base)
        except (TypeError, ValueError):
            what = "does not say" if base is None else f"says {base!r}"
            raise UsageError(f"{self.study.path}: arm {arm!r}: {key}: {value} of what? The base {what}") from None
        return int(scaled) if scaled == int(scaled) and scaled >= 1 else scaled

    def _shrink(self, values: dict[str, Any]) -> None:
        """The run's tokens in proportion to QUICK_TOKENS of the first arm; at least one step."""
        train, base = values["train"], copy.deepcopy(self.base[0])
        first, key = next(iter(self.study.file.arms)), "train.total_tokens"
        own = (self.study.file.arms[first] or {}).get(key) or base["train"].get("total_tokens") or QUICK_TOKENS
        whole = self.budgets[0] or _number(self._scaled(first, key, own, base))
        step = QUICK["train.batch_size"] * QUICK["data.sequence_length"]
        train.pop("max_steps", None)
        tokens = _number(train.get("total_tokens") or whole)
        train["total_tokens"] = max(step, round(tokens * QUICK_TOKENS / whole))


def _leave_out(values: dict[str, Any], own: dict[str, Any], is_continued: bool) -> None:
    """Drop what the base says of another method, or of a new model's backbone, unless the arm says it itself."""
    model = values.get("model")
    if not isinstance(model, dict):
        return
    method = str(model.get("method"))
    dropped = [f"model.{name}" for name in METHOD_FIELDS if name not in FIELDS_OF.get(method, METHOD_FIELDS)]
    if method in FIELDS_OF and "recycler" not in method:
        dropped.append("train.third_pass_fraction")
    if method in FIELDS_OF and "adaptive" not in method:
        dropped.append("train.no_cut_fraction")
    if is_continued:
        dropped += ["model.init", "model.backbone"]
    for key in dropped:
        section, name = key.split(".")
        if not any(given == key or given.startswith(f"{key}.") for given in own):
            (values.get(section) or {}).pop(name, None)


def _run_name(arm: str, seed: int, budget: int | None) -> str:
    return f"{arm}-s{seed}" if budget is None else f"{arm}-{short_count(budget)}-s{seed}"


def _number(value: Any) -> float:
    """YAML 1.1 reads 3e-3 and 1_200_000.0 as text."""
    return float(str(value).replace("_", ""))
