"""Latent steps on the command line: how deep a call may go, and what it is told that it used."""

import io
import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import texts
from unspoken import cli
from unspoken.decode.generate import BatchWriter
from unspoken.decode.sampling import Sampling
from unspoken.decode.session import ChatSession
from unspoken.errors import UsageError
from unspoken.models.knobs import LatentKnobs

PROMPTS = ["The with statement", "a", "Objects are Python's abstraction for data, and all"]
NUM_NEW = 6


def run(capsys, folder, *more, status=0):
    assert cli.main(["generate", str(folder), "--max-new-tokens", str(NUM_NEW), *map(str, more)]) == status
    return capsys.readouterr()


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def prompts(*texts_: str) -> list[str]:
    return [argument for text in texts_ for argument in ("--prompt", text)]


@torch.no_grad()
def by_hand(folder, text: str, **knobs) -> tuple[str, int]:
    """Greedy text and latent steps, each token from a forward that runs everything anew, as decoding would."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    prompt = torch.tensor([tokenizer(text).input_ids])
    ids = prompt
    for _ in range(NUM_NEW):
        recurrent = {}
        if hasattr(model.config, "num_prefill_passes"):
            recurrent = {"num_passes": model.config.num_prefill_passes, "num_recurrent": ids.shape[1] - prompt.shape[1]}
        outputs = model(ids, use_cache=False, **recurrent, **knobs)
        outputs.logits[..., tokenizer.eos_token_id] = -torch.inf
        ids = torch.cat([ids, outputs.logits[:, -1:].argmax(-1)], dim=1)
    return tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True), int(outputs.latents.lengths.sum())


KNOBS = [{}, {"exit_threshold": 0.4}, {"max_latent_steps": 1}, {"exit_at_step": 3}, {"max_latent_steps": 0}]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_knobs_reach_the_model_and_the_usage_is_told(capsys, thinking_folder, knobs):
    options = [word for name, value in knobs.items() for word in (f"--{name.replace('_', '-')}", value)]
    answers = rows(run(capsys, thinking_folder, *prompts(*PROMPTS), *options).out)
    tokenizer = AutoTokenizer.from_pretrained(thinking_folder)
    for answer in answers:
        text, num_latent_steps = by_hand(thinking_folder, answer["prompt"], **knobs)
        assert answer["completions"][0]["text"] == text
        num_prompt_tokens = len(tokenizer(answer["prompt"]).input_ids)
        assert answer["usage"] == {
            "num_prompt_tokens": num_prompt_tokens,
            "num_new_tokens": NUM_NEW,
            "num_latent_steps": num_latent_steps,
        }
        if "exit_at_step" in knobs:
            assert num_latent_steps == 2 * (num_prompt_tokens + NUM_NEW - 1)
    total = sum(answer["usage"]["num_latent_steps"] for answer in answers)
    assert (total == 0) == (knobs.get("max_latent_steps") == 0)


def test_the_usage_ends_with_the_text(thinking_folder, tokenizer):
    """A row that met its end token is run along with the others, on pads: that is none of its text's usage."""
    model = AutoModelForCausalLM.from_pretrained(thinking_folder).eval()
    ids = [tokenizer(text).input_ids for text in PROMPTS]
    knobs = LatentKnobs(exit_at_step=3)
    plain = BatchWriter(model, tokenizer, Sampling(NUM_NEW, knobs=knobs))
    new = model.generate(torch.tensor([ids[0]]), **plain.options)[0, len(ids[0]) :].tolist()
    stopping = BatchWriter(model, tokenizer, Sampling(NUM_NEW, knobs=knobs))
    stopping.ends = [new[2]]
    stopping.options["eos_token_id"] = stopping.ends
    for prompt, answer in zip(ids, stopping.complete(ids)):
        num_taken_in = len(prompt) + answer["completions"][0]["num_tokens"] - 1
        assert answer["usage"]["num_latent_steps"] == 2 * num_taken_in
    assert answer["completions"][0]["num_tokens"] > new.index(new[2]) + 1, "all rows ended alike"


@pytest.mark.parametrize(
    ("options", "num_sequences"), [(("--num-beams", 3), 3), (("--temperature", 1, "--num-return-sequences", 2), 2)]
)
def test_the_usage_of_beams_and_of_several_texts(capsys, thinking_folder, tokenizer, options, num_sequences):
    """The prompt counts once; of beams, those that were dropped count too."""
    for answer in rows(run(capsys, thinking_folder, *prompts(*PROMPTS[:2]), "--exit-at-step", 2, *options).out):
        num_taken_in = len(tokenizer(answer["prompt"]).input_ids) + num_sequences * (NUM_NEW - 1)
        assert answer["usage"]["num_latent_steps"] == num_taken_in


def test_a_chat_thinks_as_deep_as_it_is_told(thinking_folder, tokenizer, monkeypatch, capsys):
    """Over two turns; the second is read over the first one's cache, as deep as that one was."""
    model = AutoModelForCausalLM.from_pretrained(thinking_folder).eval()
    session = ChatSession(model, tokenizer, Sampling(NUM_NEW, knobs=LatentKnobs(exit_at_step=3)))
    answers = [session.ask("What is a list?"), session.ask("Why?")]
    table = next(layer for layer in session.cache.layers if hasattr(layer, "latent_steps"))
    assert table.latent_steps.tolist() == [2 * (len(session.token_ids) - 1)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"What is a list?\nWhy?\n")))
    assert cli.main(["chat", str(thinking_folder), "--max-new-tokens", str(NUM_NEW), "--exit-at-step", "3"]) == 0
    assert capsys.readouterr().out == "".join(answer + "\n" for answer in answers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--exit-threshold", "1.5"], "--exit-threshold must be a probability, 0 to 1, got 1.5"),
        (["--max-latent-steps", "-1"], "--max-latent-steps must be a whole number of at least 0, got -1"),
        (["--exit-at-step", "0"], "--exit-at-step must be a whole number of at least 1"),
        (["--exit-at-step", "2", "--exit-threshold", "0.1"], "--exit-threshold would have no effect"),
        (["--exit-at-step", "2", "--max-latent-steps", "3"], "--max-latent-steps would have no effect"),
    ],
)
def test_what_cannot_be_meant_exits_with_2(capsys, thinking_folder, options, message):
    assert message in run(capsys, thinking_folder, *prompts("a"), *options, status=2).err


@pytest.mark.parametrize("option", ["--exit-threshold", "--max-latent-steps", "--exit-at-step"])
def test_a_model_without_latent_steps_is_told(capsys, folder, monkeypatch, option):
    message = f"{option}: a model of type unspoken_recycler takes no latent steps"
    assert message in run(capsys, folder, *prompts("a"), option, 1, status=2).err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert cli.main(["chat", str(folder), option, "1"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"), [({"router": "none"}, "no router"), ({"exit_at_step": 2}, "has exit_at_step 2; give")]
)
def test_a_threshold_that_nothing_reads_is_refused(fields, message):
    model = texts.text_model("adaptive", **fields)
    with pytest.raises(UsageError, match=f"--exit-threshold would have no effect: .*{message}"):
        LatentKnobs(exit_threshold=0.1).options(model)
    assert LatentKnobs(max_latent_steps=1).options(model) == {"max_latent_steps": 1}
