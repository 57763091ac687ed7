"""Faults that an adversarial reading found, each with the use that showed it. All gave wrong numbers in silence."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.families import random_ids, tiny_model
from unspoken import RecyclerConfig, convert
from unspoken.errors import CacheError, UsageError
from unspoken.models.loss import plain_cross_entropy, shift_labels

EXACT = 1e-10  # float64, logits of a few units


def logits_of(model, ids, **options):
    return model(ids, use_cache=False, **options).logits


def test_a_pad_between_packed_documents_does_not_join_them():
    """Only jumps between two real neighbours counted as a document's start, so [a b c PAD d e f] was one document."""
    model, ids = tiny_model("llama"), random_ids(1, 8)
    for pads in (1, 2):
        mask = torch.ones(1, 8, dtype=torch.long)
        mask[0, 3 : 3 + pads] = 0
        positions = torch.tensor([[0, 1, 2] + [0] * pads + list(range(5 - pads))])
        packed = logits_of(model, ids, attention_mask=mask, position_ids=positions)[:, 3 + pads :]
        assert (packed - logits_of(model, ids[:, 3 + pads :])).abs().max() < EXACT
        with pytest.raises(ValueError, match="packed"):
            model(ids, attention_mask=mask, position_ids=positions, use_cache=True)


@pytest.mark.parametrize("num_passes", [2, 3])
def test_pads_neither_enter_nor_interrupt_the_recurrence(num_passes):
    """A state was dropped after a hole, and after right pads when a cache went on."""
    model, ids = tiny_model("llama"), random_ids(1, 7)
    whole = logits_of(model, ids, num_passes=num_passes)
    holed = torch.cat([ids[:, :4], random_ids(1, 2, seed=9), ids[:, 4:]], dim=1)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 3, 3, 4, 5, 6]])
    got = logits_of(model, holed, attention_mask=mask, position_ids=positions, num_passes=num_passes)
    assert (got[:, mask[0].bool()] - whole).abs().max() < EXACT


def test_a_right_padded_prompt_goes_on_from_its_last_real_token():
    model, ids = tiny_model("llama"), random_ids(1, 5)
    alone = model(ids, use_cache=True)
    expected = model(torch.tensor([[7]]), cache=alone.cache).logits
    padded = torch.cat([ids, random_ids(1, 2, seed=5)], dim=1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    cache = model(padded, attention_mask=mask, use_cache=True).cache
    mask = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], dim=1)
    got = model(torch.tensor([[7]]), attention_mask=mask, position_ids=torch.tensor([[5]]), cache=cache).logits
    assert (got - expected).abs().max() < EXACT


def test_a_state_passes_only_where_a_4d_mask_lets_attention_pass():
    """The recycled state crossed the blocks of a block-diagonal mask."""
    model, ids = tiny_model("llama"), random_ids(1, 8)
    block = torch.ones(8, 8, dtype=torch.bool).tril()
    block[4:, :4] = False
    edited = ids.clone()
    edited[0, :4] = random_ids(1, 4, seed=3)
    for mask in (block[None, None], torch.where(block, 0.0, torch.finfo(torch.float32).min).double()[None, None]):
        before, after = (logits_of(model, x, attention_mask=mask)[:, 4:] for x in (ids, edited))
        assert torch.equal(before, after)


def test_compiled_evaluation_keeps_packed_documents_apart():
    """While compiling nobody can look for documents; a cache was made, and the documents saw each other."""
    model, ids = tiny_model("llama"), random_ids(1, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        got = compiled(ids, position_ids=positions).logits[:, 3:]
        assert (got - logits_of(model, ids[:, 3:])).abs().max() < EXACT


@pytest.mark.parametrize("num_passes", [2, 3])
def test_chunks_of_one_token_in_a_static_cache_see_the_pads(num_passes):
    """A one-token chunk got the 4D mask of a decoding step, which does not show that the token before is a pad."""
    model = tiny_model("llama")
    ids, mask = torch.tensor([[0, 0, 0, 11, 12]]), torch.tensor([[0, 0, 0, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "num_passes": num_passes}
    expected = model.generate(ids, **options)
    got = model.generate(ids, **options, cache_implementation="static", prefill_chunk_size=1)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["lookup", "draft"])
def test_speculation_goes_on_from_a_returned_cache(kind):
    """transformers ran the tokens of the returned cache a second time."""
    model = tiny_model("llama")
    prompt = random_ids(1, 3).repeat(1, 4)
    first = model.generate(prompt, max_new_tokens=6, return_dict_in_generate=True, do_sample=False)
    ids = torch.cat([first.sequences, random_ids(1, 3, seed=3).repeat(1, 2)], dim=1)
    expected = model.generate(ids, cache=copy.deepcopy(first.cache), max_new_tokens=8, do_sample=False)
    how = {"prompt_lookup_num_tokens": 3} if kind == "lookup" else {"assistant_model": tiny_model("llama", seed=1)}
    assert torch.equal(model.generate(ids, cache=first.cache, max_new_tokens=8, do_sample=False, **how), expected)


def test_our_options_do_not_reach_a_plain_draft_model():
    from tests.families import plain_model

    model, ids = tiny_model("llama"), random_ids(1, 6)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, num_passes=1)
    draft = plain_model("llama", seed=2)
    got = model.generate(ids, max_new_tokens=6, do_sample=False, num_passes=1, assistant_model=draft)
    assert torch.equal(got, expected)


def test_lora_on_the_head_is_in_the_loss():
    """The loss took the head's weight past whatever wrapped it."""
    model = tiny_model("llama", dtype=torch.float32).train()
    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], modules_to_save=["adapter"], init_lora_weights=False)
    wrapped, ids = get_peft_model(model, lora), random_ids(2, 7)
    output = wrapped(ids, labels=ids, skip_logits=False, num_passes=1)
    targets = ids[:, 1:].flatten()
    expected = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets)
    assert torch.isclose(output.loss, expected, rtol=1e-5)
    output.loss.backward()
    gradients = {name: p.grad for name, p in wrapped.named_parameters() if "lm_head.lora" in name}
    assert len(gradients) == 2
    assert all(gradient is not None and gradient.any() for gradient in gradients.values())


def test_labels_out_of_range_are_refused():
    """A label of -1 was trained as token 0."""
    model, ids = tiny_model("llama"), random_ids(1, 6)
    for wrong in (-1, 64):
        labels = ids.clone()
        labels[0, 2] = wrong
        with pytest.raises(ValueError, match=r"labels must lie in 0\.\.63"):
            model(ids, labels=labels)
    with pytest.raises(ValueError, match="labels must be"):
        model(ids, labels=ids[:, 1:])


def test_a_second_derivative_is_refused():
    """The first derivative was taken for a constant."""
    model, ids = tiny_model("llama").train(), random_ids(1, 6)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(model(ids, labels=ids).loss, next(iter(model.parameters())), create_graph=True)


def test_detach_cuts_with_a_cache_too():
    model, ids = tiny_model("llama", detach_between_passes=True).train(), random_ids(1, 6)
    weight = model.model.backbone.layers[0].self_attn.q_proj.weight

    def gradient(**options):
        hidden = model.model(ids, num_passes=2, **options).last_hidden_state
        return torch.autograd.grad(hidden.pow(2).sum(), weight)[0]

    assert (gradient(use_cache=True) - gradient(use_cache=False)).abs().max() < EXACT


def test_router_loss_of_the_exact_recurrence_and_none_without_labels():
    """The exact recurrence lost it; a padded `generate` of a balanced model crashed over it."""
    model = tiny_model("qwen3_moe", text={"output_router_logits": True}).train()
    ids = random_ids(1, 5)
    exact = model(ids, labels=ids, num_passes="exact").aux_loss
    parallel = model(ids, labels=ids, num_passes=5)
    assert exact is not None and parallel.aux_loss is not None
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    made = model.eval().generate(random_ids(2, 5), attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert made.shape == (2, 8)


def test_conversion_agrees_with_what_it_says_of_tying(tmp_path):
    """A tied model converted as untied was saved without a head."""
    from tests.families import plain_model

    source = plain_model("llama_tied")
    ids = random_ids(1, 6)
    expected = source(ids).logits
    model = convert(source, tie_word_embeddings=False)
    assert torch.equal(model(ids).logits, expected)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.equal(loaded(ids).logits, expected)
    with pytest.raises(UsageError, match="differs from its embedding"):
        convert(plain_model("llama"), tie_word_embeddings=True)


def test_conversion_keeps_one_configuration():
    """The body read another object than `model.config.text_config`, so that setting a field there did nothing."""
    from tests.families import plain_model

    model = convert(plain_model("qwen3_moe"))
    assert model.config.text_config is model.model.backbone.config


def test_unknown_fields_and_values_are_refused():
    from tests.families import plain_model, text_config

    with pytest.raises(UsageError, match="'num_passes' is no field"):
        convert(plain_model("llama"), num_passes=3)
    with pytest.raises(UsageError, match="no language-model head"):
        convert(plain_model("llama").model)
    with pytest.raises(UsageError, match="not a NoneType"):
        convert(None)
    for field, value in [
        ("num_train_passes", 2.5),
        ("detach_between_passes", "no"),
        ("embedding_scale", 0),
        ("pass_loss_reduction", "average"),
    ]:
        with pytest.raises(ValueError, match=field):
            RecyclerConfig(text_config=text_config("llama"), **{field: value})
    shared = text_config("llama")
    RecyclerConfig(text_config=shared, tie_word_embeddings=True)
    assert not shared.tie_word_embeddings


def test_a_plain_model_refuses_a_recycling_cache():
    from tests.families import text_config
    from unspoken import VanillaConfig, VanillaForCausalLM

    cache = tiny_model("llama")(random_ids(1, 4), use_cache=True).cache
    plain = VanillaForCausalLM(VanillaConfig(text_config=text_config("llama"))).double()
    with pytest.raises(CacheError, match="stale"):
        plain(random_ids(1, 1), cache=cache)


def test_the_reference_loss_has_a_second_derivative():
    """What the refusal above points to works."""
    model, ids = tiny_model("llama").train(), random_ids(1, 5)
    passes = model.model(ids, num_passes=2, use_cache=False).pass_hidden_states
    weight = model.lm_head.weight
    loss = plain_cross_entropy(list(passes), weight, shift_labels(ids), model.transform).sum()
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    assert torch.autograd.grad(first.pow(2).sum(), weight)[0].any()


def test_a_configuration_leaves_a_live_model_alone():
    """Wrapping a model's configuration reset its attention implementation: the model lost its causal mask."""
    from tests.families import plain_model

    model, ids = plain_model("llama"), random_ids(1, 6)
    expected = model(ids).logits
    RecyclerConfig(text_config=model.config)
    assert torch.equal(model(ids).logits, expected)
