"""Study files: every mistake is one line that names the place and the nearest valid word; what ships is valid."""

from pathlib import Path

import pytest

from unspoken import cli
from unspoken.errors import UsageError
from unspoken.paper.arms import Arms
from unspoken.paper.study import known_studies, load_study, parse_comparison


def test_a_study_is_read(values, write_study):
    study = write_study({**values, "baseline": "plain"})
    assert study.name == "claim" and study.file.seeds == (0, 1)
    equal_tokens, feedback, *against = study.comparisons
    assert str(equal_tokens) == "recycler - plain" and equal_tokens.name == "equal tokens"
    assert (feedback.minus.arm, feedback.minus.loss, feedback.of.loss) == ("recycler", "k=1", None)
    assert [str(one) for one in against] == ["plain-2x - plain", "recycler - plain", "later - plain"]
    assert study.file.ancestors("later") == ["plain"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quesion": "?"}, r"study.yaml:\d+: quesion: unknown key \(did you mean 'question'\?\)"),
        ({"eval": {"dept": 4}}, r"study.yaml:\d+: eval.dept: unknown key \(did you mean 'depth'\?\)"),
        ({"text": {"corpora": ["core"]}}, "text.corpora: unknown key; there are: corpus, tokenizer"),
        ({"arms": {}}, "arms: "),
        ({"seeds": [-1]}, r"seeds.0: expected greater than or equal to 0, got -1"),
        ({"seeds": ["one"]}, "seeds.0: "),
        ({"baseline": "plian"}, r"there is no arm 'plian' \(did you mean 'plain'\?\)"),
        ({"compare": {"x": "recycler - qqq"}}, "there is no arm 'qqq'; there are: plain, plain-2x, recycler, later"),
        ({"compare": {"x": "recycler"}}, "a comparison is `ARM - ARM`"),
        ({"compare": {"x": "recycler k=0 - plain"}}, "a comparison is `ARM - ARM`"),
        ({"plots": ["dept"]}, "plots.0: "),
        ({"arms": {"Two Passes": {}}}, "a name is of small letters"),
        ({"arms": {"a": {"after": "b"}, "b": {"after": "a"}}, "compare": {}}, "it would go on from itself"),
        ({"arms": {"a": {"after": "c"}}, "compare": {}}, "there is no arm 'c'"),
        ({"title": None}, "title: "),
    ],
)  # fmt: skip
def test_a_mistake_is_named(values, write_study, change, message):
    with pytest.raises(UsageError, match=message):
        write_study({**values, **change})


def test_a_missing_key_and_a_key_given_twice(values, write_study, tmp_path):
    del values["question"]
    with pytest.raises(UsageError, match="question: required, but not given"):
        write_study(values)
    path = tmp_path / "claim" / "study.yaml"
    path.write_text("title: a\ntitle: b\n")
    with pytest.raises(UsageError, match=r"study.yaml:2: title is given twice"):
        load_study(str(path.parent))
    path.write_text("a: [")
    with pytest.raises(UsageError, match="not valid YAML"):
        load_study(str(path))


def test_losses_of_a_comparison():
    found = parse_comparison("", "plain-2x exact - recycler k=12")
    assert (found.of.arm, found.of.loss, found.minus.loss) == ("plain-2x", "exact", "k=12")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recycler-clam"], "(did you mean 'recycler-claim'?)"),
        (["qqqqq"], "there are: "),
        ([], "give the name of a study, or --list"),
        (["recycler-claim", "--arms", "plane"], "has no arm 'plane' (did you mean 'plain'?)"),
        (["recycler-claim", "--jobs", "0"], "--jobs is 0"),
        (["recycler-claim", "--seeds", "-1"], "--seeds"),
        (["recycler-claim", "--optim.learning_rat", "1"], "(did you mean 'learning_rate'?) (in arm 'plain')"),
        (["recycler-claim", "--train.batch_size", "x"], "batch_size"),
        (["recycler-claim", "--quick", "--train.batch_size", "2"], "--train.batch_size: --quick says it itself"),
        (["recycler-claim", "--train.total_tokens", "abc"], "total_tokens"),
        (["recycler-claim", "--outt", "x"], "outt: unknown key"),
    ],
)  # fmt: skip
def test_wrong_usage_ends_before_anything_is_written(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(["paper", *words])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2 and message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_studies_are_listed(capsys):
    assert cli.main(["paper", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(known_studies()) and any(line.startswith("recycler-claim ") for line in lines)


@pytest.mark.parametrize("is_quick", [False, True], ids=["full", "quick"])
@pytest.mark.parametrize("name", known_studies())
def test_every_shipped_study_makes_valid_recipes(name, is_quick):
    study = load_study(name)
    arms = Arms(study, Path("out"), is_quick=is_quick)
    runs = arms.runs(list(study.file.arms), study.file.seeds)
    names = [run.name for run in runs]
    assert len(set(names)) == len(names) == len(arms.budgets) * len(study.file.seeds) * len(study.file.arms)
    assert all(run.after is None or run.after in names[: names.index(run.name)] for run in runs)
    assert study.comparisons and all(run.total_tokens < 50_000 for run in runs if is_quick)
