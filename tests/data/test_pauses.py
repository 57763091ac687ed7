"""Pauses at random places: where they stand, what they are not, and from a recipe to a prompt that ends with them."""

import json

import pytest
import torch
import yaml

from tests.data.test_packing import T
from unspoken import cli
from unspoken.data.packing import PackedDataset
from unspoken.data.pauses import PAUSE, PausedWindows
from unspoken.data.windows import IGNORE_LABEL
from unspoken.models.load import load_model

PAUSE_ID = 10_000


def naive(window: dict[str, torch.Tensor], pause_after: list[int]) -> dict[str, list[int]]:
    """Token by token, a position's pauses behind it; a document goes on over them."""
    ids, positions, labels = [], [], []
    for token, position, label, count in zip(*(window[name].tolist() for name in window), pause_after):
        place = 0 if position == 0 else positions[-1] + 1
        ids += [token] + [PAUSE_ID] * count
        positions += range(place, place + 1 + count)
        labels += [label] + [IGNORE_LABEL] * count
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def test_a_window_is_its_text_with_pauses(shards):
    text = PackedDataset(shards, T)
    paused = PausedWindows(text, 4, PAUSE_ID, seed=3)
    assert paused.sequence_length == T + 4 and len(paused) == len(text)
    seen = set()
    for index in range(2 * len(text)):
        window = paused[index]
        is_pause = window["input_ids"] == PAUSE_ID
        assert int(is_pause.sum()) == 4 and not is_pause[0]
        place = (~is_pause).cumsum(0) - 1
        counts = torch.bincount(place[is_pause], minlength=T).tolist()
        assert {name: values.tolist() for name, values in window.items()} == naive(text[index], counts)
        assert all(torch.equal(window[name], again) for name, again in paused[index].items())
        seen.add(tuple(counts))
    assert len(seen) > len(text), "each window has its own"
    other = PausedWindows(text, 4, PAUSE_ID, seed=4)
    assert any(not torch.equal(other[i]["input_ids"], paused[i]["input_ids"]) for i in range(5))


def test_places_are_drawn_evenly(shards):
    paused = PausedWindows(PackedDataset(shards, T), 2, PAUSE_ID)
    counts = torch.zeros(T)
    for index in range(700):
        is_pause = paused[index]["input_ids"] == PAUSE_ID
        counts += torch.bincount(((~is_pause).cumsum(0) - 1)[is_pause], minlength=T)
    assert counts.min() > 150 and counts.max() < 250, "1400 pauses behind 7 places"


@pytest.fixture
def recipe(tmp_path) -> dict:
    data = tmp_path / "data"
    assert cli.main(["data", "prepare", "--corpus", "stdlib", "--out", str(data), "--tokenizer", "bpe:300"]) == 0
    backbone = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    backbone |= {"num_attention_heads": 2, "tie_word_embeddings": True}
    return {
        "run": {"out": str(tmp_path / "run")},
        "model": {"method": "vanilla", "backbone": backbone},
        "data": {"path": str(data), "sequence_length": 40, "pause_fraction": 0.1},
        "optim": {"learning_rate": 0.003},
        "train": {"max_steps": 4, "batch_size": 2, "log_every": 2, "eval_every": 2, "eval_sequences": 2},
    }


def train(recipe: dict, path) -> int:
    path.write_text(yaml.safe_dump(recipe))
    return cli.main(["train", str(path)])


def test_from_a_recipe_to_a_prompt_that_pauses(recipe, tmp_path, capsys):
    """Also a model that knew no pause goes on with them, and one that does is evaluated on text without."""
    assert train(recipe, tmp_path / "paused.yaml") == 0
    folder = tmp_path / "run" / "model"
    model, tokenizer = load_model(folder)
    number = tokenizer.convert_tokens_to_ids(PAUSE)
    assert number == len(tokenizer) - 1 == model.config.vocab_size - 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["tokens"] == 4 * 2 * 40 and summary["target_tokens"] < 4 * 2 * 36
    data = recipe["data"]["path"]
    assert cli.main(["eval", str(folder), "--data", data, "--sequence-length", "40", "--max-sequences", "2"]) == 0
    capsys.readouterr()
    prompt = ["generate", str(folder), "--prompt", "The", "--max-new-tokens", "5"]
    assert cli.main([*prompt, "--num-pauses", "3"]) == 0
    answer = json.loads(capsys.readouterr().out)
    ids = [*tokenizer("The").input_ids, number, number, number]
    expected = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False, eos_token_id=None)[0, len(ids) :]
    assert answer["usage"]["num_prompt_tokens"] == len(ids)
    assert answer["completions"][0]["text"] == tokenizer.decode(expected, skip_special_tokens=True)

    plain = {**recipe, "run": {"out": str(tmp_path / "plain")}, "data": {**recipe["data"], "pause_fraction": 0.0}}
    assert train(plain, tmp_path / "plain.yaml") == 0
    capsys.readouterr()
    assert cli.main(["generate", str(tmp_path / "plain" / "model"), "--prompt", "The", "--num-pauses", "1"]) == 2
    assert "was not trained with pause tokens" in capsys.readouterr().err
    assert cli.main([*prompt, "--num-pauses", "-1"]) == 2
    assert "--num-pauses is -1" in capsys.readouterr().err
    start = {"from_pretrained": str(tmp_path / "plain" / "model")}
    goes_on = {**recipe, "run": {"out": str(tmp_path / "on")}, "model": start}
    assert train(goes_on, tmp_path / "on.yaml") == 0
    kept = {**plain, "run": {"out": str(tmp_path / "kept")}, "model": {"from_pretrained": str(folder)}}
    assert train(kept, tmp_path / "kept.yaml") == 0
    assert cli.main(["generate", str(tmp_path / "kept" / "model"), "--prompt", "The", "--num-pauses", "2"]) == 0
    assert load_model(tmp_path / "on" / "model")[0].config.vocab_size == model.config.vocab_size


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"pause_fraction": 1.0}, "pause_fraction"),
        ({"pause_fraction": 0.98}, "leaves fewer than 2 tokens"),
        ({"pause_fraction": 0.01}, "less than one pause in a window"),
        ({"path": None, "task": {"name": "running_sum"}}, "`pause_fraction` is for text"),
    ],
)
def test_what_cannot_be_is_refused(recipe, tmp_path, capsys, data, message):
    recipe["data"] |= data
    recipe["data"] = {key: value for key, value in recipe["data"].items() if value is not None}
    assert train(recipe, tmp_path / "r.yaml") == 2
    assert message in capsys.readouterr().err
