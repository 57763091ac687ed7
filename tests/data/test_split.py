from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from unspoken.data.documents import Document
from unspoken.data.split import Placed, cut_in_three, cut_long, fill_small_splits, hashed_split


def test_the_split_of_a_name_is_fixed_and_shares_are_near_2_percent():
    """These values must never change: a document would move from test to train."""
    assert [hashed_split("sotu", id) for id in ("1790_george_washington_n", "a", "b")] == ["train", "train", "train"]
    counts = Counter(hashed_split("source", str(number)) for number in range(20_000))
    assert counts == {"train": 19_200, "val": 379, "test": 421}


def test_a_small_corpus_still_has_val_and_test():
    documents = [Placed("s", str(number), 100, "train") for number in range(50)]
    assert fill_small_splits(documents) == 2
    assert Counter(document.split for document in documents) == {"train": 48, "val": 1, "test": 1}
    assert fill_small_splits(documents) == 0


def test_moving_spares_large_documents_and_those_with_a_rule():
    documents = [Placed("s", "large", 10_000, "train"), Placed("s", "rule", 10, "train", by_rule=True)]
    documents += [Placed("s", str(number), 150, "train") for number in range(3)]
    fill_small_splits(documents)
    assert [document.split for document in documents[:2]] == ["train", "train"]
    assert sorted(document.split for document in documents[2:]) == ["test", "train", "val"]


def test_one_document_is_cut_into_three_parts_at_line_ends():
    text = "".join(f"This is line number {number} of the only text.\n" for number in range(1000))
    parts = cut_in_three(Document("local", "x", text))
    assert [split for _, split in parts] == ["train", "val", "test"]
    assert "\n".join(part.text for part, _ in parts) == text.strip()
    assert all(part.text.startswith("This is line") and part.text.endswith("only text.") for part, _ in parts)
    assert [round(len(part.text) / len(text), 2) for part, _ in parts] == [0.96, 0.02, 0.02]


@given(st.text(alphabet="ab \n", max_size=200), st.integers(1, 50))
def test_long_texts_are_cut_without_loss(text, limit):
    pieces = cut_long(text, limit)
    assert all(0 < len(piece) <= limit for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())
