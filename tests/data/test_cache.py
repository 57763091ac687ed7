import pytest

from unspoken.data import cache
from unspoken.data.cache import cache_folder, check_file, check_folder, whole_folder
from unspoken.errors import UsageError


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


def test_a_path_that_leads_through_the_folder_itself_replaces_it(tmp_path):
    """`data/../data` was moved away, and then nothing was there to put the new one into."""
    target = tmp_path / "data"
    for name in ("old", "new"):
        with whole_folder(target / ".." / "data", replace=target.exists()) as made:
            (made / name).touch()
    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_places_that_cannot_be_written_are_refused_and_nothing_is_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    check_folder("--out", tmp_path / "a" / "b")
    check_file("--json", tmp_path / "new.json")
    check_file("--json", tmp_path / "file")
    for place in ("file", "file/a/b"):
        with pytest.raises(UsageError, match=r"--out: .*file is a file; give a folder"):
            check_folder("--out", tmp_path / place)
    with pytest.raises(UsageError, match=r"--json: .* is a folder; give a file"):
        check_file("--json", tmp_path)
    with pytest.raises(UsageError, match=r"--json .*new.json: its folder does not exist"):
        check_file("--json", tmp_path / "a" / "new.json")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    monkeypatch.setattr(cache.os, "access", lambda path, mode: False)  # the tests may run as root, who may all
    for check, name in ((check_folder, "a/b"), (check_file, "new"), (check_file, "file")):
        with pytest.raises(UsageError, match="no permission to write"):
            check("--out", tmp_path / name)
