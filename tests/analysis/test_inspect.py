"""`unspoken inspect`: what it says of a token is what the model did there."""

import json
import math

import numpy as np
import pytest
import torch

from tests import texts
from unspoken import cli
from unspoken.analysis.token_depth import TokenDepth, gain_by_right, length_by_loss, right_by_length, token_depth

NAN = math.nan


@pytest.fixture(scope="module")
def tokenizer():
    return texts.chat_tokenizer()


@pytest.mark.parametrize("method", ["adaptive", "adaptive_recycler"])
@torch.no_grad()
def test_every_number_is_that_of_a_forward_over_the_tokens_before(method):
    """Two windows, each token with what its own prefix gives; p_target by the head, one state at a time."""
    model = texts.text_model(method, torch.float64)
    ids = torch.randint(5, texts.VOCAB_SIZE, (9,), generator=torch.Generator().manual_seed(0)).tolist()
    found = token_depth(model, ids, start_id=3, window=6)
    assert found.ids.tolist() == ids
    assert len(set(found.lengths.tolist())) > 1
    for i, token in enumerate(ids):
        prefix = torch.tensor([[3, *ids[:i][6 * (i // 6) :]]])
        output = model.model(prefix, keeps_steps=True, use_cache=False)
        assert found.lengths[i] == output.latents.lengths[0, -1]
        logits = model.transform(model.lm_head(output.last_hidden_state[0, -1]))
        assert found.loss[i] == pytest.approx(-float(logits.log_softmax(-1)[token]), rel=1e-6)
        for k in range(found.num_steps):
            taken = [step for step in output.latents.steps[k : k + 1] if len(prefix[0]) - 1 in step.token.tolist()]
            if not taken:
                assert np.isnan(found.right[i, k]) and np.isnan(found.reach[i, k])
                continue
            place = taken[0].token.tolist().index(len(prefix[0]) - 1)
            right = model.transform(model.lm_head(taken[0].hidden[place])).softmax(-1)[token]
            assert found.right[i, k] == pytest.approx(float(right), rel=1e-6)
            assert found.reach[i, k] == pytest.approx(float(taken[0].reach[place]), rel=1e-6)


def test_the_relations_by_hand():
    depth = TokenDepth(
        ids=np.array([1, 2, 3]),
        lengths=np.array([0, 2, 2]),
        loss=np.array([0.05, 2.0, -math.log(0.5)]),
        reach=np.array([[1, NAN, NAN], [1, 0.9, 0.5], [1, 0.9, 0.4]]),
        right=np.array([[0.95, NAN, NAN], [0.12, 0.22, 0.2], [0.15, 0.35, 1.0]]),
    )
    assert [(b.name, b.count) for b in right_by_length(depth)] == [("0", 1), ("1", 0), ("2", 2)]
    assert right_by_length(depth)[2].mean == pytest.approx((math.exp(-2) + 0.5) / 2)
    assert right_by_length(depth)[1].mean is None
    lengths = {bucket.name: bucket.mean for bucket in length_by_loss(depth)}
    assert lengths["0.03 to 0.1"] == 0 and lengths["1 to 3"] == lengths["0.3 to 1"] == 2 and lengths["3 to 10"] is None
    gains = dict(gain_by_right(depth))
    assert [(b.name, b.mean) for b in gains[1] if b.count] == [("0.1 to 0.2", pytest.approx(0.15))]
    assert [b.mean for b in gains[2] if b.count] == [pytest.approx(-0.02), pytest.approx(0.65)]


def test_the_command_shows_writes_and_escapes(tmp_path, tokenizer, capsys):
    model = texts.save(tmp_path / "model", texts.text_model("adaptive"), tokenizer)
    (tmp_path / "text.txt").write_text("if a < b: return '<b>' & \"x\"\n" * 30)
    words = ["inspect", str(model), "--text", str(tmp_path / "text.txt"), "--sequence-length", "20"]
    assert cli.main([*words, "--html", str(tmp_path / "a.html"), "--json", str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    assert "latent steps a token" in out and "probability of the right token" in out
    found = json.loads((tmp_path / "a.json").read_text())
    lengths = [token["latent_steps"] for token in found["tokens"]]
    assert found["mean_latent_length"] == pytest.approx(sum(lengths) / len(lengths)) and len(set(lengths)) > 1
    assert all(len(token["reach"]) == token["latent_steps"] + 1 for token in found["tokens"])
    assert "".join(token["token"] for token in found["tokens"]).startswith("if a < b")
    assert sum(bucket["count"] for bucket in found["gain_by_right"]["3"]) == len(lengths), "all tokens took all steps"
    html = (tmp_path / "a.html").read_text()
    assert html.count("<span style") == len(lengths) and "<script" not in html and "<b>'" not in html
    assert cli.main([*words, "--exit-at-step", "2", "--json", str(tmp_path / "b.json")]) == 0
    assert json.loads((tmp_path / "b.json").read_text())["mean_latent_length"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "nowhere.txt"], "--text: cannot read"),
        (["--text", "EMPTY"], "has no token"),
        (["--text", "TEXT", "--html", "nowhere/a.html"], "--html"),
        (["--text", "TEXT", "--sequence-length", "1"], "--sequence-length is 1"),
        (["--text", "TEXT", "--exit-threshold", "2"], "--exit-threshold"),
    ],
)
def test_wrong_usage_is_named(tmp_path, tokenizer, capsys, words, message):
    model = texts.save(tmp_path / "model", texts.text_model("adaptive"), tokenizer)
    (tmp_path / "EMPTY").touch()
    (tmp_path / "TEXT").write_text("text")
    words = [str(tmp_path / word) if word in ("EMPTY", "TEXT") else word for word in words]
    assert cli.main(["inspect", str(model), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_latent_steps_is_refused(tmp_path, tokenizer, capsys):
    model = texts.save(tmp_path / "model", texts.text_model("recycler"), tokenizer)
    (tmp_path / "text.txt").write_text("text")
    assert cli.main(["inspect", str(model), "--text", str(tmp_path / "text.txt")]) == 2
    assert "takes no latent steps" in capsys.readouterr().err


@pytest.mark.parametrize(("knobs", "allowed"), [(("--exit-threshold", "0.9"), 3), (("--max-latent-steps", "0"), 0)])
def test_what_is_pruned_is_of_what_was_allowed(tmp_path, tokenizer, knobs, allowed):
    """It was of the deepest step that any token took, so a model that took none was said to prune all of one."""
    model = texts.save(tmp_path / "model", texts.text_model("adaptive"), tokenizer)
    (tmp_path / "text.txt").write_text("if a < b: return 0\n" * 9)
    words = ["inspect", str(model), "--text", str(tmp_path / "text.txt"), "--json", str(tmp_path / "a.json")]
    assert cli.main([*words, *knobs]) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["max_latent_steps"] == allowed
    expected = None if allowed == 0 else pytest.approx(1 - found["mean_latent_length"] / allowed)
    assert found["prune_ratio"] == expected


@pytest.mark.parametrize("words", [("--max-tokens", "0"), ("--max-tokens", "-3"), ("--sequence-length", "500")])
def test_lengths_that_cannot_be_are_refused(tmp_path, tokenizer, capsys, words):
    model = texts.save(tmp_path / "model", texts.text_model("adaptive"), tokenizer)
    (tmp_path / "text.txt").write_text("if a < b: return 0\n" * 9)
    assert cli.main(["inspect", str(model), "--text", str(tmp_path / "text.txt"), *words]) == 2
    assert f"{words[0]} is {words[1]}" in capsys.readouterr().err
