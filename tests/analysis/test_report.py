import json
from html.parser import HTMLParser

import pytest

from tests import texts
from tests.analysis.conftest import write_run
from unspoken import cli
from unspoken.analysis.report import curves, gap, run_report
from unspoken.analysis.runs import read_run
from unspoken.errors import UnspokenError

VOID = {"meta", "path", "use", "br", "rect", "line"}


class Balance(HTMLParser):
    """Collects tags, and complains about one that is closed out of turn."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_a_page_is_whole_and_fetches_nothing(run_folder, tmp_path):
    html = run_report([run_folder, write_run(tmp_path / "plain", "vanilla")], title="Two runs")
    page = Balance(html)
    assert not page.open and page.tags >= {"svg", "table", "details", "style"}
    assert "script" not in page.tags and "link" not in page.tags and "@import" not in html
    assert all(link.startswith("#") for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    assert "#010203" not in html and "currentColor" in html
    for text in ("Two runs", "causality", "pass", "FAIL", "3,000", "4.9000", "exact", "6 N D"):
        assert text in html


def test_every_text_is_escaped(tmp_path):
    folder = write_run(tmp_path / "a <b>& 'c'", from_pretrained='<img src="x">')
    html = run_report([folder], title="<title>")
    assert "<script>alert" not in html and "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<i>Once" not in html and "ValueError: &lt;b&gt;" in html
    assert "&lt;img src=" in html and '<img src="x">' not in html
    assert "<b>&" not in html and "&lt;title&gt;" in html
    Balance(html)


@pytest.mark.parametrize("name", ["resolved.yaml", "summary.json", "metrics.jsonl", "eval.json"])
def test_a_missing_file_is_named_and_the_rest_is_shown(run_folder, name):
    (run_folder / name).unlink()
    html = run_report([run_folder])
    assert f"{run_folder / name} is not there" in html and "causality" in html


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("summary.json", "{", "Expecting property name"),
        ("summary.json", "[1]", "a mapping is expected, not list"),
        ("eval.json", "{}", "it has no 'results'"),
        ("resolved.yaml", "a: [", "while parsing"),
        ("metrics.jsonl", "x\n{}\n", "metrics.jsonl:1: not JSON"),
    ],
)
def test_a_damaged_file_is_named_and_the_rest_is_shown(run_folder, name, text, reason):
    (run_folder / name).write_text(text)
    missing = read_run(run_folder).missing
    assert len(missing) == 1 and str(run_folder / name) in missing[0] and reason in missing[0]
    assert "cannot be read" in run_report([run_folder])


def test_a_folder_with_nothing_says_so(tmp_path):
    html = run_report([tmp_path])
    assert "No run has a summary.json." in html and "No run has an evaluation" in html and "not there" in html
    with pytest.raises(UnspokenError, match="no such run folder"):
        run_report([tmp_path / "none"])


def test_a_diverged_model_is_shown_as_such(run_folder):
    evaluation = json.loads((run_folder / "eval.json").read_text())
    evaluation["results"]["exact"].update(loss=None, bits_per_byte=None)
    evaluation["depth_curve"].update(losses=[5.0, None, None], drift=None)
    (run_folder / "eval.json").write_text(json.dumps(evaluation))
    assert run_report([run_folder]).count("not finite") == 3


def test_curves_show_what_was_logged(run_folder, tmp_path):
    run, plain = read_run(run_folder), read_run(write_run(tmp_path / "plain", "vanilla"))
    assert run.curve(2) == ([0, 1000, 2000, 3000], pytest.approx([7.8, 6.8, 5.8, 4.8]))
    assert run.num_passes == 2 and plain.num_passes == 1
    assert run.flops_per_token == 2 * plain.flops_per_token
    assert [svg.count("<svg") for svg, _ in curves([run, plain])] == [1, 1]
    assert "run, pass 2" in curves([run])[0][0] and "plain, pass" not in curves([plain])[0][0]
    assert "pass 2" in (gap(run, plain) or "")
    assert gap(run, plain, kind="train") is None
    for one in (run, plain):
        one.metrics.extend({"kind": "train", "tokens": tokens, "loss_pass_1": 1.0} for tokens in (7, 8))
    assert "pass 1" in (gap(run, plain, kind="train") or "")


def test_a_page_shows_where_models_think(tmp_path, monkeypatch, capsys):
    """Two runs, one of which takes latent steps, and a text."""
    monkeypatch.chdir(tmp_path)
    tokenizer = texts.chat_tokenizer()
    for name, method in (("thinks", "adaptive"), ("plain", "vanilla")):
        write_run(tmp_path / name, method)
        texts.text_model(method).save_pretrained(tmp_path / name / "model")
        tokenizer.save_pretrained(tmp_path / name / "model")
    (tmp_path / "text.txt").write_text("The cat sat on the mat.")
    assert cli.main(["report", "thinks", "plain", "--text", "text.txt", "--title", "Both"]) == 0
    assert "report.html: 2 runs" in capsys.readouterr().out
    html = (tmp_path / "report.html").read_text()
    assert not Balance(html).open and "Depth of thinks" in html and "Depth of plain" not in html
    assert "latent steps a token, of" in html and "Both" in html


def test_losses_of_several_thresholds_stand_in_one_table(run_folder):
    found = json.loads((run_folder / "eval.json").read_text())
    found["results"] |= {f"{name} tau=0.1": loss for name, loss in found["results"].items()}
    (run_folder / "eval.json").write_text(json.dumps(found))
    html = run_report([run_folder])
    places = [html.index(f">{name}<") for name in ("k=1", "k=2", "exact", "k=1 tau=0.1", "exact tau=0.1")]
    assert places == sorted(places)


def test_a_run_of_another_version_is_named(tmp_path):
    folder = write_run(tmp_path / "old")
    text = (folder / "resolved.yaml").read_text()
    (folder / "resolved.yaml").write_text(text + "made_with: {unspoken: 0.0.1}\n")
    assert "was made with unspoken 0.0.1" in run_report([folder])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "no such run folder: "),
        (["run", "--max-tokens", "0"], "--max-tokens is 0"),
        (["empty"], "holds nothing of a run"),
        (["run", "other/run"], "two of the runs are named run"),
        (["run", "--text", "none.txt"], "--text: cannot read none.txt"),
        (["run", "--out", "no/such/report.html"], "--out"),
    ],
)
def test_what_cannot_be_reported_is_named(run_folder, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "other" / "run")
    assert cli.main(["report", *words]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
