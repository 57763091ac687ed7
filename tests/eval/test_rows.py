import numpy as np
import pytest

from unspoken.data.tokens import TokenShards
from unspoken.errors import UnspokenError, UsageError
from unspoken.eval import rows as rows_module
from unspoken.eval.rows import cut_rows


def test_no_row_holds_two_documents(shards):
    for row in cut_rows(shards, 50, 10_000):
        document = shards.document(row.document)
        assert 2 <= len(row.ids) <= 50
        # The end token is the last one of a document and nowhere else.
        assert (row.ids[:-1] != shards.document_end_id).all()
        assert any(np.array_equal(document[s : s + len(row.ids)], row.ids) for s in range(0, len(document), 50))


def test_all_rows_together_are_the_split(shards):
    rows = cut_rows(shards, 50, 10_000)
    lengths = np.diff(shards.offsets)
    alone = int((lengths % 50 == 1).sum())  # a last piece of one token has no target
    assert sum(len(row.ids) for row in rows) == shards.num_tokens - alone


def test_a_choice_of_rows_spans_the_split_and_is_the_same_each_time(shards):
    chosen = cut_rows(shards, 50, 10)
    assert len(chosen) == 10
    assert chosen[0].document == 0 and chosen[-1].document == shards.num_documents - 1
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(chosen, cut_rows(shards, 50, 10)))


def test_bytes_are_those_of_the_targets(shards):
    tokenizer = shards.load_tokenizer()
    checked = 0
    for row in cut_rows(shards, 64, 20):
        text = tokenizer.decode(row.ids[1:], skip_special_tokens=True)
        if text.isascii():  # a piece may begin inside a character
            assert row.num_bytes == len(text)
            checked += 1
    assert checked > 10


def test_bytes_are_estimated_for_a_tokenizer_that_cannot_say(shards, monkeypatch):
    exact = sum(row.num_bytes for row in cut_rows(shards, 64, 10_000))

    def refuse(tokenizer):
        raise UnspokenError("not byte-level")

    monkeypatch.setattr(rows_module, "token_byte_lengths", refuse)
    estimated = sum(row.num_bytes for row in cut_rows(shards, 64, 10_000))
    assert estimated != exact and abs(estimated / exact - 1) < 0.02


def test_what_cannot_be_is_refused(shards, data_folder):
    with pytest.raises(UsageError, match="sequence-length is 1"):
        cut_rows(shards, 1, 10)
    with pytest.raises(UsageError, match="max-sequences is 0"):
        cut_rows(shards, 10, 0)
    with pytest.raises(UsageError, match="did you mean 'train'"):
        TokenShards.open(data_folder, "trian")
