"""How deep a call may go: in `generate`, in a forward, in the configuration; and what zero latent steps are."""

import pytest
import torch
from transformers import PreTrainedModel

from tests.equivalence.test_generate import left_padded
from tests.equivalence.test_latent_decoding import NEW_TOKENS, PROMPTS, check_greedy, greedy, thinking
from tests.families import ALL, MOE, REPRESENTATIVE, SLIDING, adaptive_model, random_ids
from tests.oracle import adaptive_oracle, close
from unspoken import AdaptiveLatentForCausalLM, VanillaConfig, VanillaForCausalLM, export_backbone

KNOBS = [
    {"max_latent_steps": 1},
    {"max_latent_steps": 5},
    {"exit_threshold": 0.5},
    {"exit_threshold": 0.0},
    {"exit_at_step": 1},
    {"exit_at_step": 3},
    {"max_latent_steps": 2, "exit_threshold": 0.4},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_the_knobs_of_one_call(knobs):
    """In `generate` and in a forward, over a batch; and the configuration's own values are read the same way."""
    model = thinking("llama")
    ids = greedy(model, **left_padded(PROMPTS), **knobs)
    for row, prompt in enumerate(PROMPTS):
        check_greedy(model, prompt, ids[row : row + 1, -NEW_TOKENS - prompt.shape[1] :], **knobs)
    with torch.no_grad():
        outputs = model(PROMPTS[0], **knobs)
        expected, lengths = adaptive_oracle(model, PROMPTS[0], **knobs)
        close(outputs.logits, expected)
        assert outputs.latents.lengths[0].tolist() == lengths
        assert lengths != adaptive_oracle(model, PROMPTS[0])[1], "the knob made no difference"
        configured = thinking("llama", **knobs)
        configured.load_state_dict(model.state_dict())
        close(configured(PROMPTS[0]).logits, expected)


def test_a_call_s_depth_overrules_the_configuration_s_fixed_one():
    model = thinking("llama", exit_at_step=2)
    with torch.no_grad():
        assert model(PROMPTS[0]).latents.lengths.unique().tolist() == [1]
        outputs = model(PROMPTS[0], max_latent_steps=2)
        close(outputs.logits, adaptive_oracle(model, PROMPTS[0], max_latent_steps=2)[0])


@torch.no_grad()
def test_a_model_without_a_router_takes_all_steps():
    model = thinking("llama", router="none", max_latent_steps=2)
    close(model(PROMPTS[0]).logits, adaptive_oracle(model, PROMPTS[0], exit_at_step=3)[0])
    close(model(PROMPTS[0], max_latent_steps=1).logits, adaptive_oracle(model, PROMPTS[0], exit_at_step=2)[0])


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"exit_threshold": 1.5}, "exit_threshold must be a probability"),
        ({"max_latent_steps": -1}, "max_latent_steps must be a whole number of at least 0"),
        ({"exit_at_step": 0}, "exit_at_step must be a whole number of at least 1"),
    ],
)
def test_a_knob_that_cannot_be_meant_is_refused(knobs, message):
    model = thinking("llama")
    with pytest.raises(ValueError, match=message):
        greedy(model, PROMPTS[0], **knobs)
    with pytest.raises(ValueError, match=message):
        model(PROMPTS[0], **knobs)
    with pytest.raises(ValueError, match="exit_treshold"):
        greedy(model, PROMPTS[0], exit_treshold=0.5)


def plain_pair(name: str) -> tuple[AdaptiveLatentForCausalLM, VanillaForCausalLM, PreTrainedModel]:
    """A model with latent steps, the plain one of the same weights, and the family's own."""
    model = adaptive_model(name, torch.float32, max_latent_steps=0)
    vanilla = VanillaForCausalLM(VanillaConfig(text_config=model.config.text_config)).eval()
    vanilla.load_state_dict(model.state_dict(), strict=False)
    return model, vanilla, export_backbone(model).eval()


@pytest.mark.parametrize("name", ALL)
def test_no_latent_step_is_the_plain_model_bit_for_bit(name):
    """Forward, with pads and without, losses and gradients, and packed documents."""
    model, vanilla, family = plain_pair(name)
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
    for options in ({}, {"attention_mask": mask}, {"position_ids": positions}):
        outputs, expected = (m(ids, labels=ids, use_cache=False, **options) for m in (model, vanilla))
        assert torch.equal(outputs.logits, expected.logits)
        assert torch.equal(outputs.loss, expected.loss)
        outputs.loss.backward()
        expected.loss.backward()
        for parameter_name, parameter in vanilla.named_parameters():
            assert torch.equal(model.get_parameter(parameter_name).grad, parameter.grad), parameter_name
        assert not model.model.router.gates[0].weight.grad.any()
        if "position_ids" not in options:
            theirs, real = (
                family(ids, use_cache=False, **options).logits,
                options.get("attention_mask", 1 + 0 * ids) > 0,
            )
            if name in MOE:  # other states at pads: an expert multiplies other rows with them, and rounds otherwise
                close(outputs.logits[real], theirs[real], 1e-5)
            else:
                assert torch.equal(outputs.logits[real], theirs[real])
    deep = adaptive_model(name, torch.float32)
    deep.load_state_dict(model.state_dict())
    for options in ({"max_latent_steps": 0}, {"exit_at_step": 1}):
        assert torch.equal(deep(ids, use_cache=False, **options).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_decoding_without_latent_steps_is_the_plain_model_s(name):
    """Bit for bit where the plain model's cache holds all keys too; a window's cache drops what it has left."""
    model, vanilla, family = plain_pair(name)
    has_window = name in SLIDING
    for prompts in ({"input_ids": PROMPTS[0]}, left_padded(PROMPTS)):
        options = {**prompts, "return_dict_in_generate": True, "output_logits": True}
        outputs, expected, theirs = (greedy(m, **options) for m in (model, vanilla, family))
        assert torch.equal(outputs.sequences, expected.sequences)
        assert torch.equal(outputs.sequences, theirs.sequences)
        for a, b, c in zip(outputs.logits, expected.logits, theirs.logits):
            assert torch.equal(b, c)
            if has_window:
                close(a, b, 1e-5)
            else:
                assert torch.equal(a, b)


@pytest.mark.parametrize("name", REPRESENTATIVE)
@torch.no_grad()
def test_a_deep_cache_is_a_plain_one_to_who_takes_no_step(name):
    """Step 1 reads step 1 alone, whatever lies deeper: thinking over a prompt leaves a later plain turn as it was."""
    model, ids = thinking(name), random_ids(2, 11)
    plain = model(ids, max_latent_steps=0, use_cache=False).logits
    outputs = model(ids[:, :7], use_cache=True)
    assert outputs.latents.lengths.any()
    first = model(ids[:, 7:10], cache=outputs.cache, max_latent_steps=0)
    second = model(ids[:, 10:], cache=outputs.cache, exit_at_step=1)
    close(torch.cat([first.logits, second.logits], dim=1), plain[:, 7:])
