"""Worker processes that start with torch and transformers imported.

Input: a module of graftwork with its arguments, environment and log. Output: a process that runs it as
`python -m` would, forked from a process that has done the imports, which take longer than many a job. That
process opens no GPU, runs no thread and no job, so that each worker starts from the same state and may be
killed like any other. Where it cannot be used, nothing is started here. GRAFT_PRELOAD=0 switches it off.

`python -m graftwork.process.preload DESCRIPTOR MODULES` is the process with the imports.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from graftwork.process.worker import PARENT_VARIABLE, tie_to_parent

SWITCH = "GRAFT_PRELOAD"
MODULES = (  # none that starts a thread: pyarrow does
    "numpy",
    "torch",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "safetensors.torch",
    "tokenizers",
    "pydantic",
    "jinja2.sandbox",
)
UNUSED = ("sklearn", "scipy", "pandas", "pyarrow", "datasets")
"""Packages that transformers imports if installed, for models and metrics that are never used here: they take
longer than the rest, and a thread of pyarrow would prevent forks.
"""
READ_AT_START = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "ATEN_", "MALLOC_", "HF_", "TRANSFORMERS_")
"""Prefixes of variables that only count when a process starts."""
SET_LATER = {"PYTHONUNBUFFERED", "HF_HUB_OFFLINE"}
KEEPS_FORKABLE = {
    # A thread that numpy starts on import would be missing in every worker.
    "OPENBLAS_NUM_THREADS": "1",
    # A library that asks whether there is a GPU does not open it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
PATIENCE_SECONDS = 120.0
_LENGTH, _CODE = struct.Struct("<I"), struct.Struct("<i")


class ChildProcess(Protocol):
    """What `subprocess.Popen` and a preloaded worker have in common."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...


class PreloadedWorker:
    """A process that another process started for us. Its exit code comes through a pipe."""

    def __init__(self, pid: int, exits: int) -> None:
        self.pid = pid
        self._exits = exits
        self._code: int | None = None

    def fileno(self) -> int:
        """Readable once the process has ended; closed once `poll` or `wait` has returned its exit code."""
        return self._exits

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; negative for a signal."""
        if self._code is None:
            ready, _, _ = select.select([self._exits], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            report = os.read(self._exits, _CODE.size)
            # Without a code the process that started it is gone, and with it the worker.
            self._code = _CODE.unpack(report)[0] if len(report) == _CODE.size else -int(signal.SIGTERM)
            os.close(self._exits)
        return self._code

    def terminate(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


class PreloadedWorkers:
    """Starts the process with the imports once, and workers from it."""

    def __init__(self, modules: Sequence[str] = MODULES, *, package: str = "graftwork.") -> None:
        self._modules, self._package = modules, package
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._environment: dict[str, str] = {}

    def warm_up(self, environment: Mapping[str, str], *, further: Sequence[str] = ()) -> None:
        """Begin with the imports; returns at once. The `further` modules are imported while idle."""
        with self._lock:
            if self._process is not None or not is_supported():
                return
            ours, theirs = socket.socketpair()
            ours.settimeout(PATIENCE_SECONDS)
            self._environment = dict(environment)
            modules = json.dumps([list(self._modules), list(further)])
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno()), modules],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**environment, **KEEPS_FORKABLE, PARENT_VARIABLE: str(os.getpid())},
                    start_new_session=True,
                )
            self._connection = ours

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: IO[bytes],
        stdin: int | None = None,
    ) -> PreloadedWorker | None:
        """None if it has to be started in the usual way. Without `stdin`, its standard input is empty."""
        if self._connection is None or not module.startswith(self._package):
            return None
        if _part_read_at_start(environment) != _part_read_at_start(self._environment):
            return None
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "cwd": str(Path.cwd()),
        }
        exits, report = os.pipe()
        try:
            files = [log.fileno(), report, *([] if stdin is None else [stdin])]
            pid = self._ask(json.dumps(request).encode(), files)
        finally:
            os.close(report)
        if pid is None:
            os.close(exits)
            return None
        return PreloadedWorker(pid, exits)

    def run(self, module: str, arguments: Sequence[str]) -> tuple[int, str] | None:
        """Run a module to its end: its exit code and what it printed. None as with `start`."""
        with tempfile.TemporaryFile() as output:
            worker = self.start(module, arguments, environment=self._environment, log=output)
            if worker is None:
                return None
            code = worker.wait()
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def stop(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            if self._process is not None:
                self._process.terminate()
                self._process.wait()
            self._connection = self._process = None

    def _ask(self, message: bytes, files: list[int]) -> int | None:
        with self._lock:
            connection = self._connection
            if connection is None:
                return None
            try:
                socket.send_fds(connection, [_LENGTH.pack(len(message))], files)
                connection.sendall(message)
                pid = int(_LENGTH.unpack(_receive(connection, _LENGTH.size))[0])
            except (OSError, struct.error):
                # It died or does not answer: from now on workers start in the usual way.
                connection.close()
                self._connection = None
                return None
            return pid or None


SHARED = PreloadedWorkers()
"""The instance of this process."""


def is_supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and os.environ.get(SWITCH) != "0"


def _part_read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and name not in SET_LATER
    }


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            raise ConnectionError
        received += piece
    return received


# The process with the imports


def serve(connection: socket.socket, modules: Sequence[str], further: Sequence[str]) -> None:
    """Fork a worker for each request, and report the exit code of each, until the other side is gone."""
    _import(modules)
    remaining = list(further)
    workers: dict[int, tuple[int, int]] = {}
    while True:
        ready, _, _ = select.select([connection.fileno(), *workers], [], [], 0.0 if remaining else None)
        if not ready:
            _import([remaining.pop(0)])
            continue
        for ended in [descriptor for descriptor in ready if descriptor in workers]:
            pid, report = workers.pop(ended)
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(BrokenPipeError):
                os.write(report, _CODE.pack(os.waitstatus_to_exitcode(status)))
            os.close(report)
            os.close(ended)
        if connection.fileno() in ready and not _answer(connection, workers):
            return


def _import(modules: Sequence[str]) -> None:
    import_without_unused(modules)
    # Workers share these objects until one writes to them.
    gc.collect()
    gc.freeze()


def import_without_unused(modules: Sequence[str]) -> None:
    """Import these modules while optional packages appear not to be installed."""
    if all(name in sys.modules for name in modules):
        return
    hidden = [name for name in UNUSED if name not in sys.modules]
    # The entry that `importlib` takes for a module that does not exist.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        for name in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def _answer(connection: socket.socket, workers: dict[int, tuple[int, int]]) -> bool:
    """Take one request; False at the end of them."""
    length, files, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
    if not length:
        return False
    request = json.loads(_receive(connection, _LENGTH.unpack(length)[0]))
    log, report, *stdin = files
    pid = os.fork() if _can_fork() else 0
    if pid == 0 and os.getpid() != _SERVER:
        _become(request, log, stdin)
    if pid:
        workers[os.pidfd_open(pid)] = pid, report
    else:
        os.close(report)
    for file in (log, *stdin):
        os.close(file)
    connection.sendall(_LENGTH.pack(pid))
    return True


_SERVER = os.getpid()


def _can_fork() -> bool:
    """A second thread would be missing in the worker, and an open GPU does not survive a fork."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    opened = (link.resolve().name for link in Path("/proc/self/fd").iterdir())
    return threads == 1 and "nvidia-uvm" not in opened


def _become(request: dict[str, Any], log: int, stdin: Sequence[int]) -> NoReturn:
    """Run the module as a new interpreter would."""
    code = 70
    try:
        _set_up(request, log, stdin)
        code = _run(request["module"])
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _set_up(request: dict[str, Any], log: int, stdin: Sequence[int]) -> None:
    for source, number in (*((file, 0) for file in stdin), (log, 1), (log, 2)):
        os.dup2(source, number)
    for link in list(Path("/proc/self/fd").iterdir()):
        if int(link.name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(link.name))
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ[PARENT_VARIABLE] = str(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-m", *request["arguments"]]
    sys.orig_argv = [sys.executable, "-m", request["module"], *request["arguments"]]
    sys.path[0] = request["cwd"]
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure")(write_through=True)  # noqa: B009


def _run(module: str) -> int:
    import atexit

    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            code = (ended.code or 0) & 0xFF
        else:
            print(ended.code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


if __name__ == "__main__":
    tie_to_parent(int(os.environ.pop(PARENT_VARIABLE)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])), *json.loads(sys.argv[2]))
