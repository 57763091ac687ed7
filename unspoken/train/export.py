"""`unspoken export RUN`: a checkpoint of a run as a model folder, for a run that is still going, or its best one."""

import argparse
from pathlib import Path

from unspoken.errors import UnspokenError, UsageError
from unspoken.train.folder import TOKENIZER


def main(args: argparse.Namespace) -> int:
    run, out = Path(args.run), Path(args.out)
    if not run.is_dir():
        raise UsageError(f"{run} is no folder of a training run")
    from transformers.utils.logging import disable_progress_bar

    from unspoken.data.pretrained import read_tokenizer
    from unspoken.models.convert import check_place, save

    check_place(out, args.overwrite)
    from unspoken.train.build import model_like
    from unspoken.train.checkpoint import check_files, read_tensors
    from unspoken.train.loop import model_tensors

    disable_progress_bar()
    checkpoint = _chosen(run, args.checkpoint)
    check_files(checkpoint)
    model = model_like(checkpoint)
    read_tensors(checkpoint, model_tensors(model))
    tokenizer = read_tokenizer(run / TOKENIZER) if (run / TOKENIZER).is_dir() else None
    save(model.eval(), tokenizer, out, overwrite=args.overwrite)
    print(f"{out}: the model of {checkpoint}")
    return 0


def _chosen(run: Path, which: str) -> Path:
    """`newest`, `best`, or a step.

    Raises:
        UnspokenError: the run has no such checkpoint; the message lists those it has.
    """
    from unspoken.train.checkpoint import checkpoint_of, checkpoints, read_record

    found = checkpoints(run)
    if not found:
        raise UnspokenError(f"{run} has no checkpoint; set train.save_every, or stop the run once with Ctrl-C")
    if which == "newest":
        return found[0]
    step = read_record(found[0])["best"]["step"] if which == "best" else which
    if which != "best" and not which.isdecimal():
        raise UsageError(f"--checkpoint: {which!r} is none of newest, best, or a step")
    wanted = None if step is None else checkpoint_of(run, int(step))
    if wanted not in found:
        names = ", ".join(path.name.removeprefix("step-").lstrip("0") for path in found)
        what = "the best evaluation" if which == "best" else f"step {step}"
        hint = "; `train.keep_best: true` keeps it" if which == "best" else ""
        raise UnspokenError(f"{run} has no checkpoint of {what}, but of steps {names}{hint}")
    return wanted
