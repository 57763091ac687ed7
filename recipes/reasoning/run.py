"""From answers to rewards: does recycling, or do latent steps, help a model that is taught to answer and then rewarded?

    python recipes/reasoning/run.py small   [--out runs/reasoning/small] [--seeds 0 1] [--jobs 2] [--quick]
    python recipes/reasoning/run.py smollm2 [...]            (needs reasoning-gym: pip install 'unspoken[reasoning]')

Each command below is one that you can run by itself. The study is resumable: what is finished is skipped, a run that
was stopped goes on from its checkpoint. `table.md` and `report.html` hold what has been finished.
"""

import argparse
import sys
from pathlib import Path

from outcome import write_outcome
from rich.console import Console
from rich.text import Text
from settings import QUICK, STUDIES, Arm, Size

from unspoken.errors import UnspokenError
from unspoken.paper.command import Command
from unspoken.paper.environment import PROGRAM, interrupt_on_signals, prepare_environment
from unspoken.paper.pipeline import Pipeline, Stage

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130


def main() -> int:
    parser = argparse.ArgumentParser(description="Fine-tuning on answers, then reinforcement learning: a comparison.")
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--out", help="folder for everything it makes (default: runs/reasoning/STUDY)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--jobs", type=int, default=1, help="commands side by side, one thread each (default: 1)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that all works, and nothing else")
    args = parser.parse_args()
    out = Path(args.out or f"runs/reasoning/{args.study}")
    prepare_environment()
    console = Console()
    interrupt_on_signals()
    size = QUICK[args.study] if args.quick else STUDIES[args.study]
    try:
        pipeline = Pipeline(out, stages(out, size, args.seeds, args.jobs), PROGRAM, console, keep_going=True)
        pipeline.run()
    except UnspokenError as error:
        console.print(Text("\nreasoning: ", style="red") + Text(str(error)), soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        console.print("\nstopped; the same command goes on from here")
        return INTERRUPTED
    finally:
        if (out / "commands").is_dir():
            write_outcome(out, size, args.seeds, console)
    return 1 if pipeline.failed else 0


def stages(out: Path, size: Size, seeds: list[int], jobs: int) -> list[Stage]:
    """What the study does, in order."""
    data = out / "data"
    problems = ["data", "problems", *size.specs, "--format", size.format, "--num-train", size.num_train]
    problems += ["--num-val", size.num_val, "--out", data]
    if size.instruction:
        problems += ["--instruction", size.instruction]
    prepared = [_command("problems", 20, data, *problems)]
    if size.text:
        words = ["data", "prepare", "--corpus", size.text, "--tokenizer", "smollm2", "--out", out / "text"]
        prepared.append(_command("text", 20, out / "text", *words))
    lanes = [lane for seed in seeds for lane in [*_continued(out, size, seed), *_arms(out, size, seed)]]
    return [
        Stage("Problems", "What all models are asked, and what they are taught.", [prepared]),
        Stage(
            "Answers, then rewards",
            "Each model is taught on the same rows, asked the same held-out problems, and rewarded on as many samples.",
            lanes,
            at_once=jobs,
        ),
    ]


def _continued(out: Path, size: Size, seed: int) -> list[list[Command]]:
    """The pretrained model goes on with text, in each way that an arm begins with."""
    lanes = []
    for kind in dict.fromkeys(arm.continued for arm in size.arms if arm.continued):
        name, recipe = f"ct-{kind}-s{seed}", f"recipes/ct/smollm2_{kind}.yaml"
        words = ["train", recipe, "--run.out", out / name, "--run.seed", seed, "--data.path", out / "text", *size.ct]
        lanes.append([_resumable(name, size.ct_seconds * (2 if kind == "recycler" else 1), recipe, ["text"], words)])
    return lanes


def _arms(out: Path, size: Size, seed: int) -> list[list[Command]]:
    return [_arm(out, size, arm, seed) for arm in size.arms]


def _arm(out: Path, size: Size, arm: Arm, seed: int) -> list[Command]:
    """An arm is taught, asked, rewarded and asked again; or another arm's model is asked in another way."""
    name = f"{arm.name}-s{seed}"
    if arm.asks:
        taught = f"sft-{arm.asks}-s{seed}"
        return [_asked(out, size, f"sft-{name}", out / taught / "model", arm, taught)]
    taught, rewarded = f"sft-{name}", f"rl-{name}"
    begins = f"ct-{arm.continued}-s{seed}" if arm.continued else ""
    words = ["sft", arm.recipe, "--run.out", out / taught, "--run.seed", seed, *_data(out, size), *arm.sft, *size.sft]
    words += ["--model.from_pretrained", out / begins / "model"] if begins else []
    needs = ["problems", *([begins] if begins else [])]
    commands = [
        _resumable(taught, size.sft_seconds * arm.cost, arm.recipe, needs, words),
        _asked(out, size, taught, out / taught / "model", arm, taught),
    ]
    if arm.is_rewarded:
        words = ["rl", size.rl_recipe, "--run.out", out / rewarded, "--run.seed", seed, *size.rl]
        words += ["--model.from_pretrained", out / taught / "model"]
        words += ["--data.files", f"[{out / 'data' / 'train.jsonl'}]"]
        words += ["--data.validation_files", f"[{out / 'data' / 'val.jsonl'}]"]
        commands += [
            _resumable(rewarded, size.rl_seconds * arm.cost, size.rl_recipe, [taught], words),
            _asked(out, size, rewarded, out / rewarded / "model", arm, rewarded),
        ]
    return commands


def _asked(out: Path, size: Size, name: str, model: Path, arm: Arm, need: str) -> Command:
    folder = out / "evals" / name
    words = ["eval", model, "--problems", out / "data" / "val.jsonl", "--reward", size.reward, "--log-samples"]
    words += ["--max-new-tokens", size.max_new_tokens, "--batch-size", 50, "--dtype", "float32", "--out", folder]
    words += ["--num-prefill-passes", arm.asked_passes] if arm.asked_passes else []
    return _command(f"eval-{name}", size.eval_seconds, folder, *words, needs=("problems", need))


def _data(out: Path, size: Size) -> list[object]:
    folder, key = out / "data", "--data.conversations"
    words = [f"{key}.files", f"[{folder / 'train.jsonl'}]", f"{key}.validation_files", f"[{folder / 'val.jsonl'}]"]
    return [*words, *([f"{key}.tokenizer", folder / "tokenizer"] if size.format == "plain" else [])]


def _command(name: str, seconds: float, output: Path, *words: object, needs: tuple[str, ...] = ()) -> Command:
    return Command(name, tuple(map(str, words)), output, seconds, needs)


def _resumable(name: str, seconds: float, recipe: str, needs: list[str], words: list[object]) -> Command:
    """A training run into `--run.out`."""
    output = Path(str(words[words.index("--run.out") + 1]))
    text = tuple(map(str, words))
    return Command(name, text, output, seconds, tuple(needs), can_resume=True, recipe=ROOT / recipe)


if __name__ == "__main__":
    sys.exit(main())
