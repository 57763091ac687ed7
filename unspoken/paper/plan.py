"""The commands of a study.

OUT/recipes/RUN.yaml     the recipe of a run (an arm with a seed)
OUT/runs/RUN/            what `unspoken train` left
OUT/evals/RUN/           what `unspoken eval` left; RUN-other/ that on text of another kind, RUN-tasks/ of lm-eval,
                         RUN-problems/ answers to problems
OUT/commands/            how each command went
"""

from collections.abc import Sequence
from pathlib import Path

import yaml

from unspoken.paper.arms import DATA, PROBLEM_FILES, Arms, Run
from unspoken.paper.command import Command
from unspoken.paper.environment import is_bfloat16_fast
from unspoken.paper.pipeline import Stage
from unspoken.paper.study import PROBLEMS, ProblemsSection, TextSection
from unspoken.train.folder import MODEL

OTHER, QUESTIONS = "other-data", "questions"
QUICK_LIMIT, TASK_SECONDS = 4, 40.0  # questions of a task with --quick; of lm-eval's start and a small model's answers
START_SECONDS = 6.0  # of a command, before it does anything
SECONDS_PER_PASS_TOKEN = 1.2e-4  # and run of the backbone, of the small model of recipes/demo, trained on one core
QUICK_CORPUS, QUICK_TOKENIZER = ("stdlib",), "bpe:512"  # a pretrained model keeps its own tokenizer
QUICK_EVAL = {"sequence_length": 64, "max_sequences": 8, "batch_size": 8, "samples": 20}
QUICK_DEPTH = 6
QUICK_PROBLEMS = {"num_train": 40, "num_val": 4, "max_new_tokens": 8}
SECONDS_PER_PROBLEM = 0.05  # of a small model's answer, in a batch


class Plan:
    """The commands of a study's runs in `arms.out`."""

    def __init__(self, arms: Arms, runs: Sequence[Run]):
        self.arms, self.runs, self.out = arms, list(runs), arms.out
        self.eval, self.text, self.problems = arms.study.file.eval, arms.study.file.text, arms.study.file.problems
        if arms.is_quick:
            is_trained = self.text.tokenizer.startswith("bpe:")
            self.text = TextSection(
                corpus=QUICK_CORPUS, tokenizer=QUICK_TOKENIZER if is_trained else self.text.tokenizer
            )
            depth = min(self.eval.depth, QUICK_DEPTH)
            self.eval = self.eval.model_copy(update={**QUICK_EVAL, "depth": depth})
            self.problems = self.problems and self.problems.model_copy(update=QUICK_PROBLEMS)

    def stages(self, at_once: int, runs: Sequence[Run] | None = None) -> list[Stage]:
        """The text, then a lane for each run, `at_once` side by side. `runs`: some of them."""
        lanes = [self.commands(run) for run in (self.runs if runs is None else runs)]
        study = self.arms.study.file
        stages = [Stage(study.title, study.question, lanes, at_once)]
        texts = [self.prepare()] if self.arms.makes_text else []
        texts += [self.prepare_other()] if self.has_other_text else []
        texts += [self.prepare_questions()] if self.has_tasks else []
        texts += [self.prepare_problems(self.problems)] if self.problems else []
        return [Stage("Text", "What all runs read.", [texts]), *stages] if texts else stages

    def notes(self) -> list[str]:
        """What the study asks for and this plan leaves out."""
        study = self.arms.study.file
        wanted = [name for name in ("other_text", "tasks") if getattr(study, name)]
        if wanted and not self.arms.makes_text:
            return [f"{' and '.join(wanted)}: left out, as they belong to the text that the study prepares itself"]
        return []

    def commands(self, run: Run) -> list[Command]:
        """Those of a run, in their order."""
        commands = [self.train(run), self.evaluate(run)]
        commands += [self.evaluate_other(run)] if self.has_other_text else []
        commands += [self.evaluate_tasks(run)] if self.has_tasks else []
        return [*commands, self.ask_problems(run, self.problems)] if run.learns_problems and self.problems else commands

    @property
    def has_other_text(self) -> bool:
        """Not with --quick, whose own text is the one that is there without a download."""
        return bool(self.arms.study.file.other_text) and self.arms.makes_text and not self.arms.is_quick

    def write_recipes(self) -> None:
        """Write each run's recipe, where it is not written yet."""
        (self.out / "recipes").mkdir(parents=True, exist_ok=True)
        for run in self.runs:
            path, text = self.recipe_path(run), self.recipe_text(run)
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")

    def recipe_path(self, run: Run) -> Path:
        return self.out / "recipes" / f"{run.name}.yaml"

    def recipe_text(self, run: Run) -> str:
        values = dict(run.values)
        if not is_bfloat16_fast():
            values["train"] = {"autocast": "none"} | values["train"]
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)

    def prepare(self) -> Command:
        folder = self.out / DATA
        words = ["data", "prepare", *_repeated("--corpus", self.text.corpus)]
        words += ["--tokenizer", self.text.tokenizer, "--out", str(folder)]
        return Command("data", tuple(words), folder, 10)

    @property
    def has_tasks(self) -> bool:
        return bool(self.arms.study.file.tasks) and self.arms.makes_text

    def prepare_questions(self) -> Command:
        """Tasks for lm-eval, out of the held-out text."""
        folder = self.out / QUESTIONS
        words = ("data", "questions", str(self.out / DATA), "--out", str(folder))
        return Command(QUESTIONS, words, folder, 20, needs=("data",))

    def evaluate_tasks(self, run: Run) -> Command:
        folder = self.out / "evals" / f"{run.name}-tasks"
        words = ["eval", str(self.out / "runs" / run.name / MODEL), "--tasks", ",".join(self.arms.study.file.tasks)]
        words += ["--include-path", str(self.out / QUESTIONS), "--batch-size", str(self.eval.batch_size)]
        words += ["--limit", str(QUICK_LIMIT)] if self.arms.is_quick else []
        words += ["--out", str(folder)]
        return Command(f"{run.name}-tasks", tuple(words), folder, TASK_SECONDS, needs=(run.name, QUESTIONS))

    def prepare_problems(self, wanted: ProblemsSection) -> Command:
        """Rows to learn from and to be asked."""
        folder = self.out / PROBLEMS
        words = ["data", "problems", *wanted.specs, "--format", "plain", "--num-train", str(wanted.num_train)]
        words += ["--num-val", str(wanted.num_val), "--out", str(folder)]
        return Command(PROBLEMS, tuple(words), folder, 10)

    def ask_problems(self, run: Run, wanted: ProblemsSection) -> Command:
        folder = self.out / "evals" / f"{run.name}-{PROBLEMS}"
        words = ["eval", str(self.out / "runs" / run.name / MODEL)]
        words += ["--problems", str(self.out / PROBLEMS / PROBLEM_FILES["validation_files"]), "--log-samples"]
        words += ["--reward", wanted.reward, "--max-new-tokens", str(wanted.max_new_tokens)]
        words += ["--batch-size", str(wanted.batch_size), "--dtype", "float32", "--out", str(folder)]
        seconds = START_SECONDS + len(wanted.specs) * wanted.num_val * SECONDS_PER_PROBLEM
        return Command(f"{run.name}-{PROBLEMS}", tuple(words), folder, seconds, needs=(run.name, PROBLEMS))

    def prepare_other(self) -> Command:
        """The text of another kind, in the tokens of the training text."""
        folder = self.out / OTHER
        words = ["data", "prepare", *_repeated("--corpus", self.arms.study.file.other_text)]
        words += ["--tokenizer", str(self.out / DATA / "tokenizer"), "--out", str(folder)]
        return Command(OTHER, tuple(words), folder, 10, needs=("data",))

    def train(self, run: Run) -> Command:
        path = self.recipe_path(run)
        needs = (*(["data"] if self.arms.makes_text else []), *([run.after] if run.after else []))
        needs += (PROBLEMS,) if run.learns_problems else ()
        seconds = START_SECONDS + run.total_tokens * run.runs_per_token * SECONDS_PER_PASS_TOKEN
        output = self.out / "runs" / run.name
        return Command(run.name, ("train", str(path)), output, seconds, needs, can_resume=True, recipe=path)

    def evaluate(self, run: Run) -> Command:
        wanted, folder = self.eval, self.evaluation_folder(run)
        words = ["eval", str(self.out / "runs" / run.name / MODEL)]
        options = ["num_passes", "samples"]
        tokens = wanted.samples * sum(wanted.lengths)
        if run.values["data"].get("task"):
            words += _repeated("--length", [str(length) for length in wanted.lengths])
        else:
            words += ["--data", str(self.arms.text_path)]
            options = ["num_passes", "depth", "split", "sequence_length", "max_sequences", "batch_size"]
            tokens = wanted.max_sequences * wanted.sequence_length
        for option in options:
            words += [f"--{option.replace('_', '-')}", str(getattr(wanted, option))]
        words += [] if wanted.exact else ["--no-exact"]
        passes = (max(wanted.num_passes, wanted.depth) + 2 * wanted.exact) if run.num_passes > 1 else 1
        seconds = START_SECONDS + tokens * passes * SECONDS_PER_PASS_TOKEN
        return Command(f"{run.name}-eval", (*words, "--out", str(folder)), folder, seconds, needs=(run.name,))

    def evaluate_other(self, run: Run) -> Command:
        """As on the text that it read, without the depth curve."""
        own, folder = self.evaluate(run), self.out / "evals" / f"{run.name}-other"
        changed = {"--data": str(self.out / OTHER), "--depth": "0", "--out": str(folder)}
        words = [changed.get(before, word) for before, word in zip(("", *own.words), own.words, strict=False)]
        return Command(f"{run.name}-other-eval", tuple(words), folder, own.cpu_seconds, needs=(run.name, OTHER))

    def evaluation_folder(self, run: Run) -> Path:
        return self.out / "evals" / run.name


def _repeated(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]
