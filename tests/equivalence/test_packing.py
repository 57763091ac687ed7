"""Documents packed into one row equal the same documents alone: states, losses and gradients."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.families import ALL, MOE, PAD, REPRESENTATIVE, random_ids, text_config, tiny_model
from tests.oracle import TOLERANCE, close
from unspoken import RecyclerConfig, VanillaConfig, VanillaForCausalLM
from unspoken.models.inputs import document_mask

# Rows of 11 tokens: documents shorter and longer than a window, and of one token.
ROWS = ((4, 1, 6), (7, 4))
# transformers' eager attention in float64 has no finite value for pads that see nothing; see test_padding.py.
FLOAT32_TOLERANCE = 1e-4


def documents() -> list[list[Tensor]]:
    return [[random_ids(1, n, seed=10 * r + i) for i, n in enumerate(row)] for r, row in enumerate(ROWS)]


def packed(rows: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Rows of documents [1, n] -> (ids, position_ids), both [B, T]."""
    ids = torch.cat([torch.cat(row, dim=1) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(d.shape[1]) for d in row]) for row in rows])
    return ids, positions


def assert_equal_alone(model, rows, outputs, tolerance: float = TOLERANCE) -> None:
    """Each pass's states of each packed document equal those of the document alone."""
    num_passes = len(outputs.pass_hidden_states)
    for r, row in enumerate(rows):
        start = 0
        for document in row:
            alone = model(document, use_cache=False, num_passes=num_passes)
            part = slice(start, start := start + document.shape[1])
            for states, states_alone in zip(outputs.pass_hidden_states, alone.pass_hidden_states):
                close(states[r, part], states_alone[0], tolerance)


@pytest.mark.parametrize("name", ALL)
def test_packed_documents_equal_documents_alone(name):
    """B57 and B58: packed documents saw each other, through attention or the recycled state, as soon as a mask came."""
    model, rows = tiny_model(name), documents()
    ids, positions = packed(rows)
    embeds = model.get_input_embeddings()(ids)
    for options in (
        {"input_ids": ids, "use_cache": False},
        {"input_ids": ids, "use_cache": False, "attention_mask": torch.ones_like(ids)},
        {"input_ids": ids, "use_cache": None, "attention_mask": torch.ones_like(ids)},
        {"inputs_embeds": embeds, "use_cache": None},
    ):
        outputs = model(position_ids=positions, num_passes=3, **options)
        assert outputs.cache is None
        assert_equal_alone(model, rows, outputs)


@pytest.mark.parametrize("name", [*REPRESENTATIVE, "gemma2", "gpt_oss"])
def test_packed_documents_with_pads_after_them(name):
    dtype = torch.float32 if name in ("gemma2", "gpt_oss") else torch.float64
    model, rows = tiny_model(name, dtype), documents()
    ids, positions = packed(rows)
    pads = torch.full((2, 3), PAD)
    mask = torch.cat([torch.ones_like(ids), torch.zeros_like(pads)], dim=1)
    outputs = model(
        torch.cat([ids, pads], dim=1),
        attention_mask=mask,
        position_ids=torch.cat([positions, torch.zeros_like(pads)], dim=1),
        use_cache=False,
        num_passes=2,
    )
    assert_equal_alone(model, rows, outputs, TOLERANCE if dtype == torch.float64 else FLOAT32_TOLERANCE)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", ALL)
def test_editing_one_document_moves_no_bit_of_another(name, mode):
    model = tiny_model(name).train(mode == "train")
    ids, positions = packed(documents())
    other = ids.clone()
    other[0, 1] += 1  # in the first document of the first row
    first, second = (model.model(i, position_ids=positions, use_cache=False, num_passes=3) for i in (ids, other))
    for a, b in zip(first.pass_hidden_states, second.pass_hidden_states):
        assert not torch.equal(a[0, 1:4], b[0, 1:4])
        if name in MOE:  # the edit moves tokens between experts, whose products round by their number of rows
            close(a[0, 4:], b[0, 4:])
            close(a[1], b[1])
        else:
            assert torch.equal(a[0, 4:], b[0, 4:])
            assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("ask", ["use_cache", "cache", "past_key_values"])
def test_a_cache_for_packed_documents_is_refused(ask):
    """B58: a cache cannot keep documents apart, and transformers mixes them without a word."""
    ids, positions = packed(documents())
    with pytest.raises(ValueError, match=r"packed documents.*use_cache=False"):
        tiny_model("llama")(ids, position_ids=positions, **{ask: True if ask == "use_cache" else DynamicCache()})


def test_the_exact_recurrence_of_packed_documents_is_refused():
    ids, positions = packed(documents())
    with pytest.raises(ValueError, match="one document a row"):
        tiny_model("llama")(ids, position_ids=positions, num_passes="exact", use_cache=False)


@pytest.mark.parametrize("mask", [None, "ones"])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_loss_of_a_pack_is_the_loss_of_its_documents(name, mask):
    """B59: the first token of a document was predicted from the last of the one before. Labels are the plain ids."""
    model, rows = tiny_model(name).train(), documents()
    ids, positions = packed(rows)
    num_documents = sum(len(row) for row in rows)
    num_targets = ids.numel() - num_documents
    options = {} if mask is None else {"attention_mask": torch.ones_like(ids)}
    outputs = model(ids, position_ids=positions, labels=ids, **options)
    outputs.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    alone = [model(d, labels=d, num_items_in_batch=num_targets) for row in rows for d in row if d.shape[1] > 1]
    torch.testing.assert_close(outputs.loss, sum(o.loss for o in alone), rtol=1e-6, atol=0)
    torch.testing.assert_close(outputs.pass_losses, sum(o.pass_losses for o in alone), rtol=1e-6, atol=0)
    sum(o.loss for o in alone).backward()
    for n, p in model.named_parameters():
        close(gradients[n], p.grad)


def test_targets_in_a_pack_are_tokens_minus_documents():
    """B59, by counting: with the head at zero every target costs log(vocabulary)."""
    model, (ids, positions) = tiny_model("llama", num_train_passes=1), packed(documents())
    model.lm_head.weight.data.zero_()
    loss = model(ids, position_ids=positions, labels=ids, num_items_in_batch=1).loss
    num_targets = loss / torch.tensor(64.0).double().log()
    torch.testing.assert_close(num_targets.item(), float(ids.numel() - 5))


def test_a_plain_model_packs_too():
    """The baseline of every comparison reads the same batches."""
    config = VanillaConfig(text_config=tiny_model("llama").config.text_config)
    model, rows = VanillaForCausalLM(config).double().eval(), documents()
    ids, positions = packed(rows)
    for options in ({}, {"attention_mask": torch.ones_like(ids)}):
        outputs = model(ids, position_ids=positions, labels=ids, num_items_in_batch=1, **options)
        alone = [model(d, labels=d, num_items_in_batch=1).loss for row in rows for d in row if d.shape[1] > 1]
        torch.testing.assert_close(outputs.loss, sum(alone))


def test_an_attention_backend_that_would_mix_documents_is_refused():
    """B20: flash attention takes padding masks alone and drops the rest without a word."""
    config = RecyclerConfig(text_config=text_config("gemma3_text"))
    config._attn_implementation = "flash_attention_2"
    _, positions = packed(documents())
    embeds, mask = torch.zeros(2, 11, 32), torch.ones(2, 11, dtype=torch.long)
    masks = document_mask(config, embeds, mask, positions)
    assert set(masks.values()) == {None}  # nothing masked: the backend reads the position ids itself
    mask[:, -1] = 0
    with pytest.raises(ValueError, match=r"flash_attention_2.*attention_mask=None"):
        document_mask(config, embeds, mask, positions)
