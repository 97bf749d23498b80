"""Converted files: those that nobody has used for longest make room."""

import os

import pytest

from graftwork.model import gguf as cache
from graftwork.records.errors import UserError

NOW = 1_700_000_000.0
HOUR = 3600.0


def put(folder, name, *, size, hours):
    path = folder / name
    path.write_bytes(bytes(size))
    os.utime(path, (NOW - hours * HOUR,) * 2)
    return path


def test_the_files_unused_for_longest_are_removed_until_the_rest_fits(tmp_path):
    old, new, fresh = (
        put(tmp_path, name, size=100, hours=hours)
        for name, hours in (("old.gguf", 50), ("new.lora.gguf", 5), ("fresh.gguf", 0.5))
    )
    other = put(tmp_path, "notes.txt", size=1000, hours=99)
    assert cache.remove_unused(tmp_path, most_bytes=300, now=NOW) == []
    assert cache.remove_unused(tmp_path, most_bytes=200, now=NOW) == [old]
    # What was used within the hour may be about to be opened, whatever the limit.
    assert cache.remove_unused(tmp_path, most_bytes=0, now=NOW) == [new]
    assert fresh.exists()
    assert other.exists()


def test_unfinished_files_of_killed_processes_are_removed(tmp_path):
    left = put(tmp_path, ".abc.gguf", size=10, hours=3)
    running = put(tmp_path, ".def.gguf", size=10, hours=0.1)
    assert cache.remove_unused(tmp_path, most_bytes=1000, now=NOW) == [left]
    assert running.exists()


def test_a_file_that_is_asked_for_counts_as_used_and_a_new_one_makes_room(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv(cache.LIMIT_VARIABLE, "0")

    def convert(name):
        return cache._converted(name, lambda path: path.write_bytes(b"x" * 10))

    first = convert("first.gguf")
    os.utime(first, (NOW, NOW))
    assert convert("first.gguf").stat().st_mtime > NOW
    os.utime(first, (NOW, NOW))
    convert("second.gguf")
    assert [path.name for path in first.parent.iterdir()] == ["second.gguf"]


def test_a_limit_that_is_no_number_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv(cache.LIMIT_VARIABLE, "much")
    with pytest.raises(UserError, match="GRAFT_GGUF_CACHE_GIB is not a number"):
        cache._converted("a.gguf", lambda path: path.write_bytes(b"x"))
