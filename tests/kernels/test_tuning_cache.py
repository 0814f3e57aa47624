"""What is found out for a machine is found out once, and the same for all who start on it."""

import pytest

from rloo.kernels import tuning_cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rloo"


def test_names_are_found_once(folder):
    assert tuning_cache.names_kept("names.json", lambda: ["a", "b"]) == ["a", "b"]
    assert tuning_cache.names_kept("names.json", lambda: pytest.fail("found again")) == ["a", "b"]
    assert tuning_cache.names_kept("others.json", lambda: []) == []
    assert sorted(file.name for file in folder.iterdir()) == ["names.json", "others.json"]


def test_who_finds_names_at_the_same_time_takes_those_of_the_first(folder):
    def find():
        assert tuning_cache.names_kept("names.json", lambda: ["first"]) == ["first"]
        return ["second"]

    assert tuning_cache.names_kept("names.json", find) == ["first"]
    assert tuning_cache.names_kept("names.json", list) == ["first"]


@pytest.mark.parametrize("text", ["", '["a', "{}", "[1]"])
def test_what_is_no_list_of_names_is_replaced(folder, text):
    tuning_cache.folder()
    (folder / "names.json").write_text(text, encoding="utf-8")
    assert tuning_cache.names_kept("names.json", lambda: ["a"]) == ["a"]
    assert tuning_cache.names_kept("names.json", list) == ["a"]


def test_where_nothing_can_be_kept_it_is_found_each_time(folder, monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuning_cache.tempfile, "TemporaryDirectory", refuse)
    assert tuning_cache.names_kept("names.json", lambda: ["a"]) == ["a"]
    assert tuning_cache.names_kept("names.json", lambda: ["b"]) == ["b"]


def test_a_folder_that_others_may_write_to_is_not_used(folder):
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    tuning_cache.names_kept("names.json", lambda: ["a"])
    assert not any(folder.iterdir())
