"""Start and end of a worker process: `python -m some.worker JOB_FILE`.

Input: the job as a file. Output: an exit code of the design and, for an expected failure, `error.json` in the
job's folder, so that the parent can say what happened without parsing a traceback.
"""

import _thread
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TypeVar

from graftwork.files.disk import (
    PRIVATE_UMASK,
    append_to,
    explain_os_error,
    file_mode,
    is_held,
    is_private,
    make_folder,
    try_lock,
    write_atomic,
)
from graftwork.process.machine import explain_exhaustion, is_exhaustion
from graftwork.records.base import Record
from graftwork.records.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    Busy,
    EnvironmentFailure,
    GracefulStop,
    GraftError,
    Interrupted,
    pip_install,
)

LOCK_FILE = "lock"
_ASKED_SECONDS, _PAUSE_SECONDS = 10.0, 0.001
"""Asking who holds a folder shares its lock for a moment. A start waits for that, at most this long."""


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Hold the folder, or say at once who does."""
    make_folder(folder)
    path = folder / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, file_mode(folder))
    try:
        if not _take(descriptor):
            holder = path.read_text().strip() or "unknown"
            raise Busy(
                f"another worker (process {holder}) works in this folder",
                why="two workers on one run would overwrite each other",
                fix="wait for it (`graft status`), or stop it first",
                where=str(folder),
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


def lock_holder(folder: Path) -> int | None:
    """The process that holds the folder now, or None. Does not disturb a process that takes it."""
    path = folder / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if not is_held(descriptor):
            return None
        text = path.read_text().strip()
        return int(text) if text.isdigit() else -1
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Take the lock unless another worker has it; one that is only being queried is free in a moment."""
    deadline = time.monotonic() + _ASKED_SECONDS
    while True:
        if try_lock(descriptor):
            return True
        if is_held(descriptor) or time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE_SECONDS)


PARENT_VARIABLE = "GRAFT_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def stop_with_parent() -> None:
    """Tie this process to the parent that the environment names; without one, do nothing."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent:
        tie_to_parent(int(parent))


def tie_to_parent(parent: int) -> None:
    """End this process when the process `parent`, which started it, is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    else:

        def watch() -> None:
            pause = threading.Event()
            while os.getppid() == parent:
                pause.wait(1.0)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, daemon=True, name="parent watch").start()
    if os.getppid() != parent:
        # It died before the tie was made.
        os.kill(os.getpid(), signal.SIGTERM)


ERROR_FILE = "error.json"

J = TypeVar("J", bound=Record)

stop_asked = threading.Event()
"""Set by SIGTERM: the worker ends at its next safe point and asks to be resumed."""


def run_worker(
    kind: type[J],
    folder_of: Callable[[J], Path],
    work: Callable[[J], None],
    *,
    first: bool = True,
    writes_elsewhere: bool = False,
) -> int:
    """Read the job, hold its folder, work; turn expected errors into `error.json`. If several processes do
    one job together, the `first` holds the folder for all. Files of a worker and its libraries are as private
    as its folder, unless it writes for the user elsewhere.
    """
    job = kind.from_json(Path(sys.argv[1]).read_bytes())
    folder = folder_of(job)
    if is_private(folder) and not writes_elsewhere:
        os.umask(PRIVATE_UMASK)
    signal.signal(signal.SIGTERM, _ask_to_stop)
    stop_with_parent()
    try:
        with hold_lock(folder) if first else nullcontext():
            if first:
                (folder / ERROR_FILE).unlink(missing_ok=True)
            try:
                work(job)
            except ModuleNotFoundError as missing:
                lacking = EnvironmentFailure(
                    f"the package {missing.name} is not installed",
                    why="models run only where it is",
                    fix=f"{pip_install('train')}; the extra `serve` in its place serves too",
                )
                return _leave(folder, lacking)
            except GraftError as error:
                return _leave(folder, error)
            except Exception as error:
                if not is_exhaustion(error):
                    raise
                # The log gets the full traceback, whatever is shown elsewhere.
                sys.excepthook(*sys.exc_info())
                return _leave(folder, explain_exhaustion(error))
    except GraftError as error:
        print(json.dumps(error.as_json()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_DONE


def _leave(folder: Path, error: GraftError) -> int:
    """Write the error where the parent looks for it."""
    write_atomic(folder / ERROR_FILE, json.dumps(error.as_json()))
    return error.exit_code


def set_in_handler(event: threading.Event) -> None:
    """Set an event from a signal handler: the interrupted thread may hold the event's lock."""
    with suppress(RuntimeError):  # the interpreter is shutting down
        _thread.start_new_thread(event.set, ())


_on_stop: list[GracefulStop] = []


@contextmanager
def stop_at_once(error: GracefulStop) -> Iterator[None]:
    """For work that can be interrupted anywhere, such as loading a model: a stop raises `error`."""
    _on_stop.append(error)
    try:
        yield
    finally:
        _on_stop.clear()


def _ask_to_stop(_signal: int, _frame: FrameType | None) -> None:
    set_in_handler(stop_asked)
    if _on_stop:
        raise _on_stop.pop()


_asked = threading.Event()


@contextmanager
def stoppable() -> Iterator[None]:
    """For the work of a command, in the main thread; has no effect elsewhere."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _asked.clear()
    before = signal.signal(signal.SIGTERM, _ask)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if _asked.is_set():
            raise interruption_error() from interrupt
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def forget_stop() -> None:
    """A stop that this process requested itself is over: the next one counts again."""
    _asked.clear()


def interruption_error() -> GracefulStop | Interrupted:
    """The error for interrupted work: by a stop request or by Ctrl-C."""
    fix = "run the same command again: it resumes from the last good point"
    if _asked.is_set():
        return GracefulStop("stopped cleanly, as requested", fix=fix)
    return Interrupted("interrupted", fix=fix)


def _ask(_signal: int, _frame: FrameType | None) -> None:
    # Asked twice, it is on its way out already.
    if not _asked.is_set():
        _asked.set()
        raise KeyboardInterrupt


WORKER_ENVIRONMENT = {
    # Threads that wait for each other spin for a moment and then sleep. Without a bound they burn
    # whole cores on a shared machine (the same generation took three times as long); without any
    # spinning training on a quiet one takes half as long again. Next to a busy process even this is
    # too long: `graftwork.model.threads` shortens it while threads wait for a core.
    "GOMP_SPINCOUNT": "30000",
    # What a GPU's allocator holds is then what it needs, and not what its fixed pieces leave over.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def compiled_cache() -> dict[str, str]:
    """Folder that keeps compiled kernels for the next run; nothing if none is available."""
    try:
        folder = Path.home() / ".cache" / "graftwork" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (RuntimeError, OSError):
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder)}


def start_detached(command: list[str], *, log: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start it in `folder`, with its output appended to `log`."""
    try:
        make_folder(log.parent)
        with append_to(log) as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                # No terminal is this session's: none can hang up on it.
                start_new_session=True,
            )
    except OSError as error:
        raise explain_os_error(error, log) from error
