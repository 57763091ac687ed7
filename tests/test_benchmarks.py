"""The benchmarks with tiny models: no report where the arms disagree, and a table that says what was recorded."""

import json
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import (
    decode,
    gpu,
    gpu_checks,
    isolated,
    latent_work,
    loop_overhead,
    loss_memory,
    pass_memory,
    run,
    table,
    throughput,
    train_step,
)
from benchmarks.arms import Arms, shared_arms
from benchmarks.ceiling import counted_flops
from benchmarks.measure import RedCheckError, check, interleave, ratio
from benchmarks.record import RESULTS, Result, Row, Spread, Target, environment
from unspoken.data.prepare import PrepareOptions, prepare
from unspoken.models import latent_lm

SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip
full = loss_memory.FUNCTIONS["full logits"]
DECODE = {"prompt_tokens": 5, "new_tokens": 4, "rounds": 2, "warmup_rounds": 0}
ROUNDS = {"rounds": 1, "warmup_rounds": 0}


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch):
    for module in (decode, train_step, loss_memory, latent_work):
        monkeypatch.setattr(module, "matmul_flops_per_second", lambda dtype: 1e9)
    for module in (decode, latent_work):
        monkeypatch.setattr(module, "read_bytes_per_second", lambda: 1e9)


def arms(adapter: float = 0.0) -> Arms:
    """Arms over one tiny model; they agree while the adapter is zero."""
    torch.manual_seed(0)
    made = shared_arms(LlamaForCausalLM(LlamaConfig(vocab_size=50, eos_token_id=None, **SMALL)).eval())
    torch.nn.init.constant_(made.recycler.model.adapter.proj.weight, adapter)
    return made


def example() -> Result:
    rows = [
        Row({"dtype": "fp32", "batch": 1}, "plain", "tokens per CPU-second", Spread(10.0, 9.5, 10.5, 5), ceiling=20.0),
        Row(
            {"dtype": "fp32", "batch": 1}, "recycler", "tokens per CPU-second", Spread(9.9, 9.4, 10.4, 5),
            "plain", Spread(0.99, 0.98, 1.0, 5), Target(at_least=0.97), 20.0,
        ),
        Row(
            {"k": 2}, "chunked", "CPU-seconds", Spread(1234.5, 1234.5, 1234.5, 1),
            "full", Spread(1.5, 1.4, 1.6, 5), Target(at_most=1.0), 617.25,
        ),
    ]  # fmt: skip
    return Result("decode", "How fast?", "Method.", "what is", {"rounds": 5}, ["same tokens"], rows, environment(0.5))


def test_the_table_says_what_was_recorded():
    lines = table.section(example()).splitlines()
    assert "| dtype | batch | arm | tokens per CPU-second | ratio to plain | target | ceiling |" in lines
    assert "| fp32 | 1 | plain | 10.0 [9.500, 10.5] |  |  | 20.0 (50%) |" in lines
    assert "| fp32 | 1 | recycler | 9.900 [9.400, 10.4] | 0.990 [0.980, 1.000] | >= 0.97: met | 20.0 (50%) |" in lines
    # Another kind of case is another table; seconds come near their ceiling from above; a miss is loud.
    assert "| 2 | chunked | 1,234 | 1.500 [1.400, 1.600] | <= 1.0: MISSED | 617 (50%) |" in lines
    assert "Held: same tokens." in lines


def test_the_table_has_no_empty_columns():
    result = example()
    result.rows = [Row({"k": 2}, "segmented", "MiB added by a step", Spread.of([2.0]))]
    assert "| k | arm | MiB added by a step |\n| --- | --- | --- |\n| 2 | segmented | 2.000 |" in table.section(result)


def test_what_failed_or_was_skipped_is_said_and_that_no_gpu_has_run():
    result = example()
    result.failed, result.skipped = ["decode 135M: no"], ["train 1.4B: does not fit"]
    text = table.render([result])
    assert "**FAILED**:\n\n- decode 135M: no\n" in text and "Skipped:\n\n- train 1.4B: does not fit\n" in text
    assert "has not run on a GPU yet" in text
    result.name = "gpu"
    assert "has not run on a GPU yet" not in table.render([result])


def test_a_record_is_whole_and_reads_back(tmp_path):
    result = example()
    path = result.save(tmp_path)
    assert Result.load(path) == result
    recorded = json.loads(path.read_text())["environment"]
    assert {"commit", "command", "cpu", "cores", "threads_used", "load_average", "torch", "transformers"} <= set(
        recorded
    )


def test_the_readme_is_the_one_that_the_records_make():
    records = sorted(RESULTS.glob("*.json"))
    assert {path.stem for path in records} <= {*run.NAMES, "gpu"}
    assert table.README.read_text() == table.render(map(Result.load, records))


def test_a_round_begins_with_the_next_arm_and_ratios_are_within_rounds():
    calls: list[str] = []

    def arm(name: str, values: list[float]):
        return lambda: calls.append(name) or {"seconds": values.pop(0)}

    rounds = interleave({"a": arm("a", [1, 2, 8]), "b": arm("b", [1, 6, 16])}, repeats=2, warmup=1)
    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert rounds == {"a": {"seconds": [2, 8]}, "b": {"seconds": [6, 16]}}
    assert ratio(rounds, "b", "a", "seconds") == Spread(2.5, 2.25, 2.75, 2)


def test_decode_reports_equal_arms_and_refuses_others():
    checks: list[str] = []
    rows = decode.measure(arms(), torch.float32, 2, DECODE, checks)
    assert [row.arm for row in rows] == ["plain", "recycler k_prefill=1", "recycler k_prefill=2"] * 2
    assert all(row.value.median > 0 and row.value.repeats == 2 for row in rows) and len(checks) == 2
    with pytest.raises(RedCheckError, match="logits"):
        decode.measure(arms(adapter=1.0), torch.float32, 2, DECODE, checks)


def test_decode_refuses_other_tokens(monkeypatch):
    """One-pass prefill hides an adapter that is awake; decoding does not."""
    monkeypatch.setattr(decode, "_check_logits", lambda *_: None)
    with pytest.raises(RedCheckError, match="same tokens"):
        decode.measure(arms(adapter=1.0), torch.float32, 1, {**DECODE, "new_tokens": 24}, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_train_step_reports_equal_arms_and_refuses_others(dtype):
    rows = train_step.measure(arms(), dtype, (2, 9), ROUNDS, [])
    flops = {row.arm: row.ceiling for row in rows}
    assert flops["recycler k=2"] == pytest.approx(2 * flops["vanilla"], rel=0.1)
    assert {row.arm: row.target for row in rows if row.target} == {"recycler k=2": Target(at_most=2.05)}
    with pytest.raises(RedCheckError, match="each pass's loss"):
        train_step.measure(arms(adapter=1.0), dtype, (2, 9), ROUNDS, [])


def test_our_loss_counts_the_flops_that_the_plain_one_does():
    both, tokens = arms(), torch.ones(1, 9, dtype=torch.long)
    # The plain model makes logits at the last position too, where there is no target.
    ours, theirs = (
        counted_flops(lambda model=model: train_step.forward_backward(model, tokens, torch.float32))
        for model in (both.vanilla, both.plain)
    )
    assert theirs - ours == 3 * 2 * SMALL["hidden_size"] * 50


def test_loss_time_is_reported_of_equal_losses_alone(monkeypatch):
    case = {"dtype": "bf16", "vocabulary": 40, "hidden": 8, "tokens": 11, "k": 2}
    assert [row.arm for row in loss_memory.seconds(case, ROUNDS, [])] == ["full logits", "chunked"]
    monkeypatch.setitem(loss_memory.FUNCTIONS, "chunked", lambda *arguments: (1.1 * full(*arguments)[0], None))
    with pytest.raises(RedCheckError, match="the loss alone"):
        loss_memory.seconds(case, ROUNDS, [])


def test_loss_memory_is_reported_of_equal_losses_and_gradients_alone(monkeypatch):
    case = {"dtype": "fp32", "vocabulary": 40, "batch": 2, "tokens": 9, "k": 2, "body": SMALL}
    settings = {"memory_runs": 1}
    monkeypatch.setattr(latent_lm, "chunked_cross_entropy", latent_lm.chunked_cross_entropy)  # put back afterwards
    monkeypatch.setattr(loss_memory, "_in_fresh_process", loss_memory._one_step)
    peaks = iter([100, 300, 100, 200] * 2)
    monkeypatch.setattr(loss_memory, "peak_bytes", lambda start_anew=False: next(peaks))
    rows = loss_memory.memory(case, settings, [])
    assert rows[1].ratio.median == 0.5 and "body" not in rows[1].case

    def same_loss_double_gradient(*arguments):
        total, losses = full(*arguments)
        return 2 * total - total.detach(), losses

    monkeypatch.setitem(loss_memory.FUNCTIONS, "chunked", same_loss_double_gradient)
    with pytest.raises(RedCheckError, match="gradient norm"):
        loss_memory.memory(case, settings, [])


def test_a_red_check_reports_nothing_and_leaves_no_record(tmp_path, monkeypatch, capsys):
    def red(quick: bool) -> Result:
        check(False, "the arms agree", [])
        raise AssertionError

    monkeypatch.setitem(sys.modules, "benchmarks.decode", SimpleNamespace(run=red))
    assert run.main(["--only", "decode", "--out", str(tmp_path)]) == 1
    assert "does not hold that the arms agree" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json"))


def test_a_run_records_and_rewrites_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "benchmarks.decode", SimpleNamespace(run=lambda quick: example()))
    assert run.main(["--only", "decode", "--quick"]) == 0  # shown, not recorded
    assert run.main(["--only", "decode", "--out", str(tmp_path)]) == 0
    assert re.search(r"0\.990 \[0\.980, 1\.000\]", capsys.readouterr().out)
    assert (tmp_path / "README.md").read_text() == table.render([Result.load(tmp_path / "decode.json")])


def test_loop_overhead_refuses_loops_that_train_differently(tmp_path, monkeypatch):
    prepare(PrepareOptions(("stdlib",), tokenizer="bpe:300"), tmp_path / "data")
    settings = {
        "backbone": {"model_type": "llama", **SMALL}, "sequence_length": 16, "batch_size": 2,
        "steps": 4, "steps_per_round": 2, "warmup_rounds": 0,
    }  # fmt: skip
    checks: list[str] = []
    rows = loop_overhead.measure("recycler", tmp_path, settings, checks)
    assert [row.arm for row in rows] == ["bare loop", "unspoken"] and rows[1].ratio.repeats == 2 and len(checks) == 1

    def twice_as_fast(optimizer, rate, step):
        for group in optimizer.param_groups:
            group["lr"] = 2 * rate.at(step)

    monkeypatch.setattr(loop_overhead, "set_learning_rate", twice_as_fast)
    (tmp_path / "recycler").rename(tmp_path / "finished")
    with pytest.raises(RedCheckError, match="same weights"):
        loop_overhead.measure("recycler", tmp_path, settings, [])


@pytest.mark.slow
def test_throughput_refuses_compiled_code_that_trains_differently(tmp_path, monkeypatch):
    """torch's tracing stands for its compiler here, which takes a minute."""
    prepare(PrepareOptions(("stdlib",), tokenizer="bpe:300"), tmp_path / "data")
    settings = {
        "backbone": {"model_type": "llama", **SMALL}, "sequence_length": 16, "batch_size": 2,
        "steps": 9, "steps_per_round": 2, "rounds": 2, "warmup_rounds": 0,
    }  # fmt: skip
    checks: list[str] = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    eager, compiled, cost = throughput.measure("vanilla", tmp_path, settings, 1e9, checks)
    assert (eager.arm, compiled.arm, compiled.ratio.repeats) == ("eager", "compiled", 2)
    assert cost.unit == "CPU-seconds to compile" and cost.value.median > 0 and len(checks) == 3
    loops = {arm: SimpleNamespace(factor=factor) for arm, factor in (("eager", 1.0), ("compiled", 1.1))}
    monkeypatch.setattr(throughput, "_gradients", lambda loop: (torch.ones(()), torch.ones(3) * loop.factor))
    with pytest.raises(RedCheckError, match="compiled gradient"):
        throughput._check_gradients(loops, [])


def test_pass_memory_is_reported_of_equal_gradients_alone(monkeypatch):
    sizes = {"whole": 300, "segmented": 100, "whole, kept gathered": 400}

    def found(case):
        factor = 1.1 if (case["processes"], case["backward"], case["k"]) == broken else 1.0
        return {
            "step_bytes": sizes[case["backward"]] * case["k"] * pass_memory.MIB, "gradient_bytes": pass_memory.MIB,
            "gradients": {"weight": [2.0 * factor, -1.0]}, "units": 4, "gathers": 4, "reductions": 5,
        }  # fmt: skip

    monkeypatch.setattr(pass_memory, "in_fresh_processes", found)
    broken = None
    rows = pass_memory.run(quick=True).rows
    assert [(row.arm, row.ratio and row.ratio.median) for row in rows[:3]] == [
        ("k=1", None),
        ("k=2", 2.0),
        ("k=3", 3.0),
    ]
    assert {row.case["backward"] for row in rows if row.target} == {"segmented"}
    assert [row.value.median for row in rows if row.unit == "reduce-scatters a step"] == [5] * 9
    broken = (2, "segmented", 3)
    with pytest.raises(RedCheckError, match="every gradient"):
        pass_memory.run(quick=True)


def test_a_step_of_two_processes_has_the_gradients_of_one():
    case = {"backward": "segmented", "k": 2, "model": {"vocab_size": 50, **pass_memory.TINY}, "rows": 2, "tokens": 5}
    alone, both = pass_memory._one_step(case), pass_memory.in_fresh_processes({**case, "processes": 2})
    checks: list[str] = []
    pass_memory._check_gradients(both, alone, checks)
    assert checks and len(both["gradients"]) == 31 and both["step_bytes"] > 0
    assert (alone["gathers"], both["units"]) == (0, 4) and both["gathers"] > 4 and both["reductions"] > 4
    assert 2 * both["gradient_bytes"] == alone["gradient_bytes"]


WORK = {
    "vocab_size": 40, "train_batch": 2, "train_tokens": 12, "prompt_tokens": 6, "new_tokens": 3, **ROUNDS,
}  # fmt: skip


def test_latent_work_is_counted_as_it_is_computed():
    model, checks = latent_work.build(latent_work.QUICK["tiny"], 40), []
    model.set_attn_implementation("eager")  # the counter sees matrix products
    lengths, ids = latent_work.drawn_lengths(0.4, 2, 12), torch.ones(2, 12, dtype=torch.long)
    assert lengths.sum() == 43 and lengths.max() == 3, "of 72 steps"
    with latent_work.Forced(model.train()) as forced:
        seen = counted_flops(lambda: latent_work._timed_step(forced, ids, lengths, checks))
    assert seen == latent_work.training_flops(latent_work.model_flops(model), lengths, is_dense=True)
    assert checks == ["every token took the steps drawn for it"] and "_gate" not in vars(model.model)


def test_latent_work_compares_times_with_flops():
    model, checks = latent_work.build(latent_work.QUICK["tiny"], 40), []
    rows = latent_work.training("tiny", model, WORK, checks) + latent_work.decoding("tiny", model, 2, WORK, checks)
    assert len(rows) == 13 and len(checks) == 3 and [row.ratio is None for row in rows[:5]] == [True] + [False] * 4
    half = rows[3]
    assert float(half.case["FLOPs"]) == pytest.approx(0.69, abs=0.01) and half.arm == "prune 40%"
    assert half.target.at_most == pytest.approx(1.1 * float(half.case["FLOPs"]), abs=2e-3)
    assert str(Target(0.9, 1.1)) == "0.9 to 1.1" and rows[2].target is None
    cache = [row for row in rows if row.case["phase"] == "cache"]
    assert cache[0].ceiling == cache[0].value.median and cache[0].case["runs a token"] == "4.000"
    assert cache[0].value.median == pytest.approx(4 * (2 * 2 * 32 * 4 + 16) / 1024), "two layers' keys and values"


def test_latent_work_refuses_tokens_that_take_other_steps(monkeypatch):
    model = latent_work.build(latent_work.QUICK["tiny"], 40)
    monkeypatch.setattr(latent_work.Forced, "_gate", lambda self, *asked: self._asked(*asked))
    with pytest.raises(RedCheckError, match="every token took the steps"):
        latent_work.training("tiny", model, WORK, [])


@pytest.mark.slow
def test_the_gpu_command_runs_whole_on_a_cpu(tmp_path, capsys):
    assert gpu.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    result = Result.load(tmp_path / "gpu.json")
    assert result.failed == result.skipped == [] and len(result.checks) == 17
    measured = {(row.unit, row.arm) for row in result.rows if row.ceiling}
    units = ("training tokens per second", "decoded tokens per second")
    assert measured == {(unit, arm) for unit in units for arm in ("plain", "recycler k=2")}
    assert {row.case.get("cache") for row in result.rows} == {None, "growing", "static, compiled"}
    assert "It has not run on a GPU yet" in capsys.readouterr().out


def test_the_gpu_command_says_that_there_is_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path)]) == 1
    assert "no CUDA device" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_case_leaves_its_time_to_the_next(monkeypatch):
    given = []
    monkeypatch.setattr(isolated, "run_isolated", lambda *a: given.append(a[-1]) or isolated.Findings(skipped=[a[0]]))
    assert [result.skipped for result in gpu.run("cuda", False, 450.0)][-1] == [
        "check", "train 135M", "decode 135M", "train 360M", "decode 360M", "train 1.4B", "decode 1.4B"
    ]  # fmt: skip
    assert given[0] == pytest.approx(450 * 2 / 17, abs=1) and given[-1] == pytest.approx(450, abs=1)


def child(code: str, seconds: float) -> isolated.Findings:
    return isolated.run_isolated("child", ["-c", f"from benchmarks.isolated import *\n{code}"], seconds)


def test_what_a_child_found_stands_whatever_becomes_of_it():
    said = "plan(['a', 'b', 'c'])\nsay(DONE, 'a', 0)\nsay(DONE, 'a', 1)\nsay(FAILED, 'b', 'no')\nprint('noise')\n"
    stopped = child(said + "import time\ntime.sleep(60)", 3)
    assert stopped == isolated.Findings([1], ["b: no"], ["c: not reached", "child: stopped after 3 s"])
    crashed = child(said + "os.abort()", 60)
    assert crashed == isolated.Findings([1], ["b: no", "child: the process ended with status -6"], ["c: not reached"])
    assert child("1 / 0", 60).failed == ["child: the process ended with status 1"]


def test_a_failing_case_is_reported_and_the_next_one_runs(capsys):
    def too_large():
        raise torch.OutOfMemoryError

    for name, function in (("zero", lambda: 1 // 0), ("large", too_large), ("one", lambda: 1)):
        isolated.attempt(name, function)
    reports = [json.loads(line.removeprefix(isolated.MARK)) for line in capsys.readouterr().out.splitlines()]
    assert [kind for kind, _, _ in reports] == ["failed", "skipped", "done"] and "ZeroDivisionError" in reports[0][2]


def test_the_numerics_go_red(monkeypatch):
    one, cpu = {"a": torch.ones(3)}, torch.device("cpu")
    assert gpu_checks.compare(one, one, 0.0) == "to 0"
    for other in ({"a": torch.ones(3) * 1.1}, {"a": torch.ones(3) * torch.nan}, {}):
        with pytest.raises(RedCheckError):
            gpu_checks.compare(other, one, 0.05)
    monkeypatch.setattr(gpu_checks, "backward_by_pass", lambda loss, segments: loss.backward())
    with pytest.raises(RedCheckError):
        gpu_checks._segmented(cpu, 2)
    monkeypatch.setattr(gpu_checks.reference, "prefill_then_decode", lambda body, adapter, inputs, *_: body(inputs))
    with pytest.raises(RedCheckError, match="other tokens"):
        gpu_checks._generate(cpu, 1)
