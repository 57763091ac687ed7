from collections import Counter

import pytest

from unspoken.data.clean import Deduplicator, clean_book, clean_manual, clean_verse, tidy


def test_tidy_normalises_without_touching_the_text():
    assert tidy("\ufeffe\u0301te\u0301 \r\nline  two\t\r\rend\n\n") == "été\nline  two\n\nend"


def test_verse_keeps_its_lines():
    text = "  Of Cerberus        10\n....and Midnight,  born\n\n\n\nHamlet.\nTo be\n"
    assert clean_verse(text) == (["Of Cerberus\nand Midnight, born", "Hamlet.\nTo be"], Counter())


def test_a_book_keeps_every_paragraph_with_its_lines_joined():
    assert clean_book('CHAPTER I\n\nIt was\n  a dark   night.\n\n"Yes."\n')[0] == [
        "CHAPTER I",
        "It was a dark night.",
        '"Yes."',
    ]


@pytest.mark.parametrize(
    ("paragraph", "reason"),
    [
        ("Too short to be kept.", "short_paragraph"),
        ("This line has eight words but no full stop", "no_sentence_end"),
        ("Set a[0] = 1; b[1] = 2; c[2] = 3; d[3] = 4.", "few_letters"),
        ("It calls foo_barbaz and bar_foobaz with baz_barfoo set.", "few_words"),
    ],
)
def test_a_manual_loses_what_is_not_prose(paragraph, reason):
    prose = "The quick brown fox doesn't jump over well-known lazy dogs."
    assert clean_manual(f"{prose}\n\n{paragraph}") == ([prose], Counter({reason: 1}))


def test_repeated_paragraphs_are_dropped_across_documents_and_short_ones_stay():
    deduplicator = Deduplicator()
    long = "A sentence that is long enough to count as repeated when it is seen again."
    assert deduplicator.new_paragraphs([long, "Exeunt.", "Exeunt."]) == [long, "Exeunt.", "Exeunt."]
    assert deduplicator.new_paragraphs(["Exeunt.", long.upper().replace(" ", "\n"), long + "!"]) == [
        "Exeunt.",
        long + "!",
    ]


def test_documents_and_paragraphs_are_remembered_apart():
    deduplicator = Deduplicator()
    text = "One paragraph that is a whole document of its own, and long enough to be remembered."
    assert deduplicator.new_paragraphs([text]) == [text]
    assert deduplicator.is_new_document(text)
    assert not deduplicator.is_new_document(text)
