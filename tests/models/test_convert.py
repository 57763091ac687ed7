"""Conversion moves weights and changes nothing: the converted model equals its source, and the way back too."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import unspoken
from tests.families import ALL, plain_model, randomise
from unspoken.cli import main
from unspoken.config import RecyclerConfig, VanillaConfig, scaled_init
from unspoken.errors import UnspokenError, UnsupportedBackboneError, UsageError
from unspoken.models import latent_steps
from unspoken.models.convert import convert, export_backbone, save
from unspoken.models.drift import drift
from unspoken.models.load import load_model, load_source

IDS = torch.tensor([[5, 9, 2, 31, 7, 11, 3], [1, 1, 60, 22, 8, 4, 17]])


def tiny_llama(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["recycler", "vanilla"])
def test_round_trip_through_folders_is_bit_exact(tmp_path, tied, method):
    source = tiny_llama(tied)
    expected = source(IDS).logits
    source.save_pretrained(tmp_path / "source")

    save(convert(tmp_path / "source", method), None, tmp_path / "latent")
    latent, tokenizer = load_model(tmp_path / "latent")
    assert tokenizer is None
    assert torch.equal(latent(IDS).logits, expected)
    assert (latent.lm_head.weight is latent.get_input_embeddings().weight) == tied

    save(export_backbone(latent), None, tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(plain) is LlamaForCausalLM
    assert torch.equal(plain(IDS).logits, expected)
    assert set(plain.state_dict()) == set(source.state_dict())


def test_export_folds_the_embedding_scale_and_unties():
    """A model trained here from scratch scales its embeddings; a plain Llama cannot, so its embedding must carry it."""
    init = scaled_init(32)
    text_config = LlamaConfig(**{**tiny_llama().config.to_dict(), "initializer_range": init["initializer_range"]})
    latent = unspoken.RecyclerForCausalLM(
        RecyclerConfig(text_config=text_config, embedding_scale=init["embedding_scale"])
    ).eval()
    expected = latent(IDS, num_passes=1).logits
    plain = export_backbone(latent)
    assert torch.equal(plain(IDS).logits, expected)
    assert not plain.config.tie_word_embeddings
    assert torch.equal(latent(IDS, num_passes=1).logits, expected), "export must not change the latent model"


def test_a_trained_plain_model_goes_on_as_a_recycler():
    plain = unspoken.VanillaForCausalLM(VanillaConfig(text_config=tiny_llama().config, embedding_scale=3.0)).eval()
    expected = plain(IDS).logits
    recycler = convert(plain, "recycler", num_train_passes=3)
    assert recycler.config.embedding_scale == 3.0
    assert recycler.config.num_train_passes == 3
    assert torch.equal(recycler(IDS, num_passes=3).logits, expected)
    with pytest.raises(UsageError, match="already"):
        convert(recycler, "recycler")


def test_the_adapter_is_trainable_from_zero():
    model = convert(tiny_llama(), "recycler").train()
    weight = model.model.adapter.proj.weight
    assert not weight.any()
    assert torch.equal(model.model.adapter.norm.weight, torch.ones(32))
    model(IDS, labels=IDS).loss.backward()
    assert weight.grad.norm() > 0


def test_an_unsupported_family_is_named(tmp_path):
    config = OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=16
    )
    model = OPTForCausalLM(config)
    with pytest.raises(UnsupportedBackboneError, match=r"'opt' is not supported.*llama"):
        convert(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedBackboneError, match="'opt'"):
        load_source(tmp_path)


def test_incomplete_checkpoints_are_refused(tmp_path):
    """transformers loads a checkpoint that lacks weights with random ones and a warning."""
    from safetensors.torch import load_file, save_file

    tiny_llama().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnspokenError, match=r"lacks 1 of the model's weights.*up_proj"):
        load_source(tmp_path)


def run(*args: str) -> int:
    """The command's exit status; argparse ends with SystemExit."""
    try:
        return main(["convert", *args])
    except SystemExit as ended:
        return int(ended.code or 0)


def test_command_line(tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "source")
    source, out = str(tmp_path / "source"), str(tmp_path / "out")
    assert run("--model", source, "--out", out, "--num-prefill-passes", "1") == 0
    assert "bit for bit" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_prefill_passes"] == 1

    for args, status, message in [
        (("--model", source, "--out", out), 2, "exists"),
        (("--model", str(tmp_path / "nothing"), "--out", out + "2"), 2, "no such folder"),
        (("--model", str(tmp_path), "--out", out + "2"), 2, "no config.json"),
        (("--model", out, "--out", out + "2"), 2, "already"),
        (("--model", source, "--out", out + "2", "--export-backbone"), 2, "plain llama"),
        (("--model", source, "--out", out + "2", "--method", "looped"), 2, "invalid choice"),
    ]:
        assert run(*args) == status, args
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize("back", [("--export-backbone",), ()], ids=["back", "forth"])
def test_a_model_is_not_converted_onto_itself(tmp_path, back, capsys):
    """A latent model was replaced by its backbone, and its adapter was lost."""
    model = convert(tiny_llama()) if back else tiny_llama()
    model.save_pretrained(tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    for out in ("model", "other/../model", "."):
        (tmp_path / "other").mkdir(exist_ok=True)
        assert run("--model", str(tmp_path / "model"), "--out", str(tmp_path / out), "--overwrite", *back) == 2
        assert "which would be lost; give another folder" in capsys.readouterr().err
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_the_damaged_file_of_a_model_is_named(tmp_path):
    """It was `SafetensorError: Error while deserializing header`, of no file."""
    tiny_llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for damage in (whole[:-100], whole[:10], b"", b"version https://git-lfs.github.com/spec/v1"):
        file.write_bytes(damage)
        with pytest.raises(UnspokenError, match=r"model\.safetensors is damaged"):
            load_source(tmp_path)
    file.write_bytes(whole)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnspokenError, match=r"config\.json is damaged"):
        load_source(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnspokenError, match=r"cannot read a model from .*model\.gguf"):
        load_source(tmp_path / "model.gguf")


@pytest.mark.parametrize("file", ["manifest.json", "resolved.yaml", "checkpoint.json", "novel.txt"])
def test_overwrite_replaces_model_folders_alone(tmp_path, file):
    """It once replaced a data folder, and a run with all its checkpoints."""
    from unspoken.models.convert import check_place

    out = tmp_path / "out"
    check_place(out, overwrite=False)
    out.mkdir()
    check_place(out, overwrite=True)  # an empty folder holds nothing to lose
    with pytest.raises(UsageError, match="exists; give another folder, or --overwrite"):
        check_place(out, overwrite=False)
    (out / "config.json").touch()
    check_place(out, overwrite=True)
    (out / file).touch()
    if file == "novel.txt":
        (out / "config.json").unlink()
    with pytest.raises(UsageError, match="is no model folder, so --overwrite does not replace it"):
        check_place(out, overwrite=True)
    with pytest.raises(UsageError, match="is no model folder"):
        check_place(out / file, overwrite=True)


def test_the_working_directory_is_not_replaced(tmp_path, monkeypatch):
    from unspoken.models.convert import check_place

    (tmp_path / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is the working directory"):
        check_place(tmp_path, overwrite=True)


ADAPTIVE = ["adaptive", "adaptive_recycler"]


@pytest.mark.parametrize("method", ADAPTIVE)
@pytest.mark.parametrize("tied", [True, False])
def test_latent_steps_begin_next_to_the_source(tmp_path, tied, method):
    """Bit for bit without them; with them one step a token, which weighs sigmoid(-4); and back."""
    source = tiny_llama(tied)
    expected = source(IDS).logits
    source.save_pretrained(tmp_path / "source")
    save(convert(tmp_path / "source", method), None, tmp_path / "latent")
    latent, _ = load_model(tmp_path / "latent")
    assert torch.equal(latent(IDS, max_latent_steps=0).logits, expected)
    outputs = latent(IDS)
    assert outputs.latents.lengths.unique().tolist() == [1]
    assert (outputs.logits - expected).abs().max() > 1e-3
    gate = torch.sigmoid(torch.tensor(-4.0))
    second = latent(IDS, exit_at_step=2).logits
    torch.testing.assert_close(outputs.logits, expected + gate * (second - expected), rtol=0, atol=1e-5)
    assert torch.equal(export_backbone(latent)(IDS).logits, expected)


@pytest.mark.parametrize("method", ADAPTIVE)
def test_a_new_router_learns_from_its_first_step(method):
    model = convert(tiny_llama(), method).train()
    weight = model.model.router.gates[0].weight
    assert not weight.any()
    model(IDS, labels=IDS).loss.backward()
    assert weight.grad.norm() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_the_drift_of_every_family_is_bounded(name, dtype):
    """Granite multiplies its inputs, Gemma caps its logits, experts choose anew at each step."""
    for bias in (-4.0, 1.0):
        source = plain_model(name, dtype)
        expected = source(IDS[:1], use_cache=False).logits
        model = convert(source, "adaptive", router_bias=bias)
        assert torch.equal(model(IDS[:1], use_cache=False, max_latent_steps=0).logits, expected)
        found = drift(model, IDS[:1], expected)
        assert found.holds and 0 < found.measured < found.bound * 1.2
        assert found.latent_length == (1 if bias == -4.0 else 3)


def test_a_drift_beyond_its_bound_is_seen(monkeypatch):
    """The states of another token mixed in, and a weight too many."""
    source = plain_model("llama", torch.float32)
    expected = source(IDS[:1]).logits
    model = convert(source, "adaptive")
    assert drift(model, IDS[:1], expected).holds
    assert not drift(model, IDS[:1], expected.roll(1, dims=1)).holds
    add = latent_steps._Mixture.add
    monkeypatch.setattr(
        latent_steps._Mixture,
        "add",
        lambda self, hidden, weight, *rest, **more: add(self, hidden, 1.1 * weight, *rest, **more),
    )
    assert not drift(model, IDS[:1], expected).holds


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"router_bias": -5.0}, r"every gate 0\.0067, below exit_threshold 0\.01: no token .* above -4\.6"),
        ({"exit_threshold": 0.1}, r"router_bias -4\.0 .* above -2\.2"),
        ({"exit_threshold": 1.0}, r"below exit_threshold 1\.0"),
        ({"router_biass": 1.0}, r"did you mean 'router_bias'"),
    ],
)
def test_a_router_that_could_not_learn_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        convert(tiny_llama(), "adaptive", **fields)


def test_what_needs_no_open_router_is_not_refused():
    for fields in ({"max_latent_steps": 0}, {"exit_at_step": 2}, {"router": "none"}, {"exit_threshold": 0.0}):
        convert(tiny_llama(), "adaptive", router_bias=-9.0, **fields)


def test_adapter_and_router_go_on_in_a_model_of_both():
    """A trained Recycler gets latent steps, and its adapter stays; a trained router gets an adapter."""
    recycler = randomise(convert(tiny_llama(), "recycler", num_train_passes=3))
    adapter, expected = recycler.model.adapter, recycler(IDS).logits
    both = convert(recycler, "adaptive_recycler")
    assert both.model.adapter is adapter and both.config.num_train_passes == 3 and both.config.router_bias == -4
    assert torch.equal(both(IDS, max_latent_steps=0).logits, expected)

    thinking = randomise(convert(tiny_llama(), "adaptive", max_latent_steps=2))
    expected = thinking(IDS).logits
    both = convert(thinking, "adaptive_recycler")
    assert torch.equal(both(IDS).logits, expected)
    assert convert(both, "recycler").model.adapter is both.model.adapter, "it was `a recycler model already`"
    with pytest.raises(UsageError, match="has one already"):
        convert(thinking, "adaptive_recycler", router_bias=1.0)


@pytest.mark.parametrize("method", ADAPTIVE)
def test_command_line_with_latent_steps(tmp_path, capsys, method, monkeypatch):
    source, out = tmp_path / "source", tmp_path / "out"
    unspoken.VanillaForCausalLM(VanillaConfig(text_config=tiny_llama().config, embedding_scale=3.0)).save_pretrained(
        source
    )
    options = ("--model", str(source), "--method", method)
    assert (
        run(*options, "--out", str(out), "--max-latent-steps", "2", "--router-bias", "-3", "--exit-threshold", "0.02")
        == 0
    )
    printed = capsys.readouterr().out
    assert "without latent steps, logits equal the source's bit for bit" in printed
    assert "with them (1.00 a token), logits differ by at most" in printed and "(at a weight of 0.0474)" in printed
    config = json.loads((out / "config.json").read_text())
    assert (config["max_latent_steps"], config["router_bias"], config["exit_threshold"]) == (2, -3, 0.02)
    assert config["embedding_scale"] == 3.0
    assert run("--model", str(out), "--out", str(tmp_path / "plain"), "--export-backbone") == 0

    for more, message in [
        (("--router-bias", "-6"), "no token would take a latent step"),
        (("--exit-threshold", "1.5"), "exit_threshold must be a probability"),
        (("--max-latent-steps", "-1"), "max_latent_steps must be a whole number"),
        (
            ("--method", "recycler", "--router-bias", "1"),
            "--router-bias is for --method adaptive and adaptive_recycler",
        ),
        (("--method", "adaptive", "--num-train-passes", "2"), "is for --method recycler and adaptive_recycler"),
    ]:
        assert run(*options, "--out", str(tmp_path / "none"), *more) == 2, more
        assert message in capsys.readouterr().err
    monkeypatch.setattr(latent_steps._Mixture, "state", lambda self: self.total.view(*self.shape[:2], -1) * 1.05)
    assert run(*options, "--out", str(tmp_path / "none")) == 1
    assert "latent steps change its logits by more than they may" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
