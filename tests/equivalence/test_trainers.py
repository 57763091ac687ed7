"""Users' own scripts: transformers' Trainer, TRL's SFT and GRPO trainers, LoRA through peft. One step each."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments

from tests.families import BOS, EOS, PAD, VOCAB_SIZE, adaptive_model, random_ids, tiny_model
from tests.oracle import close
from unspoken import RecyclerForCausalLM

LENGTHS = (11, 3, 7, 2, 9, 5, 8, 6)
QUIET = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_strategy": "no"}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    special = {PAD: "[PAD]", BOS: "[BOS]", EOS: "[EOS]"}
    vocabulary = {special.get(i, f"w{i}"): i for i in range(VOCAB_SIZE)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]")


def text_of(ids: torch.Tensor) -> str:
    return " ".join(f"w{i}" for i in ids.flatten().tolist())


def fresh_model(**fields) -> RecyclerForCausalLM:
    """Wide backbone weights, adapter at zero, as after a conversion."""
    model = tiny_model("llama_tied", torch.float32, text={"eos_token_id": EOS}, **fields)
    model.model.adapter.proj.weight.data.zero_()
    return model.train()


class AdapterGradient(TrainerCallback):
    """The adapter's gradient as each optimizer step sees it."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        gradients = [
            p.grad for name, p in model.named_parameters() if name.endswith("proj.weight") and "adapter" in name
        ]
        self.seen += [g.abs().max().item() for g in gradients if g is not None]


def rows() -> Dataset:
    ids = [random_ids(1, length, seed=i)[0].tolist() for i, length in enumerate(LENGTHS)]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def collate(features: list[dict]) -> dict[str, torch.Tensor]:
    longest = max(len(f["input_ids"]) for f in features)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for f in features:
        pads = longest - len(f["input_ids"])
        batch["input_ids"].append([*f["input_ids"], *[PAD] * pads])
        batch["attention_mask"].append([1] * len(f["input_ids"]) + [0] * pads)
        batch["labels"].append([*f["labels"], *[-100] * pads])
    return {key: torch.tensor(value) for key, value in batch.items()}


@pytest.mark.parametrize("accumulation", [1, 8])
def test_trainer_and_accumulation(accumulation, tmp_path):
    """B42: loss 33.4 instead of 3.73 at accumulation 8, when `num_items_in_batch` is dropped on the way."""
    model, gradient = fresh_model(), AdapterGradient()
    batch = collate(list(rows()))
    expected = model(**batch).loss
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
    seen = {}

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            seen.update({name: p.grad.clone() for name, p in model.named_parameters()})

    trainer = Trainer(model, arguments, collate, rows(), callbacks=[gradient, Keep()])
    loss = trainer.train().training_loss
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert gradient.seen[0] > 0
    for name, g in wanted.items():
        close(seen[name], g, 1e-5)


def test_trainer_saves_a_model_that_generates_with_a_cache(tmp_path):
    """B52: `use_cache` set to false for training with checkpointing, saved, and slow for ever after."""
    model = fresh_model()
    arguments = TrainingArguments(
        tmp_path, max_steps=2, gradient_checkpointing=True, bf16=True, per_device_train_batch_size=4, **QUIET
    )
    trainer = Trainer(model, arguments, collate, rows(), eval_dataset=rows())
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["text_config"]["use_cache"] is True
    assert saved.get("use_cache", True) is True
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation.get("use_cache", True) is True
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded(random_ids(1, 5)).cache is not None
    assert loaded.model.adapter.proj.weight.any()


def test_trainer_resumes_where_it_stopped(tmp_path):
    def train(steps: int, resume: bool) -> RecyclerForCausalLM:
        options = {**QUIET, "save_strategy": "steps", "save_steps": 1}
        arguments = TrainingArguments(
            tmp_path / ("resumed" if steps != 3 or resume else "whole"),
            max_steps=steps,
            lr_scheduler_type="constant",
            per_device_train_batch_size=2,
            **options,
        )
        model = fresh_model()
        Trainer(model, arguments, collate, rows()).train(resume_from_checkpoint=resume)
        return model

    whole = train(3, resume=False)
    train(1, resume=False)
    resumed = train(3, resume=True)
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters()):
        assert torch.equal(a, b), name
    assert whole.model.adapter.proj.weight.any()


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_trl_sft(packing, tokenizer, tmp_path):
    """B39 and B40: TRL calls the base model and the head by itself. With the recurrence in the head model's forward
    it trained the last layers happily, and the adapter stayed at zero."""
    from trl import SFTConfig, SFTTrainer

    model, gradient = fresh_model(), AdapterGradient()
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
    trainer = SFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer, callbacks=[gradient])
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        loss = trainer.compute_loss(model, dict(batch))
        # By hand: the last pass's loss over the batch as it is, packed documents one by one.
        hidden = model.model(batch["input_ids"], position_ids=batch.get("position_ids"), use_cache=False)
        logits = model.lm_head(hidden.last_hidden_state)[:, :-1]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    close(loss, expected, 1e-5)
    if packing:
        assert (batch["position_ids"] == 0).sum() > len(batch["position_ids"])
        assert (batch["labels"][batch["position_ids"] == 0] == -100).all()
    trainer.train()
    assert gradient.seen[0] > 0
    assert model.model.adapter.proj.weight.any()


def apart(batch: dict) -> list[dict[str, torch.Tensor]]:
    """The documents of TRL's batch, each without pads and neighbours."""
    found = []
    for ids, labels, row in zip(batch["input_ids"], batch["labels"], range(len(batch["input_ids"]))):
        mask, positions = batch.get("attention_mask"), batch.get("position_ids")
        size = len(ids) if mask is None else int(mask[row].sum())
        starts = [0] if positions is None else (positions[row] == 0).nonzero()[:, 0].tolist()
        for a, b in zip(starts, [*starts[1:], size]):
            found.append({"input_ids": ids[None, a:b], "labels": labels[None, a:b]})
    return found


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("num_prefill_passes", [1, 2])
def test_our_sft_trainer_trains_every_pass_on_the_answers(packing, num_prefill_passes, tokenizer, tmp_path):
    """Loss and gradients are those of our forward over the batch that TRL has made, each row by itself."""
    from trl import SFTConfig

    from unspoken import LatentSFTTrainer

    model, seen = fresh_model(num_prefill_passes=num_prefill_passes), {}
    model.model.adapter.proj.weight.data.normal_(std=0.1)
    words = [text_of(random_ids(1, n, seed=i)).split() for i, n in enumerate(LENGTHS)]
    halves = [{"prompt": " ".join(w[: len(w) // 2]), "completion": " " + " ".join(w[len(w) // 2 :])} for w in words]

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            seen.update({name: p.grad.clone() for name, p in model.named_parameters()})

    arguments = SFTConfig(
        tmp_path,
        max_steps=1,
        per_device_train_batch_size=1 if packing else 4,
        gradient_accumulation_steps=8 if packing else 2,
        packing=packing,
        max_length=16,
        max_grad_norm=0.0,
        learning_rate=0.0,
        bf16=False,
        **{**QUIET, "logging_strategy": "steps", "logging_steps": 1},
    )
    trainer = LatentSFTTrainer(
        model, arguments, train_dataset=Dataset.from_list(halves), processing_class=tokenizer, callbacks=[Keep()]
    )
    batches = [list(apart(batch)) for batch in trainer.get_train_dataloader()]
    documents = [document for batch in batches for document in batch]
    trainer.train()
    model.zero_grad()
    count = sum(int((document["labels"][:, 1:] != -100).sum()) for document in documents)
    total, means = torch.zeros(2), []
    for batch in batches:
        own = torch.zeros(2)
        for document in batch:
            if num_prefill_passes == 1:
                document["prompt_mask"] = document["labels"] == -100
            output = model(**document, use_cache=False, num_items_in_batch=count)
            output.loss.backward()
            own += output.pass_losses.detach()
        total += own
        means.append(own * count / sum(int((document["labels"][:, 1:] != -100).sum()) for document in batch))
    assert len(documents) == len(LENGTHS) and 0 < count < sum(len(w) for w in words)
    for name, parameter in model.named_parameters():
        close(seen[name], parameter.grad, 1e-5)
    row = trainer.state.log_history[0]
    assert row["loss"] == pytest.approx(float(total.sum()), rel=1e-4)
    logged = torch.tensor([row["loss_pass_1"], row["loss_pass_2"]])
    close(logged, torch.stack(means).mean(0), 1e-4)
    assert row["num_tokens"] == sum(document["input_ids"].numel() for document in documents)


def test_our_sft_trainer_refuses_what_is_not_its_own(tokenizer, tmp_path):
    from transformers import LlamaForCausalLM
    from trl import SFTConfig

    from unspoken import LatentSFTTrainer

    data = Dataset.from_list([{"text": "w5 w6 w7"}])
    with pytest.raises(ValueError, match="has the model's own loss"):
        arguments = SFTConfig(tmp_path, loss_type="dft", **QUIET)
        LatentSFTTrainer(fresh_model(), arguments, train_dataset=data, processing_class=tokenizer)
    plain = LlamaForCausalLM(fresh_model().config.text_config)
    with pytest.raises(TypeError, match="not a LlamaForCausalLM"):
        LatentSFTTrainer(plain, SFTConfig(tmp_path, **QUIET), train_dataset=data, processing_class=tokenizer)


def test_trl_grpo(tokenizer, tmp_path):
    """B51: rollouts with a cache although checkpointing is on, and no flood of warnings."""
    from trl import GRPOConfig, GRPOTrainer

    model, gradient, lengths = fresh_model(), AdapterGradient(), []
    model.model.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: (
            None if torch.is_grad_enabled() else lengths.append(kwargs["inputs_embeds"].shape[1])
        ),
        with_kwargs=True,
    )

    def reward(completion_ids, **kwargs):
        return [float(sum(ids)) for ids in completion_ids]

    arguments = GRPOConfig(
        tmp_path,
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
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
            model, reward, arguments, train_dataset=prompts, processing_class=tokenizer, callbacks=[gradient]
        )
        trainer.train()
    assert gradient.seen[0] > 0
    assert model.model.adapter.proj.weight.any()
    assert lengths.count(1) >= 4  # one token a step after the prefill
    assert sum("use_cache" in str(w.message) for w in caught) <= 1


LORA_TARGETS = ["q_proj", "v_proj", "down_proj"]


def with_lora(model, part: str = "adapter"):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=3, target_modules=LORA_TARGETS, modules_to_save=[part], task_type="CAUSAL_LM", init_lora_weights=True
    )
    return get_peft_model(model, config)


def train_a_little(model) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for seed in range(3):
        ids = random_ids(2, 9, seed=seed)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("part", ["adapter", "router"])
def test_lora_with_our_part_trained_saved_reloaded_and_merged(part, tmp_path):
    """B86, and the plain mistake: LoRA freezes the adapter, which starts at zero and stays there, or the router."""
    from peft import PeftModel

    tied = {"tie_word_embeddings": True}
    source = fresh_model() if part == "adapter" else adaptive_model("llama", torch.float32, text=tied)
    source.save_pretrained(tmp_path / "base")
    before = {name: p.clone() for name, p in getattr(source.model, part).named_parameters()}

    def base():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    ids, original = random_ids(2, 9), base()
    model = with_lora(base(), part).train()
    close(model(input_ids=ids).logits, original(ids).logits, 1e-5)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora" in name or f"{part}.modules_to_save" in name for name in trained)
    assert any(f"{part}.modules_to_save" in name and name.endswith("weight") for name in trained)
    train_a_little(model)
    model.eval()
    expected = model(input_ids=ids).logits
    assert (expected - original(ids).logits).abs().max() > 0.01
    model.save_pretrained(tmp_path / "lora")
    kept = sum(f.stat().st_size for f in Path(tmp_path / "lora").iterdir())
    assert kept < 60_000, "not the whole model"
    reloaded = PeftModel.from_pretrained(base(), tmp_path / "lora").eval()
    close(reloaded(input_ids=ids).logits, expected, 1e-6)
    prompt = ids[:1]
    text = model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
    assert torch.equal(reloaded.generate(input_ids=prompt, max_new_tokens=5, do_sample=False), text)

    merged = reloaded.merge_and_unload()
    assert type(merged) is type(source)
    assert all(not torch.equal(p, before[name]) for name, p in getattr(merged.model, part).named_parameters())
    close(merged(ids).logits, expected, 1e-5)
    merged.save_pretrained(tmp_path / "merged")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values())
    close(loaded.eval()(ids).logits, expected, 1e-5)
    assert loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()


def test_lora_under_trl_trains_the_adapter(tokenizer, tmp_path):
    from trl import SFTConfig, SFTTrainer

    model, gradient = with_lora(fresh_model()), AdapterGradient()
    texts = Dataset.from_dict({"text": [text_of(random_ids(1, 8, seed=i)) for i in range(4)]})
    arguments = SFTConfig(tmp_path, max_steps=1, max_length=16, learning_rate=0.01, **QUIET)
    SFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer, callbacks=[gradient]).train()
    assert gradient.seen[0] > 0
