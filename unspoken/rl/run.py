"""`unspoken rl`: reinforcement learning on problems with checked answers, from claiming the folder to the report.

RUN/resolved.yaml          the recipe with every default, and what it ran with; a recipe itself
RUN/metrics.jsonl .csv     a row for each rollout and each evaluation (`journal.py`)
RUN/samples.jsonl          what was sampled, and its rewards
RUN/checkpoints/           for --resume: between rollouts
RUN/model/                 the trained model with its tokenizer, once the run is finished
RUN/summary.json           counts, and held-out accuracy before and after
RUN/report.html            reward, accuracy, the gap to the rollout, lengths, samples
"""

import argparse
import copy
import json
import os
import shlex
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase, PrinterCallback
from transformers.utils.logging import disable_progress_bar, set_verbosity_error
from trl import GRPOConfig

from unspoken.analysis.policy_report import policy_report
from unspoken.config import RecyclerConfig
from unspoken.data.tokenizer import load_existing
from unspoken.errors import UnspokenError, UsageError
from unspoken.eval import rewards
from unspoken.eval.problems import Score, answer_problems, by_task
from unspoken.models.convert import save
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.load import load_model
from unspoken.rl.checkpoints import SealedCheckpoints
from unspoken.rl.journal import Journal, Progress
from unspoken.rl.prompts import Prompts, Rollouts, read_prompts
from unspoken.rl.recipe import RLRecipe
from unspoken.rl.trainer import LatentGRPOTrainer, check_policy
from unspoken.train.build import end_answers, model_like, pick_device, pretrained_model
from unspoken.train.checkpoint import check_belongs, read_record
from unspoken.train.folder import (
    MODEL,
    RESOLVED,
    RUN_ID,
    SUMMARY,
    TOKENIZER,
    claimed,
    is_finished,
    newest_checkpoint,
    same_run,
    say_where_it_begins,
)
from unspoken.train.loop import generation_text
from unspoken.train.metrics import Row, check_trackers, open_trackers
from unspoken.train.optim import build_optimizer, freeze_adapter
from unspoken.train.parallel import Ranks
from unspoken.train.recipe_file import compact, dotted, load_recipe
from unspoken.train.run import INTERRUPTED, made_with, peak_memory
from unspoken.train.schedule import LearningRate

REFERENCE, REPORT = "reference", "report.html"


def main(args: argparse.Namespace) -> int:
    """Train as the recipe says. Exit status 130 if a signal stopped it; its checkpoint is saved."""
    recipe = load_recipe(Path(args.recipe), args.overrides, RLRecipe)
    try:
        return train(recipe, args.resume)
    except UsageError as error:
        raise UsageError(f"{args.recipe}: {error}") from error


def train(recipe: RLRecipe, resume: bool = False) -> int:
    """Run a recipe in this process."""
    folder = recipe.run.out
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("rl runs in one process; for several, use LatentGRPOTrainer in a script of TRL's")
    if resume and is_finished(folder):
        print(f"{folder} is finished; its model is in {folder / MODEL}")
        return 0
    disable_progress_bar()
    set_verbosity_error()  # what transformers warns of here, no one who uses this command has set
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|trl")
    check_trackers(recipe.run.report_to)
    with claimed(folder, resume, Ranks()):
        trainer, journal = _start(recipe, resume)
        with journal.following(trainer):
            trainer.train(resume_from_checkpoint=trainer.begins_at)
        for tracker in journal.trackers:
            tracker.finish()
        is_at_end = journal.progress.step == recipe.train.num_rollouts
        if is_at_end:
            trainer.forget_pad()
            save(trainer.latent, load_existing(str(folder / TOKENIZER)), folder / MODEL, overwrite=True)
        _write_summary(trainer, journal, is_at_end)
        (folder / REPORT).write_text(policy_report([folder], folder.name), encoding="utf-8")
    if is_at_end:
        print(f"{folder / MODEL}; {folder / REPORT}: {_before_and_after(journal)}")
        return 0
    command = f"unspoken rl {shlex.quote(str(folder / RESOLVED))} --resume"
    print(f"stopped after rollout {journal.progress.step}; go on with\n  {command}")
    return INTERRUPTED


class PolicyTrainer(SealedCheckpoints, LatentGRPOTrainer):
    """The trainer of a run folder. `begins_at`: the checkpoint to go on from."""

    begins_at: str | None = None
    journal: Journal

    @property
    def latent(self) -> LatentForCausalLM:
        model: Any = self.accelerator.unwrap_model(self.model)
        return model

    def progress(self) -> dict[str, Any]:
        return self.journal.record()

    def forget_pad(self) -> None:
        """The pad token that TRL wrote into the model: where it is the end token too, the next stage would not learn
        its embedding."""
        latent: Any = self.latent
        latent.config.text_config.pad_token_id = self.config.text_config.pad_token_id
        latent.generation_config.pad_token_id = self.config.text_config.pad_token_id

    def _clip_grad_norm(self, model: Any) -> Any:
        """transformers', and weights never move on a gradient that is not a number."""
        norm = super()._clip_grad_norm(model)
        if not torch.isfinite(torch.as_tensor(norm)):
            raise UnspokenError(
                f"rollout {self.journal.progress.step + 1}: the gradient norm is {float(norm):.4g}; the weights were "
                "not moved. A lower optim.learning_rate, or train.autocast: none may help."
            )
        return norm


def _start(recipe: RLRecipe, resume: bool) -> tuple[PolicyTrainer, Journal]:
    """Everything before the first rollout: checks, model, problems, the resolved recipe."""
    folder, device = recipe.run.out, pick_device(recipe.run.device)
    functions = [rewards.find(name, recipe.reward.partial) for name in recipe.reward.functions]
    tokenizer = load_existing(recipe.model.from_pretrained or "")
    newest, cut = newest_checkpoint(folder, Ranks()) if resume else (None, [])
    torch.manual_seed(recipe.run.seed)
    model: Any = (
        pretrained_model(recipe.model, tokenizer, "the model's folder") if newest is None else model_like(newest)
    )
    if tokenizer.eos_token_id is None:
        raise UsageError("model.from_pretrained: its tokenizer has no end token, so no answer would end")
    end_answers(model, tokenizer)
    _check_model(recipe, model)
    prompts = read_prompts(recipe, tokenizer, model, functions)
    values = recipe.plain() | {"made_with": made_with(prompts.fingerprint)}
    if newest is not None:
        values["made_with"][RUN_ID] = same_run(values, folder)
        check_belongs(newest, values["made_with"][RUN_ID])
    (folder / RESOLVED).write_text(compact(values) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder / TOKENIZER)
    trackers = open_trackers(recipe.run.report_to, folder, dict(dotted(values)))
    journal = Journal(
        recipe,
        [function.__name__ for function in functions],
        prompts.tasks,
        _evaluation(recipe, model, tokenizer, prompts, functions[0]),
        trackers,
        None if newest is None else Progress(**read_record(newest)["progress"]),
    )
    config = copy.deepcopy(model.config)
    generation = generation_text(model)
    reference = _reference(recipe, model, tokenizer, is_new=newest is None)
    trainer = _trainer(recipe, model.to(device), tokenizer, prompts, functions, journal, reference)
    trainer.keep(folder, values["made_with"][RUN_ID], recipe.train.keep_last, recipe.updates, config, generation)
    trainer.begins_at = None if newest is None else str(newest)
    _say_what_begins(recipe, model, prompts, newest, cut, resume)
    return trainer, journal


def _check_model(recipe: RLRecipe, model: LatentForCausalLM) -> None:
    passes = recipe.policy.num_scoring_passes
    if passes not in (None, 1, "exact") and not isinstance(model.config, RecyclerConfig):
        raise UsageError(f"policy.num_scoring_passes: {passes}: a {model.config.model_type} model has one pass")
    try:
        check_policy(model.config)
    except ValueError as error:
        raise UsageError(f"model: {error}") from error


def _trainer(
    recipe: RLRecipe,
    model: LatentForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    functions: list[rewards.Checked],
    journal: Journal,
    reference: LatentForCausalLM | None,
) -> PolicyTrainer:
    policy, rows, is_cpu = recipe.policy, recipe.micro_batch_size, model.device.type == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options that a user of this command has not set
        options = GRPOConfig(
            str(recipe.run.out),
            seed=recipe.run.seed,
            use_cpu=is_cpu,
            bf16=recipe.train.autocast == "bfloat16",
            max_steps=recipe.num_updates,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=recipe.update_size // rows,
            generation_batch_size=recipe.rollout.num_completions,
            num_generations=recipe.rollout.num_generations,
            num_iterations=recipe.train.num_iterations,
            max_completion_length=recipe.rollout.max_new_tokens,
            temperature=recipe.rollout.temperature,
            importance_sampling_level=policy.importance_sampling_level,
            loss_type="grpo",
            epsilon=policy.epsilon,
            epsilon_high=policy.epsilon_high,
            beta=policy.beta,
            scale_rewards=policy.scale_rewards,
            mask_truncated_completions=policy.mask_truncated_completions,
            reward_weights=recipe.reward.weights,
            learning_rate=recipe.optim.learning_rate,
            max_grad_norm=recipe.optim.max_grad_norm,
            gradient_checkpointing=recipe.train.gradient_checkpointing,
            shuffle_dataset=False,
            remove_unused_columns=False,
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            disable_tqdm=True,
            report_to="none",
        )
        if recipe.optim.adapter_learning_rate_factor == 0:
            freeze_adapter(model)
        optimizer = build_optimizer(dict(model.named_parameters()), recipe.optim)
        trainer = PolicyTrainer(
            model,
            functions,
            options,
            train_dataset=Dataset.from_dict({"prompt": ["of its type"]}),
            processing_class=tokenizer,
            callbacks=[journal],
            optimizers=(optimizer, _schedule(optimizer, recipe)),
            reference=reference,
            num_scoring_passes=policy.num_scoring_passes,
            gap_limit=policy.gap_limit,
            on_gap=policy.on_gap,
            correction_limit=policy.correction_limit,
        )
    trainer.train_dataset = Rollouts(prompts.train, recipe)  # no Arrow table: its columns may hold what they like
    trainer.remove_callback(PrinterCallback)
    trainer.journal = journal
    return trainer


def _schedule(optimizer: torch.optim.Optimizer, recipe: RLRecipe) -> LambdaLR:
    """The recipe's learning rates, as factors of the one that the optimizer begins with."""
    rate = LearningRate(recipe.optim, recipe.num_updates)

    def factor(of: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: of(step) / recipe.optim.learning_rate

    groups = optimizer.param_groups
    return LambdaLR(optimizer, [factor(rate.adapter_at if g["group"] == "adapter" else rate.at) for g in groups])


def _evaluation(
    recipe: RLRecipe,
    model: LatentForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    reward: rewards.Checked,
) -> Callable[[], Row]:
    """Greedy answers to held-out problems, as a row."""

    def evaluate() -> Row:
        is_mixed = recipe.train.autocast == "bfloat16"
        with torch.autocast(model.device.type, torch.bfloat16) if is_mixed else nullcontext():
            answers = answer_problems(
                model,
                tokenizer,
                prompts.held_out,
                reward,
                max_new_tokens=recipe.rollout.max_new_tokens,
                batch_size=recipe.rollout.num_completions,
            )
        whole, scores = Score.of(answers), by_task(answers)
        row: Row = {"accuracy": whole.right.share, "num_problems": len(answers), "completions/clipped_ratio": whole.cut}
        row["completions/mean_length"] = whole.mean_tokens
        return row | {f"accuracy/{task}": score.right.share for task, score in scores.items()}

    return evaluate


def _reference(
    recipe: RLRecipe, model: LatentForCausalLM, tokenizer: PreTrainedTokenizerBase, is_new: bool
) -> LatentForCausalLM | None:
    """The policy as it began, which the KL term pulls back to; None without one. is_new: the run begins now.

    Raises:
        UnspokenError: a run goes on, and what it began with is gone.
    """
    if not recipe.policy.beta:
        return None
    folder = recipe.run.out / REFERENCE
    if is_new:
        save(model, tokenizer, folder, overwrite=folder.exists())
    elif not folder.exists():
        raise UnspokenError(f"{folder} is gone, so the run has nothing for its KL term to pull to; it cannot go on")
    return load_model(folder, str(model.device), "float32")[0]


def _say_what_begins(
    recipe: RLRecipe, model: LatentForCausalLM, prompts: Prompts, newest: Path | None, cut: list[Path], resume: bool
) -> None:
    say_where_it_begins(recipe.run.out, resume, newest, cut, "the first rollout")
    method = model.config.model_type.removeprefix("unspoken_")
    num_parameters = sum(p.numel() for p in model.parameters())
    rollout = recipe.rollout
    print(
        f"{recipe.run.out}: {method}, {num_parameters:,} parameters, {len(prompts.train):,} problems; "
        f"{recipe.train.num_rollouts:,} rollouts of {rollout.num_prompts} x {rollout.num_generations} completions, "
        f"{recipe.updates} updates each; the whole recipe is in {recipe.run.out / RESOLVED}",
        flush=True,
    )


def _write_summary(trainer: PolicyTrainer, journal: Journal, is_at_end: bool) -> None:
    summary = {
        "status": "finished" if is_at_end else "interrupted",
        **journal.record(),
        "updates": trainer.state.global_step,
        "peak_memory_bytes": peak_memory(trainer.latent.device),
        "num_parameters": sum(p.numel() for p in trainer.latent.parameters()),
        "first_evaluation": journal.first_evaluation,
        "final": journal.last_rows,
    }
    (journal.recipe.run.out / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def _before_and_after(journal: Journal) -> str:
    rows = (journal.first_evaluation, journal.last_rows.get("eval"))
    if None in rows:
        return f"{journal.progress.completions:,} completions"
    before, after = (100 * row["accuracy"] for row in rows if row)
    return f"held-out accuracy {before:.1f} % before, {after:.1f} % after {journal.progress.completions:,} completions"
