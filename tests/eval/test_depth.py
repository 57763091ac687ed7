import pytest
import torch

from tests import texts
from tests.oracle import TOLERANCE
from unspoken.eval.depth import DepthCurve, depth_curve
from unspoken.eval.perplexity import prepare_scores, score
from unspoken.eval.rows import cut_rows


def test_depth_reaches_the_exact_recurrence(shards):
    """A depth that covers the sequence is the recurrence itself; the depths before it are not."""
    model = texts.text_model(dtype=torch.float64)
    scores = prepare_scores(model, cut_rows(shards, 9, 5), num_passes=9)
    score(model, scores)
    curve = depth_curve(scores, num_train_passes=2, depth=9)
    assert len(curve.losses) == 9
    assert curve.gap_to_exact == pytest.approx(0, abs=TOLERANCE)
    assert abs(curve.losses[0] - curve.exact) > 100 * TOLERANCE
    shorter = depth_curve(scores, num_train_passes=2, depth=3)
    assert shorter.losses == curve.losses[:3]


def test_drift_is_measured_from_the_depth_of_training():
    curve = DepthCurve((3.0, 2.5, 2.75, 2.8125), exact=2.8125, num_train_passes=2)
    assert curve.best_depth == 2
    assert curve.drift == pytest.approx(0.3125)
    assert curve.gap_to_exact == 0
    assert DepthCurve((3.0,), None, 2).drift == 0
    assert DepthCurve((3.0,), None, 2).as_dict()["exact"] is None
