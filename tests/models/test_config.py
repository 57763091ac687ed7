import pytest
from transformers import AutoConfig, GPT2Config, LlamaConfig

from tests.families import ALL, text_config
from unspoken import RecyclerConfig, RecyclerForCausalLM, VanillaConfig, scaled_init
from unspoken.errors import UnsupportedBackboneError, UsageError


@pytest.mark.parametrize("name", ALL)
def test_a_configuration_survives_its_file(name, tmp_path):
    config = RecyclerConfig(
        text_config=text_config(name),
        num_train_passes=3,
        num_prefill_passes=1,
        detach_between_passes=True,
        pass_loss_reduction="mean",
        embedding_scale=2.5,
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is RecyclerConfig
    assert type(loaded.text_config) is type(config.text_config)
    assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()
    assert loaded.num_train_passes == 3
    assert loaded.text_config.vocab_size == loaded.vocab_size == 64


def test_the_backbone_is_what_transformers_finds():
    """generate, TRL and the caches ask for `get_text_config()`."""
    config = RecyclerConfig(text_config=text_config("gemma3_text"))
    assert config.get_text_config() is config.text_config
    assert (config.hidden_size, config.num_hidden_layers) == (32, 2)


def test_special_tokens_and_tying_come_from_the_backbone():
    backbone = {"eos_token_id": [2, 7], "bos_token_id": 1, "pad_token_id": 5}
    config = RecyclerConfig(text_config=LlamaConfig(**backbone, tie_word_embeddings=True))
    assert {name: getattr(config, name) for name in backbone} == backbone
    assert config.tie_word_embeddings is True
    overridden = RecyclerConfig(text_config=LlamaConfig(**backbone), pad_token_id=9, tie_word_embeddings=True)
    assert overridden.pad_token_id == 9
    assert overridden.text_config.tie_word_embeddings is True  # one truth


def test_a_backbone_may_be_a_dictionary():
    config = RecyclerConfig(text_config=text_config("qwen3").to_dict())
    assert config.text_config.model_type == "qwen3"


@pytest.mark.parametrize("field", ["num_train_passes", "num_prefill_passes"])
def test_a_number_of_passes_below_one_is_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be a whole number of at least 1, got 0"):
        RecyclerConfig(text_config=text_config("llama"), **{field: 0})


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="'sum' or 'mean', got 'max'"):
        RecyclerConfig(text_config=text_config("llama"), pass_loss_reduction="max")


@pytest.mark.parametrize("wrong", ["num_train_pases", "num_prefil_passes", "embeding_scale"])
def test_a_misspelled_argument_is_refused(wrong):
    """transformers keeps what it does not know as an attribute, and the run goes on with the default."""
    with pytest.raises(TypeError, match=f"{wrong}.*did you mean"):
        RecyclerConfig(text_config=text_config("llama"), **{wrong: 3})


def test_an_unsupported_backbone_is_refused_by_name():
    """B63: crashed deep inside a run instead."""
    with pytest.raises(UnsupportedBackboneError, match=r"'gpt2' is not supported.*llama, qwen2.*gpt_oss"):
        RecyclerForCausalLM(RecyclerConfig(text_config=GPT2Config(n_layer=1)))
    assert issubclass(UnsupportedBackboneError, UsageError)


def test_a_near_miss_of_a_backbone_is_suggested():
    class Lama(LlamaConfig):
        model_type = "lama"

    with pytest.raises(UnsupportedBackboneError, match="did you mean 'llama'"):
        RecyclerForCausalLM(RecyclerConfig(text_config=Lama()))


def test_scaled_init_gives_embeddings_of_rms_one():
    init = scaled_init(256)
    assert init["initializer_range"] * init["embedding_scale"] == pytest.approx(1.0)
    assert init["initializer_range"] == pytest.approx((2 / (5 * 256)) ** 0.5)


def test_a_plain_configuration_has_no_passes():
    assert not hasattr(VanillaConfig(text_config=text_config("llama")), "num_train_passes")
