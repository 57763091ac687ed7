"""A looped model's exit gate: the expected loss over exits, their entropy, and the state that speaks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.baselines import baseline
from tests.equivalence.test_latent_training import assert_same, gradients
from tests.equivalence.test_training import batch_of_rows
from tests.families import REPRESENTATIVE, random_ids
from tests.oracle import close
from unspoken import LoopedConfig
from unspoken.latent import reference
from unspoken.models import loss as loss_module
from unspoken.models.loss import shift_labels

KIND = "looped with a gate"


def all_exits(model: Any, **inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """States of each loop and probabilities of exiting there, from models of one, two, ... loops."""
    states = []
    for num_loops in range(1, model.config.num_loops + 1):
        model.config.num_loops, whole = num_loops, model.config.num_loops
        states.append(model.model(**inputs, use_cache=False).last_hidden_state)
        model.config.num_loops = whole
    gates = [torch.sigmoid(model.model.exit_gate(state).squeeze(-1)) for state in states[:-1]]
    return states, reference.exits(states, gates)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_loss_and_gradients_equal_the_oracles(name, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 700)  # several chunks
    model, batch = baseline(KIND, name).train(), batch_of_rows((7, 4))
    output = model(**batch)
    output.loss.backward()
    found = gradients(model)
    labels = batch.pop("labels")
    states, probabilities = all_exits(model, **batch)
    assert all(0.01 < p.mean() < 0.99 for p in probabilities)
    targets = shift_labels(labels.masked_fill(batch["attention_mask"] == 0, -100))
    counted = targets != -100
    expected, entropy = 0.0, 0.0
    for state, probability in zip(states, probabilities):
        logits = model.transform(model.lm_head(state))[counted]
        expected = expected + (F.cross_entropy(logits, targets[counted], reduction="none") * probability[counted]).sum()
        entropy = entropy - (probability * probability.log())[counted].sum()
    total = (expected - model.config.exit_entropy_weight * entropy) / counted.sum()
    total.backward()
    close(output.loss, total, 1e-9)
    close(output.pass_losses, (expected / counted.sum()).detach().unsqueeze(0), 1e-9)
    assert found["model.exit_gate.weight"].abs().max() > 1e-4
    assert_same(found, gradients(model))


@torch.no_grad()
def test_the_quantile_says_whose_state_speaks():
    model, ids = baseline(KIND), random_ids(3, 9)
    states, probabilities = all_exits(model, input_ids=ids)
    reached = torch.stack(probabilities).cumsum(0)
    for quantile in (0.0, 0.3, 0.6, 1.0):
        model.config.exit_quantile = quantile
        found = model.model(ids, use_cache=False).last_hidden_state
        for row in range(3):
            for t in range(9):
                loop = next(i for i in range(3) if i == 2 or (quantile < 1 and reached[i, row, t] >= quantile))
                assert torch.equal(found[row, t], states[loop][row, t])
        output = model(ids, labels=ids)
        logits = model.lm_head(found)[:, :-1].flatten(0, 1)
        close(output.loss, F.cross_entropy(logits, ids[:, 1:].flatten()), 1e-9)


def test_a_gate_needs_normed_states():
    with pytest.raises(ValueError, match="exit_gate needs norm_between_loops"):
        LoopedConfig(exit_gate=True)
