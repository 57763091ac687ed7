"""Answers to problems: the model's own greedy text, whatever it is batched with; what the command reports of them."""

import hashlib
import json
import shlex
import sys
import types

import pytest
import torch

from tests import reasoning_standin, texts
from tests.oracle import naive_generate
from unspoken import cli
from unspoken.errors import UnspokenError, UsageError
from unspoken.eval.problems import Problem, Score, answer_problems, by_task, read_problems
from unspoken.eval.rewards import Checked, find
from unspoken.eval.tasks import Rate

NUM_NEW = 6
UNTIED = {"tie_word_embeddings": False}  # or a random model repeats its last token
QUESTIONS = ["3+8=", "What is a tuple? Answer only.", "9", "3+8-5+9-2-2+7=", "Is it?", "12+1=", "a b c d e f g h"]


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def problems_of(*rows: dict) -> list[Problem]:
    return [Problem(row, row.get("task", "t"), f"f:{line}") for line, row in enumerate(rows, start=1)]


PROBLEMS = problems_of(
    *({"prompt": chat(text) if number % 3 else text, "answer": "4"} for number, text in enumerate(QUESTIONS))
)


@pytest.fixture(scope="module")
def tokenizer():
    return texts.chat_tokenizer()


@pytest.fixture(scope="module")
def model():
    return texts.text_model(text=UNTIED)


def asked(prompt, tokenizer) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)


def by_hand(model, tokenizer, prompt, num_passes=2) -> str:
    """Greedy text of the oracle, which knows no cache and no padding."""
    ids = torch.tensor([tokenizer(asked(prompt, tokenizer)).input_ids])
    whole, _ = naive_generate(model, ids, NUM_NEW, num_passes)
    new = whole[0, ids.shape[1] :].tolist()
    end = new.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in new else NUM_NEW
    return tokenizer.decode(new[:end], skip_special_tokens=True)


def answers(model, tokenizer, batch_size=3, problems=PROBLEMS, reward=None, **options):
    reward = reward or find("exact")
    return answer_problems(model, tokenizer, problems, reward, max_new_tokens=NUM_NEW, batch_size=batch_size, **options)


def test_answers_are_the_greedy_ones_in_the_rows_order(model, tokenizer):
    for k in (1, 2):
        found = answers(model, tokenizer, num_prefill_passes=k)
        assert [answer.text for answer in found] == [by_hand(model, tokenizer, p.prompt, k) for p in PROBLEMS]
        assert [answer.problem for answer in found] == PROBLEMS
        assert len({answer.text for answer in found}) == len(PROBLEMS)
    assert [answer.text for answer in answers(model, tokenizer)] == [answer.text for answer in found]


@pytest.mark.parametrize("method", ["recycler", "adaptive", "vanilla"])
def test_batches_change_nothing(tokenizer, method):
    """Prompts of 1 to 60 tokens, some of which end early, in float32."""
    model = texts.text_model(method, text=UNTIED)
    model.generation_config.eos_token_id = list(range(0, texts.VOCAB_SIZE, 4))
    alone = answers(model, tokenizer, 1)
    assert {answer.is_cut for answer in alone} == {True, False}
    assert len({answer.num_tokens for answer in alone}) > 2
    for batch_size in (2, 3, 7, 50):
        assert answers(model, tokenizer, batch_size) == alone
    seen = []

    def count(prompts, completions, completion_ids, **columns):
        seen.extend(completion_ids)
        return [0.0] * len(completions)

    answers(model, tokenizer, 7, reward=Checked("count", count))
    assert [len(ids) for ids in seen] == [answer.num_tokens for answer in alone]
    assert [ids[-1] % 4 == 0 for ids in seen] == [not answer.is_cut for answer in alone], "the end token is there"


def test_a_reward_sees_what_trl_would_give_it(model, tokenizer):
    """Columns as lists, a completion in its prompt's form; a column that a row lacks is None."""
    seen = {}

    def function(prompts, completions, **columns):
        seen.update(prompts=prompts, completions=completions, columns=columns)
        return [0.5 * number for number in range(len(prompts))]

    mixed = problems_of(
        {"prompt": "3+8=", "completion": "11", "answer": "11", "task": "a"},
        {"prompt": chat("9"), "completion": [], "more": [1], "answer": 9, "task": "b"},
        {"prompt": "1", "answer": "12", "task": "b"},
    )
    progress = []
    found = answers(model, tokenizer, 2, mixed, Checked("f", function), progress=progress.append)
    assert seen["prompts"] == ["3+8=", chat("9"), "1"]
    assert seen["completions"] == [found[0].text, [{"role": "assistant", "content": found[1].text}], found[2].text]
    ids = seen["columns"].pop("completion_ids")
    assert [tokenizer.decode(one) for one in ids] == [answer.text for answer in found]
    assert [len(one) for one in ids] == [answer.num_tokens for answer in found]
    assert seen["columns"] == {"answer": ["11", 9, "12"], "task": ["a", "b", "b"], "more": [None, [1], None]}
    assert [answer.reward for answer in found] == [0.0, 0.5, 1.0] and progress == [2, 1]
    scores = by_task(found)
    assert list(scores) == ["a", "b"]
    assert scores["b"] == Score(Rate(1, 2), 0.75, Rate(1, 2), float(NUM_NEW), 1.0)
    assert Score.of(found).majority == Rate(2, 3), "each task's own: 11, and 9 or 12"
    assert Score.of(found[:1]).right == Rate(0, 1)
    del mixed[0].row["answer"]
    assert Score.of(found).majority is None and by_task(found)["b"].majority is not None


def test_the_model_keeps_its_mode(model, tokenizer):
    model.train()
    answers(model, tokenizer)
    assert model.training
    model.eval()


def test_rows_are_checked_before_anything_is_written(model, tokenizer, monkeypatch):
    monkeypatch.setattr(type(model), "generate", lambda *args, **options: pytest.fail("it generates"))
    lacking = [*PROBLEMS, Problem({"prompt": "x"}, "t", "here:9")]
    with pytest.raises(UnspokenError, match=r"^here:9: reward exact: the row has no 'answer'"):
        answers(model, tokenizer, problems=lacking)
    with pytest.raises(UnspokenError, match=r"^here:2: the prompt has .* tokens, the model's context is 128"):
        answers(model, tokenizer, problems=[Problem({"prompt": "x " * 200, "answer": "1"}, "t", "here:2")])
    plain = texts.chat_tokenizer()
    plain.chat_template = None
    with pytest.raises(UsageError, match=r"^f:2: the model's tokenizer has no chat template"):
        answers(model, plain)


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model, tokenizer):
    return texts.save(tmp_path_factory.mktemp("problems") / "model", model, tokenizer)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory, model, tokenizer):
    """Rows of two tasks, whose answer is what the model writes in two of the first three, and one of the others."""
    rows = []
    for number, question in enumerate(QUESTIONS):
        prompt = chat(question)
        own = by_hand(model, tokenizer, prompt).strip()
        rows.append({"prompt": prompt, "answer": own if number in (0, 2, 3) else "x", "task": "ab"[number > 2]})
    return write(tmp_path_factory.mktemp("rows") / "val.jsonl", rows)


def run(folder, file, *more, out=None, status=0):
    command = ["eval", str(folder), "--problems", str(file), "--device", "cpu", "--max-new-tokens", str(NUM_NEW), *more]
    assert cli.main([*command, "--out", str(out)] if out else command) == status
    return json.loads(((out or folder) / "eval_problems.json").read_text()) if status == 0 else None


def test_table_report_and_samples(folder, file, tmp_path, capsys):
    report = run(folder, file, "--log-samples", out=tmp_path)
    printed = capsys.readouterr().out
    assert f"{file}, reward exact, k=2, then exact" in printed and "majority" in printed
    lines = {
        line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.strip()[:3] in ("a  ", "b  ", "all")
    }
    assert lines["a"][:2] == ["3", "66.7"] and lines["b"][:2] == ["4", "25.0"] and lines["all"][:2] == ["7", "42.9"]
    assert lines["b"][2:5] == ["4.6", "-", "69.9"] and lines["b"][5:] == ["75.0", "6.0", "100.0"]
    assert report["tasks"]["a"]["num_right"] == 2 and report["tasks"]["b"]["num"] == 4
    low, high = Rate(3, 7).interval
    assert (report["all"]["low"], report["all"]["high"]) == (low, high)
    assert report["depth"] == {"num_passes": 2, "generating": "k=2, then exact", "knobs": None}
    assert report["data"]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert report["model"]["weights_sha256"] and report["versions"]["transformers"] and report["limit"] is None
    samples = [json.loads(line) for line in (tmp_path / "eval_problems.jsonl").read_text().splitlines()]
    assert [sample["row"] for sample in samples] == [json.loads(line) for line in file.read_text().splitlines()]
    assert "--num-prefill-passes 2 --batch-size 8" in report["command"], "what the model's configuration says"
    assert sum(sample["reward"] for sample in samples) == 3 and samples[6]["place"] == f"{file}:7"
    for sample in samples:
        assert (sample["text"].strip() == sample["row"]["answer"]) == (sample["reward"] == 1)


def test_the_reported_command_gives_the_reported_numbers(folder, file, tmp_path):
    """B105; with another batch size, too."""
    out = tmp_path / "a folder"
    report = run(folder, file, "--num-prefill-passes", "1", "--limit", "2", "--batch-size", "1", out=out)
    assert report["all"]["num"] == 4 and report["depth"]["generating"] == "k=1, then exact"
    (out / "eval_problems.json").unlink()
    first, *again = shlex.split(report["command"])
    assert first == "unspoken" and cli.main(again) == 0
    repeated = json.loads((out / "eval_problems.json").read_text())
    for one in (report, repeated):
        del one["seconds"]
    assert repeated == report
    assert run(folder, file, "--num-prefill-passes", "1", "--limit", "2", out=out)["tasks"] == report["tasks"]


def test_the_library_scores_rows_that_have_its_entry(folder, tmp_path, monkeypatch, capsys):
    """From `data problems` to the table; and its partial credit."""
    reasoning_standin.install(monkeypatch)
    made = tmp_path / "made"
    specs = ["sums", "other=sums:max_number=30"]
    assert cli.main(["data", "problems", *specs, "--out", str(made), "--num-train", "0", "--num-val", "3"]) == 0
    report = run(folder, made / "val.jsonl", out=tmp_path)
    assert report["reward"] == {"name": "reasoning_gym", "partial": False} and list(report["tasks"]) == [
        "other",
        "sums",
    ]
    assert report["versions"]["reasoning-gym"] and report["all"]["majority"] is not None
    module = types.ModuleType("graded")
    module.half = lambda prompts, completions, **columns: [0.5] * len(prompts)
    monkeypatch.setitem(sys.modules, "graded", module)
    capsys.readouterr()
    report = run(folder, made / "val.jsonl", "--reward", "graded:half", out=tmp_path)
    assert report["all"]["reward"] == 0.5 and report["all"]["num_right"] == 0 and "0.5000" in capsys.readouterr().out
    assert run(folder, made / "val.jsonl", "--partial", out=tmp_path)["reward"]["partial"]
    rows = [json.loads(line) for line in (made / "val.jsonl").read_text().splitlines()]
    mixed = write(tmp_path / "mixed.jsonl", [*rows, {"prompt": "1+1=", "answer": "2"}])
    run(folder, mixed, out=tmp_path, status=2)
    assert "some rows have 'entry'" in capsys.readouterr().err
    rows[1]["entry"] = json.dumps({"metadata": {}})
    run(folder, write(tmp_path / "bad.jsonl", rows), out=tmp_path, status=1)
    assert (
        "bad.jsonl:2: reward reasoning_gym: 'entry' is no problem of reasoning-gym (KeyError" in capsys.readouterr().err
    )


def test_rows_without_a_task_have_their_files_name(tmp_path):
    file = write(tmp_path / "quiz.2.jsonl", [{"prompt": "1"}, {"prompt": "2", "task": 7}])
    assert [(problem.task, problem.place) for problem in read_problems([file])] == [
        ("quiz", f"{file}:1"),
        ("7", f"{file}:2"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "SECRET", }', "broken JSON"),
        (b'["SECRET"]', "not a JSON object but an array"),
        (b'{"question": "SECRET"}', "the row has no 'prompt' (it has: 'question')"),
        (b'{"prompt": 3}', "'prompt' is int, not a text or a list of messages"),
        (b'{"prompt": []}', "'prompt': no message"),
        (b'{"prompt": [{"role": "user"}]}', "'prompt': message 1 is not an object with the texts 'role' and 'content'"),
        (b'{"prompt": "SECRET \\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": "SECRET \xe9"}', "invalid UTF-8"),
        (b'{"prompt": "SECRET"}', "reward exact: the row has no 'answer'"),
    ],
)
def test_a_bad_row_is_named_and_not_shown(folder, tmp_path, capsys, monkeypatch, line, reason):
    monkeypatch.setattr("unspoken.eval.problem_run.load_model", lambda *args: pytest.fail("the model was loaded"))
    good = b'{"prompt": "a", "answer": "b"}\n'
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + good + b" \n" + line + b"\n" + good)
    run(folder, tmp_path / "in.jsonl", "--reward", "exact", status=1)
    error = capsys.readouterr().err
    assert f"{tmp_path / 'in.jsonl'}:3: " in error and reason in error and "SECRET" not in error


def test_files_without_rows(folder, tmp_path, capsys):
    for content, message in (("", "the file is empty"), (" \n\n", "no rows")):
        (tmp_path / "in.jsonl").write_text(content)
        run(folder, tmp_path / "in.jsonl", status=1)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "x"], "--problems and --data are two evaluations"),
        (["--tasks", "x"], "--problems and --tasks are two evaluations"),
        (["--split", "val"], "--split is for --data FOLDER"),
        (["--num-passes", "2"], "--num-passes is for --data FOLDER, and for the task"),
        (["--samples", "3"], "--samples is for the task"),
        (["--num-fewshot", "3"], "--num-fewshot is for --tasks NAMES"),
        (["--chat"], "--chat is for --tasks NAMES"),
        (["--batch-size", "auto"], "--batch-size auto is for --tasks NAMES"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--no-exact"], "--no-exact is for losses"),
        (["--limit", "0.5"], "--limit is 0.5; with --problems it is a whole number"),
        (["--limit", "0"], "--limit is 0;"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--reward", "exakt"], "no reward 'exakt' (did you mean 'exact'?)"),
        (["--partial"], "--partial is for the reward reasoning_gym, not for exact"),
        (["--exit-threshold", "0.1"], "takes no latent steps"),
        (["--exit-threshold", "0.1", "--exit-threshold", "0.2"], "with --problems it is one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_options_exit_with_2(folder, file, capsys, more, message):
    run(folder, file, *more, status=2)
    assert message in capsys.readouterr().err


def test_a_file_must_be_given(folder, file, capsys, tmp_path):
    run(folder, file.parent, status=2)
    assert "is a folder; give one of its files" in capsys.readouterr().err
    run(folder, tmp_path / "none.jsonl", status=2)
    assert "none.jsonl does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--reward", "exact"], ["--partial"], ["--num-prefill-passes", "1"]], ids=" ".join)
def test_options_of_problems_are_refused_elsewhere(folder, capsys, more):
    assert cli.main(["eval", str(folder), "--data", "x", *more]) == 2
    assert f"{more[0]} is for --problems FILE" in capsys.readouterr().err


def test_latent_steps_are_knobs_of_the_run(tmp_path, tokenizer, file, capsys):
    folder = texts.save(tmp_path / "adaptive", texts.text_model("adaptive", text=UNTIED), tokenizer)
    texts_by_depth = []
    for step in ("1", "2"):
        report = run(folder, file, "--exit-at-step", step, "--limit", "1", "--log-samples")
        samples = (folder / "eval_problems.jsonl").read_text().splitlines()
        texts_by_depth.append([json.loads(sample)["text"] for sample in samples])
    assert texts_by_depth[0] != texts_by_depth[1]
    assert report["depth"]["knobs"]["exit_at_step"] == 2 and report["depth"]["generating"] == "exact"
    assert "--exit-at-step 2" in report["command"] and "--num-prefill-passes" not in report["command"]
    run(folder, file, "--num-prefill-passes", "2", status=2)
    assert "an adaptive model has one pass" in capsys.readouterr().err
