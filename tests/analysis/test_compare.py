import numpy as np
import pytest

from tests.analysis.conftest import evaluation
from unspoken.analysis.compare import Difference, Outcome, deployed, difference, verdict
from unspoken.analysis.numbers import number, short_count, signed
from unspoken.errors import UnspokenError

PIECES = 12


def pair(shift: float, spread: float = 0.0, num_documents: int = 2, pieces: int = PIECES):
    """A plain model's evaluation and one that differs from it by `shift` nats a token, more or less."""
    random = np.random.RandomState(0)
    plain = random.uniform(30, 70, pieces)  # pieces differ far more than the models do
    other = plain + 10 * (shift + spread * random.standard_normal(pieces))
    return (
        evaluation("recycler", {"k=1": plain.tolist(), "exact": other.tolist()}, 2, num_documents),
        evaluation("plain", {"k=1": plain.tolist()}, 1, num_documents),
    )


def test_the_difference_is_paired():
    found = difference(*interleave(pair(-0.03, spread=0.01)))
    assert found.mean == pytest.approx(-0.03, abs=0.01)
    low, high = found.interval
    assert low < found.mean < high < 0 and high - low < 0.03  # unpaired it would be a hundred times as wide
    assert (found.unit, found.num_units, found.outcome) == ("pieces", PIECES, Outcome.BETTER)


def interleave(evaluations):
    of, minus = evaluations
    return of, deployed(of), minus, deployed(minus)


@pytest.mark.parametrize(
    ("shift", "spread", "outcome"),
    [(-0.05, 0.01, Outcome.BETTER), (0.05, 0.01, Outcome.WORSE), (0.0, 0.05, Outcome.UNCLEAR)],
)
def test_outcome(shift, spread, outcome):
    assert difference(*interleave(pair(shift, spread))).outcome is outcome


def test_documents_are_redrawn_where_there_are_enough():
    assert difference(*interleave(pair(-0.1, 0.01, num_documents=12))).unit == "documents"
    assert difference(*interleave(pair(-0.1, 0.01, num_documents=9, pieces=20))).unit == "pieces"


def test_too_little_text_gives_no_interval_and_no_verdict():
    found = difference(*interleave(pair(-0.5, pieces=4)))
    assert found.interval is None and found.outcome is Outcome.UNCLEAR and "too little text" in str(found)


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e["data"].update(fingerprint="other"),
        lambda e: e["data"].update(split="test"),
        lambda e: e["rows"]["targets"].__setitem__(0, 9),
        lambda e: e["rows"].update(document=[7] * PIECES),
    ],
)
def test_other_text_is_refused(change):
    of, minus = pair(-0.1)
    change(minus)
    with pytest.raises(UnspokenError, match="different text"):
        difference(of, "exact", minus, "k=1")


def test_a_loss_that_was_not_measured_is_named():
    of, minus = pair(-0.1)
    with pytest.raises(UnspokenError, match="plain has no 'exact'"):
        difference(of, "exact", minus, "exact")


def test_a_diverged_model_is_named():
    of, minus = pair(-0.1)
    minus["rows"]["nats"]["k=1"][3] = None
    with pytest.raises(UnspokenError, match="plain has a loss that is not a number"):
        difference(of, "exact", minus, "k=1")


def test_deployed_is_what_decoding_runs():
    of, plain = pair(-0.1)
    assert deployed(of) == "exact" and deployed(plain) == "k=1"
    for name in ("k=2", "k=3", "k=4"):
        of["results"][name] = of["results"]["k=1"]
    del of["results"]["exact"]
    assert deployed(of) == "k=2"  # the passes of training
    of["model"]["config"]["num_train_passes"] = 3
    assert deployed(of) == "k=3"


def test_numbers():
    assert [short_count(value) for value in (1_200_000, 128, 20_480, 2e13)] == ["1.2M", "128", "20.5k", "20T"]
    assert (number(None), number(1.23456), number(-1.0, 2, sign="+")) == ("not finite", "1.2346", "-1.00")
    assert (signed(-0.0004), signed(0.0004), signed(-0.0006)) == ("0.000", "0.000", "-0.001")


BETTER, WORSE = Difference(-0.03, (-0.04, -0.02), "pieces", 99), Difference(0.27, (0.25, 0.29), "pieces", 99)
UNCLEAR = Difference(-0.001, (-0.01, 0.01), "pieces", 99)


@pytest.mark.parametrize(
    ("tokens", "compute", "said", "not_said"),
    [
        (BETTER, BETTER, "beat the plain model at equal tokens (-0.030 [-0.040, -0.020]) and at equal compute", "not"),
        (BETTER, WORSE, "but lost to it at equal compute (+0.270 [+0.250, +0.290])", "did not win"),
        (BETTER, UNCLEAR, "but could not be told from it at equal compute", "lost"),
        (WORSE, WORSE, "did not win: it lost to the plain model", "beat"),
        (UNCLEAR, UNCLEAR, "did not win: it could not be told from the plain model", "beat"),
        (UNCLEAR, WORSE, "could not be told from the plain model at equal tokens", "beat"),
        (WORSE, BETTER, "lost to the plain model at equal tokens (+0.270 [+0.250, +0.290]), and beat it", "won"),
    ],
)
def test_verdict(tokens, compute, said, not_said):
    sentence = verdict(tokens, compute)
    assert sentence.startswith("recycling ") and sentence.endswith(".")
    assert said in sentence and not_said not in sentence
