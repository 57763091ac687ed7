import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import texts
from tests.oracle import TOLERANCE, body, embed
from unspoken.errors import UsageError
from unspoken.eval import perplexity
from unspoken.eval.perplexity import evaluate, interval, prepare_scores, score, work
from unspoken.eval.rows import cut_rows
from unspoken.latent import reference

LENGTH = 21  # not a multiple of the stretch of the exact recurrence


@pytest.fixture(scope="module")
def rows(shards):
    return cut_rows(shards, LENGTH, 11)


@pytest.fixture(scope="module")
def model():
    return texts.text_model(dtype=torch.float64)


@torch.no_grad()
def by_hand(model, rows, hidden_states) -> float:
    """Mean loss, a row at a time, from full logits."""
    nats = count = 0
    for row in rows:
        ids = torch.from_numpy(row.ids)[None]
        logits = model.transform(model.lm_head(hidden_states(ids)))
        nats += F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return nats / count


def test_losses_are_those_of_the_oracle(model, rows):
    losses = {loss.name: loss for loss in evaluate(model, rows, num_passes=3, batch_size=4)}
    backbone, adapter = body(model), model.model.adapter
    for k in (1, 2, 3):
        expected = by_hand(
            model, rows, lambda ids, k=k: reference.parallel_passes(backbone, adapter, embed(model, ids), k)[-1]
        )
        assert losses[f"k={k}"].loss == pytest.approx(expected, abs=TOLERANCE)
    exact = by_hand(model, rows, lambda ids: reference.exact_recurrence(backbone, adapter, embed(model, ids)))
    assert losses["exact"].loss == pytest.approx(exact, abs=TOLERANCE)
    assert abs(losses["exact"].loss - losses["k=1"].loss) > 100 * TOLERANCE, "the model does not recycle: no test"
    assert list(losses) == ["k=1", "k=2", "k=3", "exact"]


def test_numbers_that_follow_from_the_loss(model, rows):
    loss = evaluate(model, rows, num_passes=1, exact=False)[0]
    num_bytes = sum(row.num_bytes for row in rows)
    assert loss.num_targets == sum(len(row.ids) - 1 for row in rows)
    assert loss.num_documents == len({row.document for row in rows})
    assert loss.perplexity == pytest.approx(math.exp(loss.loss))
    assert loss.bits_per_byte == pytest.approx(loss.loss * loss.num_targets / math.log(2) / num_bytes)
    assert loss.interval[0] < loss.loss < loss.interval[1]


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_results_do_not_depend_on_the_batch_size(model, rows, batch_size):
    expected = evaluate(model, rows, num_passes=2, batch_size=5)
    for loss, reference_loss in zip(evaluate(model, rows, num_passes=2, batch_size=batch_size), expected):
        assert loss.loss == pytest.approx(reference_loss.loss, abs=TOLERANCE / 10)
        assert loss.interval == pytest.approx(reference_loss.interval, abs=TOLERANCE)


def test_a_plain_model_has_one_pass_and_it_is_exact(rows):
    losses = evaluate(texts.text_model("vanilla"), rows, num_passes=4)
    assert [loss.name for loss in losses] == ["k=1"]


def test_an_asleep_adapter_makes_no_difference(rows):
    model = texts.text_model(dtype=torch.float64)
    torch.nn.init.zeros_(model.model.adapter.proj.weight)
    for loss in evaluate(model, rows, num_passes=2):
        assert loss.difference == pytest.approx(0, abs=TOLERANCE)


def test_logits_exist_for_a_few_tokens_at_a_time(model, rows, monkeypatch):
    expected = evaluate(model, rows, num_passes=2)
    monkeypatch.setattr(perplexity, "CHUNK_LOGITS", 7 * texts.VOCAB_SIZE)
    seen = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[0]))
    chunked = evaluate(model, rows, num_passes=2)
    hook.remove()
    assert max(seen) == 7
    assert [loss.loss for loss in chunked] == pytest.approx([loss.loss for loss in expected], abs=1e-12)


def test_many_passes_run_fewer_rows_together(model, rows, monkeypatch):
    monkeypatch.setattr(perplexity, "MAX_STATES", 3 * 6 * LENGTH * 32)
    sizes = []
    hook = model.model.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["inputs_embeds"].shape[0]), with_kwargs=True
    )
    evaluate(model, rows, num_passes=5, batch_size=8)
    hook.remove()
    assert max(sizes) == 3


def test_a_stopped_evaluation_says_what_it_has_and_goes_on(model, rows):
    expected = evaluate(model, rows, num_passes=2, batch_size=2)
    scores = prepare_scores(model, rows, num_passes=2)
    assert scores.losses() == []
    tokens = 0

    def stop_in_the_third_batch(more):
        nonlocal tokens
        tokens += more
        if tokens > 2 * 2 * LENGTH * 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(model, scores, 2, stop_in_the_third_batch)
    assert 0 < scores.done.sum() < len(rows) and not scores.is_complete
    done = [row for row, is_done in zip(rows, scores.done) if is_done]
    assert [loss.loss for loss in scores.losses()] == pytest.approx(
        [loss.loss for loss in evaluate(model, done, num_passes=2)], abs=TOLERANCE
    )
    score(model, scores, 2)
    assert scores.losses() == expected


def test_progress_sums_to_the_work_and_the_mode_is_kept(model, rows):
    scores = prepare_scores(model, rows, num_passes=2)
    reported = []
    model.train()
    score(model, scores, 4, reported.append)
    assert model.training
    model.eval()
    assert sum(reported) == work(scores)
    assert scores.seconds["parallel"] > 0 and scores.seconds["exact"] > 0


def test_intervals_are_over_documents():
    random = np.random.RandomState(1)
    counts = random.randint(50, 150, size=400)
    sums = counts * (3 + random.randn(400))
    low, high = interval(sums, counts)
    error = 1 / math.sqrt(400)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.2)
    assert low < sums.sum() / counts.sum() < high
    assert interval(sums[:1], counts[:1]) is None


@pytest.mark.parametrize(("num_passes", "batch_size", "message"), [(0, 8, "passes is 0"), (1, 0, "batch-size is 0")])
def test_wrong_numbers_are_refused(model, rows, num_passes, batch_size, message):
    with pytest.raises(UsageError, match=message):
        evaluate(model, rows, num_passes, batch_size=batch_size)
