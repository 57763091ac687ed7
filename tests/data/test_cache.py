import pytest

from unspoken.data.cache import cache_folder, whole_folder


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("UNSPOKEN_CACHE", str(tmp_path / "c"))
    assert cache_folder() == tmp_path / "c"
    monkeypatch.delenv("UNSPOKEN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "unspoken"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_nothing(tmp_path, error):
    target = tmp_path / "deep" / "data"
    with pytest.raises(error), whole_folder(target) as made:
        (made / "half").write_text("x")
        raise error
    assert list(target.parent.iterdir()) == []


def test_an_interrupted_replacement_keeps_the_old_folder(tmp_path):
    target = tmp_path / "data"
    with whole_folder(target) as made:
        (made / "old").touch()
    with pytest.raises(RuntimeError), whole_folder(target, replace=True) as made:
        raise RuntimeError
    assert [p.name for p in target.iterdir()] == ["old"]
    with whole_folder(target, replace=True) as made:
        (made / "new").touch()
    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_of_two_writers_the_first_wins(tmp_path):
    target = tmp_path / "data"
    with whole_folder(target) as late:
        (late / "late").touch()
        with whole_folder(target) as early:
            (early / "early").touch()
    assert [p.name for p in target.iterdir()] == ["early"]
    assert [p.name for p in tmp_path.iterdir()] == ["data"]
