"""A row in a padded batch equals the row alone, on either side, whatever lies at the pads."""

import pytest
import torch
from torch import Tensor

from tests.families import ALL, PAD, REPRESENTATIVE, random_ids, tiny_model
from tests.oracle import TOLERANCE, close

LENGTHS = (7, 3, 10)


# transformers' eager attention gives NaN in float64 for a query that sees nothing: the mask's value becomes minus
# infinity in its float32 softmax. Families that need it, and tests of it, run in float32.
DTYPES = {"eager": torch.float32, "sdpa": torch.float64}
FLOAT32_TOLERANCE = 1e-4  # three passes through tiny wide-weighted models; 2e-6 seen, a wrong state is off by 1e-2


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Rows [1, n] of different lengths -> (ids, attention_mask), both [B, T]."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), longest), PAD)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        columns = slice(longest - row.shape[1], None) if side == "left" else slice(row.shape[1])
        ids[i, columns], mask[i, columns] = row[0], 1
    return ids, mask


def rows_of(lengths=LENGTHS) -> list[Tensor]:
    return [random_ids(1, length, seed=i) for i, length in enumerate(lengths)]


def token_positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ALL)
def test_a_padded_row_equals_the_row_alone(name, side):
    """B06, B09, B13, B16: masks ignored, or positions of the longest row given to all."""
    dtype = torch.float32 if name == "gemma2" else torch.float64
    tolerance = FLOAT32_TOLERANCE if name == "gemma2" else TOLERANCE
    model, rows = tiny_model(name, dtype), rows_of()
    ids, mask = padded(rows, side)
    for options in ({"position_ids": token_positions(mask)}, {}):  # without them, positions count the pads
        outputs = model(ids, attention_mask=mask, use_cache=False, num_passes=3, **options)
        for i, row in enumerate(rows):
            alone = model(row, use_cache=False, num_passes=3)
            for states, states_alone in zip(outputs.pass_hidden_states, alone.pass_hidden_states):
                close(states[i][mask[i].bool()], states_alone[0], tolerance)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_what_lies_at_pads_has_no_effect(name, side, implementation):
    """B16: a recurrent state took in what was computed at pads."""
    model = tiny_model(name, DTYPES[implementation])
    model.set_attn_implementation(implementation)
    assert model.model.backbone.config._attn_implementation == implementation
    ids, mask = padded(rows_of(), side)
    real = mask.bool()
    expected = model(ids, attention_mask=mask, use_cache=False, num_passes=3).logits[real]
    other = model(ids.masked_fill(~real, 9), attention_mask=mask, use_cache=False, num_passes=3).logits[real]
    embeds = model.get_input_embeddings()(ids).masked_fill(~real.unsqueeze(-1), 1e3)
    huge = model(inputs_embeds=embeds, attention_mask=mask, use_cache=False, num_passes=3).logits[real]
    if name == "qwen3_moe":  # other pads change which tokens an expert multiplies at once, and so the rounding
        close(other, expected)
        close(huge, expected)
    else:
        assert torch.equal(other, expected)
        assert torch.equal(huge, expected)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_state_of_nan_at_pads_is_never_read(name):
    """Attention backends return what they like for rows that see nothing, NaN too; neither states nor gradients of
    real tokens may meet it."""
    model = tiny_model(name)
    ids, mask = padded(rows_of(), "left")
    real = mask.bool()

    def spoil(module, args, kwargs, output):
        output.last_hidden_state = output.last_hidden_state.masked_fill(~real.unsqueeze(-1), float("nan"))

    def run():
        hidden = model.model(ids, attention_mask=mask, use_cache=False, num_passes=3).last_hidden_state[real]
        return hidden, torch.autograd.grad(hidden.square().sum(), model.model.adapter.proj.weight)[0]

    expected, expected_gradient = run()
    model.model.backbone.register_forward_hook(spoil, with_kwargs=True)
    hidden, gradient = run()
    assert torch.equal(hidden, expected)
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("side", ["left", "right"])
def test_embeddings_of_nan_at_pads_have_no_effect(side):
    model = tiny_model("llama")
    ids, mask = padded(rows_of(), side)
    embeds = model.get_input_embeddings()(ids)
    spoiled = embeds.masked_fill(~mask.bool().unsqueeze(-1), float("nan"))
    for options in ({"use_cache": False}, {"use_cache": True}):
        expected = model(inputs_embeds=embeds, attention_mask=mask, **options).logits[mask.bool()]
        actual = model(inputs_embeds=spoiled, attention_mask=mask, **options).logits[mask.bool()]
        close(actual, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_a_padded_batch_is_the_loss_of_its_rows(side):
    model, rows = tiny_model("llama_tied").train(), rows_of()
    ids, mask = padded(rows, side)
    labels = ids.masked_fill(mask == 0, -100)
    num_targets = sum(row.shape[1] - 1 for row in rows)
    loss = model(ids, attention_mask=mask, position_ids=token_positions(mask), labels=labels).loss
    alone = sum(model(row, labels=row, num_items_in_batch=num_targets).loss for row in rows)
    torch.testing.assert_close(loss, alone, rtol=1e-6, atol=0)


@pytest.mark.parametrize("appended", [1, 5, 32])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_pads_on_the_right_without_a_mask_change_nothing_before_them(name, appended):
    """B103: lm-eval passes right-padded ids and no mask."""
    model, ids = tiny_model(name), random_ids(1, 9)
    pads = torch.full((1, appended), PAD)
    close(model(torch.cat([ids, pads], dim=1), use_cache=False).logits[:, :9], model(ids, use_cache=False).logits)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_pads_stay_hidden_during_a_long_decode(name):
    """B15: the pad mask was built for the prefill alone, so pads became visible later."""
    model, row = tiny_model(name), random_ids(1, 24)
    prompt_length, num_pads = 4, 64
    ids = torch.cat([torch.full((1, num_pads), PAD), row], dim=1)
    mask = (torch.arange(ids.shape[1]) >= num_pads).long().unsqueeze(0)
    steps = [slice(0, prompt_length), *(slice(t, t + 1) for t in range(prompt_length, 24))]
    cache, cache_alone = None, None
    for step in steps:
        alone = model(row[:, step], cache=cache_alone, use_cache=True)
        stop = num_pads + step.stop
        columns = slice(0 if cache is None else num_pads + step.start, stop)
        positions = token_positions(mask)[:, columns]
        outputs = model(
            ids[:, columns], attention_mask=mask[:, :stop], position_ids=positions, cache=cache, use_cache=True
        )
        cache, cache_alone = outputs.cache, alone.cache
        close(outputs.logits[:, -1], alone.logits[:, -1])


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_4d_mask_of_the_caller_is_obeyed(name):
    """B19: a mask that forbids position 2 to all later ones; what lies there must not matter, recycled or attended."""
    model, ids, forbidden = tiny_model(name, num_train_passes=1), random_ids(1, 7), 2
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    mask[forbidden + 1 :, forbidden] = False
    mask = mask[None, None]
    other = ids.clone()
    other[0, forbidden] += 1
    first, second = (model(i, attention_mask=mask, use_cache=False).logits for i in (ids, other))
    assert not torch.equal(first[:, forbidden], second[:, forbidden])
    assert torch.equal(first[:, forbidden + 1 :], second[:, forbidden + 1 :])
