"""Parallel passes against the plain loops of `latent/reference.py`: outputs and gradients, every family."""

import pytest
import torch

from tests.families import ALL, REPRESENTATIVE, plain_model, random_ids, tiny_model
from tests.oracle import body, close, embed
from unspoken import convert
from unspoken.errors import UsageError
from unspoken.latent import reference

LENGTH = 7  # odd, and longer than the sliding windows
# Gradients pass the float32 norms of every position several times: a little more rounding than in the outputs.
GRADIENT_TOLERANCE = 1e-4


def gradients(model, passes: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradient of a fixed random projection of all passes' states, for every parameter that has one."""
    generator = torch.Generator().manual_seed(5)
    total = sum((h * torch.randn(h.shape, generator=generator, dtype=h.dtype)).sum() for h in passes)
    named = dict(model.model.named_parameters())
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {name: grad for name, grad in zip(named, grads) if grad is not None}


def assert_same_gradients(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        close(actual[name], gradient, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("name", ALL)
def test_two_passes_equal_the_reference(name):
    model, ids = tiny_model(name), random_ids(2, LENGTH)
    actual = list(model.model(ids, use_cache=False, num_passes=2).pass_hidden_states)
    expected = reference.parallel_passes(body(model), model.model.adapter, embed(model, ids), 2)
    assert len(actual) == 2
    for a, e in zip(actual, expected):
        close(a, e)
    assert (actual[1] - actual[0]).abs().max() > 0.01  # or nothing was recycled
    assert_same_gradients(gradients(model, actual), gradients(model, expected))


@pytest.mark.parametrize("name", ALL)
def test_as_many_passes_as_tokens_are_the_exact_recurrence(name):
    model, ids = tiny_model(name), random_ids(2, LENGTH)
    actual = model.model(ids, use_cache=False, num_passes=LENGTH).last_hidden_state
    expected = reference.exact_recurrence(body(model), model.model.adapter, embed(model, ids))
    close(actual, expected)
    assert_same_gradients(gradients(model, [actual]), gradients(model, [expected]))


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_exact_is_the_recurrence_token_by_token(name):
    model, ids = tiny_model(name), random_ids(2, LENGTH)
    outputs = model.model(ids, use_cache=False, num_passes="exact")
    expected = reference.exact_recurrence(body(model), model.model.adapter, embed(model, ids))
    close(outputs.last_hidden_state, expected)
    assert outputs.cache is None
    assert_same_gradients(gradients(model, [outputs.last_hidden_state]), gradients(model, [expected]))


@pytest.mark.parametrize("num_passes", [1, 2, 3, 5])
def test_pass_k_is_exact_at_the_first_k_positions_and_not_after(num_passes):
    model, ids = tiny_model("llama"), random_ids(1, LENGTH)
    hidden = model.model(ids, use_cache=False, num_passes=num_passes).last_hidden_state
    expected = reference.exact_recurrence(body(model), model.model.adapter, embed(model, ids))
    close(hidden[:, :num_passes], expected[:, :num_passes])
    assert (hidden - expected)[:, num_passes].abs().max() > 0.01


@pytest.mark.parametrize("name", ["llama_tied", "granite", "gemma3_text"])
def test_the_embedding_scale_is_of_tokens_and_not_of_what_is_recycled(name):
    model, ids = tiny_model(name, embedding_scale=2.5), random_ids(2, LENGTH)
    actual = model.model(ids, use_cache=False, num_passes=3).pass_hidden_states
    for a, e in zip(actual, reference.parallel_passes(body(model), model.model.adapter, embed(model, ids), 3)):
        close(a, e)
    from_embeds = model.model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False, num_passes=3)
    close(from_embeds.last_hidden_state, actual[-1], tolerance=0.0)


def test_passes_detached_from_each_other():
    model, ids = tiny_model("llama", detach_between_passes=True), random_ids(2, LENGTH)
    actual = list(model.model(ids, use_cache=False, num_passes=2).pass_hidden_states)
    embeds, run = embed(model, ids), body(model)
    first = run(embeds)
    recycled = model.model.adapter(first.detach())[:, :-1]
    second = run(torch.cat([embeds[:, :1], embeds[:, 1:] + recycled], dim=1))
    assert_same_gradients(gradients(model, actual), gradients(model, [first, second]))


@pytest.mark.parametrize("num_passes", [1, 2, 3])
@pytest.mark.parametrize("detach", [False, True])
def test_every_parameter_is_in_the_graph_at_every_number_of_passes(num_passes, detach):
    """B48 and DDP: a rank whose adapter is unused in a step is silently wrong, or hangs, on that step."""
    model = tiny_model("llama", detach_between_passes=detach).train()
    ids = random_ids(2, LENGTH)
    model(ids, labels=ids, num_passes=num_passes).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_the_default_number_of_passes_comes_from_the_configuration():
    model, ids = tiny_model("llama", num_train_passes=3, num_prefill_passes=1), random_ids(1, LENGTH)
    assert len(model(ids, use_cache=False).pass_hidden_states) == 3
    assert len(model(ids, use_cache=True).pass_hidden_states) == 1


def test_a_forward_is_deterministic():
    """B24: no seed enters a forward."""
    model, ids = tiny_model("llama"), random_ids(2, LENGTH)
    torch.manual_seed(1)
    first = model(ids, num_passes=3).logits
    torch.manual_seed(2)
    assert torch.equal(model(ids, num_passes=3).logits, first)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_one_pass_prompt_in_training_is_a_one_pass_prefill_in_decoding(name):
    """`prompt_mask` keeps recycled states out of the prompt, so enough passes are prefill (one pass) and decoding."""
    model, ids, prompt_length = tiny_model(name), random_ids(2, LENGTH), 3
    prompt_mask = (torch.arange(LENGTH) < prompt_length).expand(2, -1)
    outputs = model.model(ids, use_cache=False, num_passes=LENGTH - prompt_length + 1, prompt_mask=prompt_mask)
    expected = reference.prefill_then_decode(body(model), model.model.adapter, embed(model, ids), prompt_length, 1)
    close(outputs.last_hidden_state, expected)
    first, second = outputs.pass_hidden_states[:2]
    assert torch.equal(first[:, :prompt_length], second[:, :prompt_length])
    assert not torch.equal(first[:, prompt_length], second[:, prompt_length])


def test_prompts_of_different_lengths_in_one_batch():
    model, ids, lengths = tiny_model("llama"), random_ids(2, LENGTH), torch.tensor([2, 5])
    prompt_mask = torch.arange(LENGTH) < lengths[:, None]
    hidden = model.model(ids, use_cache=False, num_passes=LENGTH, prompt_mask=prompt_mask.long()).last_hidden_state
    for row, length in enumerate(lengths.tolist()):
        embeds = embed(model, ids[row : row + 1])
        expected = reference.prefill_then_decode(body(model), model.model.adapter, embeds, length, 1)
        close(hidden[row : row + 1], expected)


@pytest.mark.parametrize("norm", ["output", "none"])
def test_other_places_of_the_adapter_s_norm(norm):
    """They begin as the source, bit for bit, and follow the same recurrence."""
    source, ids = plain_model("llama", torch.float32), random_ids(2, LENGTH)
    begin = convert(source, adapter_norm=norm)
    assert torch.equal(begin(ids, num_passes=3, use_cache=False).logits, source(ids, use_cache=False).logits)
    model = tiny_model("llama", adapter_norm=norm)
    actual = model.model(ids, use_cache=False, num_passes=LENGTH).last_hidden_state
    expected = reference.exact_recurrence(body(model), model.model.adapter, embed(model, ids))
    close(actual, expected)
    assert_same_gradients(gradients(model, [actual]), gradients(model, [expected]))
    close(model.model(ids, num_passes="exact").last_hidden_state, expected)


@pytest.mark.parametrize("name", ["llama", "granite", "qwen3_moe"])
def test_a_gated_product_in_the_embeddings_place(name):
    """FBT's feedback: every pass, the recurrence and decoding from a prompt, outputs and gradients."""
    model, ids = tiny_model(name, feedback="gated"), random_ids(2, LENGTH)
    embeds, adapter = embed(model, ids), model.model.adapter
    states = model.model(ids, use_cache=False, num_passes=3).pass_hidden_states
    expected = reference.parallel_passes(body(model), adapter, embeds, 3)
    for found, wanted in zip(states, expected, strict=True):
        close(found, wanted)
    assert_same_gradients(gradients(model, [states[-1]]), gradients(model, [expected[-1]]))
    assert not torch.allclose(states[1], states[0])
    exact = reference.exact_recurrence(body(model), adapter, embeds)
    close(model.model(ids, use_cache=False, num_passes=LENGTH).last_hidden_state, exact)
    close(model.model(ids, num_passes="exact").last_hidden_state, exact)
    prefilled = reference.prefill_then_decode(body(model), adapter, embeds, 4, 2)
    cache = model.model(ids[:, :4], use_cache=True, num_passes=2).cache
    decoded = [model.model(ids[:, t : t + 1], cache=cache).last_hidden_state for t in range(4, LENGTH)]
    close(torch.cat(decoded, dim=1), prefilled[:, 4:])


def test_a_gated_product_keeps_documents_and_pads_plain():
    """Where nothing is recycled the token's embedding enters, and one pass leaves the adapter in the graph."""
    model, ids = tiny_model("llama", feedback="gated"), random_ids(1, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    together = model.model(ids, position_ids=positions, use_cache=False, num_passes=2).last_hidden_state
    for part in (slice(0, 3), slice(3, 6)):
        close(together[:, part], model.model(ids[:, part], use_cache=False, num_passes=2).last_hidden_state)
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(8) >= 2).long()[None]
    shown = model.model(
        padded,
        attention_mask=mask,
        position_ids=(torch.arange(8) - 2).clamp(min=0)[None],
        use_cache=False,
        num_passes=2,
    ).last_hidden_state
    close(shown[:, 2:], model.model(ids, use_cache=False, num_passes=2).last_hidden_state)
    model.train()(ids, labels=ids, num_passes=1).loss.backward()
    assert all(p.grad is not None for p in model.model.adapter.parameters())


def test_a_gated_product_is_no_start_from_a_pretrained_model():
    with pytest.raises(UsageError, match="no model computes what it did"):
        convert(plain_model("llama"), feedback="gated")
    with pytest.raises(ValueError, match="adapter_norm is for feedback 'added'"):
        tiny_model("llama", feedback="gated", adapter_norm="none")
    gated = tiny_model("llama", feedback="gated")
    with pytest.raises(UsageError, match="leave feedback"):
        convert(gated, "adaptive_recycler", feedback="added")
