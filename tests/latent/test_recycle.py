"""Adapter and shift, against their definitions position by position."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspoken.latent.recycle import RecycleAdapter, carry, receiving_positions, shift


def states(batch: int = 2, length: int = 5, width: int = 3) -> torch.Tensor:
    return torch.randn(batch, length, width, dtype=torch.float64)


def test_the_adapter_is_a_linear_map_of_the_normed_state():
    """Eq. 2, with its own norm weight."""
    adapter = RecycleAdapter(3, eps=1e-6).double()
    torch.nn.init.normal_(adapter.proj.weight)
    torch.nn.init.normal_(adapter.norm.weight)
    h = states()
    normed = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * adapter.norm.weight
    torch.testing.assert_close(adapter(h), normed @ adapter.proj.weight.T)


@pytest.mark.parametrize("norm", ["input", "output", "none"])
def test_nothing_recycled_adds_exactly_nothing(norm):
    """No bias anywhere: pads, document starts and prompts are zeroed once, before the adapter."""
    adapter = RecycleAdapter(3, norm)
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter)
    assert torch.equal(adapter(torch.zeros(2, 4, 3)), torch.zeros(2, 4, 3))
    assert adapter(states().float()).all()
    names = {"proj.weight"} if norm == "none" else {"norm.weight", "proj.weight"}
    assert {name for name, _ in adapter.named_parameters()} == names


def test_a_norm_behind_the_linear_map_sets_the_size():
    adapter = RecycleAdapter(3, "output").double()
    torch.nn.init.constant_(adapter.norm.weight, 0.3)
    added = adapter(states())
    torch.testing.assert_close(added.square().mean(-1).sqrt(), torch.full((2, 5), 0.3).double(), rtol=1e-4, atol=0)
    torch.testing.assert_close(
        adapter(100 * states()).square().mean().sqrt(), torch.tensor(0.3).double(), rtol=1e-4, atol=0
    )


def test_shift_moves_states_one_position_to_the_right():
    h = states()
    shifted = shift(h, receives=None)
    assert torch.equal(shifted[:, 1:], h[:, :-1])
    assert not shifted[:, 0].any()


def test_shift_begins_with_the_state_before():
    h, previous = states(), states(length=1)
    assert torch.equal(shift(h, None, previous)[:, :1], previous)
    receives = torch.tensor([[True] * 5, [False, *[True] * 4]])
    shifted = shift(h, receives, previous)
    assert torch.equal(shifted[0, 0], previous[0, 0])
    assert not shifted[1, 0].any()


def test_shift_of_one_position_is_the_state_before():
    h, previous = states(length=1), states(length=1)
    assert torch.equal(shift(h, None, previous), previous)
    assert torch.equal(shift(h, None), torch.zeros_like(h))


def test_what_is_not_received_is_never_read():
    """Hidden states at pads may be NaN: 0 * NaN would be NaN, in the output and in the gradient."""
    h = states()
    h[0, 1] = float("nan")
    h.requires_grad_()
    receives = torch.ones(2, 5, dtype=torch.bool)
    receives[0, 2] = False
    shifted = shift(h, receives)
    assert torch.isfinite(shifted).all()
    (gradient,) = torch.autograd.grad(shifted.square().sum(), h)
    assert torch.isfinite(gradient).all()
    assert not gradient[0, 1].any()
    assert gradient[1, 1].all()


def last_real_before(real, b, t) -> int | None:
    return max((i for i in range(t) if real is None or real[b, i]), default=None)


def by_definition(real, position_ids, prompt_mask, batch, length) -> list[list[bool]]:
    """Position t reads the state before it unless it starts a document or is of a prompt."""
    rows = [[True] * length for _ in range(batch)]
    for b in range(batch):
        for t in range(length):
            before = last_real_before(real, b, t)
            if position_ids is not None and before is not None and (real is None or real[b, t]):
                grown = position_ids[b, t] - position_ids[b, before]
                rows[b][t] &= bool(grown == 1 if before == t - 1 else grown > 0)
            if prompt_mask is not None:
                rows[b][t] &= not prompt_mask[b, t]
    return rows


@st.composite
def batches(draw):
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 9))

    def rows(strategy):
        row = st.lists(strategy, min_size=length, max_size=length)
        return st.lists(row, min_size=batch, max_size=batch)

    real = draw(st.none() | rows(st.booleans()).map(torch.tensor))
    prompt_mask = draw(st.none() | rows(st.booleans()).map(torch.tensor))
    starts = draw(st.none() | rows(st.booleans()))
    positions = None
    if starts is not None:
        positions = torch.zeros(batch, length, dtype=torch.long)
        for b in range(batch):
            for t in range(1, length):
                positions[b, t] = 0 if starts[b][t] else positions[b, t - 1] + 1
    return real, positions, prompt_mask, batch, length


@given(batches())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_receiving_positions_by_definition(batch):
    real, positions, prompt_mask, size, length = batch
    receives = receiving_positions(real, positions, prompt_mask)
    expected = by_definition(real, positions, prompt_mask, size, length)
    if receives is None:
        assert all(all(row) for row in expected)
    else:
        assert receives.dtype == torch.bool
        assert receives.expand(size, length).tolist() == expected


def test_positions_of_one_row_hold_for_all():
    """transformers passes position ids [1, T] for a batch."""
    real = torch.ones(3, 4, dtype=torch.bool)
    receives = receiving_positions(real, torch.tensor([[0, 1, 0, 1]]))
    assert receives.tolist() == [[True, True, False, True]] * 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_a_prompt_mask_may_be_bool_or_int(dtype):
    mask = torch.tensor([[1, 1, 0, 0]]).to(dtype)
    assert receiving_positions(None, None, mask).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("has_previous", [False, True])
@given(
    rows=st.integers(1, 7).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=2, max_size=2)
    )
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_pad_holds_the_last_real_state(rows, has_previous):
    real = torch.tensor(rows)
    hidden = torch.randn(*real.shape, 3)
    previous = torch.randn(2, 1, 3) if has_previous else None
    carried = carry(hidden.masked_fill(~real.unsqueeze(-1), float("nan")), real, previous)
    for b in range(2):
        held = previous[b, 0] if has_previous else torch.zeros(3)
        for t in range(real.shape[1]):
            held = hidden[b, t] if real[b, t] else held
            assert torch.equal(carried[b, t], held)


def test_without_pads_nothing_is_carried():
    hidden = torch.randn(1, 3, 2)
    assert carry(hidden, None) is hidden
