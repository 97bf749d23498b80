"""A further machine's part of a run leaves by itself when its work is done, and is stopped if it does not."""

import subprocess
import sys

import pytest

from graftwork.files.disk import write_atomic
from graftwork.process import local_workers
from graftwork.train.distributed import launch, multi_node
from graftwork.train.distributed.launch import NodeGroup
from graftwork.train.distributed.multi_node import CALL_FILE, Call, _answer

ENDS_BY_ITSELF = """
import pathlib, sys, time
file, polls = pathlib.Path(sys.argv[1]), float(sys.argv[2])
print("here", flush=True)
while '"over":true' not in file.read_text().replace(" ", ""):
    time.sleep(0.01)
# Long enough that the watcher has seen it, too.
time.sleep(4 * polls)
"""
GOES_ON = """
import threading
print("here", flush=True)
threading.Event().wait()
"""
POLL = 0.05


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """What a part ends with whose process runs this code, after the first machine said that it is over."""
    monkeypatch.setattr(multi_node, "POLL_SECONDS", POLL)
    job_file, file = tmp_path / "job.json", tmp_path / CALL_FILE
    job_file.write_text("{}")
    call = Call(id="1", job_file=str(job_file), processes=1, nodes=2)
    write_atomic(file, call.to_json())

    def answer_with(code: str) -> int:
        def start(_):
            child = subprocess.Popen(
                [sys.executable, "-c", code, str(file), str(POLL)], stdout=subprocess.PIPE
            )
            assert child.stdout.readline() == b"here\n"
            write_atomic(file, call.model_copy(update={"id": "2", "over": True}).to_json())
            return child

        monkeypatch.setattr(local_workers, "start_child", start)
        return _answer(
            call, NodeGroup(count=2, rank=1), tmp_path / "machine", file, workers=local_workers.LocalWorkers()
        )

    return answer_with


def test_a_part_whose_work_is_done_is_not_asked_to_stop_while_it_leaves(answer):
    assert answer(ENDS_BY_ITSELF) == 0


def test_a_part_is_given_longer_to_leave_than_its_goodbye_takes():
    """A store that is not responding is tried twice."""
    goodbye = launch.CONNECT_SECONDS + 2 * launch.STORE_TIMEOUT.total_seconds()
    assert goodbye < multi_node.LEAVING_SECONDS


def test_a_part_that_goes_on_without_the_first_machine_is_stopped(answer, monkeypatch):
    monkeypatch.setattr(multi_node, "LEAVING_SECONDS", 0.01)
    assert answer(GOES_ON) == -15
