"""Starts the worker processes of a test from a process that has imported torch and transformers already.

In: `python -m graftwork.…`, or a stand-in for it, as a test or the code under test starts it through
`subprocess`. Out: the same process: a child of the same parent with the same files, environment and signals,
which runs the module as `python -m` would, but without six seconds of imports. Commands of another kind, or
with another setting of what Python and its libraries read at their start, start as always.

`pytest --real-processes` switches it off, and `make test-slow` does so.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import platform
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (  # Nothing that starts a thread: pyarrow does.
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "safetensors.torch",
    "pydantic",
    "sqlalchemy.dialects.sqlite",
    "orjson",
    "typer",
    "yaml",
    "jinja2.sandbox",
    "rich.console",
    "rich.live",
    "rich.table",
)
STAND_INS = {path.stem for path in Path(__file__).with_name("stand_ins").glob("*.py")}
CLONE_PARENT = 0x8000
CLONE_NUMBERS = {"x86_64": 56, "aarch64": 220}
READ_AT_START = (
    "PYTHON",
    "LD_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "ATEN_",
    "MALLOC_",
    "HF_",
    "TRANSFORMERS_",
)
"""Beginnings of the variables that count only when a process starts."""
SET_LATER = {"PYTHONUNBUFFERED", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "HF_HUB_OFFLINE"}
INTERRUPTIBLE = ["env", "--default-signal=INT"]
LENGTH = struct.Struct("<I")

_start_program = getattr(subprocess, "_fork_exec", None)


class Starter:
    """In place of the function by which `subprocess` starts a program, for the commands that it takes."""

    def __init__(self, clone: Any, *, package: str = "graftwork") -> None:
        self._clone = clone
        self._package = package
        self._at_start = _part_read_at_start(dict(os.environ))
        self._process = os.getpid()
        self._interpreter = sys.executable  # A test may put another program in its place.

    def install(self) -> None:
        subprocess._fork_exec = self.fork_exec  # type: ignore[attr-defined]

    def fork_exec(self, args: Any, executables: Any, *more: Any) -> int:
        """As `_posixsubprocess.fork_exec`: the same arguments, the id of the child."""
        keep, cwd, variables, group = more[1], more[2], more[3], more[14]
        command = [os.fsdecode(argument) for argument in args]
        interruptible = command[:2] == INTERRUPTIBLE
        command = command[2:] if interruptible else command
        environment = _read_environment(variables)
        # No descriptors but the three, no other user, group or mask, nothing to call before.
        plain = more[0] and len(keep) == 1 and more[12] and group == -1 and more[19] is None
        plain = plain and all(value in (None, -1) for value in more[15:19])
        if not plain or os.getpid() != self._process or not self._takes(command, environment):
            return int(_start_program(args, executables, *more))
        request = {
            "module": command[2],
            "arguments": command[3:],
            "environment": environment,
            "cwd": os.fsdecode(cwd) if cwd else str(Path.cwd()),
            "new_session": bool(more[13]),
            "interruptible": interruptible,
            "umask": _read_umask(),
        }
        given = (more[4], more[7], more[9])
        files = [file if file != -1 else number for number, file in enumerate(given)]
        pid = self._clone(request, files)
        return int(_start_program(args, executables, *more)) if pid is None else pid

    def _takes(self, command: list[str], environment: dict[str, str]) -> bool:
        module = "".join(command[2:3])
        ours = module.startswith(f"{self._package}.") or module in STAND_INS
        as_here = (
            command[:2] == [self._interpreter, "-m"] and _part_read_at_start(environment) == self._at_start
        )
        return ours and as_here


class Server:
    """The process with the imports, started with the first command. Its children become ours."""

    def __init__(self, modules: Sequence[str] = PRELOADED) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def clone(self, request: dict[str, Any], files: list[int]) -> int | None:
        """The id of a child of this process that does what the request says; None where none was made."""
        with self._lock:
            try:
                connection = self._connection or self._start()
                message = json.dumps(request).encode()
                socket.send_fds(connection, [LENGTH.pack(len(message))], files)
                connection.sendall(message)
                answer = connection.recv(LENGTH.size, socket.MSG_WAITALL)
            except OSError:
                return None
        pid = LENGTH.unpack(answer)[0] if len(answer) == LENGTH.size else 0
        return pid or None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *self._modules]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # A thread that numpy starts on import would be missing in every child. Workers are offline.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        self._connection = ours
        return ours

    def stop(self) -> None:
        if self._connection is not None and self._process is not None:
            self._connection.close()
            self._process.wait()


def is_supported() -> bool:
    """Not with a GPU: its driver does not survive a fork."""
    known = (
        sys.platform == "linux"
        and platform.machine() in CLONE_NUMBERS
        and not Path("/dev/nvidiactl").exists()
    )
    return known and sys.version_info < (3, 14) and _start_program is not None


def check_descriptor(file: Any) -> None:
    """In place of `os.fsync`, which would wait for the disk."""
    os.fstat(file if isinstance(file, int) else file.fileno())


def _read_environment(variables: Any) -> dict[str, str]:
    if variables is None:
        return dict(os.environ)
    pairs = (os.fsdecode(variable).partition("=") for variable in variables)
    return {name: value for name, _, value in pairs}


def _part_read_at_start(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and name not in SET_LATER
    }


def _read_umask() -> int:
    # `os.umask` would set it to read it, and another thread may make a file meanwhile.
    return int(Path("/proc/self/status").read_text().partition("\nUmask:")[2].split()[0], 8)


def _serve(connection: socket.socket, modules: Sequence[str]) -> None:
    """Makes a child for each request, until the other side is gone."""
    _import_all(modules)
    os.fsync = check_descriptor  # type: ignore[assignment]
    while True:
        length, files, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
        if not length:
            return
        request = json.loads(connection.recv(LENGTH.unpack(length)[0], socket.MSG_WAITALL))
        alone = len(list(Path("/proc/self/task").iterdir())) == 1
        pid = _clone_as_sibling() if alone else -1
        if pid == 0:
            _become(request, files)
        connection.sendall(LENGTH.pack(max(pid, 0)))
        for file in files:
            os.close(file)


def _import_all(modules: Sequence[str]) -> None:
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Children share these objects as long as nobody touches them.
    gc.collect()
    gc.freeze()


def _clone_as_sibling() -> int:
    """As `os.fork`, but the parent of the child is the parent of this process."""
    python, library = ctypes.pythonapi, ctypes.PyDLL(None)
    python.PyOS_BeforeFork()
    flags = CLONE_PARENT | signal.SIGCHLD
    pid = int(library.syscall(CLONE_NUMBERS[platform.machine()], flags, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _clone_here(request: dict[str, Any], files: list[int]) -> int:
    """For a process that was made here and starts others: its own imports serve them too."""
    pid = os.fork()
    if pid == 0:
        _become(request, files)
    return pid


def _become(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Run the module as a new interpreter would."""
    code = 70
    try:
        outputs = (sys.stdin, sys.stdout, sys.stderr)
        _set_up(request, files)
        code = _run(request)
        del outputs  # Kept until now: what the former process had buffered is not ours to write.
    finally:
        os._exit(code)


def _set_up(request: dict[str, Any], files: list[int]) -> None:
    copies = [os.dup(file) for file in files]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(entry.name))
    if request["new_session"]:
        os.setsid()
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGPIPE}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if request["interruptible"] or callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    package = request["module"].partition(".")[0]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    sys.excepthook = sys.__excepthook__
    sys.argv = ["-m", *request["arguments"]]
    sys.orig_argv = [sys.executable, "-m", request["module"], *request["arguments"]]
    sys.path[0] = request["cwd"]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        through = number == 2 or "PYTHONUNBUFFERED" in request["environment"]
        buffered = open(number, "wb", buffering=0 if through else -1, closefd=False)  # noqa: SIM115
        setattr(sys, name, _as_text(buffered, write_through=through, line_buffering=os.isatty(number)))
    threads = request["environment"].get("OMP_NUM_THREADS")
    if threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))
    Starter(_clone_here, package=package).install()


def _as_text(buffered: Any, **options: bool) -> Any:
    errors = "backslashreplace" if buffered.fileno() == 2 else "strict"
    return io.TextIOWrapper(buffered, encoding="utf-8", errors=errors, **options)


def _run(request: dict[str, Any]) -> int:
    code = 0
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = _exit_code(ended)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def _exit_code(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return (ended.code or 0) & 0xFF
    print(ended.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
