"""Results from another machine: what is taken into the folder of the run, and what is not."""

import io
import json
import tarfile

import pytest
from fleet_samples import LARGE, memory_limit

from graftwork.fleet.bundle import parse_exit, take_files, take_folder, take_results
from graftwork.fleet.place import NotThere
from graftwork.records.errors import Corrupted


def text(content):
    return lambda target: target.write(content.encode())


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
    with pytest.raises(Corrupted, match="does not match the hash"):
        take_results(packed(**{name: outcome}), tmp_path)
    assert not (tmp_path / "outcome.json").exists()


@pytest.mark.parametrize("keep", [0, 100, 600, 1100])
def test_results_that_end_too_early_or_are_none_are_damaged(tmp_path, keep):
    whole = packed(log=bytes(4000)).read()
    with pytest.raises(Corrupted):
        take_results(io.BytesIO(whole[:keep] or b"no archive" * 100), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", "lock/x", "job.json/x", "outcome.json/x", "a\0b", "a\udcff\ud800"]
)
def test_names_that_would_stand_in_the_way_of_the_run_are_refused(tmp_path, name):
    with pytest.raises(Corrupted):
        take_files([(name, text("there"))], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a" * 250, "a" * 5000, "a/" * 1500 + "a", f"{'ä' * 120}/b", "log/below/it"])
def test_a_name_that_no_file_can_have_here_is_damage_and_leaves_no_part(tmp_path, name):
    with pytest.raises(Corrupted, match=r"cannot be|same name"):
        take_results(packed(**{"log": b"1", name: b"2"}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_folder_and_then_a_file_of_its_name_is_damage(tmp_path):
    with pytest.raises(Corrupted, match="same name"):
        take_results(packed(**{"adapter/x": b"1", "adapter": b"2"}), tmp_path)


def test_a_file_that_a_running_job_removes_meanwhile_is_left_out(tmp_path):
    def gone(target):
        target.write(b"a part of it")
        raise NotThere("it was removed")

    take_files([("gone", gone), ("log", text("there"))], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_results_larger_than_the_memory_allowed_are_taken_piece_by_piece(tmp_path):
    weights, archive = tmp_path / "source" / "weights", tmp_path / "results.tar"
    weights.parent.mkdir()
    with weights.open("wb") as content:
        content.truncate(LARGE)
    with tarfile.open(archive, "w") as tar:
        tar.add(weights, arcname="weights")
    with archive.open("rb") as stream, memory_limit(LARGE // 8):
        take_results(stream, tmp_path / "a")
        take_folder(weights.parent, tmp_path / "b")
    assert {(tmp_path / name / "weights").stat().st_size for name in "ab"} == {LARGE}


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
    with pytest.raises(Corrupted, match="not a file"):
        take_results(io.BytesIO(bytes(head) + bytes(10240 - len(head))), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_outcome_that_is_nested_without_end_is_damaged(tmp_path):
    with pytest.raises(Corrupted):
        take_files([("outcome.json", text("[" * 200_000))], tmp_path)


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"code": 1e999, "reason": ""}', b"\xff", b"7"])
def test_an_exit_that_cannot_be_read_is_none(content):
    assert parse_exit(content) is None
