"""The `unspoken` command: options here, work in the module each command names.

Parsers are built without importing torch or transformers, so that `--help` answers at once; a command's
module is imported when it runs. Exit status: 0 success, 1 a failed check or run, 2 wrong usage.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from unspoken.errors import UnspokenError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; never prints a traceback unless `--debug` is given."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown and not args.takes_overrides:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.overrides = unknown
    if not sys.stderr.isatty():  # transformers' bars would fill a log with their steps
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_MININTERVAL", "30")  # lm-eval's cannot be turned off
    module, _, function = args.handler.partition(":")
    try:
        return getattr(importlib.import_module(module), function)(args) or 0
    except UnspokenError as error:
        if args.debug:
            raise
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not error.said_by_main:
            print(f"unspoken: error: {error}" if rank == "0" else f"process {rank}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("unspoken: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, a folder that may not be written
        if args.debug:
            raise
        place = f": {error.filename}" if error.filename else ""
        print(f"unspoken: error: {error.strerror or error}{place}", file=sys.stderr)
        return 1
    except Exception as error:
        if args.debug:
            raise
        print(f"unspoken: error: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unspoken", description="Language models that think between tokens.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        _convert, _data, _train, _sft, _rl, _launch, _export, _eval, _generate, _chat, _verify, _inspect, _report,
        _paper, _compare,
    ):  # fmt: skip
        add(commands)
    return parser


def _version() -> str:
    from importlib.metadata import version

    return f"unspoken {version('unspoken')}"


def _command(commands, name: str, handler: str, help: str, takes_overrides: bool = False):
    parser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(handler=handler, takes_overrides=takes_overrides, parser=parser)
    return parser


def _model_options(parser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")


def _convert(commands) -> None:
    p = _command(
        commands,
        "convert",
        "unspoken.models.convert:main",
        "Turn a pretrained model into a latent one, or back.",
    )
    p.add_argument("--model", required=True, help="local folder, .gguf file, hub name, or `smollm2` (embedded)")
    p.add_argument("--method", choices=["recycler", "adaptive", "adaptive_recycler", "vanilla"], default="recycler")
    p.add_argument("--out", required=True, help="folder to write (safetensors)")
    p.add_argument("--export-backbone", action="store_true", help="write the plain transformers model inside --model")
    p.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    p.add_argument("--num-train-passes", type=int, help="passes over the sequence in training (default 2)")
    p.add_argument("--num-prefill-passes", type=int, choices=[1, 2], help="passes over a prompt (default 2)")
    p.add_argument("--max-latent-steps", type=int, help="of each token, at most (default 3)")
    p.add_argument("--exit-threshold", type=float, help="a token goes on if it gets to the next step so likely (0.01)")
    p.add_argument("--router-bias", type=float, help="of the new router: its gates are sigmoid of it (default -4)")
    p.add_argument("--overwrite", action="store_true", help="replace --out if it exists")


def _data(commands) -> None:
    group = commands.add_parser("data", help="Prepare and check training text.")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    p = _command(actions, "prepare", "unspoken.data.prepare:main", "Clean, split and tokenise text into shards.")
    p.add_argument(
        "--corpus",
        action="append",
        required=True,
        help="`core` (pip only), `full` (pip, npm, Debian packages), `stdlib` (Python's own help texts, no download), "
        "files or folders of text/JSONL/parquet, or a `datasets` data set NAME or NAME:CONFIGURATION; may be repeated",
    )
    p.add_argument("--out", required=True, help="folder to write")
    p.add_argument(
        "--tokenizer", default="bpe:4096", help="`bpe:SIZE` (trained on the text), `smollm2`, folder or name"
    )
    p.add_argument("--text-field", default="text", help="field that holds the text in JSONL and parquet rows")
    p.add_argument("--on-bad-line", choices=["error", "skip"], default="error", help="stop at bad rows, or count them")
    p.add_argument("--max-document-chars", type=int, default=1_000_000, help="longer documents are cut into pieces")
    p.add_argument("--seed", type=int, default=0, help="decides the order of documents in the shards")
    p.add_argument("--overwrite", action="store_true", help="replace --out if it exists")
    p = _command(actions, "validate", "unspoken.data.validate:main", "Name file, line and reason of every bad row.")
    p.add_argument("files", nargs="+", help="text, JSONL or parquet files or folders")
    p.add_argument("--text-field", default="text", help="field that holds the text in JSONL and parquet rows")
    p.add_argument("--on-bad-line", choices=["error", "skip"], default="error")
    p.add_argument("--max-document-chars", type=int, default=1_000_000, help="longer documents are noted")
    p = _command(actions, "show", "unspoken.data.show:main", "Show what a prepared folder holds, and some windows.")
    p.add_argument("folder", help="folder written by `data prepare`; with --tokenizer, rows to answer (JSONL, parquet)")
    p.add_argument("--tokenizer", help="model or tokenizer that reads the rows: which of their tokens are learned")
    p.add_argument("--split", choices=["train", "val", "test"], default="train")
    p.add_argument("--num-windows", type=int, default=3, help="decoded training windows to print")
    p.add_argument("--sequence-length", type=int, default=128, help="tokens in a window")

    p = _command(
        actions,
        "questions",
        "unspoken.data.question_folder:main",
        "Make small tasks for lm-eval (`unspoken eval --tasks`) out of prepared text.",
    )
    p.add_argument("data", help="folder written by `data prepare`")
    p.add_argument("--out", required=True, help="folder to write; it stays usable where it is made")
    p.add_argument("--num", type=int, default=500, help="questions of each task, at most")
    p.add_argument("--reasoning", action="append", metavar="NAME", help="data set of reasoning-gym; may be repeated")
    p.add_argument("--seed", type=int, default=0, help="decides which questions, where there are more")
    p.add_argument("--overwrite", action="store_true", help="replace --out if it exists")

    p = _command(
        actions,
        "problems",
        "unspoken.data.problems:main",
        "Make problems with one right answer, to learn from (`sft`, `rl`) and to be asked (`eval --problems`).",
    )
    p.add_argument(
        "specs",
        nargs="+",
        metavar="SPEC",
        help="[LABEL=]NAME[:SETTING=VALUE,...], a data set of reasoning-gym or `written_sum`: "
        "chain_sum:max_terms=2,max_digits=1",
    )
    p.add_argument("--out", required=True, help="folder to write")
    p.add_argument("--num-train", type=int, default=1000, help="rows of each spec in train.jsonl")
    p.add_argument("--num-val", type=int, default=200, help="rows of each spec in val.jsonl, of other questions")
    p.add_argument("--seed", type=int, default=0, help="decides which problems")
    p.add_argument("--instruction", default="", help="text behind every question")
    p.add_argument("--format", choices=["chat", "plain"], default="chat", help="prompts as messages, or as texts")
    p.add_argument("--overwrite", action="store_true", help="replace --out if it exists")


def _train(commands) -> None:
    _recipe_command(commands, "train", "unspoken.train.run:main", "recipes/", "Pretrain or continue pretraining")


def _sft(commands) -> None:
    what = "Fine-tune on conversations, or prompts and completions,"
    _recipe_command(commands, "sft", "unspoken.train.run:sft", "recipes/sft/", what)


def _rl(commands) -> None:
    what = "Reinforcement learning on problems with checked answers,"
    _recipe_command(commands, "rl", "unspoken.rl.run:main", "recipes/rl/", what)


def _recipe_command(commands, name: str, handler: str, home: str, what: str) -> None:
    """A run of a recipe into a folder of its own."""
    help = f"{what} from a recipe; `--a.b value` overrides its keys."
    p = _command(commands, name, handler, help, takes_overrides=True)
    p.add_argument("recipe", help=f"YAML file; see {home}")
    p.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the run folder")


def _launch(commands) -> None:
    p = _command(
        commands,
        "launch",
        "unspoken.launch:main",
        "Train in several processes, started again when one dies: unspoken launch --processes 2 -- train RECIPE ...",
    )
    p.add_argument("--processes", type=int, help="on this machine (default: one for each GPU)")
    p.add_argument("--max-restarts", type=int, default=3, help="how often all are started again after a failure")
    p.add_argument("--nodes", type=int, default=1, help="machines; run the same command on each")
    p.add_argument("--rendezvous", metavar="HOST:PORT", help="where the machines meet: a free port of one of them")
    p.add_argument("--run-id", help="a name that the machines of one run share")
    p.add_argument("command", nargs=argparse.REMAINDER, help="-- train RECIPE.yaml ...")


def _export(commands) -> None:
    p = _command(commands, "export", "unspoken.train.export:main", "Write a run's checkpoint as a model folder.")
    p.add_argument("run", help="folder of a training run")
    p.add_argument("--checkpoint", default="newest", help="`newest` (default), `best`, or a step")
    p.add_argument("--out", required=True, help="folder to write (safetensors)")
    p.add_argument("--overwrite", action="store_true", help="replace --out if it exists")


def _eval(commands) -> None:
    p = _command(
        commands,
        "eval",
        "unspoken.eval.run:main",
        "Loss, perplexity and bits per byte of text, or right answers of tasks, by pass and exactly.",
    )
    p.add_argument("model", nargs="?", help="model folder")
    p.add_argument("--data", help="folder written by `data prepare` (default: the task the model was trained on)")
    p.add_argument("--tasks", metavar="NAMES", help="tasks of lm-eval and suites of the papers, separated by commas")
    p.add_argument("--problems", metavar="FILE", help="rows with a `prompt` and what its answer is scored by (JSONL)")
    p.add_argument("--list-suites", action="store_true", help="show the papers' suites, row by row")
    p.add_argument(
        "--num-passes",
        type=_count_or("exact"),
        help="parallel passes 1..N to evaluate (default: 4); with --tasks this one depth, a number or `exact` "
        "(default: as the model's config says of prompts)",
    )
    p.add_argument("--no-exact", action="store_true", help="skip the exact recurrence (sequential)")
    p.add_argument(
        "--batch-size",
        type=_count_or("auto"),
        help="sequences at once (default: 8, or 250 samples of a task that the model was trained on); with --tasks "
        "also `auto`",
    )
    _latent_options(p, each_threshold=True)
    p.add_argument("--out", help="folder for results and plots (default: the model folder)")
    text = p.add_argument_group("text (with --data)")
    text.add_argument("--split", choices=["val", "test", "train"], help="default: val")
    text.add_argument("--depth", type=int, help="depth curve up to this recycle depth (default 0: none)")
    text.add_argument("--sequence-length", type=int, help="default: 256")
    text.add_argument("--max-sequences", type=int, help="default: 64")
    task = p.add_argument_group("task that the model was trained on (without --data)")
    task.add_argument(
        "--length", type=int, action="append", help="may be repeated (default: 1, 1.5, 2 and 4 times the trained one)"
    )
    task.add_argument("--samples", type=int, help="of each length (default: 1000)")
    _answer_options(p.add_argument_group("answers (with --tasks or --problems)"))
    _lm_eval_options(p.add_argument_group("tasks of lm-eval (with --tasks)"))
    _problem_options(p.add_argument_group("problems (with --problems)"))
    _model_options(p)


# Defaults stand in `eval/run.py`: None tells an option that was not given.
_YES = {"action": "store_const", "const": True}


def _answer_options(group) -> None:
    group.add_argument("--limit", type=float, help="so many of each task, or below 1 such a share: to try it")
    group.add_argument("--max-new-tokens", type=int, help="of an answer (default: as the task says; of a problem, 64)")
    group.add_argument("--log-samples", **_YES, help="also write every question and answer")


def _lm_eval_options(group) -> None:
    group.add_argument("--num-fewshot", type=int, help="examples before each question (default: the task's number)")
    group.add_argument("--include-path", metavar="FOLDER", help="task files of yours, or of `unspoken data questions`")
    group.add_argument("--chat", **_YES, help="put each question into the model's chat template")
    group.add_argument("--confirm-run-unsafe-code", **_YES, help="let tasks run the programs that the model writes")


def _problem_options(group) -> None:
    group.add_argument(
        "--reward",
        metavar="NAME",
        help="reasoning_gym (default where rows have `entry`), exact (default elsewhere), last_number, math, or yours: "
        "package.module:function",
    )
    group.add_argument("--partial", **_YES, help="show the partial credit that reasoning_gym gives")
    group.add_argument("--num-prefill-passes", type=int, choices=[1, 2], help="default: as the model's config says")


def _count_or(word: str):
    """A whole number, or that word."""

    def parse(text: str) -> int | str:
        return text if text == word else int(text)

    parse.__name__ = f"number or `{word}`"
    return parse


def _sampling_options(parser) -> None:
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-prefill-passes", type=int, choices=[1, 2], help="default: as the model's config says")
    _latent_options(parser)


def _latent_options(parser, each_threshold: bool = False) -> None:
    group = parser.add_argument_group("latent steps (default: as the model's config says)")
    several = " (may be repeated: a row for each, after the model's own)" if each_threshold else ""
    group.add_argument(
        "--exit-threshold",
        type=float,
        action="append" if each_threshold else "store",
        help=f"a token goes on if it gets to the next step at least so likely{several}",
    )
    group.add_argument("--max-latent-steps", type=int, help="of each token, at most; 0: none")
    group.add_argument("--exit-at-step", type=int, help="so many runs of the backbone for every token, and no router")


def _generate(commands) -> None:
    p = _command(commands, "generate", "unspoken.decode.generate:main", "Continue prompts.")
    p.add_argument("model", help="model folder")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="may be repeated; the prompts form one batch")
    source.add_argument("--input", help="JSONL file, one object with `prompt` (or `messages`) a line; - is stdin")
    p.add_argument("--output", help="JSONL file to write (default: stdout)")
    p.add_argument("--num-beams", type=int, default=1)
    p.add_argument("--num-return-sequences", type=int, default=1)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    p.add_argument("--num-pauses", type=int, default=0, help="pause tokens behind each prompt (default 0)")
    p.add_argument("--stream", action="store_true", help="print tokens as they come (one prompt)")
    _sampling_options(p)
    _model_options(p)


def _chat(commands) -> None:
    p = _command(commands, "chat", "unspoken.decode.chat:main", "Talk to a model; the cache is kept across turns.")
    p.add_argument("model", help="model folder")
    p.add_argument("--system", help="system message")
    _sampling_options(p)
    _model_options(p)


def _verify(commands) -> None:
    p = _command(
        commands,
        "verify",
        "unspoken.eval.verify:main",
        "Check a model against its reference; a pass/fail table.",
    )
    p.add_argument("model", help="model folder")
    p.add_argument("--base", help="source checkpoint: also check that logits equal it (freshly converted models)")
    p.add_argument("--json", help="also write the table to this file")
    p.add_argument("--seed", type=int, default=0)
    _model_options(p)


def _inspect(commands) -> None:
    p = _command(
        commands,
        "inspect",
        "unspoken.analysis.inspect:main",
        "Show where a model with latent steps thinks, token by token.",
    )
    p.add_argument("model", help="model folder")
    p.add_argument("--text", required=True, help="file with the text to read")
    p.add_argument("--html", help="file to write: every token, with its steps where the pointer rests, and the plots")
    p.add_argument("--json", help="file to write what was measured to")
    p.add_argument("--sequence-length", type=int, help="tokens read together (default: 256, if the model can)")
    p.add_argument("--max-tokens", type=int, default=20_000, help="so many from the text's start")
    _latent_options(p)
    _model_options(p)


def _report(commands) -> None:
    p = _command(
        commands, "report", "unspoken.analysis.report:main", "One page of several runs: curves, tables, depth."
    )
    p.add_argument("runs", nargs="+", metavar="RUN", help="folder of a training run, or of a model")
    p.add_argument("--out", default="report.html", help="file to write (default: report.html)")
    p.add_argument("--title", default="Runs")
    p.add_argument("--text", help="file with a text; models with latent steps show where they think in it")
    p.add_argument("--max-tokens", type=int, default=2000, help="so many from the text's start")


def _paper(commands) -> None:
    what = "Run a study of recipes/paper and report it; `--a.b value` overrides its recipes' keys."
    _study(_command(commands, "paper", "unspoken.paper.run:main", what, takes_overrides=True), "paper")


def _compare(commands) -> None:
    what = "Run a comparison of methods (recipes/compare) and report it; `--a.b value` overrides its recipes' keys."
    _study(_command(commands, "compare", "unspoken.paper.run:compare", what, takes_overrides=True), "compare")


def _study(p, home: str) -> None:
    p.add_argument("study", nargs="?", help="its name, or its file")
    p.add_argument("--list", action="store_true", help="name them, with what each asks")
    p.add_argument("--out", help=f"folder for runs and results (default: runs/{home}/NAME)")
    p.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    p.add_argument("--seeds", type=int, nargs="+", help="instead of the study's")
    p.add_argument("--arms", nargs="+", help="only these, and what they go on from")
    p.add_argument("--quick", action="store_true", help="tiny sizes: shows that all works, and nothing else")
    p.add_argument("--overwrite", action="store_true", help="make runs again that were made with other settings")
    p.add_argument("--report-only", action="store_true", help="report what is finished, and run nothing")


if __name__ == "__main__":
    sys.exit(main())
