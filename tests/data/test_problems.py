"""Problems with one right answer: that each has it, where it stands, and that what cannot be made is named."""

import json
import re
import sys

import pytest

from tests import reasoning_standin, texts
from unspoken import cli
from unspoken.data import problems
from unspoken.data.conversations import read_examples
from unspoken.data.problem_specs import parse
from unspoken.data.reasoning import DataSet, fresh_problems, plain
from unspoken.data.tokenizer import load_existing
from unspoken.data.written_sum import WrittenSum
from unspoken.errors import UsageError


@pytest.fixture
def library(monkeypatch):
    reasoning_standin.install(monkeypatch)


def run(out, *specs, more=(), train=20, val=5, status=0):
    options = ["--num-train", str(train), "--num-val", str(val), *more]
    assert cli.main(["data", "problems", *specs, "--out", str(out), *options]) == status
    return json.loads((out / "problems.json").read_text()) if status == 0 else None


def rows(out, split):
    return [json.loads(line) for line in (out / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("modulus", [0, 11])
def test_every_step_of_a_written_sum_is_right(modulus):
    """Against Python's own arithmetic."""
    signs, lengths, results = set(), set(), set()
    for problem in WrittenSum(2, 5, 10, modulus).draw(300, seed=3):
        assert re.fullmatch(r"\d+([+-]\d+){1,4}=", problem["question"])
        first, *terms = re.findall(r"[+-]?\d+", problem["question"])
        steps, result = problem["completion"].split(";"), int(first)
        assert len(steps) == len(terms)
        for step, term in zip(steps, terms):
            before, after = step.split("=")
            assert before == f"{result}{term}"
            result = eval(before) % modulus if modulus else eval(before)
            assert int(after) == result >= 0 and 1 <= abs(int(term)) <= 10
            signs.add(term[0])
            results.add(result)
        assert problem["answer"] == str(result)
        lengths.add(len(terms) + 1)
    assert signs == {"+", "-"} and lengths == {2, 3, 4, 5}
    assert 0 in results and (max(results) == 10 if modulus else max(results) > 20)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_terms": 1}, "min_terms 1 and max_terms 4"),
        ({"min_terms": 5}, "min_terms 5 and max_terms 4"),
        ({"max_number": 0}, "max_number is 0"),
        ({"modulus": 9}, "modulus is 9; it must be above max_number 9"),
        ({"modulus": -3}, "modulus is -3"),
        ({"max_terms": 2.5}, "max_terms is 2.5; it must be a whole number"),
    ],
)
def test_wrong_settings_of_a_written_sum(settings, message):
    with pytest.raises(UsageError, match=message):
        WrittenSum(**settings)


def test_specs():
    """Values are YAML; labels are the names, made unique, unless they are given."""
    specs = parse(["a", "a:x=1,y=[p, q],z=off", "a-2=b:x=", "c:x=1.5", "a"])
    assert [(spec.label, spec.name) for spec in specs] == [
        ("a", "a"), ("a-3", "a"), ("a-2", "b"), ("c", "c"), ("a-4", "a"),
    ]  # fmt: skip
    assert specs[1].settings == {"x": 1, "y": ["p", "q"], "z": False}
    assert [spec.settings for spec in specs[2:4]] == [{"x": None}, {"x": 1.5}]


def test_two_files_of_different_questions(tmp_path, capsys):
    made = run(tmp_path / "a", "w=written_sum:max_terms=3,modulus=10", "written_sum", more=["--seed", "7"])
    found = {split: rows(tmp_path / "a", split) for split in ("train", "val")}
    assert {split: len(lines) for split, lines in found.items()} == {"train": 40, "val": 10}
    questions = [row["prompt"][0]["content"] for lines in found.values() for row in lines]
    assert len(set(questions)) == 50
    assert {row["task"] for row in found["train"][:12]} == {"w", "written_sum"}, "tasks are mixed"
    row = found["val"][0]
    assert list(row) == ["prompt", "completion", "answer", "task"]
    assert [message["role"] for message in row["prompt"] + row["completion"]] == ["user", "assistant"]
    assert row["completion"][0]["content"].endswith(f"={row['answer']}")
    task = made["tasks"]["w"]
    assert task["settings"] == {"max_terms": 3, "modulus": 10} and task["train"]["rows"] == 20
    answers = [row["answer"] for row in found["train"] if row["task"] == "w"]
    assert task["train"]["majority_share"] == max(map(answers.count, answers)) / 20
    assert answers.count(task["train"]["majority"]) == 20 * task["train"]["majority_share"]
    assert task["all"]["rows"] == 25 and task["all"]["answers"] <= 10 and made["notices"] == []
    assert made["versions"].keys() == {"unspoken"} and made["options"]["seed"] == 7
    printed = capsys.readouterr().out
    assert "majority" in printed and f"--problems {tmp_path / 'a' / 'val.jsonl'} --reward last_number" in printed


def test_equal_seeds_give_equal_files(tmp_path, library):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(tmp_path / name, "sums:max_number=99", "written_sum", more=["--seed", str(seed)])
    for split in ("train", "val"):
        assert rows(tmp_path / "a", split) == rows(tmp_path / "b", split) != rows(tmp_path / "c", split)


def test_neighbouring_seeds_share_no_problems_but_by_chance(tmp_path, library):
    """reasoning-gym's entry i of seed s is entry 0 of seed s + i: another seed was the same problems, moved by one."""
    for seed in (0, 1):
        run(tmp_path / str(seed), "sums:max_number=99999", more=["--seed", str(seed)])
    questions = [
        {row["prompt"][0]["content"] for split in ("train", "val") for row in rows(tmp_path / seed, split)}
        for seed in ("0", "1")
    ]
    assert not questions[0] & questions[1]


def test_nor_do_questions_for_evaluation(library):
    asked = [{row["question"] for row in fresh_problems(["sums"], 50, seed)["sums"]} for seed in (0, 1, 2)]
    assert all(len(one) == 50 for one in asked)
    assert len(asked[0] & asked[1]) < 25 and len(asked[1] & asked[2]) < 25, "49 if moved by one"


def test_formats_and_the_instruction(tmp_path, library):
    more = ["--format", "plain", "--instruction", "Answer only."]
    run(tmp_path / "plain", "sums:max_number=99", "written_sum", more=more)
    run(tmp_path / "chat", "sums:max_number=99", "written_sum", more=more[2:])
    tokenizer = load_existing(str(tmp_path / "plain" / "tokenizer"))
    assert not (tmp_path / "chat" / "tokenizer").exists()
    for plain_row, chat_row in zip(rows(tmp_path / "plain", "train"), rows(tmp_path / "chat", "train")):
        assert plain_row["prompt"].endswith((" Answer only.", "= Answer only."))
        ids = tokenizer(plain_row["prompt"]).input_ids
        assert len(ids) == len(plain_row["prompt"]) and tokenizer.decode(ids) == plain_row["prompt"]
        assert chat_row["prompt"] == [{"role": "user", "content": plain_row["prompt"]}]
        assert chat_row["completion"] == [{"role": "assistant", "content": plain_row["completion"]}]
        assert plain_row["answer"] == chat_row["answer"]
        if entry := json.loads(plain_row.get("entry", "null")):
            assert plain_row["prompt"] == f"{entry['question']} Answer only."
            assert plain_row["completion"] == plain_row["answer"] == entry["answer"]


@pytest.mark.parametrize("format", ["chat", "plain"])
def test_sft_reads_the_rows_and_learns_the_completions(tmp_path, library, format):
    run(tmp_path / "made", "sums", "written_sum", more=["--format", format])
    tokenizer = texts.chat_tokenizer()
    examples = read_examples([tmp_path / "made" / "train.jsonl"], tokenizer, 128)
    assert not examples.notes()
    for example, row in zip(examples.rows, rows(tmp_path / "made", "train"), strict=True):
        completion = row["completion"] if format == "plain" else row["completion"][0]["content"]
        assert tokenizer.decode(example.ids[example.is_target]) == f"{completion}<|im_end|>"


def test_a_small_data_set_gives_fewer_rows_with_a_note(tmp_path, library, capsys):
    """Both files get their share, and a question still belongs to one of them, and to one task."""
    made = run(tmp_path / "a", "sums:max_number=2", "more=sums:max_number=4", train=40, val=10)
    found = {split: rows(tmp_path / "a", split) for split in ("train", "val")}
    questions = [json.loads(row["entry"])["question"] for lines in found.values() for row in lines]
    assert len(set(questions)) == len(questions) == 25
    assert [made["tasks"]["sums"][split]["rows"] for split in ("train", "val")] == [7, 2]
    assert [made["tasks"]["more"][split]["rows"] for split in ("train", "val")] == [13, 3]
    note = "sums: 9 different problems where 50 were asked for, among 200 drawn"
    assert note in made["notices"] and f"note: {note}" in capsys.readouterr().out
    run(tmp_path / "b", "sums:max_number=2", "more=sums:max_number=2", status=1)
    assert "more=sums:max_number=2: 0 different problems where 25 were asked for" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_each_file_gets_a_row_where_one_would_get_all(tmp_path, library):
    for name, num in (("a", {"train": 1, "val": 90}), ("b", {"train": 90, "val": 1})):
        run(tmp_path / name, "sums:max_number=1", **num)
        counts = {split: len(rows(tmp_path / name, split)) for split in num}
        assert counts == {split: 1 if num[split] == 1 else 3 for split in num}


def test_one_file_alone(tmp_path):
    run(tmp_path / "a", "written_sum", train=0)
    assert len(rows(tmp_path / "a", "val")) == 5 and not (tmp_path / "a" / "train.jsonl").exists()


def test_answers_are_given_to_the_scorer_as_json_will_hold_them(tmp_path, library):
    """What does not come through as it was is left out, counted, and made up for."""
    made = run(tmp_path / "a", "odd", "several")
    found = rows(tmp_path / "a", "train") + rows(tmp_path / "a", "val")
    assert len(found) == 50
    odd = [json.loads(row["entry"]) for row in found if row["task"] == "odd"]
    assert all("key" in entry["metadata"]["by"] for entry in odd)
    assert sum(made["tasks"]["odd"]["left_out"].values()) > 2 and not made["tasks"]["several"]["left_out"]
    assert any(notice.startswith("odd: ") and "left out: " in notice for notice in made["notices"])
    several = next(row for row in found if row["task"] == "several")
    assert several["answer"] == several["completion"][0]["content"] == " it "
    assert json.loads(several["entry"])["answer"] is None
    assert made["versions"]["reasoning-gym"] == "reasoning-gym stand-in"


def test_what_json_cannot_hold():
    class Array:
        def tolist(self):
            return [1, (2, 3)]

    letters = "hgfedcba"
    value = {1: set(letters), ("x",): Array(), "s": "t", "n": [None, True, 1.5], "c": 2j}
    assert plain(value) == {"1": sorted(letters), "('x',)": [1, [2, 3]], "s": "t", "n": [None, True, 1.5], "c": "2j"}


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["smus"], "smus: reasoning-gym has no data set 'smus' (did you mean 'sums'?)"),
        (["writen_sum"], "has no data set 'writen_sum' (did you mean 'written_sum'?)"),
        (["sums:max_numbr=3"], "sums has no setting 'max_numbr' (did you mean 'max_number'?)"),
        (["sums:seed=3"], "sums has no setting 'seed'; there are letters, max_number"),
        (["sums:max_number=0"], "sums refuses its settings: max_number must be positive"),
        (["sums:max_number=many"], "sums refuses its settings: '>' not supported"),
        (["written_sum:max_trems=3"], "written_sum has no setting 'max_trems' (did you mean 'max_terms'?)"),
        (["silent"], "silent: problems of silent come without an answer to learn from"),
        (["sums:max_number"], "'max_number' is no setting; write SETTING=VALUE"),
        (["sums:max_number=3,max_number=4"], "max_number is given twice"),
        (["sums:letters=[a"], "the value of letters is no YAML"),
        (["sums,max_number=3"], "is no spec"),
        (["easy="], "'easy=' is no spec"),
        (["a=sums", "a=written_sum"], "two specs have the label 'a'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_spec_is_named(tmp_path, library, capsys, specs, message):
    run(tmp_path / "a", *specs, status=2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_data_set_that_fails_or_gives_nothing_is_named(tmp_path, library, capsys, monkeypatch):
    run(tmp_path / "a", "failing", status=1)
    assert "failing fails at its problem 3: IndexError: none left" in capsys.readouterr().err
    drawn = []
    for_each = DataSet.__iter__
    monkeypatch.setattr(DataSet, "__iter__", lambda self: (drawn.append(entry) or entry for entry in for_each(self)))
    run(tmp_path / "a", "wrong:max_number=99", train=1000, status=1)
    assert "0 different problems where 1005 were asked for; 50 left out: " in capsys.readouterr().err
    assert len(drawn) < 100, "a slow data set would be drawn to its end for nothing"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num-train", "-1"], "--num-train is -1"),
        (["--num-train", "0", "--num-val", "0"], "are both 0"),
        (["--out", "{folder}"], "exists; --overwrite replaces a folder that this command made"),
        (["--out", "{folder}", "--overwrite"], "exists"),
    ],
)
def test_wrong_options(tmp_path, capsys, more, message):
    more = [word.format(folder=tmp_path) for word in more]
    assert cli.main(["data", "problems", "written_sum", "--out", str(tmp_path / "a"), *more]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_is_replaced_on_request(tmp_path):
    run(tmp_path / "a", "written_sum")
    run(tmp_path / "a", "written_sum", train=3, more=["--overwrite"])
    assert len(rows(tmp_path / "a", "train")) == 3


def test_without_the_library_its_problems_are_refused_and_ours_are_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    run(tmp_path / "a", "chain_sum", status=2)
    assert "chain_sum: reasoning-gym is not installed" in capsys.readouterr().err
    run(tmp_path / "a", "written_sum")


def test_the_library_itself(tmp_path):
    """Data sets with and without one answer, and one whose answers do not come through JSON."""
    pytest.importorskip("reasoning_gym")
    made = run(tmp_path / "a", "chain_sum:max_terms=2,max_digits=1", "propositional_logic", "syllogism")
    assert all(task["all"]["rows"] == 25 for task in made["tasks"].values())
    assert 0.5 < made["tasks"]["syllogism"]["all"]["majority_share"] < 1
    with pytest.raises(UsageError, match=r"did you mean 'chain_sum'"):
        problems.make(parse(["chain_sums"]), problems.Options({"train": 1, "val": 1}))
    run(tmp_path / "b", "arc_agi", train=1, val=1, status=1)
