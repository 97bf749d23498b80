"""The commands of a host: their data arrives whole, and a connection that is cut is noticed."""

import fcntl
import io
import json
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fleet_samples import with_vanishing_folder
from hypothesis import given
from hypothesis import strategies as st

from graftwork.fleet.far_side import GONE, REFUSED, JobHost, PieceReader, PieceWriter, answer
from graftwork.fleet.place import PlaceUnreachable, Refused
from graftwork.fleet.places import hosts
from graftwork.fleet.places.hosts import local_place
from graftwork.records.fleet import PlacedJob


def framed(parts):
    stream = io.BytesIO()
    writer = PieceWriter(stream)
    for part in parts:
        writer.write(part)
    writer.end()
    return stream.getvalue()


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 50), st.binary(max_size=9))
def test_pieces_arrive_as_they_were_sent_however_they_are_read(parts, size, behind):
    stream = io.BytesIO(framed(parts) + behind)
    reader, found = PieceReader(stream), []
    while part := reader.read(size):
        found.append(part)
    assert b"".join(found) == b"".join(parts)
    assert reader.ended
    # What comes behind belongs to the next command.
    assert stream.read() == behind


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), st.data())
def test_data_that_ends_too_early_is_an_error(parts, data):
    whole = framed(parts)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(OSError, match="cut"):
        PieceReader(io.BytesIO(whole[:cut])).read()


def test_a_start_names_the_files_that_are_missing_and_starts_nothing(tmp_path):
    order = {"label": "graft-00000000-000000000001", "seconds": 60, "secrets": {}}
    order["bundle"] = json.dumps({"files": {"a": {"sha256": "aa"}, "b": {"sha256": "bb"}}})
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "aa").touch()
    output = io.BytesIO()
    assert answer(tmp_path, ["start"], io.BytesIO(json.dumps(order).encode()), output) == 0
    assert json.loads(output.getvalue()) == {"created": False, "missing": ["bb"]}
    assert not (tmp_path / "jobs").exists()


def test_a_start_is_not_lost_to_a_command_that_asks_for_the_job_at_the_same_time(tmp_path, monkeypatch):
    """Asking shares the lock of the job for a moment."""
    order = {"label": "graft-00000000-000000000001"}
    (tmp_path / "jobs" / order["label"]).mkdir(parents=True)
    monkeypatch.setattr(JobHost, "_start", lambda *_given: {"created": True})
    tried = threading.Event()

    def flock(descriptor, how, flock=fcntl.flock):
        try:
            flock(descriptor, how)
        except BlockingIOError:
            tried.set()
            raise

    with (tmp_path / "jobs" / order["label"] / "alive").open("w") as asking, ThreadPoolExecutor() as pool:
        fcntl.flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr(fcntl, "flock", flock)
        started = pool.submit(JobHost(tmp_path).start, order)
        tried.wait()
        asking.close()
        assert started.result() == {"created": True}


def test_a_job_that_runs_is_not_started_again(tmp_path):
    order = {"label": "graft-00000000-000000000001"}
    (tmp_path / "jobs" / order["label"]).mkdir(parents=True)
    with (tmp_path / "jobs" / order["label"] / "alive").open("w") as job:
        fcntl.flock(job, fcntl.LOCK_EX)
        assert JobHost(tmp_path).start(order) == {"created": False}


def test_files_of_a_job_that_is_not_there_are_refused_by_name(tmp_path):
    output = io.BytesIO()
    assert answer(tmp_path, ["pack", "graft-x"], io.BytesIO(), output) == REFUSED
    assert json.loads(output.getvalue())["what"] == GONE


def test_a_host_that_fails_in_the_middle_of_the_results_says_why(tmp_path, monkeypatch):
    def pack(_host, _label, stream):
        stream.write(b'{"what": 1}\xff' * 600)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(JobHost, "pack", pack)
    place = local_place(tmp_path)
    job = PlacedJob(place="local", id="1", label="graft-00000000-000000000001", host="local")
    with pytest.raises(Refused, match="the host reports: Input/output error"):
        place.fetch(job, tmp_path / "run")
    assert not (tmp_path / "run").exists()


SILENT = b"""
import sys, time
sys.stdout.buffer.write(b"\\0graft\\0"); sys.stdout.flush()
for line in sys.stdin.buffer: time.sleep(600)
time.sleep(600)
"""


@pytest.mark.parametrize("script", [SILENT, b"import time; time.sleep(600)"], ids=["silent", "no greeting"])
@pytest.mark.parametrize("words", [("list",), ("status", "x"), ("stop", "x", "now"), ("wait", "x", "0.1")])
def test_a_host_that_hangs_does_not_keep_the_reconciliation_waiting(tmp_path, monkeypatch, script, words):
    monkeypatch.setattr(hosts, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(hosts, "_script", lambda: script)
    host = hosts.ProcessConnection("gpu1", [sys.executable], root=str(tmp_path), far=False)
    with pytest.raises(PlaceUnreachable, match="gpu1 is not responding"):
        host.run(*words)


def test_files_of_a_job_that_still_runs_are_packed_though_a_checkpoint_goes(tmp_path, monkeypatch):
    run = tmp_path / "jobs" / "graft-x" / "work" / "run"
    part = with_vanishing_folder(run, monkeypatch)
    (run / "steps.jsonl").write_text("{}\n")
    packed = io.BytesIO()
    JobHost(tmp_path).pack("graft-x", packed)
    assert not part.exists()
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        assert archive.getnames() == ["steps.jsonl"]
