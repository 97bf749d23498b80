"""A process that starts from the preloaded one cannot be distinguished from one that was started again."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from itertools import takewhile

import pytest

import preloaded

pytestmark = pytest.mark.skipif(
    not preloaded.is_supported(), reason="workers are not preloaded on this machine"
)

DESCRIBE = """
import json, os, sys
mask = os.umask(0)
print(json.dumps({
    "argv": sys.argv[1:],
    "name": __name__,
    "cwd": os.getcwd(),
    "path": sys.path[0],
    "variables": sorted(item for item in os.environ.items() if item[0] not in ("COLUMNS", "LINES")),
    "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid(),
    "umask": mask,
    "input": sys.stdin.read(),
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:3],
    "preloaded": "calendar" in sys.modules,
}))
"""
ENDINGS = {
    "pass": 0,
    "raise SystemExit(75)": 75,
    "raise SystemExit": 0,
    "raise SystemExit('no reason')": 1,
    "1 / 0": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "import os; os.kill(os.getpid(), 9)": -signal.SIGKILL,
    "import atexit; atexit.register(print, 'at the end')": 0,
    "import threading; threading.Timer(0.2, print, ['later']).start()": 0,
    "import time; print('waiting', flush=True); time.sleep(60)": -signal.SIGTERM,
}


@pytest.fixture(scope="module")
def starter():
    server = preloaded.Server(modules=["calendar"])
    yield preloaded.Starter(server.clone, package="sample")
    server.stop()


@pytest.fixture
def package(tmp_path):
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample" / "__init__.py").touch()
    return tmp_path


@pytest.fixture
def plain_environment():
    """Removes variables that a library set in C: programs inherit them, and `os.environ` lacks them."""
    library = ctypes.CDLL(None)
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(library, "environ")
    names = [variable.partition(b"=")[0] for variable in takewhile(lambda found: found is not None, environ)]
    for name in names:
        if name not in os.environb:
            library.unsetenv(name)


@pytest.fixture
def both(starter, package, monkeypatch, plain_environment):
    """Runs a module of the package in both ways; the two results."""

    def run(source, *arguments, stop_when="", **options):
        (package / "sample" / "main.py").write_text(source)
        command = [sys.executable, "-m", "sample.main", *arguments]
        results = []
        for function in (preloaded._start_program, starter.fork_exec):
            monkeypatch.setattr(subprocess, "_fork_exec", function)
            with subprocess.Popen(
                command,
                cwd=package,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                **options,
            ) as process:
                if stop_when:
                    assert process.stdout.readline() == stop_when
                    process.terminate()
                output, errors = process.communicate("a line\n", timeout=300)
            results.append((process.returncode, output, errors))
        return results

    return run


@pytest.mark.parametrize("options", [{}, {"start_new_session": True}, {"env": {"ONLY": "this"}}], ids=str)
def test_a_preloaded_process_has_the_same_parent_folder_files_and_environment(both, options):
    options = {**options, "env": {**os.environ, **options["env"]}} if "env" in options else options
    (code, again, _), (other_code, clone, errors) = both(DESCRIBE, "one", "two words", **options)
    assert (code, other_code, errors) == (0, 0, "")
    again, clone = json.loads(again), json.loads(clone)
    assert (again.pop("preloaded"), clone.pop("preloaded")) == (False, True)
    assert clone == again
    assert clone["parent"] == os.getpid()


@pytest.mark.parametrize("source", ENDINGS)
def test_a_preloaded_process_exits_the_same_way(both, source):
    stop_when = "waiting\n" if "waiting" in source else ""
    again, clone = both(source, stop_when=stop_when)
    assert clone[:2] == again[:2]
    assert clone[0] == ENDINGS[source]
    assert clone[2].splitlines()[-1:] == again[2].splitlines()[-1:]


def test_settings_that_python_reads_at_start_need_a_new_process(both):
    _, (_, described, _) = both(DESCRIBE, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert json.loads(described)["preloaded"] is False


def test_children_of_a_preloaded_process_are_preloaded_too(both, package):
    (package / "sample" / "inner.py").write_text("import sys; print('calendar' in sys.modules, sys.argv[1:])")
    source = (
        "import subprocess, sys\n"
        "command = [sys.executable, '-m', 'sample.inner', 'x']\n"
        "print(subprocess.run(command, capture_output=True, text=True).stdout)"
    )
    again, clone = both(source)
    assert again[1].split() == ["False", "['x']"]
    assert clone[1].split() == ["True", "['x']"]


def test_control_c_is_heard_where_that_is_asked_for(starter, package, monkeypatch):
    (package / "sample" / "main.py").write_text("import time; print('waiting', flush=True); time.sleep(60)")
    monkeypatch.setattr(subprocess, "_fork_exec", starter.fork_exec)
    command = [*preloaded.INTERRUPTIBLE, sys.executable, "-m", "sample.main"]
    with subprocess.Popen(command, cwd=package, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == -signal.SIGINT
