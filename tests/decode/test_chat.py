import io
import os
import signal
import sys

import numpy as np
import pytest
import torch

from tests import texts
from tests.oracle import NaiveDecoder, most_likely
from unspoken import cli
from unspoken.data.chat_windows import ChatWindows
from unspoken.data.conversations import Example
from unspoken.decode import chat
from unspoken.decode.sampling import Sampling
from unspoken.decode.session import ChatSession
from unspoken.errors import UnspokenError
from unspoken.latent.cache import recycled_state

NUM_NEW = 7


@pytest.fixture
def session(model, tokenizer):
    return ChatSession(model, tokenizer, Sampling(NUM_NEW))


@pytest.fixture
def tokens_run(model):
    """Token positions that went through the backbone, run by run."""
    counts = []
    hook = model.model.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    yield counts
    hook.remove()


def rendered(tokenizer, *contents: str) -> str:
    """The conversation up to the answer that is due, user and assistant in turns."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@torch.no_grad()
def oracle_answer(decoder: NaiveDecoder, ids: list[int], num_tokens: int = NUM_NEW) -> list[int]:
    new, _ = decoder.write(decoder.read(torch.tensor([ids]), num_passes=2), num_tokens, most_likely)
    return new[0].tolist()


def test_a_conversation_is_trained_as_it_is_held(tokenizer):
    """With one prefill pass: a training window's mask, and as many passes as tokens, are three turns over one cache.
    What ends an answer is read with the next question, and the state before it is recycled into it, as in the answer.
    """
    text = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = texts.text_model("recycler", torch.float64, num_prefill_passes=1, text=text)
    model.generation_config.forced_eos_token_id = tokenizer.eos_token_id
    held = ChatSession(model, tokenizer, Sampling(NUM_NEW))
    is_target: list[bool] = []
    for question in ("What is a list?", "And a tuple?", "Why?"):
        held.ask(question)
        num_answered, was_answered = NUM_NEW - 1, bool(is_target)
        num_asked = len(held.token_ids) - num_answered - len(is_target) - was_answered
        is_target += [True] * was_answered + [False] * num_asked + [True] * num_answered
    row = Example(np.array(held.token_ids), np.array(is_target), "here")
    assert (
        is_target.count(True) == 3 * NUM_NEW - 1 and tokenizer.decode(row.ids[row.is_target]).count("<|im_end|>") == 2
    )
    windows = ChatWindows([row], len(row), 0)
    windows.has_prompt_mask = True
    window = {name: values[None] for name, values in windows[0].items()}
    ids, mask = window["input_ids"], window["prompt_mask"]
    states = model.model(ids, prompt_mask=mask, num_passes=len(row), use_cache=False).last_hidden_state
    torch.testing.assert_close(states[:, -1:], recycled_state(held.cache).read())


def test_answers_are_those_of_a_decoder_without_a_cache(session, model, tokenizer):
    """Three turns, with the state carried over each seam: the last token of an answer is run with the next turn."""
    decoder, said = NaiveDecoder(model), []
    pending = tokenizer(rendered(tokenizer, "What is a list?")).input_ids
    for question in ("What is a list?", "And a tuple?", "Why?"):
        answer = session.ask(question)
        new = oracle_answer(decoder, pending)
        assert answer == tokenizer.decode(new, skip_special_tokens=True)
        said += [question, answer]
        suffix = rendered(tokenizer, *said, "And a tuple?" if len(said) == 2 else "Why?")
        suffix = suffix[len(rendered(tokenizer, *said[:-1]) + answer) :]
        pending = [new[-1], *tokenizer(suffix).input_ids]
    assert [message["content"] for message in session.messages] == said


def test_a_turn_runs_its_new_tokens_alone(session, tokenizer, tokens_run):
    answer = session.ask("What is a list?")
    first = len(tokenizer(rendered(tokenizer, "What is a list?")).input_ids)
    assert tokens_run == [first, first] + [1] * (NUM_NEW - 1), "two passes over the prompt, then a run a token"
    tokens_run.clear()
    session.ask("And a tuple?")
    kept = rendered(tokenizer, "What is a list?") + answer
    suffix = rendered(tokenizer, "What is a list?", answer, "And a tuple?").removeprefix(kept)
    new = 1 + len(tokenizer(suffix).input_ids)  # the answer's last token had not been run
    assert tokens_run == [new, new] + [1] * (NUM_NEW - 1)
    assert session.cache.get_seq_length() == len(session.token_ids) - 1


@pytest.fixture
def letters_only(model, tokenizer, monkeypatch):
    """A random model writes broken UTF-8, which a stream holds back; this one writes letters."""
    others = [i for i in range(texts.VOCAB_SIZE) if not tokenizer.decode([i]).strip().isalpha()]
    monkeypatch.setattr(model.generation_config, "suppress_tokens", others)


def test_pieces_sum_to_the_answer(session, letters_only):
    pieces = []
    answer = session.ask("What is a list?", pieces.append)
    assert "".join(pieces) == answer and len(pieces) > 1


def ending(model, tokenizer, place: int) -> ChatSession:
    """A session whose first answer to `Hi` ends with its token number `place`."""
    answer = ChatSession(model, tokenizer, Sampling(NUM_NEW))
    answer.ask("Hi")
    session = ChatSession(model, tokenizer, Sampling(NUM_NEW))
    session._ends = [answer.token_ids[place - NUM_NEW]]
    return session


def test_an_end_token_is_left_to_the_template(model, tokenizer, tokens_run):
    session = ending(model, tokenizer, 3)
    session.ask("Hi")
    num_said = len(session.token_ids) - len(tokenizer(rendered(tokenizer, "Hi")).input_ids)
    assert num_said <= 3 and session.token_ids[-1] not in session._ends
    assert session.cache.get_seq_length() == len(session.token_ids)
    tokens_run.clear()
    held = len(session.token_ids)
    session._ends = []
    session.ask("And?")
    assert tokens_run[0] == len(session.token_ids) - NUM_NEW - held


def test_a_template_that_rewrites_earlier_turns_is_read_anew(model, tokens_run):
    tokenizer = texts.chat_tokenizer()
    tokenizer.chat_template = texts.CHAT_TEMPLATE.replace("message.content", "message.content[:2]")
    session = ChatSession(model, tokenizer, Sampling(NUM_NEW))
    first = session.ask("What is a list?")
    assert len(first) > 2
    tokens_run.clear()
    answer = session.ask("And a tuple?")
    ids = tokenizer(rendered(tokenizer, "What is a list?", first, "And a tuple?")).input_ids
    assert tokens_run[:2] == [len(ids)] * 2
    assert answer == tokenizer.decode(oracle_answer(NaiveDecoder(model), ids), skip_special_tokens=True)


def test_a_stopped_answer_counts_as_given(session, model, tokenizer, letters_only):
    pieces = []
    answer = session.ask("What is a list?", pieces.append, lambda: len(pieces) >= 3)
    whole = ChatSession(model, tokenizer, Sampling(NUM_NEW)).ask("What is a list?")
    assert whole.startswith(answer) and len(answer) < len(whole)
    assert session.messages[-1] == {"role": "assistant", "content": answer}
    held = len(session.token_ids)
    assert session.cache.get_seq_length() == held - 1
    session.ask("Go on.")
    assert len(session.messages) == 4


def test_an_answer_broken_off_leaves_the_conversation_before_it(session, model, tokenizer):
    """An exception in the middle of a turn leaves half of it in the cache, which must not be used again."""

    def break_off(text):
        raise KeyboardInterrupt

    session.ask("What is a list?")
    before = list(session.messages)
    with pytest.raises(KeyboardInterrupt):
        session.ask("And a tuple?", break_off)
    assert session.messages == before and session.cache is None
    again = session.ask("Why?")
    ids = tokenizer(rendered(tokenizer, "What is a list?", before[-1]["content"], "Why?")).input_ids
    assert again == tokenizer.decode(oracle_answer(NaiveDecoder(model), ids), skip_special_tokens=True)


def test_reset_forgets_all_but_the_system_message(model, tokenizer):
    session = ChatSession(model, tokenizer, Sampling(NUM_NEW), system="Be brief.")
    first = session.ask("Hi")
    session.ask("Why?")
    session.reset()
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    assert session.ask("Hi") == first
    assert first != ChatSession(model, tokenizer, Sampling(NUM_NEW)).ask("Hi")


def test_plain_text_goes_on_without_a_template(model):
    tokenizer = texts.chat_tokenizer()
    tokenizer.chat_template = None
    session, decoder = ChatSession(model, tokenizer, Sampling(NUM_NEW)), NaiveDecoder(model)
    new = oracle_answer(decoder, tokenizer("A list is").input_ids)
    assert session.ask("A list is") == tokenizer.decode(new, skip_special_tokens=True)
    new = oracle_answer(decoder, [new[-1], *tokenizer("\nA tuple is").input_ids])
    assert session.ask("A tuple is") == tokenizer.decode(new, skip_special_tokens=True)
    with pytest.raises(UnspokenError, match="nothing to answer"):
        ChatSession(model, tokenizer).ask("")


def test_the_context_ends_an_answer_and_then_refuses_the_next(tokenizer):
    model = texts.text_model(text={"max_position_embeddings": 64})
    session = ChatSession(model, tokenizer, Sampling(1000))
    prompt = len(tokenizer(rendered(tokenizer, "Hi")).input_ids)
    session.ask("Hi")
    assert len(session.token_ids) == 64 > prompt
    before = list(session.messages)
    with pytest.raises(UnspokenError, match=r"conversation has \d+ tokens, the model's context is 64"):
        session.ask("Why?")
    assert session.messages == before
    session.reset()
    session.ask("Why?")


def run(monkeypatch, folder, text: str, *more: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    return cli.main(["chat", str(folder), "--max-new-tokens", str(NUM_NEW), *more])


def test_the_command_answers_each_line_of_its_input(monkeypatch, capsys, folder, tokenizer):
    expected = ChatSession(texts.text_model(), tokenizer, Sampling(NUM_NEW))
    answers = [expected.ask("What is a list?"), expected.ask("Why?")]
    assert run(monkeypatch, folder, "What is a list?\n\nWhy?\n/reset\nWhat is a list?\n/quit\nnever\n") == 0
    assert capsys.readouterr().out == "".join(answer + "\n" for answer in [*answers, answers[0]])


def test_the_command_tells_what_it_cannot_do(monkeypatch, capsys, folder, tokenizer, tmp_path):
    assert run(monkeypatch, folder, "/help\n" + "x " * 200 + "\nHi\n") == 1
    captured = capsys.readouterr()
    assert "no command /help; there are /reset, /quit" in captured.err and "context is 128" in captured.err
    assert captured.out.endswith(ChatSession(texts.text_model(), tokenizer, Sampling(NUM_NEW)).ask("Hi") + "\n")
    plain = texts.save(tmp_path / "plain", texts.text_model("vanilla"), tokenizer)
    assert run(monkeypatch, plain, "", "--num-prefill-passes", "2") == 2
    assert run(monkeypatch, folder, "", "--temperature", "-1") == 2


def test_ctrl_c_in_a_terminal_stops_the_answer_and_keeps_the_conversation(monkeypatch, capsys, folder):
    """The first answer is stopped after two tokens; at the prompt Ctrl-C and a line's end change nothing."""
    typed = iter(["What is a list?", KeyboardInterrupt, "Why?", EOFError])
    ask, lengths = ChatSession.ask, []

    def type_line(self, prompt=""):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    def ask_and_interrupt(self, message, on_text, should_stop):
        def should_stop_after_signal():
            if not lengths:
                os.kill(os.getpid(), signal.SIGINT)
            return should_stop()

        answer = ask(self, message, on_text, should_stop_after_signal)
        lengths.append(len(self.token_ids))
        assert len(self.messages) == 2 * len(lengths)
        return answer

    monkeypatch.setattr(chat, "is_interactive", lambda: True)
    monkeypatch.setattr(chat.Console, "input", type_line)
    monkeypatch.setattr(ChatSession, "ask", ask_and_interrupt)
    handler = signal.getsignal(signal.SIGINT)
    assert run(monkeypatch, folder, "") == 0
    assert signal.getsignal(signal.SIGINT) is handler
    assert len(lengths) == 2 and lengths[1] - lengths[0] > NUM_NEW
    assert "/reset to begin a new conversation" in capsys.readouterr().out
