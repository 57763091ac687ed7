"""GSPO on TRL: the loss by hand, the rollouts' probabilities by the slow recurrence, and the gap between the two."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from tests import texts
from tests.equivalence.test_trainers import QUIET, text_of, tokenizer  # noqa: F401
from tests.families import EOS, PAD, VOCAB_SIZE, adaptive_model, random_ids, tiny_model
from unspoken.errors import UnspokenError
from unspoken.rl.trainer import LatentGRPOTrainer

DEEP = {"num_hidden_layers": 4}  # for recursions of the middle
PROMPTS = [text_of(random_ids(1, n, seed=n)) for n in (4, 7)]


def fresh(method: str = "recycler", **fields):
    text = {"eos_token_id": EOS, "tie_word_embeddings": True}
    if method == "adaptive":
        return adaptive_model("llama", torch.float32, text=text, exit_threshold=0.15, router_bias=0.3)
    model = tiny_model("llama", torch.float32, text=text, **fields)
    model.model.adapter.proj.weight.data.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    return model


def trainer_of(model, tokenizer, tmp_path, reward=None, options=None, **arguments):  # noqa: F811
    from trl import GRPOConfig

    given = {
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "beta": 0.0,
        "bf16": False,
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
        **QUIET,
        **arguments,
    }
    if reward is None:

        def reward(completion_ids, **columns):
            return [float(sum(ids) % 7) for ids in completion_ids]

    data = Dataset.from_dict({"prompt": PROMPTS * 4})
    return LatentGRPOTrainer(
        model, reward, GRPOConfig(tmp_path, **given), train_dataset=data, processing_class=tokenizer, **(options or {})
    )


def rollout(trainer) -> dict:
    torch.manual_seed(0)
    trainer.model.train()
    rows = next(iter(trainer.get_train_dataloader()))
    return trainer._generate_and_score_completions(rows)


def log_probabilities(model, prompt: list[int], completion: list[int], temperature: float, **options) -> list[float]:
    """One row, without pads."""
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        logits = model.eval()(ids, use_cache=False, **options).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).tolist()


def rows_of(batch: dict):
    for i in range(len(batch["prompt_ids"])):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
        yield i, prompt, batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist()


@pytest.mark.parametrize("prefill", [1, 2])
def test_rollouts_are_taken_down_as_the_recurrence_samples_them(prefill, tokenizer, tmp_path):  # noqa: F811
    """Against a model that reads the prompt by so many passes, and then decodes token by token."""
    model = fresh(num_prefill_passes=prefill)
    trainer = trainer_of(model, tokenizer, tmp_path, temperature=0.7)
    batch = rollout(trainer)
    for i, prompt, completion in rows_of(batch):
        options = {"num_passes": len(prompt + completion)}
        if prefill == 1:
            options["prompt_mask"] = torch.tensor([[True] * len(prompt) + [False] * len(completion)])
        else:  # two passes over the prompt, and the recurrence behind it
            options = {"num_passes": 2, "num_recurrent": len(completion)}
        expected = log_probabilities(model, prompt, completion, 0.7, **options)
        torch.testing.assert_close(
            batch["sampling_per_token_logps"][i][: len(completion)], torch.tensor(expected), rtol=1e-4, atol=1e-4
        )
    row = trainer._metrics["train"]
    assert row["rollout/tokens_per_second"][0] > 0 and row["completions/empty_ratio"][0] < 1


@pytest.mark.parametrize("prefill", [1, 2])
@pytest.mark.parametrize("passes", ["exact", 2])
def test_the_gap_is_what_the_passes_leave(passes, prefill, tokenizer, tmp_path):  # noqa: F811
    """B97: what the rollout computed leaves none; two passes over all do. The gradient of an exact score flows."""
    model = fresh(num_prefill_passes=prefill)
    trainer = trainer_of(model, tokenizer, tmp_path, options={"num_scoring_passes": passes})
    batch = rollout(trainer)
    gap = trainer.last_gap
    if passes == "exact":
        assert gap.max_abs < 1e-4 and abs(gap.ratio - 1) < 1e-5
        model.gradient_checkpointing_disable()
        trainer.current_gradient_accumulation_steps = 1
        batch["advantages"] = torch.tensor([1.0, -1.0, 0.5, -0.5])
        trainer._compute_loss(model.train(), batch).backward()
        assert model.model.adapter.proj.weight.grad.abs().max() > 0
    else:
        assert gap.mean_abs > 1e-3
    assert trainer._metrics["train"]["gap/mean_abs"] == [gap.mean_abs]


def test_with_one_prefill_pass_enough_scoring_passes_are_the_recurrence(tokenizer, tmp_path):  # noqa: F811
    trainer = trainer_of(fresh(num_prefill_passes=1), tokenizer, tmp_path, options={"num_scoring_passes": 16})
    rollout(trainer)
    assert trainer.last_gap.max_abs < 1e-4


def test_an_adaptive_model_scores_what_it_decodes(tokenizer, tmp_path):  # noqa: F811
    trainer = trainer_of(fresh("adaptive"), tokenizer, tmp_path, gradient_checkpointing=False)
    rollout(trainer)
    assert trainer.last_gap.max_abs < 1e-4 and trainer.last_gap.flipped == 0.0
    assert trainer.sampled_lengths.float().mean() > 0.1
    assert trainer._metrics["train"]["gap/flipped"] == [0.0]


def test_an_adaptive_model_is_off_only_where_a_halting_decision_flips(tokenizer, tmp_path):  # noqa: F811
    """Scored under a threshold a little higher than the rollout's, as if rounding had moved some reaches across it."""
    trainer = trainer_of(fresh("adaptive"), tokenizer, tmp_path, gradient_checkpointing=False, max_completion_length=12)
    original = trainer._generate_single_turn

    def sampled_under_another_threshold(*args, **kwargs):
        config = trainer.model.config
        before, config.exit_threshold = config.exit_threshold, 0.16
        try:
            return original(*args, **kwargs)
        finally:
            config.exit_threshold = before

    trainer._generate_single_turn = sampled_under_another_threshold
    rollout(trainer)
    gap = trainer.last_gap
    assert 0.0 < gap.flipped < 1.0
    assert gap.max_abs > 1e-3 and gap.max_abs_unflipped < 1e-4


@pytest.mark.parametrize("method", ["recycler", "adaptive"])
@pytest.mark.parametrize("passes", [None, "exact"])
def test_experts_are_scored_and_not_balanced(method, passes, tokenizer, tmp_path):  # noqa: F811
    """TRL's balancing loss knows neither passes nor latent steps."""
    text = {"eos_token_id": EOS, "output_router_logits": True}
    make = tiny_model if method == "recycler" else adaptive_model
    model = make("qwen3_moe", torch.float32, text=text)
    options = {"num_scoring_passes": passes}
    trainer = trainer_of(model, tokenizer, tmp_path, options=options, gradient_checkpointing=False)
    batch = rollout(trainer)
    trainer.current_gradient_accumulation_steps = 1
    batch["advantages"] = torch.tensor([1.0, -1.0, 0.5, -0.5])
    trainer._compute_loss(model.train(), batch).backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert "aux_loss" not in trainer._metrics["train"]


@pytest.mark.parametrize(
    "arguments", [{"pad_to_multiple_of": 8}, {"beta": 0.1}, {"beta": 0.1, "num_iterations": 2}], ids=str
)
def test_flips_are_found_whatever_else_is_asked(arguments, tokenizer, tmp_path):  # noqa: F811
    """Wider batches; a reference that is the same model with the LoRA that it began with, and halts elsewhere."""
    model = fresh("adaptive")
    if "beta" in arguments:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj", "down_proj"]))
    trainer = trainer_of(model, tokenizer, tmp_path, gradient_checkpointing=False, **arguments)
    for name, parameter in model.named_parameters():
        if "lora_B.default" in name:
            torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        batch = rollout(trainer)
        assert ("ref_per_token_logps" in batch) == ("beta" in arguments)
        assert trainer.last_gap.max_abs < 1e-4 and trainer.last_gap.flipped == 0.0
        assert trainer.sampled_lengths.float().mean() > 0.1
        trainer.scored_lengths = trainer.scored_lengths + 1  # of this rollout, not to be found in the next
    if "beta" in arguments:
        model.set_adapter("ref")
        trainer.scored_lengths = None
        trainer._scored(batch)
        num_taken_in = trainer.sampled_lengths.shape[1]
        read = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)[:, :num_taken_in].bool()
        assert (trainer.scored_lengths[:, :num_taken_in] != trainer.sampled_lengths)[read].any()


def test_rollouts_know_no_dropout(tokenizer, tmp_path):  # noqa: F811
    """Scoring does, in training, and the mode is kept."""
    text = {"eos_token_id": EOS, "attention_dropout": 0.5}
    model = texts.text_model("looped", exit_gate=True, norm_between_loops=True, text={"vocab_size": VOCAB_SIZE, **text})
    trainer = trainer_of(model, tokenizer, tmp_path, gradient_checkpointing=False)
    batch = rollout(trainer)
    assert model.training and trainer.last_gap.max_abs > 1e-3
    model.eval()
    scored = trainer._scored(batch)
    mask = batch["completion_mask"].bool()
    torch.testing.assert_close(scored[mask], batch["sampling_per_token_logps"][mask], rtol=1e-4, atol=1e-4)


def test_ponder2_scores_old_and_new_policy_at_one_depth(tokenizer, tmp_path):  # noqa: F811
    """In training its own forwards draw theirs."""
    model = texts.text_model("ponder2", text={"vocab_size": VOCAB_SIZE, "eos_token_id": EOS})
    trainer = trainer_of(model, tokenizer, tmp_path, gradient_checkpointing=False)
    batch = rollout(trainer)
    scores = [trainer._scored(batch) for _ in range(4)]
    assert all(torch.equal(one, scores[0]) for one in scores)
    with pytest.raises(ValueError, match="scored by their refinements"):
        trainer_of(model, tokenizer, tmp_path, options={"num_scoring_passes": "exact"})


def test_the_models_own_cut_offs_take_no_part(tokenizer, tmp_path):  # noqa: F811
    """B96: what they cut off would be scored as if it could have been sampled."""
    seen = []
    for cut in ({}, {"epsilon_cutoff": 0.05, "typical_p": 0.2, "suppress_tokens": list(range(3, 60))}):
        model = fresh()
        model.generation_config.update(**cut)
        batch = rollout(trainer_of(model, tokenizer, tmp_path))
        seen.append(batch["completion_ids"])
        assert all(getattr(model.generation_config, name) == value for name, value in cut.items())
    assert torch.equal(*seen)


def test_what_holds_no_answer_has_no_advantage(tokenizer, tmp_path):  # noqa: F811
    """Groups of four: one all cut off, one with an empty completion and one that was cut off."""
    trainer = trainer_of(fresh(), tokenizer, tmp_path)
    ids = torch.tensor([[5, 6, 7]] * 4 + [[EOS, PAD, PAD], [5, EOS, PAD], [5, 6, 7], [5, 6, EOS]])
    mask = torch.tensor([[1, 1, 1]] * 4 + [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]])
    batch = {"completion_ids": ids, "completion_mask": mask, "advantages": torch.arange(1.0, 9.0)}
    trainer._silence_unanswered(batch, "train")
    assert batch["advantages"].tolist() == [0, 0, 0, 0, 0, 6, 7, 8]
    row = trainer._metrics["train"]
    assert row["groups/all_truncated"] == [0.5] and row["completions/empty_ratio"] == [1 / 8]


def test_the_loss_by_hand(tokenizer, tmp_path):  # noqa: F811
    """B94: unequal lengths, ratios on both sides of the clip; loss and gradients."""
    model = fresh()
    trainer = trainer_of(model, tokenizer, tmp_path)
    trainer.current_gradient_accumulation_steps = 1
    prompts, completions = random_ids(3, 4, seed=1), random_ids(3, 8, seed=2)
    mask = torch.tensor([[1] * 8, [1] * 3 + [0] * 5, [1] * 2 + [0] * 6])
    completions = completions.masked_fill(mask == 0, PAD)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -0.5, 2.0]),
    }
    model.train()
    logps = torch.stack([
        torch.tensor(log_probabilities(model, p.tolist(), c.tolist(), 1.0, num_passes=2))
        for p, c in zip(prompts, completions)
    ])  # fmt: skip
    inputs["old_per_token_logps"] = logps + torch.tensor([[0.0001], [-0.01], [-0.01]])
    loss = trainer._compute_loss(model.train(), inputs)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    total = 0.0
    for i, length in enumerate(mask.sum(-1).tolist()):
        ids = torch.cat([prompts[i], completions[i, :length]])[None]
        logits = model(ids, num_passes=2, use_cache=False).logits[0, 3:-1]
        own = logits.log_softmax(-1).gather(1, completions[i, :length, None]).squeeze(1)
        ratio = torch.exp((own - inputs["old_per_token_logps"][i, :length]).mean())
        advantage = inputs["advantages"][i]
        total = total - torch.min(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage) / 3
    total.backward()
    torch.testing.assert_close(loss, total, rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_equal_rewards_move_nothing(tokenizer, tmp_path):  # noqa: F811
    """B91."""
    model = fresh()
    before = {name: p.clone() for name, p in model.named_parameters()}
    options = {"learning_rate": 0.1, "weight_decay": 0.0}
    trainer = trainer_of(model, tokenizer, tmp_path, lambda completion_ids, **c: [1.0] * len(completion_ids), **options)
    trainer.train()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    rows = [row for row in trainer.state.log_history if "frac_reward_zero_std" in row]
    assert not rows or rows[0]["frac_reward_zero_std"] == 1.0


def test_the_gap_has_a_limit(tokenizer, tmp_path):  # noqa: F811
    options = {"gap_limit": 1e-6}
    with pytest.raises(UnspokenError, match=r"nats a token, above its limit of 1e-06: score with more passes"):
        rollout(trainer_of(fresh(), tokenizer, tmp_path, options=options))
    open_ended = trainer_of(fresh(), tokenizer, tmp_path, max_completion_length=40)
    plain = rollout(open_ended)
    gap = open_ended.last_gap
    between = {"gap_limit": (gap.mean_abs + gap.max_abs) / 2}  # the limit is the mean's
    rollout(trainer_of(fresh(), tokenizer, tmp_path, options=between, max_completion_length=40))
    options = {**options, "on_gap": "correct"}
    trainer = trainer_of(fresh(), tokenizer, tmp_path, options=options, max_completion_length=40)
    corrected = rollout(trainer)
    assert torch.equal(plain["completion_ids"], corrected["completion_ids"])
    moves = plain["advantages"] != 0
    assert moves.sum() > 1
    weights = corrected["advantages"][moves] / plain["advantages"][moves]
    scored, sampled, mask = trainer._scored(plain), plain["sampling_per_token_logps"], plain["completion_mask"]
    expected = [float((a - b)[m.bool()].mean().exp()) for a, b, m in zip(scored, sampled, mask)]
    torch.testing.assert_close(weights, torch.tensor(expected)[moves].clamp(0.5, 2.0), rtol=1e-3, atol=1e-4)
    assert (weights != 1).any()


def test_the_kl_term_pulls_to_the_model_as_it_began(tokenizer, tmp_path):  # noqa: F811
    """Scored at the rollout's temperature, and left alone by what the policy learns. A reference may be given."""
    model = fresh()
    trainer = trainer_of(model, tokenizer, tmp_path, beta=0.1, temperature=0.7)
    assert trainer.beta == trainer.args.beta == 0.1 and not trainer.ref_model.training
    torch.nn.init.normal_(model.model.adapter.proj.weight, std=1.0)
    batch = rollout(trainer)
    for i, prompt, completion in rows_of(batch):
        expected = log_probabilities(fresh(), prompt, completion, 0.7, num_passes=2)
        found = batch["ref_per_token_logps"][i][: len(completion)]
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    given = fresh()
    assert trainer_of(fresh(), tokenizer, tmp_path, options={"reference": given}, beta=0.1).ref_model is given


def test_rollouts_may_prefill_as_the_trainer_is_told(tokenizer, tmp_path):  # noqa: F811
    """One pass, of a model whose own number is two."""
    model = fresh()
    trainer = trainer_of(model, tokenizer, tmp_path, options={"num_prefill_passes": 1, "num_scoring_passes": 16})
    rollout(trainer)
    assert trainer.last_gap.max_abs < 1e-4


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"top_p": 0.9}, {}, "top_p=0.9: the rollout would sample from another distribution"),
        ({"top_k": 20}, {}, "top_k=20"),
        ({"repetition_penalty": 1.1}, {}, "repetition_penalty=1.1"),
        ({"generation_kwargs": {"top_p": 0.3}}, {}, r"generation_kwargs \(top_p\)"),
        ({}, {"on_gap": "ignore"}, "on_gap must be 'stop' or 'correct'"),
    ],
)
def test_what_cannot_be_is_refused(arguments, options, message, tokenizer, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match=message):
        trainer_of(fresh(), tokenizer, tmp_path, options=options, **arguments)


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("looped", {"exit_gate": True, "exit_quantile": 0.5, "norm_between_loops": True}, r"exit_quantile=0\.5"),
        ("mor", {"recursion_router": "expert_choice"}, "recursion_router='expert_choice'"),
    ],
)
def test_a_policy_that_is_not_scored_as_it_decodes_is_refused(method, fields, message, tokenizer, tmp_path):  # noqa: F811
    model = texts.text_model(method, **fields, text={**DEEP, "vocab_size": VOCAB_SIZE, "eos_token_id": EOS})
    with pytest.raises(ValueError, match=message):
        trainer_of(model, tokenizer, tmp_path)


def test_recursions_by_token_choice_score_what_they_decode(tokenizer, tmp_path):  # noqa: F811
    model = texts.text_model("mor", text={**DEEP, "vocab_size": VOCAB_SIZE, "eos_token_id": EOS})
    trainer = trainer_of(model, tokenizer, tmp_path, gradient_checkpointing=False)
    rollout(trainer)
    assert trainer.last_gap.max_abs < 1e-4
