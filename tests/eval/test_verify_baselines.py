"""Verification of the models that ours are compared with: sound ones pass, a fault turns the row red that sees it."""

import pytest
import torch

from tests.baselines import CONFIGS, RECURRENT, baseline
from tests.eval.test_verify_latent_steps import DECODE, failed
from unspoken.eval.verify import verify
from unspoken.latent.visibility import visible
from unspoken.models import recursions, repeated, slotted


@pytest.mark.parametrize("kind", [*CONFIGS, "mor", "mor by experts with shared keys"])
def test_a_sound_model_passes(kind):
    verification = verify(baseline(kind, "llama_tied"), seed=3)
    assert failed(verification) == []
    skipped = [result.name for result in verification.results if result.passed is None]
    assert sorted(skipped) == ["k >= length = exact", "latent steps = one by one"]


@pytest.mark.parametrize("kind", list(RECURRENT))
def test_a_sound_model_with_thoughts_passes(kind):
    verification = verify(baseline(kind, "llama_tied"), seed=3)
    assert failed(verification) == []
    assert "prefill in chunks = whole" in [result.name for result in verification.results if result.passed is None]


def test_a_thought_that_enters_too_early_is_seen(monkeypatch):
    """The state that the slot before it had one refinement ago."""
    model = baseline("ponder2")
    base, original = model.model, model.model._refined
    monkeypatch.setattr(base, "_refined", lambda tokens, cache, n: original(tokens, cache, n - 1))
    assert DECODE in failed(verify(model, seed=3, names=[DECODE]))


@pytest.mark.parametrize("kind", ["looped", "ponder"])
def test_runs_that_share_a_cache_are_seen(kind, monkeypatch):
    views = repeated.caches_of_runs
    monkeypatch.setattr(repeated, "caches_of_runs", lambda *args: [views(*args)[0]] * args[1])
    assert DECODE in failed(verify(baseline(kind), seed=3, names=[DECODE]))


def test_keys_of_other_recursions_are_seen(monkeypatch):
    """A recursion that reads what lower ones wrote."""
    monkeypatch.setattr(recursions, "visible", lambda *args, lowest: visible(*args, lowest=1))
    assert DECODE in failed(verify(baseline("mor"), seed=3, names=[DECODE]))


def test_pauses_that_are_not_kept_are_seen(monkeypatch):
    """A cache that holds each token's last slot alone."""
    update = slotted.StretchedLayer.update

    def forgetful(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs):
        seen = update(self, keys, values, *args, **kwargs)
        self.values = self.values.clone()
        self.values[:, :, :: self.num_slots] = 0
        return seen

    monkeypatch.setattr(slotted.StretchedLayer, "update", forgetful)
    assert DECODE in failed(verify(baseline("pause"), seed=3, names=[DECODE]))
