"""Several processes and machines: how a run is divided and started, and who leaves when."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributed_child import make_rows
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistStoreError
from torch.distributed.elastic.multiprocessing.api import SignalException

from free_ports import free_port
from graftwork.files.disk import write_atomic
from graftwork.process import local_workers
from graftwork.process.worker import PARENT_VARIABLE
from graftwork.records.errors import EXIT_RESUME, UserError
from graftwork.train.distributed import launch, multi_node
from graftwork.train.distributed.launch import (
    NodeGroup,
    _require_possible,
    combined_exit_code,
    main_node_leaves_last,
    parse_address,
    torchrun_arguments,
)
from graftwork.train.distributed.multi_node import CALL_FILE, Call, _answer
from graftwork.train.distributed.strategies import balance_rows, split_into_micro_batches, zero_config
from graftwork.train.settings import USED_BY, TrainSettings
from graftwork.train.worker import job_settings

ROWS = make_rows(16)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=40), st.integers(1, 8))
def test_every_row_is_assigned_once_and_the_processes_are_balanced(lengths, size):
    hands = balance_rows(lengths, size=size)
    assert sorted(row for hand in hands for row in hand) == list(range(len(lengths)))
    tokens = [sum(lengths[row] for row in hand) for hand in hands]
    assert max(tokens) - min(tokens) <= max(lengths)
    assert balance_rows(lengths, size=size) == hands


@given(st.integers(1, 16), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 6)))
def test_all_work_equally_often_and_every_row_counts_once(count, size, micro_rows):
    rows = ROWS[:count]
    portions = split_into_micro_batches(rows, size=size, micro_rows=micro_rows)
    assert len({len(own) for own in portions}) == 1
    assert all([portion.last for portion in own] == [False] * (len(own) - 1) + [True] for own in portions)
    counted = [row.id for own in portions for portion in own if portion.counts for row in portion.rows]
    assert sorted(counted) == sorted(row.id for row in rows)
    if micro_rows is not None:
        assert all(len(portion.rows) <= micro_rows for own in portions for portion in own)
    assert all(portion.rows for own in portions for portion in own)


def test_one_process_keeps_the_rows_in_their_order():
    assert [row.id for row in split_into_micro_batches(ROWS, size=1)[0][0].rows] == [row.id for row in ROWS]


def test_one_machine_finds_a_port_and_several_meet_at_the_first():
    alone = torchrun_arguments(processes=2, machines=NodeGroup(), module="m", job_file="job.json")
    assert alone[0] == "--standalone"
    assert alone[-3:] == ("-m", "m", "job.json")
    third = NodeGroup(count=4, rank=2, address="10.0.0.1", port=29500)
    reported = torchrun_arguments(processes=8, machines=third, module="m", job_file="job.json")
    assert reported[:8] == (
        *("--nnodes", "4", "--node-rank", "2"),
        *("--master-addr", "10.0.0.1", "--master-port", "29500"),
    )
    assert reported[8:12] == ("--nproc-per-node", "8", "--max-restarts", "0")


def test_torchrun_accepts_the_arguments_it_gets():
    from torch.distributed.run import get_args_parser

    machines = NodeGroup(count=2, rank=1, address="h", port=1)
    reported = torchrun_arguments(processes=3, machines=machines, module="m", job_file="j")
    args = get_args_parser().parse_args(list(reported))
    assert (args.nnodes, args.node_rank, args.nproc_per_node, args.master_port) == ("2", 1, "3", 1)
    assert (args.module, args.training_script, args.training_script_args) == (True, "m", ["j"])


@pytest.mark.parametrize(
    ("text", "address"),
    [("host", ("host", 29400)), ("10.0.0.1:5000", ("10.0.0.1", 5000)), ("[::1]:7", ("::1", 7))],
)
def test_an_address_is_a_host_and_perhaps_a_port(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", ":5", "host:", "host:x", "host:70000", "::1", "[]:5"])
def test_an_invalid_address_is_refused(text):
    with pytest.raises(UserError, match="not the address"):
        parse_address(text)


@pytest.mark.parametrize(
    ("codes", "end"),
    [
        ({0: 0, 1: 0}, 0),
        ({0: 1, 1: -9}, -9),  # the first fails because the second was killed
        ({0: -15, 1: -9}, -9),
        ({0: 75, 1: 75}, 75),
        ({0: 2, 1: -15}, 2),  # the first said what is wrong; the second was asked to stop
        ({0: -15, 1: -15}, -15),
    ],
)
def test_the_exit_code_of_several_processes_is_that_of_the_first_cause(codes, end):
    assert combined_exit_code(codes) == end


def test_offload_and_clipping_reach_deepspeed():
    plain, spilled = (zero_config(3, offload=offload, most=0.7) for offload in (False, True))
    assert plain["gradient_clipping"] == 0.7
    assert "offload_param" not in plain["zero_optimization"]
    assert spilled["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert spilled["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert "offload_param" not in zero_config(2, offload=True, most=1)["zero_optimization"]


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [({"strategy": "fsdp", "method": "qlora"}, "bfloat16"), ({"strategy": "zero2"}, "float16")],
)
def test_incompatible_settings_are_refused_before_a_model_is_loaded(settings, dtype):
    with pytest.raises(UserError, match="strategy"):
        _require_possible(TrainSettings.model_validate(settings), dtype, on_cpu=True)


def test_a_run_continues_with_another_number_of_processes():
    one, two = TrainSettings(), TrainSettings(strategy="fsdp", processes=8, offload=True)
    assert one.what_is_learned() == two.what_is_learned()
    assert two.distribution() == {"strategy": "fsdp", "processes": 8, "offload": True}


def test_how_a_run_is_saved_and_hastened_is_not_what_it_learns_and_reaches_the_worker_all_the_same():
    one = TrainSettings()
    two = TrainSettings(checkpoint_every=3, keep_checkpoints=7, compile="off", packing="off")
    assert one.what_is_learned() == two.what_is_learned()
    plan = SimpleNamespace(train={"settings": two.what_is_learned()})
    job = SimpleNamespace(plan=plan, run={}, crew=two.distribution(), keeping=two.keeping(), endpoint={})
    assert job_settings(job) == two


@pytest.mark.parametrize(
    "changed", [{"watch": {"spike": 3.0}}, {"seed": 3}, {"validation_rows": 4}, {"eval": {"every": 2}}]
)
def test_a_setting_that_changes_the_result_makes_another_run(changed):
    assert TrainSettings.model_validate(changed).what_is_learned() != TrainSettings().what_is_learned()


def test_every_setting_reaches_the_worker_by_one_way():
    settings = TrainSettings()
    ways = [settings.what_is_learned(), settings.keeping(), settings.distribution(), {"run": ...}]
    names = [name for way in ways for name in way]
    assert len(names) == len(set(names))
    used = {name for objective in USED_BY.values() for name in objective}
    # Named only where they have an effect: other runs keep their names.
    assert {*names, *used, "experts", "proximal"} == set(TrainSettings.model_fields)


LEAVES = """
import atexit, os
from graftwork.train.distributed.launch import leave

class LikeAGroupsThread:
    def __del__(self, abort=os.abort):
        abort()

held = LikeAGroupsThread()
atexit.register(print, "handlers ran")
leave(3)
"""


def test_a_process_of_a_group_leaves_with_its_code_whatever_the_interpreters_shutdown_would_do():
    done = subprocess.run(
        [sys.executable, "-c", LEAVES],
        env={**os.environ, "RANK": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "handlers ran\n"), done.stderr


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
