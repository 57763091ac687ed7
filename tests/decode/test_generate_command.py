import io
import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoTokenizer

from tests import texts
from tests.oracle import naive_generate
from unspoken import cli
from unspoken.decode.generate import BatchWriter
from unspoken.decode.prompts import Request
from unspoken.decode.sampling import Sampling

PROMPTS = ["The with statement", "a", "Objects are Python's abstraction for data, and all"]
NUM_NEW = 9


def run(capsys, folder, *more, status=0):
    assert cli.main(["generate", str(folder), "--max-new-tokens", str(NUM_NEW), *map(str, more)]) == status
    return capsys.readouterr()


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def prompts(*texts_: str) -> list[str]:
    return [argument for text in texts_ for argument in ("--prompt", text)]


def by_hand(folder, text: str, num_passes: int = 2) -> str:
    """Greedy text of the oracle, which knows no cache and no padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(text).input_ids])
    whole, _ = naive_generate(texts.text_model(), ids, NUM_NEW, num_passes)
    return tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_batch_gives_each_prompt_its_own_text_in_order(capsys, folder, batch_size):
    answers = rows(run(capsys, folder, *prompts(*PROMPTS), "--batch-size", batch_size).out)
    assert [answer["prompt"] for answer in answers] == PROMPTS
    for answer in answers:
        completion = {"text": by_hand(folder, answer["prompt"]), "num_tokens": NUM_NEW, "finish_reason": "length"}
        assert answer["completions"] == [completion]
        num_prompt_tokens = len(AutoTokenizer.from_pretrained(folder)(answer["prompt"]).input_ids)
        assert answer["usage"] == {
            "num_prompt_tokens": num_prompt_tokens,
            "num_new_tokens": NUM_NEW,
            "num_latent_steps": 0,
        }


def test_prefill_passes_reach_the_model(capsys, folder):
    for k in (1, 2):
        answer = rows(run(capsys, folder, *prompts(PROMPTS[2]), "--num-prefill-passes", k).out)[0]
        assert answer["completions"][0]["text"] == by_hand(folder, PROMPTS[2], k)
    assert by_hand(folder, PROMPTS[2], 1) != by_hand(folder, PROMPTS[2], 2), "the prompt cannot tell"


def test_jsonl_in_jsonl_out(capsys, folder, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a tuple?"}]
    lines = [json.dumps({"id": 7, "prompt": PROMPTS[0]}), "", "  ", json.dumps({"messages": conversation})]
    source.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    captured = run(capsys, folder, "--input", source, "--output", target, "--batch-size", 2)
    assert captured.out == ""
    first, second = rows(target.read_text())
    assert first["id"] == 7 and first["completions"][0]["text"] == by_hand(folder, PROMPTS[0])
    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        conversation, add_generation_prompt=True, tokenize=False
    )
    assert second["messages"] == conversation and second["completions"][0]["text"] == by_hand(folder, rendered)


def test_standard_input_and_the_chat_template(capsys, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "Hi"}\n')))
    answer = rows(run(capsys, folder, "--input", "-", "--chat").out)[0]
    assert answer["completions"][0]["text"] == by_hand(
        folder, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_ends_at_the_end_token(model, tokenizer):
    """The row that ends first is filled up, which must show neither in its text nor in its count."""
    ids = [tokenizer(text).input_ids for text in PROMPTS]
    plain = BatchWriter(model, tokenizer, Sampling(NUM_NEW))
    outputs = plain.model.generate(torch.tensor([ids[0]]), **plain.options)[0, len(ids[0]) :].tolist()
    end = outputs[3]
    num_tokens = outputs.index(end) + 1
    stopping = BatchWriter(model, tokenizer, Sampling(NUM_NEW))
    stopping.ends = [end, 9999]
    stopping.options["eos_token_id"] = stopping.ends
    completion = stopping.complete(ids)[0]["completions"][0]
    text = tokenizer.decode(outputs[: num_tokens - 1], skip_special_tokens=True)
    assert completion == {"text": text, "num_tokens": num_tokens, "finish_reason": "stop"}


def test_padding_with_the_end_token_hides_nothing(model):
    """Without a pad token the end token pads, and one inside a prompt must stay a token like any other."""
    tokenizer = texts.chat_tokenizer()
    tokenizer.pad_token = None
    writer = BatchWriter(model, tokenizer, Sampling(NUM_NEW))
    assert writer.options["pad_token_id"] == tokenizer.eos_token_id
    requests = [Request({"prompt": "Yes.<|im_end|>\nNo"}, "here"), Request({"prompt": PROMPTS[2]}, "there")]
    ids = [writer.encode(request) for request in requests]
    assert tokenizer.eos_token_id in ids[0] and len(ids[0]) < len(ids[1])
    for prompt, answer in zip(ids, writer.complete(ids)):
        whole, _ = naive_generate(model, torch.tensor([prompt]), NUM_NEW, num_passes=2)
        expected = writer._completion(whole[0, len(prompt) :].tolist())
        assert answer["completions"] == [expected]


def test_an_empty_prompt_begins_with_the_first_token(model, tokenizer):
    writer = BatchWriter(model, tokenizer, Sampling(NUM_NEW))
    assert writer.encode(Request({"prompt": ""}, "here")) == [tokenizer.bos_token_id]


def test_beams_sampling_and_several_texts(capsys, folder):
    beams = rows(run(capsys, folder, *prompts(*PROMPTS[:2]), "--num-beams", 3, "--num-return-sequences", 2).out)
    assert [len(answer["completions"]) for answer in beams] == [2, 2]
    assert beams[0]["completions"][0] != beams[0]["completions"][1]
    sampled = ["--temperature", "1.5", "--top-p", "0.95", "--num-return-sequences", "2", *prompts(PROMPTS[0])]
    first = run(capsys, folder, *sampled, "--seed", 1).out
    assert first == run(capsys, folder, *sampled, "--seed", 1).out
    assert first != run(capsys, folder, *sampled, "--seed", 2).out
    assert rows(run(capsys, folder, *sampled, "--top-k", 1).out)[0]["completions"][0]["text"] == by_hand(
        folder, PROMPTS[0]
    )


def test_a_stream_shows_the_text_alone(capsys, folder, tmp_path):
    out = run(capsys, folder, *prompts(PROMPTS[0]), "--stream", "--output", tmp_path / "rows.jsonl").out
    assert out == by_hand(folder, PROMPTS[0]) + "\n"
    assert rows((tmp_path / "rows.jsonl").read_text())[0]["completions"][0]["text"] + "\n" == out


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "SECRET", }', "broken JSON at column 22"),
        (b'{"prompt": "SECRET', "broken JSON"),
        (b'["SECRET"]', "not a JSON object but list"),
        (b'{"text": "SECRET"}', "one of 'prompt' and 'messages' (it has: 'text')"),
        (b'{"prompt": "SECRET", "messages": []}', "one of 'prompt' and 'messages'"),
        (b'{"prompt": ["SECRET"]}', "'prompt' is list, not a text"),
        (b'{"prompt": null}', "'prompt' is NoneType"),
        (b'{"messages": []}', "'messages' is empty"),
        (b'{"messages": "SECRET"}', "'messages' is not a list"),
        (b'{"messages": [{"role": "user"}]}', "message 1 is not an object with the texts 'role' and 'content'"),
        (b'{"prompt": "SECRET \\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": "SECRET \xe9"}', "invalid UTF-8 at byte 20"),
    ],
)
def test_a_bad_row_is_named_and_not_shown(capsys, folder, tmp_path, line, reason):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "good"}\n\n' + line + b'\n{"prompt": "good"}\n')
    error = run(capsys, folder, "--input", source, status=1).err
    assert f"{source}:3: " in error and reason in error and "SECRET" not in error


def test_a_prompt_longer_than_the_context_is_told_with_both_numbers(capsys, folder, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps({"prompt": "x " * 200}) + "\n")
    error = run(capsys, folder, "--input", source, status=1).err
    tokens = len(AutoTokenizer.from_pretrained(folder)("x " * 200).input_ids)
    assert f"{source}:2: the prompt has {tokens} tokens, the model's context is 128" in error
    error = run(capsys, folder, *prompts("x " * 40), "--max-new-tokens", 100, status=1).err
    tokens = len(AutoTokenizer.from_pretrained(folder)("x " * 40).input_ids)
    assert f"--max-new-tokens {128 - tokens} would fit" in error


def test_an_interrupted_run_leaves_the_finished_rows(capsys, folder, tmp_path, monkeypatch):
    complete, calls = BatchWriter.complete, []

    def interrupted(self, batch, streamer=None):
        calls.append(len(batch))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return complete(self, batch, streamer)

    monkeypatch.setattr(BatchWriter, "complete", interrupted)
    target = tmp_path / "out.jsonl"
    captured = run(capsys, folder, *prompts(*PROMPTS), "--batch-size", 2, "--output", target, status=130)
    assert f"interrupted: 2 of 3 rows are in {target}" in captured.err
    assert [row["prompt"] for row in rows(target.read_text())] == PROMPTS[:2]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperature", "-1"], "--temperature is -1"),
        (["--top-p", "0"], "--top-p is 0"),
        (["--top-k", "-2"], "--top-k is -2"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--num-return-sequences", "2"], "greedy text is always the same"),
        (["--num-return-sequences", "3", "--num-beams", "2", "--temperature", "1"], "more than --num-beams 2"),
        (["--stream", "--num-beams", "2"], "--stream shows one text"),
        (["--stream", "--prompt", "another"], "there are 2"),
        (["--output", "/no/such/folder/x"], "its folder does not exist"),
        (["--output", "."], "--output: . is a folder; give a file"),
    ],
)
def test_wrong_options_exit_with_2(capsys, folder, more, message):
    assert message in run(capsys, folder, *prompts("a"), *more, status=2).err


def test_what_a_model_lacks_is_told(capsys, folder, tmp_path):
    plain = texts.save(tmp_path / "plain", texts.text_model("vanilla"), AutoTokenizer.from_pretrained(folder))
    error = run(capsys, plain, *prompts("a"), "--num-prefill-passes", 2, status=2).err
    assert "a plain model has one pass" in error
    (plain / "chat_template.jinja").unlink()
    assert "no chat template" in run(capsys, plain, *prompts("a"), "--chat", status=2).err
    bare = texts.save(tmp_path / "bare", texts.text_model())
    assert "has no tokenizer" in run(capsys, bare, *prompts("a"), status=1).err
    small = texts.save(tmp_path / "small", texts.text_model(text={"vocab_size": 300}), texts.chat_tokenizer())
    assert "the tokenizer is not this model's" in run(capsys, small, *prompts("<|im_end|>"), status=1).err


def test_a_real_process_fails_without_a_traceback(folder, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "good"}\n{"prompt"')
    arguments = ["generate", str(folder), "--input", str(tmp_path / "in.jsonl")]
    done = subprocess.run(
        [sys.executable, "-m", "unspoken.cli", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stdout == ""
    assert f"{tmp_path / 'in.jsonl'}:2: broken JSON" in done.stderr and "Traceback" not in done.stderr
