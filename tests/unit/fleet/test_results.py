"""Results from another machine: what is taken into the folder of the run, and what is not."""

import io
import json
import tarfile

import pytest

from graftwork.fleet.results import parse_exit, take_files, take_results
from graftwork.records.errors import Damaged


def packed(**files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    stream.seek(0)
    return stream


@pytest.mark.parametrize("prefix", ["", "./", ".//"])
def test_files_that_are_kept_here_are_not_replaced_under_any_spelling(tmp_path, prefix):
    (tmp_path / "job.json").write_text("here")
    take_results(packed(**{f"{prefix}{name}": b"there" for name in ("job.json", "lock", "log")}), tmp_path)
    assert (tmp_path / "job.json").read_text() == "here"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "log"]


@pytest.mark.parametrize("name", ["outcome.json", "./outcome.json"])
def test_an_outcome_without_its_adapter_is_refused_under_any_spelling(tmp_path, name):
    outcome = json.dumps({"adapter_hash": "0" * 64, "adapter_folder": "/elsewhere"}).encode()
    with pytest.raises(Damaged, match="other bytes"):
        take_results(packed(**{name: outcome}), tmp_path)
    assert not (tmp_path / "outcome.json").exists()


@pytest.mark.parametrize("keep", [0, 100, 600, 1100])
def test_results_that_end_too_early_or_are_none_are_damaged(tmp_path, keep):
    whole = packed(log=bytes(4000)).read()
    with pytest.raises(Damaged):
        take_results(io.BytesIO(whole[:keep] or b"no archive" * 100), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", "lock/x", "job.json/x", "outcome.json/x", "a\0b", "a\udcff\ud800"]
)
def test_names_that_would_stand_in_the_way_of_the_run_are_refused(tmp_path, name):
    with pytest.raises(Damaged):
        take_files([(name, b"there")], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_mostly_holes_is_refused_before_it_is_read(tmp_path):
    # A kilobyte of archive that claims to be a terabyte.
    entry = tarfile.TarInfo("log")
    entry.type = tarfile.GNUTYPE_SPARSE
    head = bytearray(entry.tobuf(format=tarfile.GNU_FORMAT))
    head[386:398] = b"%011o\0" % 0
    head[398:410] = b"%011o\0" % 0
    head[483:495] = b"%011o\0" % (8**11 - 1)
    head[148:156] = b"        "
    head[148:156] = b"%06o\0 " % sum(head)
    with pytest.raises(Damaged, match="no file"):
        take_results(io.BytesIO(bytes(head) + bytes(10240 - len(head))), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_outcome_that_is_nested_without_end_is_damaged(tmp_path):
    with pytest.raises(Damaged):
        take_files([("outcome.json", b"[" * 200_000)], tmp_path)


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"code": 1e999, "reason": ""}', b"\xff", b"7"])
def test_an_exit_that_cannot_be_read_is_none(content):
    assert parse_exit(content) is None
