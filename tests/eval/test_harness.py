"""lm-eval's model of ours: against prefixes one at a time, `generate` and our own perplexity, at every depth."""

import numpy as np
import peft
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from tests import texts
from unspoken.errors import UnspokenError, UsageError
from unspoken.eval.harness import UnspokenLM
from unspoken.eval.perplexity import prepare_scores, score
from unspoken.eval.rows import Row
from unspoken.eval.settings import settings_of
from unspoken.models.knobs import LatentKnobs

TOLERANCE = 1e-4  # float32; log-likelihoods of up to 40 tokens
EXACT_TOLERANCE = 1e-8  # float64, in which a random model's recurrence does not drift
METHODS = ["vanilla", "recycler", "adaptive", "adaptive_recycler", "ponder2", "pause"]
PAIRS = [
    ("The if statement is used for", " conditional execution"),
    ("a", " b"),
    ("def f(x):\n    return x\n\nCalling f", " returns its argument, whatever it is"),
    ("The if statement is used for", " x"),
    ("", "Without a context"),
    ("The with statement", " is"),
    ("One two three four five six seven", " eight"),
]
PROMPTS = ["The if statement", "x", "A much longer prompt, so that the others need pads"]


@pytest.fixture(scope="module")
def tokenizer(shards):
    return shards.load_tokenizer()


@pytest.fixture
def lm_of(tokenizer):
    def build(method="recycler", dtype=torch.float32, **options) -> UnspokenLM:
        options = {"batch_size": 3, "softmax_dtype": dtype, **options}
        return UnspokenLM(texts.text_model(method, dtype), tokenizer=tokenizer, **options)

    return build


def ask(lm, kind, questions):
    return getattr(lm, kind)([Instance(kind, {}, question, i) for i, question in enumerate(questions)], True)


def scores(lm, pairs=PAIRS):
    return np.array([score for score, _ in ask(lm, "loglikelihood", pairs)])


@torch.no_grad()
def by_hand(lm, context, continuation, **options) -> tuple[float, bool]:
    """One prefix after the other, each alone: no batch, no pads, nothing to the right."""
    if context:
        context_ids, answer = lm._encode_pair(context, continuation)
    else:
        context_ids, answer = [lm.prefix_token_id], lm.tok_encode(continuation)
    total, greedy = 0.0, True
    for place, token in enumerate(answer):
        ids = torch.tensor([context_ids + answer[:place]])
        logits = lm.model(ids, use_cache=False, **options).logits[0, -1]
        total += logits.log_softmax(-1)[token].item()
        greedy &= int(logits.argmax()) == token
    return total, greedy


@pytest.mark.parametrize("num_passes", [1, 2, 4, "exact"])
def test_loglikelihood_is_that_of_one_prefix_at_a_time(lm_of, num_passes):
    lm = lm_of(dtype=torch.float64, num_passes=num_passes)
    for (found, is_greedy), pair in zip(ask(lm, "loglikelihood", PAIRS), PAIRS, strict=True):
        expected, greedy = by_hand(lm, *pair, num_passes=num_passes)
        assert found == pytest.approx(expected, abs=EXACT_TOLERANCE) and is_greedy == greedy


def test_the_depths_give_different_scores(lm_of):
    """Or the test above would not see a depth that is ignored."""
    found = [scores(lm_of(num_passes=num_passes)) for num_passes in (1, 2, 4, "exact")]
    for i, first in enumerate(found):
        assert all(np.abs(first - second).max() > 100 * TOLERANCE for second in found[i + 1 :])


@pytest.mark.parametrize(
    ("method", "knobs"),
    [
        ("vanilla", {}),
        ("adaptive", {"max_latent_steps": 1, "exit_threshold": 0.4}),
        ("adaptive", {"exit_at_step": 2}),
        ("adaptive_recycler", {"num_passes": "exact", "exit_threshold": 0.0}),
        ("ponder2", {"num_passes": "exact"}),
        ("pause", {"num_passes": "exact"}),
    ],
    ids=str,
)
def test_other_methods_with_their_knobs(lm_of, method, knobs):
    lm, options = lm_of(method, torch.float64, **knobs), knobs
    if method == "pause":
        options = {}
    pairs = [("The if", " or"), ("a", " b")]
    for found, pair in zip(scores(lm, pairs), pairs, strict=True):
        assert found == pytest.approx(by_hand(lm, *pair, **options)[0], abs=EXACT_TOLERANCE)
    if knobs and method != "pause":
        assert np.abs(scores(lm, pairs) - scores(lm_of(method), pairs)).max() > 10 * TOLERANCE


@pytest.mark.parametrize("method", METHODS)
def test_scores_do_not_depend_on_the_batch(lm_of, method):
    """B101, B102: with very uneven lengths, and the size that lm-eval finds by itself."""
    alone = scores(lm_of(method, batch_size=1))
    for size in (4, "auto"):
        np.testing.assert_allclose(scores(lm_of(method, batch_size=size, max_batch_size=8)), alone, atol=TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_pads_on_the_right_change_no_real_token(lm_of, method):
    """B103: lm-eval pads there, and gives no mask."""
    lm = lm_of(method)
    ids = torch.tensor([lm.tok_encode(PROMPTS[2])])
    alone = lm._model_call(ids)
    for num_pads in (1, 7, 32):
        padded = lm._model_call(torch.nn.functional.pad(ids, (0, num_pads)))
        torch.testing.assert_close(padded[:, : ids.shape[1]], alone, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("vanilla", {}),
        ("recycler", {"num_passes": 1}),
        ("recycler", {"num_passes": 2}),
        ("recycler", {"num_passes": "exact"}),
        ("adaptive", {"exit_at_step": 2}),
        ("ponder2", {"num_passes": "exact"}),
    ],
    ids=str,
)
def test_generation_is_that_of_generate(lm_of, method, options):
    lm = lm_of(method, **options)
    stop = "t"
    found = ask(lm, "generate_until", [(prompt, {"until": [stop], "max_gen_toks": 12}) for prompt in PROMPTS])
    for text, prompt in zip(found, PROMPTS, strict=True):
        ids = torch.tensor([lm.tok_encode(prompt)])
        new = lm.model.generate(ids, max_new_tokens=12, do_sample=False, **options)[0, ids.shape[1] :]
        assert text == lm.tok_decode(new.tolist()).split(stop)[0]


def test_a_prompt_is_read_at_the_depth_that_is_asked_for(lm_of):
    questions = [(prompt, {"until": [], "max_gen_toks": 12}) for prompt in PROMPTS]
    one, two, exact = (ask(lm_of(num_passes=k), "generate_until", questions) for k in (1, 2, "exact"))
    assert one != two != exact != one


@pytest.mark.parametrize("num_passes", [1, "exact"])
def test_rolling_loglikelihood_is_our_own_perplexity(lm_of, num_passes):
    documents = ["The if statement is used for conditional execution.", "x = 1\n"]
    lm = lm_of(dtype=torch.float64, num_passes=num_passes)
    rows = [Row(np.array([lm.prefix_token_id, *lm.tok_encode(text)]), i, 1.0) for i, text in enumerate(documents)]
    own = prepare_scores(lm.latent_model, rows, 1, settings=settings_of(lm.latent_model, [LatentKnobs()]))
    score(lm.latent_model, own)
    expected = own.nats["exact" if num_passes == "exact" else "k=1"]
    found = ask(lm, "loglikelihood_rolling", [(text,) for text in documents])
    np.testing.assert_allclose(-np.array(found), expected, atol=EXACT_TOLERANCE)


@pytest.mark.parametrize(
    ("method", "options", "scoring", "generating"),
    [
        ("recycler", {}, "k=2", "k=2, then exact"),
        ("recycler", {"num_passes": 3}, "k=3", "k=3, then exact"),
        ("recycler", {"num_passes": "exact"}, "exact", "exact"),
        ("adaptive", {"exit_threshold": 0.25}, "exact", "exact"),
        ("vanilla", {"num_passes": 1}, "exact", "exact"),
        ("ponder2", {}, "refined 3 times", "refined 3 times, then exact"),
    ],
    ids=str,
)
def test_depths_are_told(lm_of, method, options, scoring, generating):
    lm = lm_of(method, **options)
    told = lm.get_model_info()["unspoken"]
    assert (told["scoring"], told["generating"]) == (scoring, generating)
    if "exit_threshold" in options:
        assert told["knobs"] == {"max_latent_steps": 3, "exit_threshold": 0.25, "exit_at_step": None}


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("recycler", {"num_pases": 2}, "takes no argument 'num_pases' .did you mean 'num_passes'"),
        ("recycler", {"num_train_passes": 2}, "takes no argument 'num_train_passes'"),
        ("recycler", {"num_passes": 0}, "num_passes is 0"),
        ("recycler", {"num_passes": "exakt"}, "num_passes is 'exakt'"),
        ("recycler", {"exit_threshold": 0.1}, "unspoken_recycler takes no latent steps"),
        ("vanilla", {"num_passes": 2}, "num_passes 2: a model of type unspoken_vanilla has one pass"),
        ("ponder2", {"num_passes": 2}, "has one pass"),
        ("adaptive", {"exit_at_step": 2, "max_latent_steps": 1}, "would have no effect"),
        ("recycler", {"trust_remote_code": True}, "no code of a checkpoint is run"),
        ("recycler", {"backend": "seq2seq"}, "causal"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_meant_are_refused(lm_of, method, options, message):
    with pytest.raises(UsageError, match=message):
        lm_of(method, **options)


def test_a_plain_model_is_sent_to_lm_evals_own(tokenizer):
    with pytest.raises(UsageError, match=r"the model is a plain llama model.*--model hf"):
        UnspokenLM(texts.text_model("vanilla").model.backbone, tokenizer=tokenizer)


def test_an_answer_that_does_not_fit_is_named(lm_of):
    """lm-eval dies of an assertion without a word."""
    with pytest.raises(UnspokenError, match="more than the model's context of 128"):
        ask(lm_of(), "loglikelihood", [("a", " b" * 200)])


def test_a_model_with_lora_is_asked_at_the_same_depth(lm_of, tokenizer):
    """A new adapter of peft changes nothing."""
    model = peft.get_peft_model(texts.text_model(), peft.LoraConfig(target_modules=["q_proj"]))
    for num_passes in (1, "exact"):
        lm = UnspokenLM(model, num_passes, tokenizer=tokenizer, batch_size=3)
        np.testing.assert_allclose(scores(lm), scores(lm_of(num_passes=num_passes)), atol=TOLERANCE)
    assert lm.latent_model is model.get_base_model()


def test_lm_eval_knows_the_models_by_name(model_folder):
    """After the import of the package, from a folder: as `unspoken`, and as `hf`, which runs the training passes."""
    arguments = f"pretrained={model_folder}"
    ours = get_model("unspoken").create_from_arg_string(f"{arguments},num_passes=exact", {"batch_size": 2})
    assert ours.num_passes == "exact" and type(ours) is UnspokenLM
    assert not np.allclose(scores(ours), scores(get_model("unspoken")(str(model_folder), num_passes=1)), atol=0.01)
    for num_passes, more in ((2, ""), (1, ",num_train_passes=1")):
        theirs = get_model("hf").create_from_arg_string(arguments + more, {"device": "cpu"})
        assert type(theirs) is HFLM
        expected = scores(get_model("unspoken")(str(model_folder), num_passes=num_passes))
        np.testing.assert_allclose(scores(theirs), expected, atol=TOLERANCE)
