"""What forward refuses, and what it says."""

import pytest
import torch

from tests.families import random_ids, text_config, tiny_model
from unspoken import VanillaConfig, VanillaForCausalLM


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def ids():
    return random_ids(2, 5)


def plain():
    return VanillaForCausalLM(VanillaConfig(text_config=text_config("llama")))


@pytest.mark.parametrize(
    ("wrong", "right"), [("prompt_masks", "prompt_mask"), ("num_pass", "num_passes"), ("lables", "labels")]
)
def test_a_misspelled_argument_is_refused(model, ids, wrong, right):
    """Bodies swallow what they do not know; a misspelled prompt mask would silently train the wrong thing."""
    for forward in (model, model.model, plain()):
        with pytest.raises(TypeError, match=f"{wrong!r}.*did you mean {right!r}"):
            forward(ids, **{wrong: None})


def test_arguments_of_transformers_are_passed_on(model, ids):
    outputs = model(ids, output_hidden_states=True, use_cache=False)
    assert len(outputs.hidden_states) == model.config.num_hidden_layers + 1
    for forward, width in ((model, 64), (model.model, 32), (plain(), 64), (plain().model, 32)):
        assert forward(ids, return_dict=True, use_cache=False)[0].shape == (2, 5, width)
        first, *_ = forward(ids, return_dict=False, use_cache=False)
        assert first.shape == (2, 5, width)


@pytest.mark.parametrize("num_passes", [0, -1, 1.5, "two", "Exact"])
def test_a_wrong_number_of_passes_is_refused(model, ids, num_passes):
    with pytest.raises(ValueError, match=f"num_passes must be.*'exact'; got {num_passes!r}"):
        model(ids, num_passes=num_passes)


def test_a_plain_model_has_one_pass(ids):
    with pytest.raises(ValueError, match="one pass; got num_passes=2"):
        plain()(ids, num_passes=2)
    exact, one = (plain_logits(ids, num_passes) for num_passes in ("exact", 1))
    assert torch.equal(exact, one)


def plain_logits(ids, num_passes):
    torch.manual_seed(0)
    return plain()(ids, num_passes=num_passes).logits


def test_ids_or_embeddings_but_not_both_and_not_neither(model, ids):
    embeds = model.get_input_embeddings()(ids)
    for options in ({"input_ids": ids, "inputs_embeds": embeds}, {}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**options)


def test_a_prompt_mask_of_another_shape_is_refused(model, ids):
    with pytest.raises(ValueError, match=r"prompt_mask must be \[batch, tokens\] = \(2, 5\), got \(2, 4\)"):
        model(ids, prompt_mask=torch.ones(2, 4))


def test_a_cache_is_made_when_evaluating_and_never_when_training(model, ids):
    """B52: `use_cache` stays true in the configuration, and training passes it by."""
    assert model(ids).cache is not None
    assert model(ids, labels=ids).cache is None
    assert model(ids, use_cache=False).cache is None
    training = tiny_model("llama").train()
    assert training(ids).cache is None
    assert training.config.text_config.use_cache


def test_a_cache_nobody_asked_for_does_not_change_the_passes(model, ids):
    """lm-eval and others score texts with `model(ids)`: the training passes, cache or not."""
    scored = tiny_model("llama", num_train_passes=3, num_prefill_passes=1)
    assert len(scored(ids).pass_hidden_states) == 3
    assert torch.equal(scored(ids).logits, scored(ids, use_cache=False).logits)
    assert len(scored(ids, use_cache=True).pass_hidden_states) == 1


def test_logits_of_some_positions(model, ids):
    everything = model(ids, use_cache=False).logits
    torch.testing.assert_close(model(ids, use_cache=False, logits_to_keep=2).logits, everything[:, -2:])
    chosen = torch.tensor([0, 3])
    torch.testing.assert_close(model(ids, use_cache=False, logits_to_keep=chosen).logits, everything[:, chosen])
    assert model(ids, skip_logits=True).logits is None
    assert model(ids, labels=ids).logits is not None
    training = tiny_model("llama").train()
    assert training(ids, labels=ids).logits is None
    assert training(ids, labels=ids, skip_logits=False).logits is not None


def test_a_configuration_that_wants_tuples(ids):
    model = tiny_model("llama")
    model.config.return_dict = False
    loss, logits, *_ = model(ids, labels=ids)
    assert (loss.ndim, logits.shape) == (0, (2, 5, 64))
