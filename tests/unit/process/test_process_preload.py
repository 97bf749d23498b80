"""Workers forked from a process that has done the imports behave as those that do them by themselves."""

import os
import signal
import subprocess
import sys
import time

import pytest

from graftwork.process import preload
from graftwork.process.preload import PreloadedWorkers

WORKER = """
import os, signal, sys
print("imported", "sqlite3" in sys.modules, sys.argv[1:], os.environ["GIVEN"], flush=True)
print(os.getsid(0) == os.getpid(), sys.stdin.read(), __name__, file=sys.stderr)
if sys.argv[1] == "wait":
    signal.pause()
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def workers(tmp_path, monkeypatch):
    (tmp_path / "some_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.delenv("GRAFT_PRELOAD", raising=False)
    if not preload.is_supported():
        pytest.skip("workers are forked on Linux only")
    started = PreloadedWorkers(("sqlite3",), package="some_")
    started.warm_up(dict(os.environ))
    yield started
    started.stop()


def start(workers, tmp_path, *arguments, log_name="log", **variables):
    with (tmp_path / log_name).open("ab") as log:
        return workers.start(
            "some_worker", arguments, environment={**os.environ, "GIVEN": "yes", **variables}, log=log
        )


def test_a_preloaded_worker_gets_arguments_environment_and_log_and_returns_its_exit_code(workers, tmp_path):
    first = start(workers, tmp_path, "end", "0", log_name="first")
    second = start(workers, tmp_path, "end", "7", log_name="second")
    assert (first.wait(300), second.wait(300)) == (0, 7)
    assert second.poll() == 7
    for name, code in (("first", 0), ("second", 7)):
        lines = (tmp_path / name).read_text().splitlines()
        assert lines == [f"imported True ['end', '{code}'] yes", "True  __main__"]


def test_a_preloaded_worker_reads_the_standard_input_it_is_given_to_its_end(workers, tmp_path):
    read, write = os.pipe()
    with (tmp_path / "log").open("ab") as log:
        variables = {**os.environ, "GIVEN": "yes"}
        started = workers.start("some_worker", ["end", "0"], environment=variables, log=log, stdin=read)
    os.close(read)
    with pytest.raises(subprocess.TimeoutExpired):
        started.wait(0.05)
    os.write(write, b"words")
    os.close(write)
    assert started.wait(300) == 0
    assert (tmp_path / "log").read_text().splitlines()[1] == "True words __main__"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_worker_ends_with_its_signal_and_the_next_one_starts(workers, tmp_path, number):
    waiting = start(workers, tmp_path, "wait", "0")
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.01)
    os.kill(waiting.pid, number)
    assert waiting.wait(300) == -number
    assert start(workers, tmp_path, "end", "3").wait(300) == 3


def test_settings_read_at_process_start_are_not_changed_for_a_worker(workers, tmp_path):
    assert start(workers, tmp_path, "end", "0", OMP_NUM_THREADS="63") is None


def test_without_the_process_with_the_imports_workers_start_in_the_usual_way(workers, tmp_path):
    os.kill(workers._process.pid, signal.SIGKILL)
    workers._process.wait()
    assert start(workers, tmp_path, "end", "0") is None
    assert start(workers, tmp_path, "end", "0") is None


def test_preloading_can_be_switched_off(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_PRELOAD", "0")
    idle = PreloadedWorkers(())
    idle.warm_up(dict(os.environ))
    assert start(idle, tmp_path, "end", "0") is None


def test_packages_that_are_not_used_are_left_out_of_the_imports_and_can_be_imported_later(
    tmp_path, monkeypatch
):
    (tmp_path / "a_large_extra.py").write_text("loaded = True")
    (tmp_path / "its_user.py").write_text(
        "import importlib.util\nfound = importlib.util.find_spec('a_large_extra') is not None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(preload, "UNUSED", ("a_large_extra",))
    preload.import_without_unused(["its_user", "no_such_module"])
    assert not sys.modules["its_user"].found
    assert "a_large_extra" not in sys.modules
    import a_large_extra

    assert a_large_extra.loaded


def test_further_modules_are_imported_while_nobody_asks(workers, tmp_path):
    workers.stop()
    (tmp_path / "some_part.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'x').close()")
    workers.warm_up(dict(os.environ), further=["no_such_part", "some_part"])
    while not (tmp_path / "imported").exists():
        time.sleep(0.01)
    # A second import would fail: the file is there.
    (tmp_path / "some_worker.py").write_text("import some_part\nprint('done', flush=True)")
    assert start(workers, tmp_path).wait(300) == 0
    assert (tmp_path / "log").read_text() == "done\n"
