"""Files appear whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from graftwork.files import disk
from graftwork.files.disk import Journal, atomic_folder, write_atomic
from graftwork.records.errors import EnvironmentFailure, GraftError


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a" / "file.txt"
    write_atomic(path, "old")
    write_atomic(path, "new")
    assert path.read_text() == "new"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def test_a_full_disk_leaves_the_old_file_and_no_trace(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    write_atomic(path, "old")

    def no_space(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk.os, "fsync", no_space)
    with pytest.raises(EnvironmentFailure, match="disk is full") as caught:
        write_atomic(path, "new")
    assert "free some space" in caught.value.fix
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_a_folder_that_fails_half_way_leaves_no_trace(tmp_path):
    target = tmp_path / "made"

    def fail_half_way():
        with atomic_folder(target) as folder:
            (folder / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks up what a descriptor is in /proc")
def test_a_folder_takes_its_name_only_when_all_that_is_in_it_is_on_disk(tmp_path, monkeypatch):
    synced: set[str] = set()
    true_sync, true_rename = os.fsync, Path.rename

    def sync(descriptor):
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        true_sync(descriptor)

    def rename(self, target):
        made = {str(self), *(str(entry) for entry in self.rglob("*"))}
        assert made <= synced
        return true_rename(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    with atomic_folder(tmp_path / "whole") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("x")
    assert (tmp_path / "whole" / "inner" / "file").read_text() == "x"


def test_a_folder_named_by_content_is_not_written_twice(tmp_path):
    target = tmp_path / "made"
    for text in ("first", "second"):
        with atomic_folder(target) as folder:
            (folder / "file").write_text(text)
    assert (target / "file").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["made"]


def test_a_torn_last_line_of_a_journal_is_ignored_and_closed_by_the_next_writer(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append({"n": 1})
    with journal.path.open("ab") as handle:
        handle.write(b'{"n": 2, "half')
    assert journal.read() == [{"n": 1}]
    journal.append({"n": 3}, durable=True)
    assert journal.read() == [{"n": 1}, {"n": 3}]


def test_a_journal_can_be_followed_from_where_one_stopped(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    assert list(journal.follow(0)) == []
    journal.append("a")
    ((first, offset),) = journal.follow(0)
    journal.append("b")
    assert first == "a"
    assert [value for value, _ in journal.follow(offset)] == ["b"]


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.EACCES, "no permission"), (errno.ENOSPC, "disk is full"), (errno.EROFS, "no permission")],
)
def test_system_errors_are_explained(code, words):
    assert words in disk.explain_os_error(OSError(code, os.strerror(code)), Path("x")).what


@pytest.mark.parametrize("name", ["a" * 250, "file/below"])
def test_a_path_that_cannot_be_made_is_an_explained_error(tmp_path, name):
    (tmp_path / "file").write_text("x")
    with pytest.raises(GraftError):
        write_atomic(tmp_path / name, "x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
