"""Of the machines of one run the first leaves last, and nobody waits for who failed."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.multiprocessing.api import SignalException

from free_ports import free_port
from graftwork.process.worker import PARENT_VARIABLE
from graftwork.records.errors import EXIT_RESUME
from graftwork.train.distributed import launch
from graftwork.train.distributed.launch import NodeGroup, main_node_leaves_last, torchrun_arguments

CHILD = Path(__file__).with_name("shutdown_child.py")


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(CHILD), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_machine_that_hears_late_that_all_is_done_reports_no_broken_connection():
    port = free_port()
    # A module that does nothing and ends well.
    first = start(0, port, "__future__")
    second = start(1, port, "__future__", first.pid)
    # A process that has ended stays until its parent waits for it.
    threading.Thread(target=first.wait, daemon=True).start()
    output = second.communicate(timeout=300)[0]
    assert second.returncode == 0, output
    assert first.wait(timeout=300) == 0
    assert "Error" not in output, output
    assert "Error" not in first.stdout.read()


def test_the_first_waits_until_every_other_has_left(monkeypatch):
    port, goodbye = free_port(), launch._report_departure
    output: list[int] = []
    one_left = threading.Event()

    def say(machines: NodeGroup) -> None:
        if machines.rank == 2:
            assert one_left.wait(timeout=300)
        output.append(machines.rank)
        goodbye(machines)
        one_left.set()

    def work(rank: int) -> None:
        with main_node_leaves_last(NodeGroup(count=3, rank=rank, port=port)):
            pass

    monkeypatch.setattr(launch, "_report_departure", say)
    others = [threading.Thread(target=work, args=(rank,)) for rank in (1, 2)]
    with main_node_leaves_last(NodeGroup(count=3, port=port)):
        for thread in others:
            thread.start()
    assert output == [1, 2]
    for thread in others:
        thread.join(timeout=300)


def test_a_process_that_never_leaves_is_not_waited_for_for_ever(monkeypatch):
    asked, passed = [], [0.0]

    class Deserted:
        def check(self, keys):
            asked.append(keys)
            return False

    def sleep(seconds):
        passed[0] += seconds

    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: passed[0], sleep=sleep))
    launch._wait_for_the_others(Deserted(), 3)
    assert passed[0] == pytest.approx(launch.LEAVE_SECONDS, abs=2 * launch.POLL_SECONDS)
    assert len(asked) > 1
    assert len(set(asked[0])) == 2


def test_a_store_that_is_gone_is_not_waited_for():
    class Gone:
        def check(self, _):
            raise DistStoreError("gone")

    launch._wait_for_the_others(Gone(), 2)


def test_waiting_for_the_others_writes_nothing(monkeypatch, capfd):
    monkeypatch.setattr(launch, "LEAVE_SECONDS", 1.2)
    with main_node_leaves_last(NodeGroup(count=2, port=free_port())):
        capfd.readouterr()
    assert capfd.readouterr() == ("", "")


def test_to_a_first_machine_that_is_gone_nobody_says_goodbye(monkeypatch, capfd):
    monkeypatch.setattr(launch, "_store", lambda *_, **__: pytest.fail("it looked for the store"))
    with main_node_leaves_last(NodeGroup(count=2, rank=1, port=free_port())):
        pass
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("in_the_work", "code"), [(False, 0), (True, EXIT_RESUME)])
def test_a_signal_after_the_work_is_a_good_end_and_one_within_it_is_not(monkeypatch, in_the_work, code):
    def signalled(*_):
        raise SignalException("asked to stop", signal.SIGTERM)

    monkeypatch.setattr(launch, "stop_with_parent", lambda: None)
    monkeypatch.setenv(PARENT_VARIABLE, "")
    monkeypatch.setattr("torch.distributed.run.run", signalled if in_the_work else lambda _: None)
    monkeypatch.setattr(launch, "_wait_for_the_others", signalled)
    machines = NodeGroup(count=2, port=free_port())
    arguments = torchrun_arguments(processes=1, machines=machines, module="__future__", job_file="none")
    assert launch.main([*arguments]) == code


def test_a_failing_process_exits_at_once_with_its_own_error(monkeypatch):
    def never(*_):
        raise AssertionError("it waited")

    monkeypatch.setattr(launch, "_wait_for_the_others", never)
    with pytest.raises(ZeroDivisionError), main_node_leaves_last(NodeGroup(count=2, port=free_port())):
        raise ZeroDivisionError


def test_a_single_machine_opens_no_port(monkeypatch):
    monkeypatch.setattr(launch, "_store", lambda *_, **__: pytest.fail("it opened one"))
    with main_node_leaves_last(NodeGroup()):
        pass
