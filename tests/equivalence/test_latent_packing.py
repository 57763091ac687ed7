"""What a token's latent steps may know of: nothing later, nothing of other documents, nothing of pads; step by step."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from tests.equivalence.test_causality import LENGTH, edits
from tests.equivalence.test_latent_decoding import thinking
from tests.equivalence.test_packing import documents, packed
from tests.families import ALL, PAD, REPRESENTATIVE, random_ids
from tests.oracle import TOLERANCE, close

FLOAT32_TOLERANCE = 1e-4  # see test_padding.py, for families whose attention is eager
EAGER_ONLY = ("gemma2", "gpt_oss")


def taken_steps(outputs) -> list[list[list[tuple[Tensor, ...]]]]:
    """Of each row, of each token, of each step that it took: state, reach, gate and weight."""
    batch, length = outputs.latents.lengths.shape
    found: list[list[list]] = [[[] for _ in range(length)] for _ in range(batch)]
    for step in outputs.latents.steps:
        gates = torch.full_like(step.reach, -1.0) if step.gate is None else step.gate
        for i, token in enumerate(step.token.tolist()):
            entry = step.hidden[i], step.reach[i], gates[i], step.weight[i]
            found[token // length][token % length].append(entry)
    for row, lengths in zip(found, outputs.latents.lengths.tolist()):
        assert all(len(steps) in (1 + taken, 0) for steps, taken in zip(row, lengths))  # 0: a pad
    return found


def assert_same_steps(actual: list[list], expected: list[list], tolerance: float = TOLERANCE) -> None:
    """Two rows' tokens, each a list of its steps."""
    assert [len(steps) for steps in actual] == [len(steps) for steps in expected], "other decisions"
    for token, other in zip(actual, expected):
        for step, other_step in zip(token, other):
            for a, b in zip(step, other_step):
                close(a, b, tolerance)


@cache
def model_of(name: str):
    return thinking(name)


@pytest.mark.parametrize("name", REPRESENTATIVE)
@given(edit=edits(), training=st.booleans())
@settings(max_examples=7, deadline=None, derandomize=True)
def test_random_edits_change_nothing_before_them_at_any_step(name, edit, training):
    """B23. To rounding, as other tokens beside them go on in the same product."""
    position, ids = edit
    model = model_of(name).train(training)
    first, second = (model(i, use_cache=False, keeps_steps=True) for i in (random_ids(2, LENGTH), ids))
    for a, b in zip(taken_steps(first), taken_steps(second)):
        assert_same_steps(a[:position], b[:position])
    close(first.logits[:, :position], second.logits[:, :position])
    assert not torch.equal(first.logits[:, position], second.logits[:, position])


@pytest.mark.parametrize("name", [name for name in ALL if name not in REPRESENTATIVE])
@torch.no_grad()
def test_every_family_is_causal(name):
    model, ids = thinking(name), random_ids(2, LENGTH)
    for position in (1, 6, LENGTH - 1):
        other = ids.clone()
        other[:, position:] = random_ids(2, LENGTH, seed=position)[:, position:]
        first, second = (model(i, use_cache=False, keeps_steps=True) for i in (ids, other))
        for a, b in zip(taken_steps(first), taken_steps(second)):
            assert_same_steps(a[:position], b[:position])


def assert_equal_alone(model, rows, outputs, tolerance: float = TOLERANCE) -> None:
    """Every step of each packed document's tokens equals that of the document alone."""
    found = taken_steps(outputs)
    for r, row in enumerate(rows):
        start = 0
        for document in row:
            alone = model(document, use_cache=False, keeps_steps=True)
            stop = start + document.shape[1]
            assert_same_steps(found[r][start:stop], taken_steps(alone)[0], tolerance)
            close(outputs.logits[r, start:stop], alone.logits[0], tolerance)
            start = stop


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_packed_documents_equal_documents_alone(name):
    """B57 and B58, with a mask of ones and without, from embeddings, and asked by nobody for no cache."""
    model, rows = thinking(name), documents()
    ids, positions = packed(rows)
    for options in (
        {"input_ids": ids, "use_cache": False},
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        {"inputs_embeds": model.get_input_embeddings()(ids)},
    ):
        outputs = model(position_ids=positions, keeps_steps=True, **options)
        assert outputs.cache is None
        assert_equal_alone(model, rows, outputs)
    lengths = outputs.latents.lengths
    assert 0 < lengths.float().mean() < model.config.max_latent_steps


@pytest.mark.parametrize("name", [*REPRESENTATIVE, *EAGER_ONLY])
@torch.no_grad()
def test_packed_documents_with_pads_after_them(name):
    dtype = torch.float32 if name in EAGER_ONLY else torch.float64
    model, rows = thinking(name, dtype), documents()
    ids, positions = packed(rows)
    pads = torch.full((2, 3), PAD)
    outputs = model(
        torch.cat([ids, pads], dim=1),
        attention_mask=torch.cat([torch.ones_like(ids), torch.zeros_like(pads)], dim=1),
        position_ids=torch.cat([positions, torch.zeros_like(pads)], dim=1),
        use_cache=False,
        keeps_steps=True,
    )
    assert_equal_alone(model, rows, outputs, FLOAT32_TOLERANCE if name in EAGER_ONLY else TOLERANCE)
    assert not outputs.latents.lengths[:, -3:].any()


@pytest.mark.parametrize("name", ["llama_tied", "mistral", "gpt_neox"])
@torch.no_grad()
def test_pads_between_packed_documents(name):
    model, rows = thinking(name), documents()
    first, second = rows[1]
    ids = torch.cat([first, torch.full((1, 2), PAD), second, torch.full((1, 1), PAD)], dim=1)
    mask = torch.tensor([[1] * 7 + [0] * 2 + [1] * 4 + [0]])
    positions = torch.tensor([[*range(7), 0, 0, *range(4), 0]])
    found = taken_steps(model(ids, attention_mask=mask, position_ids=positions, use_cache=False, keeps_steps=True))[0]
    for document, part in ((first, slice(0, 7)), (second, slice(9, 13))):
        assert_same_steps(found[part], taken_steps(model(document, use_cache=False, keeps_steps=True))[0])


@pytest.mark.parametrize("mask", [None, "ones"])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_loss_of_a_pack_is_the_loss_of_its_documents(name, mask):
    """B59, the penalty too: a document's last token has no target, and so no price."""
    model, rows = thinking(name, step_loss_weight=0.3, adaptive_loss_exponent=0.5).train(), documents()
    ids, positions = packed(rows)
    num_targets = ids.numel() - sum(len(row) for row in rows)
    options = {} if mask is None else {"attention_mask": torch.ones_like(ids)}
    outputs = model(ids, position_ids=positions, labels=ids, **options)
    outputs.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    alone = [model(d, labels=d, num_items_in_batch=num_targets) for row in rows for d in row if d.shape[1] > 1]
    torch.testing.assert_close(outputs.loss, sum(o.loss for o in alone), rtol=1e-6, atol=0)
    torch.testing.assert_close(outputs.latents.penalty, sum(o.latents.penalty for o in alone), rtol=1e-5, atol=0)
    assert outputs.latents.penalty > 0
    sum(o.loss for o in alone).backward()
    for n, p in model.named_parameters():
        close(gradients[n], p.grad)


@pytest.mark.parametrize("ask", ["use_cache", "cache"])
def test_a_cache_for_packed_documents_is_refused(ask):
    ids, positions = packed(documents())
    with pytest.raises(ValueError, match=r"packed documents.*use_cache=False"):
        thinking("llama")(ids, position_ids=positions, **{ask: True if ask == "use_cache" else DynamicCache()})
