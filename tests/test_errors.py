"""What messages are made of."""

import pytest

from unspoken.errors import first_line, nearest


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("learnign_rate", "learning_rate"),
        ("seq_length", "sequence_length"),
        ("plane", "plain"),
        ("lables", "labels"),
        ("cor", "core"),
    ],
)
def test_a_slip_is_recognised(typed, meant):
    assert nearest(typed, ["other", meant]) == f" (did you mean {meant!r}?)"


@pytest.mark.parametrize(
    ("typed", "valid"), [("max_length", "max_steps"), ("batch_size", "hidden_size"), ("gpt2", "gpt_neox"), ("x", "y")]
)
def test_another_word_is_not_suggested(typed, valid):
    """Words that share an ending or a beginning were taken for slips of each other."""
    assert nearest(typed, [valid]) == ""


def test_the_first_line_of_an_error_is_never_empty():
    assert first_line(ValueError("\n what\n and why")) == "what"
    assert first_line(KeyError()) == "KeyError"
    assert first_line(ValueError("of 'size':\n    not a number\nat all")) == "of 'size': not a number"
