"""The demo, and the library's table of contents: each command below is one that you can run by itself.

    python recipes/demo/run.py [--out runs/demo] [--quick] [--fresh]     (`make demo` runs the first form)

It is resumable: what is finished is skipped, a training run that was stopped goes on from its checkpoint.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from findings import Comparison, closing_table, sentences
from rich.console import Console
from rich.text import Text
from story import write_report

from unspoken.errors import UnspokenError
from unspoken.paper.command import Command
from unspoken.paper.environment import PROGRAM, interrupt_on_signals, is_bfloat16_fast, prepare_environment
from unspoken.paper.pipeline import Pipeline, Stage

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130
NO_NETWORK = "check the network"  # what `data prepare` says then


@dataclass(frozen=True)
class Size:
    """How much is done. The small models' recipes hold their full sizes; SmolLM2's are shortened for the demo."""

    corpus: str = "core"
    small_eval: tuple[str, ...] = ("--max-sequences", "160", "--batch-size", "32")
    smollm2_eval: tuple[str, ...] = ("--max-sequences", "16", "--batch-size", "16", "--dtype", "float32")
    small_depth: int = 16
    smollm2_depth: int = 8
    num_new_tokens: int = 60
    small_train: tuple[str, ...] = ()
    small_train_2x: tuple[str, ...] = ()
    smollm2_tokens: int = 10_240
    smollm2_train: tuple[str, ...] = ("--train.batch_size", "4", "--train.eval_every", "0")
    time_scale: float = 1.0


FULL = Size()
QUICK = Size(
    corpus="stdlib",
    small_eval=("--max-sequences", "8"),
    smollm2_eval=("--max-sequences", "2", "--sequence-length", "32", "--dtype", "float32"),
    small_depth=4,
    smollm2_depth=3,
    num_new_tokens=8,
    small_train=("--train.total_tokens", "40960", "--train.eval_every", "10", "--train.eval_sequences", "8"),
    small_train_2x=("--train.total_tokens", "81920", "--train.eval_every", "10", "--train.eval_sequences", "8"),
    smollm2_tokens=128,
    smollm2_train=("--data.sequence_length", "32", "--train.batch_size", "2", "--train.eval_every", "0"),
    time_scale=0.1,
)
SMALL_PROMPTS = ("The king is dead, and", "Come hither, gentle")
SMOLLM2_PROMPTS = ("The king is dead, and", "The two sisters walked to the river, and")


def main() -> int:
    parser = argparse.ArgumentParser(description="The demo: from text and a pretrained model to a report.")
    parser.add_argument("--out", default="runs/demo", help="folder for everything it makes (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two minutes: shows that all works, and nothing else")
    parser.add_argument("--fresh", action="store_true", help="delete what an earlier run of the demo left in --out")
    args = parser.parse_args()
    out = Path(args.out).resolve()
    out = out.relative_to(ROOT) if out.is_relative_to(ROOT) else out
    os.chdir(ROOT)
    prepare_environment()
    console = Console()
    interrupt_on_signals()
    try:
        pipeline = Pipeline(out, stages(out, QUICK if args.quick else FULL), PROGRAM, console)
        if args.fresh:
            pipeline.forget()
        pipeline.run()
        finish(out, pipeline, console, is_quick=args.quick)
    except UnspokenError as error:
        console.print(Text("\ndemo: ", style="red") + Text(str(error)), soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        console.print("\nstopped; run the demo again to go on from here")
        return INTERRUPTED
    return 0


LEGEND = (
    "Loss in nats per token of held-out text; exact: the recurrence, which decoding runs. FLOPs: 6 x parameters x "
    "tokens x passes. In brackets: 95 % intervals, paired, over pieces of text.\n"
)


def stages(out: Path, size: Size) -> list[Stage]:
    """What the demo does, in order. CPU seconds were measured on two cores of a Sapphire Rapids Xeon."""

    def command(name: str, seconds: float, output: Path, *words: object, **more) -> Command:
        return Command(name, tuple(map(str, words)), output, seconds * size.time_scale, **more)

    def prepare(name: str, tokenizer: str) -> Command:
        words = ["data", "prepare", "--corpus", size.corpus, "--tokenizer", tokenizer, "--out", str(out / name)]
        other = tuple("stdlib" if word == "core" else word for word in words)
        return command(name, 10, out / name, *words, instead=(NO_NETWORK, other))

    def train(name: str, seconds: float, recipe: str, data: str, *more: object, needs: tuple[str, ...] = ()) -> Command:
        words = ["train", recipe, "--run.out", out / name, "--data.path", out / data, *more]
        words += [] if is_bfloat16_fast() else ["--train.autocast", "none"]
        more_fields = {"needs": (data, *needs), "can_resume": True, "recipe": ROOT / recipe}
        return command(name, seconds, out / name, *words, **more_fields)

    def evaluate(name: str, seconds: float, model: Path, data: str, *more: object) -> Command:
        need, folder = model.relative_to(out).parts[0], out / f"eval-{name}"
        words = ["eval", model, "--data", out / data, "--out", folder, *more]
        return command(f"eval-{name}", seconds, folder, *words, needs=(need, data))

    def generate(name: str, seconds: float, prompts: tuple[str, ...]) -> Command:
        output = out / f"generations-{name}.jsonl"
        words = ["generate", out / name / "model", *(word for prompt in prompts for word in ("--prompt", prompt))]
        words += ["--max-new-tokens", size.num_new_tokens, "--temperature", 0.8, "--top-p", 0.95, "--output", output]
        return command(f"generate-{name}", seconds, output, *words, needs=(name,))

    text, text_smollm2, smollm2 = "data", "data-smollm2", out / "smollm2"
    continued = ("--train.total_tokens", size.smollm2_tokens, *size.smollm2_train)
    continued_2x = ("--train.total_tokens", 2 * size.smollm2_tokens, *size.smollm2_train)
    small = ("--no-exact", "--num-passes", 1, *size.small_eval)
    once = ("--no-exact", "--num-passes", 1, *size.smollm2_eval)
    deep = ("--depth", size.small_depth, *size.small_eval)
    smollm2_deep = ("--num-passes", 3, "--depth", size.smollm2_depth, *size.smollm2_eval)
    verified = out / "verify.json"
    return [
        Stage(
            "Text, and a pretrained model made to recycle",
            "Text comes from packages and is tokenised twice: by a BPE of its own for small models, and by SmolLM2's.",
            [
                [prepare(text, "bpe:4096"), prepare(text_smollm2, "smollm2")],
                [command("smollm2", 35, smollm2, "convert", "--model", "smollm2", "--out", smollm2)],
            ],
        ),
        Stage(
            "A small model learns from scratch, plain and recycling, side by side",
            "The same tokens in the same order; recycling takes two passes over them. Meanwhile SmolLM2 is verified.",
            [
                [train("recycler", 300, "recipes/demo/recycler.yaml", text, *size.small_train)],
                [
                    train("plain", 155, "recipes/demo/plain.yaml", text, *size.small_train),
                    command("verify", 45, verified, "verify", smollm2, "--base", "smollm2", "--json", verified,
                            needs=("smollm2",)),
                    evaluate("plain", 10, out / "plain" / "model", text, *small),
                    evaluate("smollm2", 20, smollm2, text_smollm2, *once),
                ],
            ],
        ),
        Stage(
            "SmolLM2 goes on learning, plain and recycling",
            "Beside it the small plain model gets what recycling cost: twice the tokens, the same compute.",
            [
                [
                    train("smollm2-recycler", 120, "recipes/ct/smollm2_recycler.yaml", text_smollm2,
                          "--model.from_pretrained", smollm2, *continued, needs=("smollm2",)),
                    train("smollm2-plain", 70, "recipes/ct/smollm2_plain.yaml", text_smollm2, *continued),
                    train("smollm2-plain-2x", 130, "recipes/ct/smollm2_plain.yaml", text_smollm2, *continued_2x),
                ],
                [train("plain-2x", 370, "recipes/demo/plain_2x.yaml", text, *size.small_train_2x)],
            ],
        ),
        Stage(
            "What did they learn?",
            "Loss on held-out text for each number of passes and for the exact recurrence, which decoding runs.",
            [
                [evaluate("smollm2-recycler", 160, out / "smollm2-recycler" / "model", text_smollm2, *smollm2_deep)],
                [
                    evaluate("recycler", 70, out / "recycler" / "model", text, *deep),
                    evaluate("plain-2x", 10, out / "plain-2x" / "model", text, *small),
                    evaluate("smollm2-plain", 22, out / "smollm2-plain" / "model", text_smollm2, *once),
                    evaluate("smollm2-plain-2x", 22, out / "smollm2-plain-2x" / "model", text_smollm2, *once),
                    generate("plain", 6, SMALL_PROMPTS),
                    generate("recycler", 6, SMALL_PROMPTS),
                    generate("smollm2-plain", 13, SMOLLM2_PROMPTS),
                    generate("smollm2-recycler", 13, SMOLLM2_PROMPTS),
                ],
            ],
        ),
    ]  # fmt: skip


def finish(out: Path, pipeline: Pipeline, console: Console, is_quick: bool) -> None:
    """The closing table, what was found in a sentence each, and the report."""
    small = Comparison.read(out, "A 1.4M model from scratch")
    smollm2 = Comparison.read(out, "SmolLM2-135M, continued", prefix="smollm2-", before="smollm2")
    for comparison in (small, smollm2):
        console.print()
        console.print(closing_table(comparison))
    console.print(Text(LEGEND, style="dim"))
    for sentence in sentences([small, smollm2], is_quick):
        console.print(Text(sentence, style="bold"))
    report = write_report(out, [small, smollm2], pipeline, is_quick)
    console.print(f"\nreport: {report}  [dim](open it in a browser)[/]", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
