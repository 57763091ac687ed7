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
from tests.equivalence.test_padding import padded, rows_of, token_positions
from tests.families import ALL, PAD, REPRESENTATIVE, random_ids
from tests.oracle import TOLERANCE, adaptive_oracle, close

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
@settings(max_examples=10, deadline=None, derandomize=True)
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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_a_padded_row_equals_the_row_alone_at_every_step(name, side):
    """B06, B09, B13: also without position ids, which then count the pads; and pads take no step."""
    dtype = torch.float32 if name == "gemma2" else torch.float64
    tolerance = FLOAT32_TOLERANCE if name == "gemma2" else TOLERANCE
    model, rows = thinking(name, dtype), rows_of()
    ids, mask = padded(rows, side)
    for options in ({"position_ids": token_positions(mask)}, {}):
        outputs = model(ids, attention_mask=mask, use_cache=False, keeps_steps=True, **options)
        assert not outputs.latents.lengths[mask == 0].any()
        found = taken_steps(outputs)
        for i, row in enumerate(rows):
            alone = taken_steps(model(row, use_cache=False, keeps_steps=True))[0]
            assert_same_steps([s for s, real in zip(found[i], mask[i]) if real], alone, tolerance)


@pytest.mark.parametrize("name", ["llama_tied", "gpt_neox"])
@torch.no_grad()
def test_pads_in_the_middle(name):
    """A document goes on behind them where its positions say so, in one forward or over a cache."""
    model, row = thinking(name), random_ids(1, 7)
    ids = torch.cat([row[:, :3], torch.full((1, 2), PAD), row[:, 3:]], dim=1)
    mask, positions = torch.tensor([[1] * 3 + [0] * 2 + [1] * 4]), torch.tensor([[0, 1, 2, 2, 2, 3, 4, 5, 6]])
    expected = model(row, use_cache=False)
    outputs = model(ids, attention_mask=mask, position_ids=positions, use_cache=False)
    close(outputs.logits[mask > 0], expected.logits[0])
    assert outputs.latents.lengths[mask > 0].tolist() == expected.latents.lengths[0].tolist()
    past, logits = DynamicCache(), []
    for part in (slice(0, 4), slice(4, 6), slice(6, 9)):
        options = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part]}
        logits.append(model(ids[:, part], cache=past, **options).logits)
    close(torch.cat(logits, dim=1)[mask > 0], expected.logits[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [False, True])
@torch.no_grad()
def test_embeddings_of_nan_at_pads_have_no_effect(side, use_cache):
    model = thinking("llama")
    ids, mask = padded(rows_of(), side)
    embeds = model.get_input_embeddings()(ids)
    spoiled = embeds.masked_fill(~mask.bool().unsqueeze(-1), float("nan"))
    expected, actual = (
        model(inputs_embeds=e, attention_mask=mask, use_cache=use_cache).logits[mask.bool()] for e in (embeds, spoiled)
    )
    close(actual, expected)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_state_of_nan_at_pads_is_never_read(name):
    """What an attention backend returns for a row that sees nothing went through the router: its gradient, and with it
    all others, was zero times NaN."""
    model = thinking(name)
    ids, mask = padded(rows_of(), "left")
    real = mask.bool()

    def run():
        model.zero_grad()
        loss = model(ids, attention_mask=mask, labels=ids.masked_fill(~real, -100)).loss
        loss.backward()
        return loss, {n: p.grad.clone() for n, p in model.named_parameters()}

    def spoil(module, args, kwargs, output):
        if kwargs["cache"].get_seq_length() == 0:  # step 1: later runs hold active tokens alone
            output.last_hidden_state = output.last_hidden_state.masked_fill(~real.unsqueeze(-1), float("nan"))

    expected, expected_gradients = run()
    model.model.backbone.register_forward_hook(spoil, with_kwargs=True)
    loss, gradients = run()
    assert torch.equal(loss, expected)
    for n, gradient in expected_gradients.items():
        assert torch.equal(gradients[n], gradient), n


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_row_of_pads_alone(name):
    """It takes no step, and leaves states, losses and gradients of the others as they were."""
    model = thinking(name).train()
    ids, mask = random_ids(3, 7), torch.ones(3, 7, dtype=torch.long)
    mask[1] = 0
    labels = ids.masked_fill(mask == 0, -100)
    outputs = model(ids, attention_mask=mask, labels=labels, skip_logits=False)
    outputs.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    expected = model(ids[[0, 2]], labels=ids[[0, 2]], skip_logits=False)
    expected.loss.backward()
    close(outputs.loss, expected.loss)
    close(outputs.logits[[0, 2]], expected.logits)
    assert outputs.latents.lengths[1].tolist() == [0] * 7
    for n, p in model.named_parameters():
        close(gradients[n], p.grad)


def test_a_batch_of_pads_alone():
    model = thinking("qwen3_moe", text={"output_router_logits": True}).train()
    ids, mask = random_ids(2, 4), torch.zeros(2, 4, dtype=torch.long)
    outputs = model(ids, attention_mask=mask, labels=torch.full_like(ids, -100), num_items_in_batch=5)
    outputs.loss.backward()
    assert outputs.loss == 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (4, 1)])
@pytest.mark.parametrize("name", REPRESENTATIVE)
@torch.no_grad()
def test_shapes_at_the_edge(name, shape):
    model, ids = thinking(name), random_ids(*shape)
    positions = torch.arange(shape[1])
    for options in (
        {},
        {"position_ids": positions.unsqueeze(0)},
        {"position_ids": positions.expand(shape)},
        {"attention_mask": torch.ones(shape, dtype=torch.long)},
        {"attention_mask": torch.ones(shape, dtype=torch.bool), "use_cache": False},
    ):
        outputs = model(ids, **options)
        for row in range(shape[0]):
            expected, lengths = adaptive_oracle(model, ids[row : row + 1])
            close(outputs.logits[row : row + 1], expected)
            assert outputs.latents.lengths[row].tolist() == lengths


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"cache": "new"}])
def test_a_mask_that_says_who_sees_whom_is_refused(options):
    """It says nothing of steps. As a dict, one for each type of layer, it was obeyed at step 1 and forgotten after."""
    model, ids = thinking("gemma3_text"), random_ids(1, 5)
    if "cache" in options:
        options = {"cache": DynamicCache()}
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    for given_mask in (mask, {"full_attention": mask, "sliding_attention": mask}):
        with pytest.raises(ValueError, match=r"4D attention_mask.*2D one, or position_ids"):
            model(ids, attention_mask=given_mask, **options)


def test_a_mask_of_the_caller_is_obeyed_where_there_are_no_steps():
    """As by the plain model (B19)."""
    model, ids = thinking("llama"), random_ids(1, 5)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    mask[..., 2:, 1] = False
    other = ids.clone()
    other[0, 1] += 1
    first, second = (model(i, attention_mask=mask, use_cache=False, exit_at_step=1).logits for i in (ids, other))
    assert torch.equal(first[:, 2:], second[:, 2:])
    assert not torch.equal(first[:, 1], second[:, 1])
