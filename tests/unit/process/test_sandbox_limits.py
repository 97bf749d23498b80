"""Code that takes more than its share: it is ended, soon, and we go on."""

import os
import secrets
import textwrap

import pytest
from sandbox_kinds import (
    MIB,
    NAME_ITSELF,
    PATIENT,
    each_way,
    nobody_is_named,
    require_way,
    run_in,
    run_until_late,
)

from graftwork.process.sandbox import CodeJob, Sandbox, SandboxKind, run_jobs


def run_briefly(kind, source, *, begun):
    """Until the deadline, which comes soon."""
    return run_until_late(
        lambda times: run_in(kind, source, limits=PATIENT.model_copy(update=times)), 0.5, begun=begun
    )


def name_it():
    return f"b{secrets.token_hex(6)}"


@each_way
def test_a_fork_bomb_stays_small_and_is_cleared_away(kind):
    name = name_it()
    source = """
        import os
        most = 1
        while True:
            try:
                if os.fork() == 0:
                    continue
                most += 1
            except BlockingIOError:
                print("no more", flush=True)
                while True:
                    pass
    """
    result = run_briefly(kind, NAME_ITSELF.format(name=name) + textwrap.dedent(source), begun="no more")
    assert result.reason == "wall_clock", result
    assert 0 < result.stdout.count("no more") <= PATIENT.processes
    assert nobody_is_named(name)


@each_way
def test_processes_and_threads_are_counted_together(kind):
    source = """
        import os, threading, time
        stop = threading.Event()
        started = 1
        try:
            for _ in range(50):
                threading.Thread(target=stop.wait, daemon=True).start()
                started += 1
        except RuntimeError:
            pass
        print(started, flush=True)
        os._exit(0)
    """
    result = run_in(kind, textwrap.dedent(source))
    assert result.stdout == f"{PATIENT.processes}\n", result


@each_way
def test_a_process_cannot_hold_more_memory_than_it_may(kind):
    result = run_in(kind, "held = bytearray(1 << 30)")
    assert result.reason == "memory", result
    assert result.peak_bytes < 128 * MIB


@each_way
def test_many_processes_cannot_hold_more_memory_together(kind):
    source = """
        import os, time
        for _ in range(6):
            if os.fork() == 0:
                held = bytearray(os.urandom(1 << 20)) * 100
                time.sleep(600)
        time.sleep(600)
    """
    result = run_in(kind, textwrap.dedent(source))
    assert result.reason == "memory", result
    assert result.seconds < PATIENT.wall_seconds


@each_way
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_and_ended(kind, stream):
    source = f"import sys\nwhile True: sys.{stream}.write('x' * 4096)"
    limits = PATIENT.model_copy(update={"output_bytes": 10_000})
    result = run_in(kind, source, limits=limits)
    assert result.reason == "output"
    assert len(getattr(result, stream)) == 10_000
    assert result.seconds < PATIENT.wall_seconds


@each_way
def test_an_endless_loop_ends_with_its_processor_time(kind):
    limits = PATIENT.model_copy(update={"cpu_seconds": 1})
    result = run_in(kind, "while True: pass", limits=limits)
    assert result.reason == "cpu", result


@each_way
def test_sleeping_and_deafness_end_at_the_deadline(kind):
    name = name_it()
    source = """
        import signal, time
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        print("asleep", flush=True)
        while True:
            time.sleep(1000)
    """
    result = run_briefly(kind, NAME_ITSELF.format(name=name) + textwrap.dedent(source), begun="asleep")
    assert result.reason == "wall_clock"
    assert result.exit_code is None
    assert result.stdout == "asleep\n"
    assert nobody_is_named(name)


@each_way
def test_closing_its_output_does_not_hide_a_process_from_the_deadline(kind):
    source = (
        "import os, time\nprint('begun', flush=True)\n"
        "for n in range(64):\n  try: os.close(n)\n  except OSError: pass\ntime.sleep(999)"
    )
    result = run_briefly(kind, source, begun="begun")
    assert result.reason == "wall_clock"
    assert result.stdout == "begun\n"


@each_way
def test_open_files_are_bounded(kind):
    source = """
        held = []
        try:
            while True:
                held.append(open("/dev/null"))
        except OSError as error:
            print(len(held) < 64, error.errno)
    """
    assert run_in(kind, textwrap.dedent(source)).stdout == "True 24\n"


@each_way
def test_a_huge_file_is_not_written(kind):
    source = """
        import os, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            with open("huge", "wb") as file:
                for _ in range(100):
                    file.write(bytes(1 << 20))
        except OSError as error:
            print("refused")
        print(os.path.getsize("huge") <= 16 << 20)
    """
    assert run_in(kind, textwrap.dedent(source)).stdout == "refused\nTrue\n"


@each_way
def test_many_files_together_are_no_way_round(kind):
    if kind is SandboxKind.LANDLOCK:
        pytest.skip("landlock has no file system of its own: tests/hostile/test_sandbox.py has its bound")
    source = """
        written = 0
        try:
            for number in range(100):
                with open(str(number), "wb", buffering=0) as file:
                    written += file.write(bytes(1 << 20))
        except OSError:
            print(written <= 16 << 20)
    """
    assert run_in(kind, textwrap.dedent(source)).stdout == "True\n"


@each_way
def test_memory_that_no_limit_counts_cannot_be_had(kind):
    source = """
        import os, ctypes
        library = ctypes.CDLL(None, use_errno=True)
        try:
            os.memfd_create("x"); print("memfd")
        except OSError:
            print("refused")
        print("segment" if library.shmget(0, 1 << 30, 0o1600) >= 0 else "refused")
    """
    assert run_in(kind, textwrap.dedent(source)).stdout == "refused\nrefused\n"


@each_way
def test_nothing_can_be_read_from_standard_input(kind):
    result = run_in(kind, "try: input()\nexcept EOFError: print('nothing')")
    assert result.stdout == "nothing\n"


@each_way
def test_the_ways_of_ending_are_distinguished(kind):
    assert run_in(kind, "print('é')").model_dump(include={"ok", "exit_code", "stdout", "reason"}) == {
        "ok": True,
        "exit_code": 0,
        "stdout": "é\n",
        "reason": "",
    }
    left = run_in(kind, "import sys; sys.exit(3)")
    assert (left.ok, left.exit_code, left.reason) == (False, 3, "exit")
    raised = run_in(kind, "def f():\n  1 / 0\nf()")
    assert (raised.ok, raised.exit_code, raised.reason) == (False, 1, "exit")
    assert raised.stderr.splitlines()[1] == '  File "main.py", line 3, in <module>'
    died = run_in(kind, "import os; os.abort()")
    assert (died.ok, died.exit_code, died.reason) == (False, -6, "signal")


def test_jobs_come_back_in_their_order_and_one_that_fails_stops_none(sandbox):
    jobs = [CodeJob(f"x = {n}", f"assert x % 3, x\nprint({n})") for n in range(7)]
    results = list(run_jobs(iter(jobs), sandbox=sandbox, at_once=3))
    assert [result.ok for result in results] == [n % 3 != 0 for n in range(7)]
    assert [result.stdout.strip() for result in results if result.ok] == ["1", "2", "4", "5"]


def test_jobs_that_nobody_waits_for_any_more_are_not_run(sandbox):
    taken = []

    def jobs():
        for n in range(1000):
            taken.append(n)
            yield CodeJob(f"x = {n}", "assert True")

    results = run_jobs(jobs(), sandbox=sandbox, at_once=1)
    assert next(results).ok
    results.close()
    assert len(taken) < 5


@pytest.fixture
def sandbox():
    from graftwork.process.sandbox.run import WAYS, why_not

    kind = next((way for way in WAYS if not why_not(way)), None)
    if kind is None:
        pytest.skip("no way to shut code in works here")
    return Sandbox(require_way(kind), PATIENT)


@pytest.fixture
def private_umask():
    """As a worker has it whose folder is private."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@each_way
def test_a_private_umask_outside_leaves_the_interpreter_readable_inside(kind, private_umask):
    files = {"answer.py": "import json, decimal\nword = 'read'"}
    result = run_in(kind, "import answer\nprint(answer.word)", files=files)
    assert (result.ok, result.stdout) == (True, "read\n"), result.stderr
