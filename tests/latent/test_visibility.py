"""Who may attend to whom, against a double loop that says it in one line."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.families import WINDOW, adaptive_model, text_config
from unspoken.latent.visibility import Entries, grid_masks, joined, visible


def double_loop(entries: Entries, num_queries: int, step: int, window: int | None) -> Tensor:
    times, steps = entries.times.tolist(), entries.steps.tolist()
    documents = [[0] * len(row) for row in times] if entries.documents is None else entries.documents.tolist()
    size = len(entries)
    seen = torch.zeros(len(times), num_queries, size, dtype=torch.bool)
    for b, u, d in ((b, times[b], documents[b]) for b in range(len(times))):
        for q in range(size - num_queries, size):
            for j in range(size):
                reads = u[j] <= u[q] and 0 < steps[b][j] <= step and d[j] == d[q] and steps[b][q] > 0
                in_window = window is None or u[j] > u[q] - window
                seen[b, q - size + num_queries, j] = (reads and in_window) or j == q
    return seen


@st.composite
def grids(draw) -> tuple[Entries, int, int]:
    """Rows of earlier entries in any order, gaps among them, then queries of one step, some of which are none."""
    batch, num_keys, num_queries = draw(st.integers(1, 3)), draw(st.integers(0, 9)), draw(st.integers(1, 5))
    step = draw(st.integers(1, 4))
    rows = [draw(st.lists(st.integers(0, 11), min_size=num_keys, max_size=num_keys)) for _ in range(batch)]
    queries = [draw(st.lists(st.integers(4, 11), min_size=num_queries, max_size=num_queries)) for _ in range(batch)]
    key_steps = [draw(st.lists(st.integers(0, 4), min_size=num_keys, max_size=num_keys)) for _ in range(batch)]
    query_steps = [draw(st.lists(st.sampled_from([0, step]), min_size=num_queries, max_size=num_queries)) for _ in rows]
    times = torch.tensor([a + b for a, b in zip(rows, queries)])
    steps = torch.tensor([a + b for a, b in zip(key_steps, query_steps)])
    documents = times // draw(st.integers(2, 12)) if draw(st.booleans()) else None
    return Entries(times, steps, documents), num_queries, step


@given(grid=grids(), window=st.sampled_from([None, 1, 3, 20]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_visible_is_the_double_loop(grid, window):
    entries, num_queries, step = grid
    seen = visible(entries, num_queries, step, window)
    assert torch.equal(seen, double_loop(entries, num_queries, step, window))
    assert seen.any(-1).all(), "a query without a key"


def test_the_drawing_of_the_docstring():
    """Four tokens, of which the first three went deeper; (t=2, k=2) reads the first three at steps 1 and 2."""
    times = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    steps = torch.tensor([[1, 1, 1, 1, 3, 3, 2, 2, 2]])
    assert visible(Entries(times, steps), 1, 2).int().tolist() == [[[1, 1, 1, 0, 0, 0, 1, 1, 1]]]


def test_rows_and_parts_of_entries():
    first = Entries(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 0], [1, 1]]), torch.tensor([[0, 0], [0, 1]]))
    second = first.rows(torch.tensor([1, 0]))
    assert second.times.tolist() == [[2, 3], [0, 1]]
    assert second.documents.tolist() == [[0, 1], [0, 0]]
    both = joined([first, second])
    assert (len(both), both.steps.tolist()) == (4, [[1, 0, 1, 1], [1, 1, 1, 0]])
    assert both.documents.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert first.rows(None) is first
    assert joined([Entries(first.times, first.steps), second]).documents is None


def entries_of(batch: int = 2) -> Entries:
    times = torch.arange(9).expand(batch, -1)
    return Entries(torch.cat([times, times[:, 3:]], dim=1), torch.tensor([1] * 9 + [2] * 6).expand(batch, -1))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_masks_in_the_form_of_the_backbone(name, implementation):
    """One mask, windowed where every layer has a window; or one for each type of layer."""
    config, entries = text_config(name), entries_of()
    config._attn_implementation = implementation
    masks = grid_masks(config, entries, 6, 2, torch.float64)
    windows = {"llama": None, "mistral": WINDOW}
    if name == "gemma3_text":
        assert set(masks) == {"full_attention", "sliding_attention"}
        found = [(masks["full_attention"], None), (masks["sliding_attention"], WINDOW)]
    else:
        found = [(masks, windows[name])]
    for mask, window in found:
        assert mask.shape == (2, 1, 6, 15)
        allowed = mask[:, 0] if implementation == "sdpa" else mask[:, 0] == 0
        assert torch.equal(allowed, double_loop(entries, 6, 2, window))
        if implementation == "eager":
            assert mask.dtype == torch.float64
            assert (mask[:, 0][~allowed] == torch.finfo(torch.float64).min).all()


@pytest.mark.parametrize("implementation", ["flash_attention_2", "paged|flash_attention_2", "no_such_thing"])
def test_attention_that_takes_no_mask_is_refused(implementation):
    """B20: flash attention drops a mask of its own without a word."""
    config = text_config("llama")
    config._attn_implementation = implementation
    with pytest.raises(ValueError, match=r'runs of a token apart.*attn_implementation="sdpa"'):
        grid_masks(config, entries_of(), 6, 2, torch.float32)


@torch.no_grad()
def test_a_model_refuses_before_it_computes_wrongly():
    model = adaptive_model("llama", exit_threshold=0.0)
    model.config.text_config._attn_implementation = "flash_attention_3"
    with pytest.raises(ValueError, match="flash_attention_3"):
        model.model.think(torch.zeros(1, 3, 32).double(), None, None, None, None, model.model.knobs(1, None, None))
