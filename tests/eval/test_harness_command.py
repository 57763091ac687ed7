"""`unspoken eval --tasks` on local tasks, from the command line to its files."""

import json
import shlex
import sys

import pytest
from lm_eval.tasks import TaskManager

from tests import texts
from unspoken import cli
from unspoken.errors import UsageError
from unspoken.eval import harness_report, harness_tasks, lm_eval
from unspoken.eval.suites import Row, Suite

ROOMY = {"max_position_embeddings": 2048}


@pytest.fixture(scope="module")
def questions(tmp_path_factory, data_folder):
    out = tmp_path_factory.mktemp("questions") / "made"
    assert cli.main(["data", "questions", str(data_folder), "--out", str(out), "--num", "12"]) == 0
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory, shards):
    home, tokenizer = tmp_path_factory.mktemp("models"), shards.load_tokenizer()
    return {
        method: texts.save(home / method, texts.text_model(method, text=ROOMY), tokenizer)
        for method in ("recycler", "adaptive", "vanilla")
    }


def run(folder, questions, tasks, *more, out=None):
    command = ["eval", str(folder), "--tasks", tasks, "--include-path", str(questions), "--device", "cpu", *more]
    status = cli.main([*command, "--out", str(out)] if out else command)
    results = (out or folder) / "eval_tasks.json"
    return status, json.loads(results.read_text()) if status == 0 else None


def test_all_local_tasks(folders, questions, tmp_path, capsys):
    """Cloze, choice, whole texts and problems, as a group; every line tells its depth, as do the files."""
    status, report = run(folders["recycler"], questions, "local", "--limit", "3", "--log-samples", out=tmp_path)
    assert status == 0
    out = capsys.readouterr().out
    depths = {score["task"]: score["depth"] for score in report["results"]}
    generated = [f"local-{name}" for name in ("chain_sum", "letter_counting", "spell_backward")]
    scored = ["local-cloze", "local-choice", "local-text"]
    assert depths == dict.fromkeys(scored, "k=2") | dict.fromkeys(generated, "k=2, then exact")
    assert [line.split()[-1] for line in out.splitlines() if line.strip().startswith("local-text")] == ["k=2"] * 3
    assert "3/12" in out and f"written: {tmp_path / 'eval_tasks.json'}" in out
    assert report["depth"] == {"num_passes": 2, "scoring": "k=2", "generating": "k=2, then exact", "knobs": None}
    assert {row["metric"] for row in report["rows"]} >= {"perplexity,none", "acc_norm,none", "exact_match,none"}
    assert report["versions"]["lm_eval"] == "0.4.13" and report["model"]["weights_sha256"] and report["limit"] == 3
    for score in report["results"]:
        assert 0 < score["num_scored"] <= 3 and score["shots"] == 0
        rows = (tmp_path / f"eval_samples_{score['task']}_0.jsonl").read_text().splitlines()
        assert len(rows) == score["num_scored"] and json.loads(rows[0])["doc"]


def test_the_reported_command_gives_the_reported_numbers(folders, questions, tmp_path):
    """B105; and another depth, asked for by one option, gives others."""
    out = tmp_path / "a folder"
    _, report = run(folders["recycler"], questions, "local-cloze,local-choice", "--limit", "2", out=out)
    again = shlex.split(report["command"])
    assert again[0] == "unspoken" and "--num-passes 2" in report["command"]
    (out / "eval_tasks.json").unlink()
    assert cli.main(again[1:]) == 0
    repeated = json.loads((out / "eval_tasks.json").read_text())
    assert repeated["rows"] == report["rows"] and repeated["command"] == report["command"]
    _, exact = run(folders["recycler"], questions, "local-cloze", "--limit", "2", "--num-passes", "exact", out=out)
    assert exact["results"][0]["depth"] == "exact"
    assert exact["results"][0]["metrics"] != report["results"][0]["metrics"]


def test_latent_steps_are_knobs_of_the_run(folders, questions, tmp_path, capsys):
    knobs = [[], ["--exit-threshold", "0.4"], ["--exit-at-step", "3"]]
    reports = [run(folders["adaptive"], questions, "local-text", "--limit", "2", *k, out=tmp_path)[1] for k in knobs]
    metrics = [report["results"][0]["metrics"]["bits_per_byte,none"] for report in reports]
    assert len(set(metrics)) == 3
    assert [report["depth"]["knobs"]["exit_threshold"] for report in reports][:2] == [0.15, 0.4]
    assert reports[2]["depth"]["knobs"]["exit_at_step"] == 3
    assert "exit_threshold 0.4" in capsys.readouterr().out


def test_examples_stand_in_front(folders, questions, tmp_path):
    options = ["--limit", "2", "--num-fewshot", "2", "--log-samples"]
    status, report = run(folders["vanilla"], questions, "local-choice", *options, out=tmp_path)
    assert status == 0 and report["results"][0]["shots"] == 2 and report["results"][0]["depth"] == "exact"
    sample = json.loads((tmp_path / "eval_samples_local-choice_2.jsonl").read_text().splitlines()[0])
    examples = [json.loads(line) for line in (questions / "choice.examples.jsonl").read_text().splitlines()]
    *shown, asked = sample["arguments"][0][0].split("\n\n")
    assert asked == sample["doc"]["context"] and len(shown) == 2
    assert set(shown) < {f"{row['context']} {row['choices'][row['label']]}" for row in examples}


def test_texts_that_are_cut_are_counted(tmp_path, shards, questions, capsys):
    """lm-eval drops the examples, and then the question's beginning, with a line in the log for each."""
    folder = texts.save(tmp_path / "model", texts.text_model("vanilla"), shards.load_tokenizer())
    options = ["--limit", "2", "--num-fewshot", "3", "--max-new-tokens", "8"]
    status, report = run(folder, questions, "local-cloze,local-chain_sum", *options, out=tmp_path)
    assert status == 0
    assert report["texts_cut"] == {"local-cloze with 3 examples": 2, "local-chain_sum with 3 examples": 2}
    assert "2 texts lost their beginning, to fit into the model's context of 128 tokens" in capsys.readouterr().out
    _, whole = run(folder, questions, "local-chain_sum", "--limit", "2", "--max-new-tokens", "8", out=tmp_path)
    assert whole["texts_cut"] == {}


def test_a_suite_of_rows_with_shots_and_one_that_is_missing(folders, questions, tmp_path, monkeypatch, capsys):
    rows = (
        Row("Words", "local-cloze", "acc", (0, 1)),
        Row("perplexity of words", "local-cloze", "perplexity", (0,)),
        Row("Sums", "local-chain_sum", "exact_match,none"),
        Row("Judged", missing="another model would have to judge"),
    )
    suite = {"paper-x": Suite("paper-x", "a paper", rows)}
    for module in (harness_tasks, harness_report):
        monkeypatch.setattr(module, "suites", lambda: suite)
    status, report = run(folders["vanilla"], questions, "paper-x", "--limit", "2", out=tmp_path)
    assert status == 0
    found = [(row["row"], row["shots"], row["metric"]) for row in report["rows"]]
    assert found == [
        ("Words", 0, "acc,none"),
        ("Words", 1, "acc,none"),
        ("perplexity of words", 0, "perplexity,none"),
        ("Sums", 0, "exact_match,none"),
    ]
    assert report["missing"] == [{"row": "Judged", "reason": "another model would have to judge"}]
    assert "not measured: Judged: another model" in capsys.readouterr().out


def test_a_task_whose_data_cannot_be_had_is_named(folders, questions, tmp_path, capsys):
    """And the others are offered, before anything is scored."""
    task_file = (questions / "text.yaml").read_text().replace("local-text", "gone-text")
    (tmp_path / "gone.yaml").write_text(task_file.replace("text.jsonl", "gone.jsonl"))
    (tmp_path / "choice.yaml").write_text((questions / "choice.yaml").read_text())
    assert run(folders["vanilla"], tmp_path, "gone-text,local-choice", out=tmp_path) == (1, None)
    error = capsys.readouterr().err
    assert "1 of 2 tasks could not be loaded:\n  gone-text: FileNotFoundError" in error
    assert "without them: --tasks local-choice" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("tasks", "more", "message"),
    [
        (",", [], "--tasks: give names"),
        ("local-text", ["--data", "x"], "--tasks and --data are two evaluations"),
        ("local-text", ["--split", "val"], "--split is for --data FOLDER"),
        ("local-text", ["--samples", "3"], "--samples is for the task that a model was trained on"),
        ("local-text", ["--no-exact"], "--no-exact is for evaluations without --tasks"),
        ("local-text", ["--num-passes", "0"], "--num-passes is 0"),
        ("local-text", ["--exit-threshold", "0.1"], "takes no latent steps"),
        ("local-text", ["--exit-threshold", "0.1", "--exit-threshold", "0.2"], "with --tasks it is one"),
        ("local-text", ["--limit", "1.5"], "--limit is 1.5"),
        ("local-text", ["--limit", "0"], "--limit is 0.0"),
        ("local-text", ["--num-fewshot", "-1"], "--num-fewshot is -1; it must be at least 0"),
        ("local-text", ["--num-fewshot", "2"], "local-text scores whole texts"),
        ("local-text", ["--max-new-tokens", "5"], "none of the tasks generates"),
        ("local-chain_sum", ["--max-new-tokens", "0"], "--max-new-tokens is 0; it must be at least 1"),
        ("local-chain_sum", ["--max-new-tokens", "2048"], "local-chain_sum generates up to 2048 tokens"),
        ("local-text", ["--confirm-run-unsafe-code"], "none of the tasks runs code"),
        ("local-text", ["--chat"], "has no chat template"),
        ("local-text", ["--batch-size", "auto"], "give a number"),
        ("local-text", ["--batch-size", "0"], "--batch-size is 0"),
        ("local-text", ["--include-path", "nowhere"], "no such folder: nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_options_exit_with_2(folders, questions, capsys, tasks, more, message):
    assert run(folders["recycler"], questions, tasks, *more) == (2, None)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--limit", "3"], "--limit is for --tasks NAMES"),
        (["--chat"], "--chat is for --tasks NAMES"),
        (["--num-passes", "exact"], "--num-passes exact is for --tasks NAMES; here it is a number"),
        (["--batch-size", "auto"], "--batch-size auto is for --tasks NAMES"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_of_tasks_are_refused_elsewhere(folders, data_folder, capsys, more, message):
    assert cli.main(["eval", str(folders["recycler"]), "--data", str(data_folder), *more]) == 2
    assert message in capsys.readouterr().err


def test_code_that_a_model_writes_is_not_run_unasked(folders, questions, tmp_path, capsys):
    task_file = (questions / "chain_sum.yaml").read_text().replace("local-chain_sum", "coding") + "unsafe_code: true\n"
    (tmp_path / "coding.yaml").write_text(task_file)
    assert run(folders["vanilla"], tmp_path, "coding", out=tmp_path) == (2, None)
    assert "coding: the program that the model writes" in capsys.readouterr().err
    allowed = ["--confirm-run-unsafe-code", "--limit", "1"]
    assert run(folders["vanilla"], tmp_path, "coding", *allowed, out=tmp_path)[0] == 0


def test_without_lm_eval_the_command_says_what_to_install(folders, questions, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval" or "eval.harness" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert run(folders["recycler"], questions, "local-text") == (2, None)
    assert "run `pip install 'unspoken[eval]'`" in capsys.readouterr().err


def test_lm_evals_own_command_tells_our_errors(monkeypatch, capsys):
    def fail():
        raise UsageError("num_pases")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", fail)
    assert lm_eval.main() == 2 and capsys.readouterr().err == "unspoken: error: num_pases\n"
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: None)
    assert lm_eval.main() == 0
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert lm_eval.main() == 2 and "unspoken[eval]" in capsys.readouterr().err


def test_a_model_must_be_given(capsys):
    with pytest.raises(SystemExit):
        cli.main(["eval", "--tasks", "local-text"])
    assert "give a model folder" in capsys.readouterr().err


def test_lm_eval_reads_the_folder_by_itself(questions):
    manager = TaskManager(include_path=str(questions), include_defaults=False)
    loaded = manager.load(["local"])
    assert list(loaded["tasks"]) == manager.load("local")["groups"]["local"].child_names
    assert {task.OUTPUT_TYPE for task in loaded["tasks"].values()} == {
        "loglikelihood",
        "multiple_choice",
        "loglikelihood_rolling",
        "generate_until",
    }
