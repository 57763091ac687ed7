"""Rows to answer: which of their tokens are learned, whatever template and tokenizer, and which rows are not used."""

import json

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import texts
from unspoken import cli
from unspoken.data.conversations import Example, Examples, _add, encode, read_examples, split
from unspoken.decode.prompts import Request
from unspoken.decode.prompts import encode as decoding_encode
from unspoken.errors import UnspokenError, UsageError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Four."},
]
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return texts.chat_tokenizer()


def learned(example, tokenizer) -> list[str]:
    """The stretches that are learned, as text."""
    edges = np.flatnonzero(np.diff(example.is_target, prepend=False, append=False))
    return [tokenizer.decode(example.ids[a:b]) for a, b in zip(edges[::2], edges[1::2])]


def write(path, *rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_an_assistants_turns_are_learned_with_what_ends_them(tokenizer):
    example = encode({"messages": MESSAGES}, tokenizer, "here")
    assert learned(example, tokenizer) == ["Two.<|im_end|>", "Four.<|im_end|>"]
    assert tokenizer.decode(example.ids) == tokenizer.apply_chat_template(MESSAGES, tokenize=False)


def test_a_template_that_marks_the_answers_says_the_same(tokenizer):
    marked = texts.chat_tokenizer()
    marked.chat_template = MARKED
    for messages in (MESSAGES, MESSAGES[1:3]):
        theirs, ours = (encode({"messages": messages}, one, "here") for one in (marked, tokenizer))
        assert learned(theirs, tokenizer) == learned(ours, tokenizer)
        assert tokenizer.decode(theirs.ids) == tokenizer.decode(ours.ids)


def test_what_is_asked_is_read_as_generate_reads_it(tokenizer):
    """The prompt by itself, so that no token straddles the place where the answer begins."""
    example = encode({"messages": MESSAGES[:3]}, tokenizer, "here")
    prompt = tokenizer.apply_chat_template(MESSAGES[:2], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    assert example.ids[: len(ids)].tolist() == ids and not example.is_target[: len(ids)].any()
    assert example.is_target[len(ids)]
    plain = encode({"prompt": "2 +", "completion": " 2"}, tokenizer, "here")
    asked = tokenizer("2 +").input_ids
    assert plain.ids.tolist() == [*asked, *tokenizer(" 2", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert plain.is_target.tolist() == [False] * len(asked) + [True] * (len(plain) - len(asked))


def test_prompt_and_completion_may_be_messages(tokenizer):
    """The answers in the prompt are part of what is asked."""
    row = {"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}
    assert learned(encode(row, tokenizer, "here"), tokenizer) == ["Four.<|im_end|>"]


def test_a_text_is_learned_whole(tokenizer):
    example = encode({"text": "All of it."}, tokenizer, "here")
    assert example.is_target.all() and example.ids[-1] == tokenizer.eos_token_id


def test_padding_with_the_end_token_hides_no_end(tokenizer):
    """B64."""
    same = texts.chat_tokenizer()
    same.pad_token = same.eos_token
    example = encode({"prompt": "a", "completion": "b"}, same, "here")
    assert example.is_target[-1] and example.ids[-1] == same.pad_token_id


def test_a_template_that_rewrites_the_beginning_is_refused(tokenizer):
    """B65: no mask can be told from it."""
    other = texts.chat_tokenizer()
    other.chat_template = "{{ messages | length }}" + texts.CHAT_TEMPLATE
    with pytest.raises(UnspokenError, match=r"here: the chat template writes .* mark them in the template"):
        encode({"messages": MESSAGES}, other, "here")
    other.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(UnspokenError, match="here: the chat template refuses the conversation: no system"):
        encode({"messages": MESSAGES}, other, "here")
    other.chat_template = None
    with pytest.raises(UsageError, match="here: messages need a chat template"):
        encode({"messages": MESSAGES}, other, "here")


def test_rows_are_cut_dropped_and_counted(tokenizer, tmp_path):
    """B56: a prompt that fills the window leaves nothing to learn."""
    long = {"prompt": "word " * 40, "completion": " end"}
    end_cut = {"prompt": "a", "completion": " word" * 60}
    good = {"prompt": "a", "completion": " b"}
    found = read_examples([write(tmp_path / "rows.jsonl", long, end_cut, "", good)], tokenizer, 30)
    assert [len(row) for row in found.rows] == [30, len(encode(good, tokenizer, ""))]
    assert found.cut == 1 and sum(found.dropped.values()) == 1
    assert found.rows[1].place == f"{tmp_path}/rows.jsonl:4"
    notes = "\n".join(found.notes())
    assert "1 rows left out: nothing to learn" in notes and "1 rows are longer than a window" in notes
    with pytest.raises(UnspokenError, match="no row to learn from: 1 rows left out: nothing to learn"):
        read_examples([write(tmp_path / "one.jsonl", long)], tokenizer, 30)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "broken JSON"),
        ("[1]", "not a JSON object but an array"),
        ({"question": "a"}, "a row has messages, or prompt and completion, or text; this one has 'question'"),
        ({"text": "a", "messages": MESSAGES}, "is one of messages"),
        ({"text": 3}, "'text' is int, not a text"),
        ({"text": "  "}, "'text' is empty or white space"),
        ({"prompt": "a", "completion": " "}, "'completion' is empty"),
        ({"prompt": "a", "completion": MESSAGES[4:]}, "both be texts or both be messages"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": "hello"}, "'messages' is str, not a list of messages"),
        ({"messages": [{"role": "user"}]}, "message 1 is not an object"),
        ({"messages": MESSAGES[:2]}, "no message is the assistant's"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tokenizer, tmp_path, row, reason):
    good = {"prompt": "a", "completion": " b"}
    path = write(tmp_path / "rows.jsonl", good, "", row, good)
    with pytest.raises(UnspokenError) as error:
        read_examples([path], tokenizer, 30)
    assert f"{path}:3: " in str(error.value) and reason in str(error.value)
    found = read_examples([path], tokenizer, 30, on_bad_line="skip")
    assert len(found.rows) == 2 and len(found.bad) == 1 and sum(found.dropped.values()) == 1


def test_parquet_rows_are_read(tokenizer, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "a", "completion": " b", "text": None}, {"prompt": None, "completion": None, "text": "c"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert len(read_examples([tmp_path / "rows.parquet"], tokenizer, 30).rows) == 2


def test_equal_rows_fall_on_one_side(tokenizer, tmp_path):
    rows = [{"prompt": f"{i % 40}", "completion": f" {i % 40}"} for i in range(200)]
    found = read_examples([write(tmp_path / "rows.jsonl", *rows)], tokenizer, 30)
    train, held_out = split(found, 0.3)
    sides = [{row.ids.tobytes() for row in side.rows} for side in (train, held_out)]
    assert not sides[0] & sides[1] and 5 < len(sides[1]) < 20
    assert len(train.rows) + len(held_out.rows) == 200
    assert split(found, 0.0)[1].rows == []


def test_a_files_name_is_shown_as_it_is(tokenizer, tmp_path, capsys):
    """Brackets are no markup: neither in it, nor in a row's fields."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write(tmp_path / "a[z].jsonl", {"[/z]": 1}, {"prompt": "a", "completion": " b"})
    assert not cli.main(["data", "show", path, "--tokenizer", str(tmp_path / "tokenizer")])
    out = capsys.readouterr().out
    assert "a[z].jsonl:2" in out and "this one has '[/z]'" in out


def test_the_file_is_shown_coloured(tokenizer, tmp_path, capsys):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write(tmp_path / "rows.jsonl", {"messages": MESSAGES}, {"prompt": "a", "completion": " b"})
    show = ["data", "show", path, "--tokenizer", str(tmp_path / "tokenizer"), "--sequence-length", "100"]
    assert not cli.main(show)
    out = capsys.readouterr().out
    assert "2 rows" in out and "Two.<|im_end|>" in out and "rows.jsonl:1" in out
    assert cli.main(["data", "show", path]) == 2
    assert "--tokenizer MODEL shows rows to answer" in capsys.readouterr().err


def test_what_a_prompt_holds_of_an_assistant_is_not_learned(tokenizer):
    """Neither with a template that marks answers, its tags trimmed or not."""
    for template in (None, MARKED, MARKED.replace("{% generation %}", "{%- generation -%}")):
        one = texts.chat_tokenizer()
        one.chat_template = template or one.chat_template
        example = encode({"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}, one, "here")
        assert learned(example, tokenizer) == ["Four.<|im_end|>"]


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_an_answer_gets_no_space_that_the_text_has_not(scheme):
    """Of tokenizers that write a space before a text: before the first word of a conversation, not of each answer."""
    words = ["▁", "▁ask", "▁more", "an", "swer", "ask", "more", "[u]", "[a]", "</s>"]
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Metaspace(prepend_scheme=scheme),
        pre_tokenizers.Split(Regex("an|swer|▁?(ask|more)|▁"), "isolated"),
    ])  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[u]", "[a]"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[u]' if m.role == 'user' else '[a]' }}{{ m.content }}"
        "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    turn = [{"role": "user", "content": "ask more"}, {"role": "assistant", "content": "answer more"}]
    example = encode({"messages": [*turn, *turn]}, tokenizer, "here")
    text = tokenizer.apply_chat_template([*turn, *turn], tokenize=False)
    assert example.ids.tolist() == tokenizer(text, add_special_tokens=False).input_ids
    prompt = decoding_encode(Request({"messages": turn[:1]}, "here"), tokenizer, len(tokenizer))
    assert example.ids[: len(prompt)].tolist() == prompt and int(example.is_target.argmax()) == len(prompt)
    plain = encode({"prompt": "ask", "completion": " more"}, tokenizer, "here")
    assert tokenizer.convert_ids_to_tokens(plain.ids)[-3:] == ["▁ask", "▁more", "</s>"]


def test_a_marked_answer_begins_where_generate_begins_it(tokenizer):
    """No token straddles the seam, though the text as a whole has one that would: a prompt that ends within a word."""
    marked = texts.chat_tokenizer()
    marked.chat_template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "th"}, {"role": "assistant", "content": "e end"}]
    whole = marked(marked.apply_chat_template(messages, tokenize=False)).input_ids
    prompt = decoding_encode(Request({"messages": messages[:1]}, "here"), marked, len(marked))
    assert whole[: len(prompt)] != prompt
    example = encode({"messages": messages}, marked, "here")
    assert example.ids[: len(prompt)].tolist() == prompt
    assert example.is_target.tolist() == [i >= len(prompt) for i in range(len(example))]
    assert example.ids[-1] == marked.eos_token_id


@pytest.mark.parametrize("is_marked", [False, True])
def test_answers_that_never_end_are_told_of(is_marked, tmp_path):
    """A template that ends them with another token, or outside of its marks. Rows that were cut are told of already."""
    unended = texts.chat_tokenizer()
    if is_marked:
        unended.chat_template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    else:
        unended.chat_template = unended.chat_template.replace("<|im_end|>", "<end>")
    long = [MESSAGES[1], {"role": "assistant", "content": "Two " * 99}]
    path = write(tmp_path / "rows.jsonl", {"messages": MESSAGES}, {"messages": long}, {"text": "ends"})
    notes = read_examples([path], unended, 90).notes()
    assert [note.partition(":")[0] for note in notes] == [
        "1 rows are longer than a window",
        "1 rows never teach the tokenizer's end token",
    ]
    train, held_out = split(read_examples([path], unended, 90), 0.5)
    assert train.endless == 1 and not held_out.notes()
    assert not read_examples([path], texts.chat_tokenizer(), 999).notes()


def test_trimmed_marks_are_marks(tokenizer):
    """They need no text that asks for an answer: this template refuses to write one."""
    trimmed = texts.chat_tokenizer()
    refusal = "{% if add_generation_prompt %}{{ raise_exception('asked') }}{% endif %}"
    trimmed.chat_template = refusal + MARKED.replace("{% generation %}", "{%- generation -%}")
    example = encode({"messages": MESSAGES[1:3]}, trimmed, "here")
    assert learned(example, tokenizer) == ["Two.<|im_end|>"]


def test_a_tokenizer_that_begins_every_text_begins_a_row_once():
    """Pieces of one row get no beginnings of their own."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = texts.chat_tokenizer()
    end = tokenizer.eos_token
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    example = encode({"prompt": "One?", "completion": "Two."}, tokenizer, "here")
    assert example.ids.tolist().count(tokenizer.eos_token_id) == 2 and example.ids[0] == tokenizer.eos_token_id
    chat = encode({"messages": MESSAGES[1:3]}, tokenizer, "here")
    text = tokenizer.apply_chat_template(MESSAGES[1:3], tokenize=False)
    assert tokenizer.decode(chat.ids) == text


def test_a_row_whose_only_target_is_its_first_token_is_left_out():
    found = Examples()
    _add(found, Example(np.array([3, 4]), np.array([True, False]), "here"), 8)
    assert not found.rows and sum(found.dropped.values()) == 1


def test_the_fingerprint_knows_what_is_learned():
    ids = np.array([3, 4, 5])
    one, other = (Examples([Example(ids, np.array(mask), "x")]) for mask in ([False, True, True], [False, False, True]))
    assert one.fingerprint != other.fingerprint


def test_a_conversation_that_the_template_refuses_is_a_bad_row(tokenizer, tmp_path):
    """One that the assistant begins: there is nothing to ask it with."""
    path = write(tmp_path / "rows.jsonl", {"messages": MESSAGES}, {"messages": MESSAGES[2:3]})
    with pytest.raises(UnspokenError, match=r"rows.jsonl:2: the chat template refuses the conversation"):
        read_examples([path], tokenizer, 64)
    found = read_examples([path], tokenizer, 64, on_bad_line="skip")
    assert len(found.rows) == 1 and len(found.bad) == 1 and sum(found.dropped.values()) == 1
