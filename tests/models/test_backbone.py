import pytest
import torch

from tests.families import ALL, MOE, random_ids, text_config, tiny_model
from unspoken.models.backbone import FAMILIES, embedding_name, logit_transform

CAPPED = {"gemma2", "gemma3_text"}


@pytest.mark.parametrize("name", ALL)
def test_a_family_is_built_with_what_it_does_around_its_body(name):
    """B84: `_tied_weights_keys` as a list raises; a class attribute would name the wrong embedding."""
    model = tiny_model(name)
    family = FAMILIES[model.config.text_config.model_type]
    embedding = dict(model.named_parameters())[next(iter(model._tied_weights_keys.values()))]
    assert model._tied_weights_keys.keys() == {"lm_head.weight"}
    assert embedding is model.get_input_embeddings().weight
    assert embedding_name(model.model.backbone) == ("embed_in" if "neox" in name else "embed_tokens")
    assert (family.experts is not None) == (name in MOE)
    assert (model.transform.cap > 0) == (name in CAPPED)
    assert model.lm_head.bias is None


def test_scales_and_caps_of_the_tests_are_not_the_identity():
    """A configuration at its default would prove nothing."""
    for name, expected in {"granite": (1, 2, 0), "cohere": (0.25, 1, 0), "gemma2": (1, 1, 2)}.items():
        transform = logit_transform(text_config(name))
        assert (transform.multiplier, transform.divisor, transform.cap) == expected
    assert text_config("granite").embedding_multiplier == 3


def test_a_cap_of_none_caps_nothing():
    assert logit_transform(text_config("gemma3_text", final_logit_softcapping=None)).cap == 0


@pytest.mark.parametrize("name", MOE)
def test_the_balancing_loss_is_over_the_layers_of_each_pass(name):
    model, ids = tiny_model(name), random_ids(2, 7)
    outputs = model(ids, labels=ids, num_passes=2, output_router_logits=True)
    layers = model.config.num_hidden_layers
    assert len(outputs.router_logits) == 2 * layers
    first = model(ids, labels=ids, num_passes=1, output_router_logits=True)
    for a, b in zip(outputs.router_logits[:layers], first.router_logits):
        torch.testing.assert_close(a, b)
    assert not torch.allclose(outputs.router_logits[layers], outputs.router_logits[0])
    # Switch Transformer's loss by hand, summed over both passes: experts * sum(share of tokens * probability).
    by_hand = 0.0
    for routers in (outputs.router_logits[:layers], outputs.router_logits[layers:]):
        probabilities = torch.cat(list(routers)).softmax(-1)
        chosen = torch.nn.functional.one_hot(probabilities.topk(2).indices, 4).double()
        by_hand += 4 * (chosen.mean(0) * probabilities.mean(0)).sum().double()
    torch.testing.assert_close(outputs.aux_loss.double(), by_hand, rtol=1e-5, atol=0)
    plain = model(ids, labels=ids, num_passes=2)
    assert plain.aux_loss is None
    torch.testing.assert_close(outputs.loss, plain.loss + 0.5 * outputs.aux_loss)


def test_the_balancing_loss_is_switched_on_by_the_backbone_s_configuration():
    model, ids = tiny_model("qwen3_moe", text={"output_router_logits": True}), random_ids(2, 7)
    assert model(ids, labels=ids).aux_loss is not None
    assert model(ids, labels=ids, output_router_logits=False).aux_loss is None


def test_attention_implementation_reaches_the_backbone():
    model = tiny_model("llama")
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert model.model.backbone.config._attn_implementation == implementation
