"""A row in a padded batch takes the latent steps that it takes alone, whatever lies at the pads; and odd shapes."""

import pytest
import torch
from transformers import DynamicCache

from tests.equivalence.test_latent_decoding import thinking
from tests.equivalence.test_latent_packing import FLOAT32_TOLERANCE, assert_same_steps, taken_steps
from tests.equivalence.test_padding import padded, rows_of, token_positions
from tests.families import ALL, PAD, REPRESENTATIVE, random_ids
from tests.oracle import TOLERANCE, adaptive_oracle, close


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
