"""Who goes on, with which weights, at what price: each formula against one written out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.families import adaptive_model
from unspoken import AdaptiveLatentForCausalLM
from unspoken.latent.halting import Router, adaptive_penalty, halt

KINDS = ["linear", "mlp", "multi_linear", "multi_mlp"]


def walk(gates: Tensor, threshold: float) -> tuple[Tensor, list[Tensor]]:
    """`halt` step by step for n tokens with gates [l_max, n]: how many steps each took, and the weights of its steps,
    zero after them."""
    reach = torch.ones_like(gates[0])
    taken, weights = torch.zeros_like(gates[0], dtype=torch.long), []
    is_here = torch.ones_like(gates[0], dtype=torch.bool)
    for gate in [*gates, None]:
        halting = halt(reach, gate, threshold)
        weights.append(halting.weight * is_here)
        taken += is_here
        is_here = is_here & halting.goes_on
        reach = halting.next_reach
    return taken, weights


def by_hand(gates: list[float], threshold: float) -> tuple[int, list[float]]:
    """K* = the last step whose reach is at least the threshold, and the weights up to it: the paper's definitions."""
    reaches = [1.0]
    for gate in gates:
        reaches.append(reaches[-1] * gate)
    last = max(k for k in range(len(reaches)) if k == 0 or reaches[k] >= max(threshold, 5e-324))
    weights = [reaches[k] * (1 - gates[k]) for k in range(last)] + [reaches[last]]
    return last + 1, weights


probabilities = st.floats(0, 1, allow_subnormal=False)


@given(gates=st.lists(probabilities, min_size=1, max_size=6), threshold=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_steps_and_weights_are_the_definitions(gates, threshold):
    taken, weights = walk(torch.tensor(gates, dtype=torch.float64).unsqueeze(-1), threshold)
    expected_taken, expected = by_hand(gates, threshold)
    assert taken.item() == expected_taken
    found = [weight.item() for weight in weights]
    assert found[: len(expected)] == pytest.approx(expected, abs=1e-15)
    assert not any(found[len(expected) :])
    assert sum(found) == pytest.approx(1, abs=1e-12)


def test_tokens_of_a_step_are_decided_one_by_one():
    gates = torch.tensor([[0.9, 0.9, 0.05, 1.0], [0.9, 0.1, 0.9, 1.0]], dtype=torch.float64)
    taken, weights = walk(gates, 0.1)
    assert taken.tolist() == [3, 2, 1, 3]
    by_token = torch.stack(weights, dim=1)
    expected = [[0.1, 0.09, 0.81], [0.1, 0.9, 0], [1, 0, 0], [0, 0, 1]]
    torch.testing.assert_close(by_token, torch.tensor(expected, dtype=torch.float64))


def test_a_reach_that_equals_the_threshold_goes_on():
    halting = halt(torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.4999]), 0.5)
    assert halting.goes_on.tolist() == [True, False]


def test_thresholds_of_zero_and_one():
    """0: nobody is cut but who cannot go on; 1: nobody goes on but who is certain to."""
    gate = torch.tensor([0.0, 1e-30, 0.5, 1 - 1e-6, 1.0])
    assert halt(torch.ones(5), gate, 0.0).goes_on.tolist() == [False, True, True, True, True]
    assert halt(torch.ones(5), gate, 1.0).goes_on.tolist() == [False, False, False, False, True]


def test_the_last_step_is_an_exit_for_all():
    halting = halt(torch.tensor([0.3, 1.0]), None, 0.0)
    assert halting.weight.tolist() == pytest.approx([0.3, 1.0])
    assert not halting.goes_on.any()
    assert not halting.next_reach.any()


def test_a_cut_has_no_gradient_and_a_step_that_runs_has():
    """The weight of who is cut is the whole reach: the gate that the cut overruled is not in it."""
    gate = torch.tensor([0.05, 0.6], dtype=torch.float64, requires_grad=True)
    halting = halt(torch.ones(2, dtype=torch.float64), gate, 0.1)
    (grad_weight,) = torch.autograd.grad(halting.weight.sum(), gate, retain_graph=True)
    (grad_reach,) = torch.autograd.grad(halting.next_reach.sum(), gate)
    assert grad_weight.tolist() == [0, -1]
    assert grad_reach.tolist() == [0, 1]


def test_the_penalties_by_hand():
    reach, gate, correctness = 0.6, 0.7, 0.8**10
    expected = {
        "A": correctness * gate,
        "B": correctness * reach * gate,
        "C": correctness * reach * gate / 5,
        "D": -correctness * reach * math.log(1 - gate),
    }
    for form, value in expected.items():
        args = (torch.tensor([x], dtype=torch.float64) for x in (reach, gate, correctness))
        assert adaptive_penalty(form, *args, 5).item() == pytest.approx(value, rel=1e-12), form
    with pytest.raises(ValueError, match="A, B, C or D, got 'E'"):
        adaptive_penalty("E", torch.ones(1), torch.ones(1), torch.ones(1), 5)


@pytest.mark.parametrize(
    ("form", "blames_reach", "slope"), [("A", False, 0.5), ("B", True, 0.3), ("C", True, 0.06), ("D", False, 0.6)]
)
def test_whom_a_penalty_blames(form, blames_reach, slope):
    """Forms A and D leave earlier gates, which made the reach, alone. Slopes with p^beta = .5, r = .6, g = .5."""
    reach, gate = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (0.6, 0.5))
    adaptive_penalty(form, reach, gate, torch.tensor([0.5], dtype=torch.float64), 5).sum().backward()
    assert (reach.grad is not None and bool(reach.grad.any())) is blames_reach
    assert gate.grad.item() == pytest.approx(slope)


def test_a_certain_gate_has_a_finite_price():
    gate = torch.ones(1, requires_grad=True)
    penalty = adaptive_penalty("D", torch.ones(1), gate, torch.ones(1), 3)
    penalty.sum().backward()
    assert penalty.isfinite().all()
    assert gate.grad.isfinite().all()


@pytest.mark.parametrize(("kind", "count"), [("linear", 9), ("mlp", 81), ("multi_linear", 27), ("multi_mlp", 243)])
def test_parameters_of_a_router(kind, count):
    """Width 8: a linear gate has 8 + 1, an MLP's 8 * 8 + 8 more; `multi` one for each of three steps with a next."""
    assert sum(p.numel() for p in Router(8, 3, kind).parameters()) == count
    assert not list(Router(8, 3, "none").parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_router_is_blind(kind):
    """Every gate is sigmoid(bias), for every state and at every step, whatever initialises the model."""
    config = adaptive_model("llama", max_latent_steps=3, router=kind, router_bias=-0.7).config
    router = AdaptiveLatentForCausalLM(config).model.router
    states = torch.randn(5, 32)
    for step in (1, 2, 3):
        assert torch.equal(router(states, step), torch.full((5,), -0.7))


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_by_hand(kind):
    """And steps beyond those that it was made for are asked the last gate."""
    router = Router(8, 2, kind).double()
    for parameter in router.parameters():
        nn.init.normal_(parameter)
    states = torch.randn(3, 4, 8, dtype=torch.float64)
    for step, gate in ((1, router.gates[0]), (2, router.gates[-1]), (7, router.gates[-1])):
        if kind.endswith("mlp"):
            first, _, last = gate
            inner = states @ first.weight.T + first.bias
            inner = inner * torch.sigmoid(inner)
        else:
            inner, last = states, gate
        expected = (inner @ last.weight.T + last.bias).squeeze(-1)
        torch.testing.assert_close(router(states, step), expected)
    differ = not torch.equal(router(states, 1), router(states, 2))
    assert differ is kind.startswith("multi")


def test_a_router_answers_in_float32_at_least():
    """Reach probabilities are products; with eight bits a cut would depend on rounding."""
    states = torch.randn(4, 8)
    assert Router(8, 1).bfloat16()(states.bfloat16(), 1).dtype == torch.float32
    assert Router(8, 1)(states.bfloat16(), 1).dtype == torch.float32
    assert Router(8, 1).double()(states.double(), 1).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        router = Router(8, 1)
        nn.init.normal_(router.gates[0].weight)
        actual = router(states, 1)
    expected = nn.functional.linear(states, router.gates[0].weight, router.gates[0].bias).squeeze(-1)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_has_every_parameter_in_its_graph(kind):
    router = Router(8, 3, kind)
    zero = router.zero()
    zero.backward()
    assert zero.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in router.parameters())


def test_a_router_for_each_step_of_a_plain_model():
    """With no step to ask for, a call that goes deeper found no gate: an IndexError."""
    router = Router(8, 0, "multi_linear")
    assert router(torch.randn(2, 8), 1).shape == (2,)
