"""What is saved is what is loaded: weights, ties, types, and vocabularies that grow."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from tests.families import ALL, REPRESENTATIVE, random_ids, tiny_model
from unspoken import RecyclerForCausalLM, RecyclerModel, VanillaConfig, VanillaForCausalLM

TIED = ["llama_tied", "qwen2", "gemma2", "gpt_neox_tied", "smollm3"]


def reload(folder: Path, **options):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


def assert_same_weights(a, b) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert weight.dtype == second[name].dtype, name
        assert torch.equal(weight, second[name]), name


@pytest.mark.parametrize("name", ALL)
def test_a_model_survives_its_folder(name, tmp_path):
    """B81 and B83: weights initialised anew after loading, or heads missing, with clean loading info."""
    model, ids = tiny_model(name, torch.float32, num_train_passes=3), random_ids(2, 7)
    model.save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert not list(tmp_path.glob("*.bin"))
    loaded = reload(tmp_path)
    assert type(loaded) is RecyclerForCausalLM
    assert_same_weights(model, loaded)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.num_train_passes == 3


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_every_parameter_is_loaded_and_none_initialised(name, tmp_path):
    """B81: every weight filled with a constant that no initialisation would choose."""
    model = tiny_model(name, torch.float32)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.fill_(0.5 + i)
    model.save_pretrained(tmp_path)
    loaded = dict(reload(tmp_path).named_parameters())
    for i, (parameter_name, parameter) in enumerate(model.named_parameters()):
        assert (loaded[parameter_name] == 0.5 + i).all(), parameter_name
        assert parameter.shape == loaded[parameter_name].shape


@pytest.mark.parametrize("name", [*TIED, "llama", "gpt_neox"])
def test_the_head_is_tied_if_the_configuration_says_so(name, tmp_path):
    """B83: after loading, after a step of training, and in the file, where it is written once."""
    tiny_model(name, torch.float32).save_pretrained(tmp_path)
    model = reload(tmp_path).train()
    tied = name in TIED
    assert model.config.tie_word_embeddings is model.config.text_config.tie_word_embeddings is tied
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = random_ids(2, 7)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    assert (embedding.data_ptr() == head.data_ptr()) is tied
    assert torch.equal(embedding, head) is tied
    assert model.get_output_embeddings() is model.lm_head
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied


def test_names_of_parameters_are_the_contract(tmp_path):
    """Other tools and checkpoints rely on them."""
    tiny_model("llama", torch.float32).save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"model.adapter.norm.weight", "model.adapter.proj.weight", "lm_head.weight"} <= names
    assert "model.backbone.layers.0.self_attn.q_proj.weight" in names
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "unspoken_recycler"


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe"])
def test_shards(name, tmp_path):
    model = tiny_model(name, torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_weights(model, reload(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, tmp_path):
    model, ids = tiny_model("llama_tied", torch.float32), random_ids(1, 7)
    model.save_pretrained(tmp_path / "full")
    half = reload(tmp_path / "full", dtype=dtype)
    assert {p.dtype for p in half.parameters()} == {dtype}
    assert_same_weights(half, model.to(dtype))
    half.save_pretrained(tmp_path / "half")
    again = reload(tmp_path / "half")  # the type of the file, without being asked
    assert_same_weights(again, half)
    assert torch.equal(again.generate(ids, max_new_tokens=4), half.generate(ids, max_new_tokens=4))


def test_base_and_head_models_load_each_other_s_files(tmp_path):
    """AutoModel of a causal LM's folder, and a head put onto a base model's folder."""
    model, ids = tiny_model("llama_tied", torch.float32), random_ids(1, 7)
    model.save_pretrained(tmp_path / "head")
    base = AutoModel.from_pretrained(tmp_path / "head")
    assert type(base) is RecyclerModel
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), model)


@pytest.mark.parametrize("name", ["llama", "gpt_neox_tied"])
def test_weights_that_a_checkpoint_lacks_start_at_zero(name, tmp_path):
    """B82: a plain model's checkpoint loaded as a Recycler; a random adapter would wreck it from the first step."""
    model, ids = tiny_model(name, torch.float32), random_ids(1, 7)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {key: weight for key, weight in weights.items() if "adapter" not in key}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not loaded.model.adapter.proj.weight.any()
    assert (loaded.model.adapter.norm.weight == 1).all()
    assert torch.equal(loaded(ids).logits, model(ids, num_passes=1).logits)


@pytest.mark.parametrize("size", [80, 50])
@pytest.mark.parametrize("name", ["llama_tied", "llama", "gpt_neox_tied", "gemma2"])
def test_a_resized_vocabulary_keeps_tie_and_adapter(name, size, tmp_path):
    """B77: rows of tokens added after conversion."""
    model, ids = tiny_model(name, torch.float32), random_ids(2, 7) % 40
    before, adapter = model(ids).logits.detach(), model.model.adapter.proj.weight.clone()
    model.resize_token_embeddings(size)
    assert model.config.vocab_size == model.config.text_config.vocab_size == size
    assert model.get_input_embeddings().weight.shape[0] == model.lm_head.weight.shape[0] == size
    assert model.lm_head.out_features == size
    tied = model.config.tie_word_embeddings
    assert (model.get_input_embeddings().weight is model.lm_head.weight) is tied
    assert torch.equal(model.model.adapter.proj.weight, adapter)
    shared = min(size, 64)
    torch.testing.assert_close(model(ids).logits[..., :shared], before[..., :shared])
    model.train()(ids, labels=ids + size - 40).loss.backward()  # labels among the new rows
    assert model.eval().generate(ids, max_new_tokens=3).shape == (2, 10)
    model.save_pretrained(tmp_path)
    assert_same_weights(model, reload(tmp_path))


def test_the_plain_baseline_too(tmp_path):
    config = VanillaConfig(text_config=tiny_model("llama_tied").config.text_config, embedding_scale=3.0)
    model = VanillaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    loaded = reload(tmp_path)
    assert type(loaded) is VanillaForCausalLM
    assert loaded.config.embedding_scale == 3.0
    assert_same_weights(model, loaded)


def test_a_fresh_model_starts_as_a_plain_one():
    """B82: initialisation in `__init__` was overwritten, and a container without parameters of its own was skipped."""
    model = RecyclerForCausalLM(tiny_model("llama").config)
    assert not model.model.adapter.proj.weight.any()
    assert model.model.backbone.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert RecyclerModel(model.config).adapter.proj.weight.any().item() is False


def test_the_initializer_range_reaches_every_matrix():
    model = RecyclerForCausalLM(tiny_model("llama", text={"initializer_range": 0.3}).config)
    for module in (model.lm_head, model.get_input_embeddings(), model.model.backbone.layers[1].self_attn.q_proj):
        assert module.weight.std().item() == pytest.approx(0.3, rel=0.1)
