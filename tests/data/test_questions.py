"""Questions made of text, and problems: that each has the answer it says, and that lm-eval can read the folder."""

import json
import re

import pytest
import yaml

from tests import texts
from unspoken import cli
from unspoken.data import questions, reasoning
from unspoken.data.prose import passages
from unspoken.data.questions import WORD, KnownWords

TEXT = """The captain
******

The old captain had kept a parrot for as long as anyone in the harbour town could remember, and he fed it every morning.
People asked him what the bird was called, but he never told a soul about it. One winter a stranger came to the inn and
offered him a purse of gold for the bird. He laughed and said that no money would ever buy him another parrot. The man
went away. The next day they saw him on the quay, and beside him, in a cage under a black cloth, sat another man's
parrot.

    parrot = captain.buy()

Prose may go on after the code of a program, and here it does so for a sentence or two, without a parrot.
"""


def test_prose_is_told_from_code_and_headings():
    found = list(passages(TEXT))
    assert [len(stretch) for stretch in found] == [6, 1]
    assert found[0][0].startswith("The old captain") and found[0][-1].endswith("parrot.")
    assert not any("=" in sentence or "\n" in sentence for stretch in found for sentence in stretch)


def test_a_cloze_question_needs_its_passage():
    """The last word stands in an earlier sentence and not in its own; two ways of guessing it are closed."""
    nothing = KnownWords.of([])

    def ends(known):
        return [row["text"].split(" ")[-2:] for row in questions.cloze([TEXT], known, 10, 0)]

    assert ends(nothing) == [["the", "bird"], ["another", "parrot"], ["man's", "parrot"]]
    assert ends(KnownWords(frozenset({"parrot"}), nothing.pairs)) == [["the", "bird"]]
    neighbours = KnownWords(frozenset(), KnownWords.of(["Another parrot; that of a man's parrot."]).pairs)
    assert ends(neighbours) == [["the", "bird"]]
    assert len(questions.cloze([TEXT], neighbours, 10, 0, are_known=True)) == 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    data = texts.write_data(tmp_path_factory.mktemp("questions") / "data")
    out = data.parent / "made"
    assert cli.main(["data", "questions", str(data), "--out", str(out), "--num", "30"]) == 0
    return out


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_rows_of_real_text(folder):
    data = folder.parent / "data"
    held_out = {split: questions.documents(data, split) for split in ("train", "val", "test")}
    flat = {split: " ".join(" ".join(texts).split()) for split, texts in held_out.items()}
    asked = flat["val"] + flat["test"]
    pairs = KnownWords.of(held_out["train"]).pairs
    for row in rows_of(folder, "cloze"):
        assert row["text"] in asked and row["text"] not in flat["train"]
        *before, previous, answer = (word.lower() for word in WORD.findall(row["text"]))
        assert answer in before and pairs[previous, answer] == 0
    choices = rows_of(folder, "choice")
    assert len(choices) == 30 and len({row["label"] for row in choices}) == 4
    for row in choices:
        right = row["choices"][row["label"]]
        assert len(set(row["choices"])) == 4
        for choice in row["choices"]:
            assert (f"{row['context']} {choice}" in asked) == (choice == right)
    assert all(row["text"] in "".join(held_out["val"] + held_out["test"]) for row in rows_of(folder, "text"))
    examples = rows_of(folder, "choice.examples")
    assert len(examples) == 20 and all(row["context"] in flat["train"] for row in examples)


def test_the_folder_says_where_it_came_from_and_is_made_again_equal(folder, tmp_path):
    made = json.loads((folder / "questions.json").read_text())
    assert made["data"]["fingerprint"] and made["options"] == {"num": 30, "seed": 0, "reasoning": None}
    data = str(folder.parent / "data")
    again, other = tmp_path / "again", tmp_path / "other"
    assert cli.main(["data", "questions", data, "--out", str(again), "--num", "30"]) == 0
    assert cli.main(["data", "questions", data, "--out", str(other), "--num", "30", "--seed", "1"]) == 0
    assert rows_of(folder, "choice") == rows_of(again, "choice") != rows_of(other, "choice")
    for name, count in made["questions"].items():
        file = name.removeprefix("local-")
        assert len(rows_of(folder, file)) == count > 0
        assert yaml.safe_load((again / f"{file}.yaml").read_text())["dataset_kwargs"]["data_files"]["test"].startswith(
            str(again)
        )


def test_the_problems_that_are_shipped_have_their_answers():
    problems = reasoning.shipped_problems()
    assert {name: len(rows) for name, rows in problems.items()} == dict.fromkeys(reasoning.NAMES, reasoning.NUM_SHIPPED)
    for row in problems["chain_sum"]:
        terms = re.fullmatch(r".*: ([-+ \d]+) =", row["question"]).group(1)
        assert sum(int(term.replace(" ", "")) for term in re.findall(r"[-+]? ?\d+", terms)) == int(row["answer"])
    for row in problems["letter_counting"]:
        letter, text = re.search(r'letter "(.)" appear in the text: "(.*)"', row["question"]).groups()
        assert text.lower().count(letter) == int(row["answer"])
    for row in problems["spell_backward"]:
        assert row["question"].rsplit(" ", 1)[1] == row["answer"][::-1]


def test_the_problems_that_are_shipped_are_those_of_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    assert reasoning.fresh_problems(reasoning.NAMES, reasoning.NUM_SHIPPED, 0) == reasoning.shipped_problems()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num", "0"], "--num is 0"),
        (["--out", "{data}"], "exists; --overwrite replaces a folder that this command made"),
        (["--out", "{data}", "--overwrite"], "exists"),
        (["--reasoning", "chain_sum"], "pip install reasoning-gym"),
    ],
)
def test_wrong_options(folder, tmp_path, capsys, monkeypatch, more, message):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    data = str(folder.parent / "data")
    more = [word.format(data=data) for word in more]
    assert cli.main(["data", "questions", data, "--out", str(tmp_path / "new"), *more]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
