"""`unspoken sft`: the loop over rows to answer, from a plain checkpoint on, and one prefill pass over prompts."""

import json

import pytest
import torch
import yaml

from tests import texts
from tests.families import tiny_model
from unspoken import cli
from unspoken.data.windows import IGNORE_LABEL
from unspoken.models.load import load_model
from unspoken.train.build import build_model, end_answers, open_data, show_prompts
from unspoken.train.heldout import held_out_losses
from unspoken.train.recipe import Recipe


@pytest.fixture
def rows(tmp_path) -> str:
    """Sums, as conversations."""
    path = tmp_path / "sums.jsonl"
    lines = []
    for number in range(30):
        a, b = number % 7, number % 9
        turns = [{"role": "user", "content": f"{a} + {b} ="}, {"role": "assistant", "content": str(a + b)}]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def base(tmp_path):
    """A plain model with a chat template, as a folder."""
    return texts.save(tmp_path / "base", texts.text_model("vanilla"), texts.chat_tokenizer())


@pytest.fixture
def recipe(rows, base, tmp_path) -> dict:
    return {
        "run": {"out": str(tmp_path / "run")},
        "model": {"method": "recycler", "from_pretrained": str(base)},
        "data": {"conversations": {"files": [rows], "validation_fraction": 0.2}, "sequence_length": 48},
        "optim": {"learning_rate": 0.003},
        "train": {"num_epochs": 2, "batch_size": 2, "log_every": 2, "eval_every": 10, "save_every": 8},
    }


def sft(recipe: dict, tmp_path, *words: str) -> int:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return cli.main(["sft", str(path), *words])


def test_from_a_plain_checkpoint_to_a_recycler_that_answers(recipe, tmp_path, capsys):
    """Two epochs; stopped and resumed, the weights are the same bit for bit."""
    assert sft(recipe, tmp_path) == 0
    out = tmp_path / "run"
    resolved = yaml.safe_load((out / "resolved.yaml").read_text())
    data = open_data(Recipe.model_validate(recipe))
    assert resolved["train"]["max_steps"] == -(-2 * len(data.train) // 2) and resolved["train"]["num_epochs"] is None
    losses = json.loads((out / "summary.json").read_text())["final"]["eval"]
    assert losses["loss_pass_2"] < 5.0, "log 320 is 5.8"
    model, tokenizer = load_model(out / "model")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template and model.config.model_type == "unspoken_recycler"
    assert model.model.adapter.proj.weight.abs().max() > 0
    for name in sorted((out / "checkpoints").iterdir())[1:]:
        for file in name.iterdir():
            file.unlink()
        name.rmdir()
    (out / "summary.json").unlink()
    assert sft(recipe, tmp_path, "--resume") == 0
    again = load_model(out / "model")[0].state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())
    capsys.readouterr()
    chat = ["generate", str(out / "model"), "--chat", "--prompt", "3 + 4 =", "--max-new-tokens", "4"]
    assert cli.main(chat) == 0


def test_text_ends_where_answers_end_and_where_it_ended_before(recipe):
    data = open_data(Recipe.model_validate(recipe))
    model = texts.text_model("recycler")
    end = data.tokenizer.eos_token_id
    for before, after in ((None, end), (end, end), (7, [end, 7]), ([7, end], [end, 7])):
        model.generation_config.eos_token_id = before
        end_answers(model, data.tokenizer)
        assert model.generation_config.eos_token_id == after


def test_loss_is_of_the_answers_alone(recipe):
    """Each pass's, computed by hand from logits at the places before an answer's tokens."""
    checked = Recipe.model_validate(recipe)
    data = open_data(checked)
    model = build_model(checked, data).eval()
    torch.nn.init.normal_(model.model.adapter.proj.weight, std=0.1)
    window = data.train[0]
    batch = {name: values[None] for name, values in window.items()}
    found = model(**batch, use_cache=False, num_passes=2).pass_losses
    for k in (1, 2):
        hidden = model.model(batch["input_ids"], position_ids=batch["position_ids"], num_passes=k, use_cache=False)
        logits = model.lm_head(hidden.last_hidden_state)[0].log_softmax(-1)
        labels = window["labels"].tolist()
        terms = [-logits[t - 1, label] for t, label in enumerate(labels) if t and label != IGNORE_LABEL]
        assert 0 < len(terms) < sum(label >= 0 for label in window["input_ids"].tolist()) / 2
        torch.testing.assert_close(found[k - 1], torch.stack(terms).mean(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_prefill_passes", [1, 2])
def test_one_prefill_pass_recycles_nothing_into_prompts(recipe, num_prefill_passes):
    """Then pass 2 equals pass 1 there, and only there."""
    recipe["model"]["num_prefill_passes"] = num_prefill_passes
    checked = Recipe.model_validate(recipe)
    data = open_data(checked)
    model = build_model(checked, data).eval()
    torch.nn.init.normal_(model.model.adapter.proj.weight, std=0.5)
    show_prompts(data, model.config)
    window = data.train[0]
    assert ("prompt_mask" in window) == ("prompt_mask" in data.held_out[0]) == (num_prefill_passes == 1)
    batch = {name: values[None] for name, values in window.items() if name != "labels"}
    first, second = model.model(**batch, num_passes=2, use_cache=False).pass_hidden_states
    same = (first == second).all(-1)[0]
    answered = window["labels"] != IGNORE_LABEL
    places = window["position_ids"]
    # Until its first answer a row has been asked alone; from its first answered token on, states are recycled.
    ends = torch.cat([places[1:] == 0, torch.tensor([True])])
    asked = torch.tensor([not answered[int(torch.where(places[: t + 1] == 0)[0][-1]) : t + 1].any() for t in range(48)])
    inner = asked & (places > 0) & ~ends
    assert same[inner].all() if num_prefill_passes == 1 else not same[inner].any()
    assert not same[answered].any()
    losses = held_out_losses(model, data.held_out, 4, 2, num_passes=2)
    assert all(torch.isfinite(torch.tensor(list(losses.values()))))


def test_a_model_that_was_trained_so_decodes_so():
    """What one prefill pass and decoding compute for an answer is the training forward at as many passes as tokens."""
    model = tiny_model("llama", num_prefill_passes=1)
    ids = torch.arange(3, 12)[None]
    prompt_mask = torch.arange(9)[None] < 5
    trained = model(ids, prompt_mask=prompt_mask, num_passes=9, use_cache=False).logits
    cache = model(ids[:, :5], use_cache=True).cache
    decoded = [model(ids[:, t : t + 1], cache=cache).logits for t in range(5, 9)]
    torch.testing.assert_close(torch.cat(decoded, dim=1), trained[:, 5:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"conversations": {"files": ["none.jsonl"]}}}, "none.jsonl does not exist"),
        ({"data": {"conversations": {"validation_fraction": 0.0}}}, "no row is held out"),
        ({"data": {"sequence_length": 8}}, "no row to learn from"),
        ({"data": {"task": {"name": "running_sum"}}}, "give one of `path`, `sources`, `task` and `conversations`"),
        ({"train": {"max_steps": 3}}, "give one of `total_tokens`, `max_steps` and `num_epochs`"),
        ({"data": {"conversations": {"flies": 1}}}, "data.conversations.flies: unknown key (did you mean 'files'?)"),
    ],
)
def test_what_cannot_be_is_named(recipe, tmp_path, capsys, change, message):
    for section, values in change.items():
        for key, value in values.items():
            own = recipe[section].get(key)
            recipe[section][key] = own | value if isinstance(own, dict) else value
    assert sft(recipe, tmp_path) in (1, 2)
    assert message in capsys.readouterr().err


def test_other_data_and_a_new_model_without_a_tokenizer_are_named(recipe, tmp_path, capsys):
    conversations = recipe["data"].pop("conversations")
    recipe["data"]["task"] = {"name": "running_sum"}
    recipe["train"] = {"max_steps": 2}
    assert sft(recipe, tmp_path) == 2
    assert "data.conversations: required for sft" in capsys.readouterr().err
    backbone = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    recipe["data"] = {"conversations": conversations, "sequence_length": 48}
    recipe["model"] = {"method": "recycler", "backbone": backbone}
    assert sft(recipe, tmp_path) == 2
    assert "data.conversations.tokenizer: a new model needs one" in capsys.readouterr().err
