"""Latent steps in users' own scripts: transformers' Trainer, TRL's SFT and GRPO trainers, LoRA through peft."""

import warnings
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tests.equivalence.test_latent_decoding import thinking
from tests.equivalence.test_trainers import LENGTHS, QUIET, collate, rows, text_of, tokenizer  # noqa: F401  # a fixture
from tests.families import EOS, random_ids
from tests.oracle import close
from unspoken import AdaptiveLatentForCausalLM


def fresh_model(name: str = "llama_tied", **fields) -> AdaptiveLatentForCausalLM:
    """A penalty that weighs, and gates that tell tokens apart."""
    loud = {"adaptive_loss_weight": 3.0, "adaptive_loss_exponent": 0.5}
    return thinking(name, torch.float32, text={"eos_token_id": EOS}, **{**loud, **fields}).train()


class Gradients(TrainerCallback):
    """What each optimizer step sees."""

    def __init__(self):
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    def of_router(self) -> float:
        return max(g.abs().max().item() for name, g in self.seen[0].items() if "router" in name)


@pytest.mark.parametrize("accumulation", [1, 8])
def test_trainer_and_accumulation(accumulation, tmp_path):
    """B42, the penalty among what is divided."""
    model, seen = fresh_model(), Gradients()
    expected = model(**collate(list(rows()))).loss
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    arguments = TrainingArguments(
        tmp_path,
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        max_grad_norm=0.0,
        learning_rate=0.0,
        **QUIET,
    )
    loss = Trainer(model, arguments, collate, rows(), callbacks=[seen]).train().training_loss
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert seen.of_router() > 0
    for name, g in wanted.items():
        close(seen.seen[0][name], g, 1e-5)


def test_trainer_checkpoints_evaluates_predicts_and_saves(tmp_path):
    """What an output says of the steps is no tensor, and the trainer, which gathers all that it finds, stumbled."""
    model = fresh_model()
    arguments = TrainingArguments(
        tmp_path, max_steps=2, gradient_checkpointing=True, bf16=True, per_device_train_batch_size=4, **QUIET
    )
    trainer = Trainer(model, arguments, collate, rows(), eval_dataset=rows())
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(rows()).predictions.shape == (8, 11, 64)  # logits, and nothing else
    trainer.save_model(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.config.text_config.use_cache  # B52
    assert torch.equal(loaded.model.router.gates[0].weight, model.model.router.gates[0].weight)


@pytest.mark.parametrize(
    "packing", [pytest.param(False, id="padded"), pytest.param(True, id="packed", marks=pytest.mark.slow)]
)
def test_trl_sft(packing, tokenizer, tmp_path):  # noqa: F811
    """B39: TRL calls the base model and the head by itself. The router learns from the mixture's loss; the penalty,
    which lives in the head model's forward, is not in it."""
    from trl import SFTConfig, SFTTrainer

    model, seen = fresh_model(), Gradients()
    texts = Dataset.from_dict({"text": [text_of(random_ids(1, n, seed=i)) for i, n in enumerate(LENGTHS)]})
    arguments = SFTConfig(
        tmp_path,
        max_steps=1,
        per_device_train_batch_size=4,
        packing=packing,
        max_length=16,
        learning_rate=0.01,
        **QUIET,
    )
    trainer = SFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer, callbacks=[seen])
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        loss = trainer.compute_loss(model, dict(batch))
        hidden = model.model(batch["input_ids"], position_ids=batch.get("position_ids"), use_cache=False)
        logits = model.lm_head(hidden.last_hidden_state)[:, :-1]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    close(loss, expected, 1e-5)
    assert hidden.latents.lengths.any()
    if packing:
        assert (batch["position_ids"] == 0).sum() > len(batch["position_ids"])
    before = model.model.router.gates[0].weight.clone()
    trainer.train()
    assert seen.of_router() > 0
    assert not torch.equal(model.model.router.gates[0].weight, before)


@pytest.mark.slow
def test_trl_grpo(tokenizer, tmp_path):  # noqa: F811
    """B51: rollouts with a cache although checkpointing is on, and no flood of warnings."""
    from trl import GRPOConfig, GRPOTrainer

    model, seen, lengths = fresh_model(), Gradients(), []
    model.model.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: (
            None if torch.is_grad_enabled() else lengths.append(kwargs["inputs_embeds"].shape[1])
        ),
        with_kwargs=True,
    )
    arguments = GRPOConfig(
        tmp_path,
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=5,
        importance_sampling_level="sequence",
        loss_type="grpo",
        learning_rate=0.01,
        gradient_checkpointing=True,
        **QUIET,
    )
    prompts = Dataset.from_dict({"prompt": [text_of(random_ids(1, n)) for n in (4, 7)]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = GRPOTrainer(
            model,
            lambda completion_ids, **kwargs: [float(sum(ids)) for ids in completion_ids],
            arguments,
            train_dataset=prompts,
            processing_class=tokenizer,
            callbacks=[seen],
        )
        trainer.train()
    assert seen.of_router() > 0
    assert lengths.count(1) >= 4  # one token a run after the prefill
    assert sum("use_cache" in str(w.message) for w in caught) <= 1


def with_lora(model: AdaptiveLatentForCausalLM, targets=("q_proj", "v_proj", "down_proj")):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, target_modules=list(targets), modules_to_save=["router"], task_type="CAUSAL_LM")
    return get_peft_model(model, config)


@pytest.mark.parametrize("kind", ["linear", "multi_mlp"])
def test_lora_with_the_router_trained_saved_reloaded_and_merged(kind, tmp_path):
    from peft import PeftModel

    fresh_model(router=kind).save_pretrained(tmp_path / "base")

    def base() -> AdaptiveLatentForCausalLM:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    ids, original = random_ids(2, 9), base()
    model = with_lora(base()).train()
    close(model(input_ids=ids).logits, original(ids).logits, 1e-5)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora" in name or "router.modules_to_save" in name for name in trained)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for seed in range(3):
        batch = random_ids(2, 9, seed=seed)
        model(input_ids=batch, labels=batch).loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    expected = model(input_ids=ids).logits
    assert (expected - original(ids).logits).abs().max() > 0.01
    model.save_pretrained(tmp_path / "lora")
    assert sum(f.stat().st_size for f in Path(tmp_path / "lora").iterdir()) < 60_000  # not the whole model
    reloaded = PeftModel.from_pretrained(base(), tmp_path / "lora").eval()
    close(reloaded(input_ids=ids).logits, expected, 1e-6)
    text = model.generate(input_ids=ids[:1], max_new_tokens=4, do_sample=False)
    assert torch.equal(reloaded.generate(input_ids=ids[:1], max_new_tokens=4, do_sample=False), text)
    merged = reloaded.merge_and_unload()
    assert type(merged) is AdaptiveLatentForCausalLM
    close(merged(ids).logits, expected, 1e-5)
    router, first = merged.model.router, original.model.router
    assert any(not torch.equal(a, b) for a, b in zip(router.parameters(), first.parameters()))


def test_lora_on_the_head_too():
    """What such a head computes is more than its weight: in p_target, and in the steps' own losses."""
    model = with_lora(fresh_model("llama", step_loss_weight=0.2), ("q_proj", "lm_head"))
    ids = random_ids(2, 7)
    expected = model(input_ids=ids, labels=ids)
    for name, p in model.named_parameters():
        if "lm_head" in name and "lora_B" in name:
            p.data.normal_()
    outputs = model(input_ids=ids, labels=ids)
    assert (outputs.loss - expected.loss).abs() > 0.01
    assert (outputs.latents.penalty - expected.latents.penalty).abs() > 1e-4
    model.merge_adapter()
    merged = model(input_ids=ids, labels=ids)
    close(outputs.loss, merged.loss, 1e-5)
    close(outputs.latents.penalty, merged.latents.penalty, 1e-5)
