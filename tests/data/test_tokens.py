import pickle

import numpy as np
import pytest

from unspoken.data.tokens import MANIFEST, TokenShards, check_embedding_rows, read_manifest, token_dtype
from unspoken.errors import UnspokenError, UsageError


def test_documents_come_back_as_written(shards):
    assert (shards.num_documents, shards.num_tokens, shards.num_bytes) == (8, 85, 255)
    assert shards.document(0).tolist() == [1, 2, 3, 4, 0]
    assert shards.document(2).tolist() == [0]
    assert np.concatenate([shards.document(i) for i in range(8)]).tolist() == shards.tokens.tolist()
    assert shards.document_bytes.tolist()[:2] == [15, 69]


def test_dtype_holds_the_largest_id(tmp_path, write_folder):
    assert token_dtype(65535) == np.uint16
    assert token_dtype(65536) == np.uint32
    big = TokenShards.open(write_folder(tmp_path / "big", [70_000], vocab_size=100_000))
    assert big.tokens[-2] == 69_999


def test_an_empty_split_opens(shards):
    empty = TokenShards.open(shards.folder, "test")
    assert (empty.num_documents, empty.num_tokens, empty.num_bytes) == (0, 0, 0)


def test_workers_get_the_path_and_not_the_tokens(tmp_path, write_folder):
    shards = TokenShards.open(write_folder(tmp_path / "data", [5000]))
    data = pickle.dumps(shards)
    assert len(data) < 1000
    assert pickle.loads(data).tokens.tolist() == shards.tokens.tolist()


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "train.bytes"])
def test_a_shard_that_was_cut_or_lost_is_named(shards, name):
    path = shards.folder / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UnspokenError, match=rf"{name} has \d+ bytes, the manifest says \d+"):
        TokenShards.open(shards.folder)
    path.unlink()
    with pytest.raises(UnspokenError, match=rf"{name} is missing"):
        TokenShards.open(shards.folder)


def test_a_changed_token_is_found_only_when_asked(shards):
    path = shards.folder / "train.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    TokenShards.open(shards.folder)
    with pytest.raises(UnspokenError, match="not those of the manifest"):
        TokenShards.open(shards.folder, verify=True)


def test_wrong_folders_say_what_to_do(shards, tmp_path):
    with pytest.raises(UnspokenError, match=r"nowhere does not exist; make a data folder with `unspoken data prepare"):
        TokenShards.open(tmp_path / "nowhere")
    with pytest.raises(UnspokenError, match=r"has no manifest.json"):
        TokenShards.open(tmp_path)
    with pytest.raises(UsageError, match=r"unknown split 'vall' \(did you mean 'val'\?\)"):
        TokenShards.open(shards.folder, "vall")
    (shards.folder / MANIFEST).write_text('{"format": 99}')
    with pytest.raises(UnspokenError, match="format 99"):
        TokenShards.open(shards.folder)
    (shards.folder / MANIFEST).write_text("{")
    with pytest.raises(UnspokenError, match="not valid JSON"):
        TokenShards.open(shards.folder)


def test_b77_more_token_ids_than_embedding_rows_is_an_error_before_training():
    check_embedding_rows(4096, 4096)
    check_embedding_rows(4095, 4096)
    with pytest.raises(UsageError, match="4097 ids but the model has 4096 embedding rows"):
        check_embedding_rows(4097, 4096)


def test_a_missing_or_broken_tokenizer_is_named_and_not_looked_for_elsewhere(tmp_path):
    """A folder's name was once taken for a hub's when the folder was gone."""
    folder = tmp_path / "data"
    folder.mkdir()
    shards = TokenShards(folder, "train", {}, np.zeros(0), np.zeros(1), np.zeros(0))
    with pytest.raises(UnspokenError, match=r"tokenizer is missing; prepare the folder again"):
        shards.load_tokenizer()
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(UnspokenError, match=r"tokenizer.json is damaged .*prepare the folder again"):
        shards.load_tokenizer()


def test_a_manifest_without_its_parts_is_named(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": 1}')
    with pytest.raises(UnspokenError, match=r"manifest.json has no 'splits'"):
        read_manifest(tmp_path)
