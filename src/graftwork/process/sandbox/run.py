"""Run generated code: one program in a sandbox, or many small ones in a few.

Input: source, limits. Output: how it ended. The code is shut in before it is read by any interpreter, is
ended at the first limit it reaches, with everything that it has started, and none of its files is ever opened
by us.

Starting a sandbox costs more than a small program takes, so one sandbox runs several jobs in turn, each as a
user of its own that sees neither code, files nor processes of the others. Where the code cannot run as a
separate user, every job gets a sandbox of its own.
"""

import logging
import marshal
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from graftwork.files.disk import read_or_empty
from graftwork.process.machine import count_cores
from graftwork.process.sandbox.command import (
    FOLDER,
    MOST_JOBS,
    choose_uid,
    command_for,
    scrubbed_environment,
    uid_of,
)
from graftwork.process.sandbox.inside.remote import UNSUPPORTED
from graftwork.process.sandbox.inside.walls import measure_deleted, measure_folder, remove_folder
from graftwork.process.sandbox.limits import Limits, Reason, SandboxKind, SandboxResult
from graftwork.process.sandbox.settings import SandboxSettings
from graftwork.records.errors import EnvironmentFailure, UserError

_PAGE = 4096
_PROC = Path("/proc")


def memory_of_tree(root: int, *, most: int) -> int:
    """A quick estimate; the exact value only if the estimate exceeds `most`."""
    tree = processes_below(root)
    used = sum(_resident(number) for number in tree)
    if used <= most:
        return used
    used = 0
    for number in tree:
        # Shared pages divided by those who share them; everything where that may not be read.
        rollup = read_or_empty(_PROC / str(number) / "smaps_rollup")
        shared = re.search(r"^Pss:\s+(\d+) kB", rollup, re.M)
        used += int(shared[1]) * 1024 if shared else _resident(number)
    return used


def processes_below(root: int) -> list[int]:
    """Orphans included: the first process of a box adopts them."""
    tree: list[int] = []
    waiting = [root]
    while waiting:
        number = waiting.pop()
        tree.append(number)
        with suppress(OSError):
            for thread in list((_PROC / str(number) / "task").iterdir()):
                waiting += [int(child) for child in read_or_empty(thread / "children").split()]
    return tree[1:]


def _resident(number: int) -> int:
    parts = read_or_empty(_PROC / str(number) / "statm").split()
    return int(parts[1]) * _PAGE if len(parts) > 1 else 0


_HEAD = struct.Struct("!I")
_LONGEST_REPLY = 256
"""Limit on messages of the sandbox over the channel: a keyword or a nonce."""
_MOST_MESSAGES = 8
"""The protocol has two. A far side that sends more than this is flooding us, and is ended."""
_LONGEST_STATUS = 65536
_LOOK_EVERY = 0.05


class Talk:
    """The messages so far. `on_message` gets each message of the sandbox and may return an answer."""

    def __init__(
        self, channel: socket.socket, on_message: Callable[[bytes], bytes | None], *, outgoing: bytearray
    ) -> None:
        self.channel, self.on_message = channel, on_message
        self.outgoing, self.incoming = outgoing, bytearray()
        self.heard: dict[str, bytearray] = {}
        self.messages = self.peak_bytes = 0
        self.reason: Reason = ""


def frame(message: bytes) -> bytes:
    return _HEAD.pack(len(message)) + message


def follow(
    talk: Talk,
    process: int,
    *,
    pipes: dict[str, int],
    deadline: float,
    limits: Limits,
    folder: str | None = None,
) -> None:
    """Follow until every pipe has ended, or a limit is reached: then `talk.reason` says which. `folder` is
    the code's own if no file system limits it: it is measured from outside.
    """
    talk.heard = {name: bytearray() for name in pipes}
    talk.channel.setblocking(False)
    with selectors.DefaultSelector() as selector:
        for name, number in pipes.items():
            selector.register(number, selectors.EVENT_READ, name)
        selector.register(talk.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, "channel")
        next_look = time.monotonic() + _LOOK_EVERY
        while any(key.data != "channel" for key in selector.get_map().values()):
            now = time.monotonic()
            if now >= deadline:
                talk.reason = "wall_clock"
                return
            if now >= next_look:
                _look(talk, process, limits=limits, folder=folder)
                if talk.reason:
                    return
                next_look = time.monotonic() + _LOOK_EVERY
            for key, events in selector.select(timeout=max(0.0, min(deadline, next_look) - now)):
                if key.data == "channel":
                    _converse(talk, selector, events)
                elif not _read_pipe(talk, key, limits.output_bytes):
                    selector.unregister(key.fileobj)
            if talk.reason:
                return


def _look(talk: Talk, process: int, *, limits: Limits, folder: str | None) -> None:
    """Check what the kernel does not limit: memory of all processes together, files without a file system."""
    used = memory_of_tree(process, most=limits.memory_bytes)
    talk.peak_bytes = max(talk.peak_bytes, used)
    if used > limits.memory_bytes:
        talk.reason = "memory"
    elif folder is not None:
        files, size = measure_folder(folder, most_files=limits.files)
        if files > limits.files or size + measure_deleted(processes_below(process)) > limits.disk_bytes:
            talk.reason = "disk"


def _read_pipe(talk: Talk, key: selectors.SelectorKey, most: int) -> bool:
    heard = talk.heard[key.data]
    if key.data == "status":
        # Written only by our code, and short.
        most = _LONGEST_STATUS
    piece = os.read(key.fd, 65536)
    heard += piece
    if len(heard) > most:
        del heard[most:]
        talk.reason = "output"
    return bool(piece)


def _converse(talk: Talk, selector: selectors.BaseSelector, events: int) -> None:
    try:
        if events & selectors.EVENT_WRITE and talk.outgoing:
            del talk.outgoing[: talk.channel.send(talk.outgoing)]
        if events & selectors.EVENT_READ:
            piece = talk.channel.recv(4096)
            talk.incoming += piece
            if not piece or not _take_messages(talk):
                selector.unregister(talk.channel)
                return
    except (ConnectionError, BrokenPipeError):
        selector.unregister(talk.channel)
        return
    mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if talk.outgoing else 0)
    selector.modify(talk.channel, mask, "channel")


def _take_messages(talk: Talk) -> bool:
    """False if the far side violates the protocol: it is ignored from then on."""
    while len(talk.incoming) >= _HEAD.size:
        if talk.messages == _MOST_MESSAGES:
            talk.reason = "messages"
            return False
        length = _HEAD.unpack_from(talk.incoming)[0]
        if length > _LONGEST_REPLY:
            return False
        if len(talk.incoming) < _HEAD.size + length:
            return True
        message = bytes(talk.incoming[_HEAD.size : _HEAD.size + length])
        del talk.incoming[: _HEAD.size + length]
        talk.messages += 1
        answer = talk.on_message(message)
        if answer is not None:
            talk.outgoing += frame(answer)
    return True


log = logging.getLogger(__name__)

_GRACE_SECONDS = 5.0
"""Time for the kernel to end a tree that has been killed."""
_NEARLY = 0.5
"""The kernel limits CPU time by counting ticks, which differs from what it reports afterwards."""
_ON_THIS_MACHINE = (SandboxKind.LANDLOCK, SandboxKind.OFF)
"""Mechanisms without a file system of their own: the code's folder is in the temporary one."""
_BY_USER = (SandboxKind.NAMESPACES, SandboxKind.LANDLOCK)
"""Mechanisms that isolate the code from our own processes by its user id."""


class BoxNotMade(Exception):
    """This mechanism does not work here, and why."""


@dataclass(frozen=True)
class Sandbox:
    """A mechanism that works on this machine, and the limits of each run."""

    kind: SandboxKind
    limits: Limits = field(default_factory=Limits)
    packages: tuple[str, ...] = ()

    def run(self, source: str, *, files: dict[str, str] | None = None) -> SandboxResult:
        """Run it like `python file.py`."""
        return self.in_box({"action": "run", "name": "main.py", "source": source, "files": files or {}})

    def compile(self, source: str) -> SandboxResult:
        """Return whether it is valid Python; nothing of it is run."""
        messages: list[bytes] = []
        task = {"action": "compile", "name": "answer.py", "source": source, "files": {}}
        result = self.in_box(task, on_message=messages.append)
        return result if messages == [b"compiled"] else _without_nonce(result)

    def test(self, source: str, tests: str, *, files: dict[str, str] | None = None) -> SandboxResult:
        """`ok` only if the tests ran to their end; exiting early, or printing what looks like success, does
        not count. The tests run in a separate process, which uses the names of the source from there.
        """
        nonce = secrets.token_hex(16)
        messages: list[bytes] = []

        def answer(message: bytes) -> bytes | None:
            messages.append(message)
            # A process that sends anything else gets no input, and is not waited for.
            return marshal.dumps({"tests": tests, "nonce": nonce}) if messages == [b"ready"] else b""

        task = {"action": "test", "name": "answer.py", "source": source, "files": files or {}}
        # One more: the process of the tests is not the answer's.
        limits = self.limits.model_copy(update={"processes": self.limits.processes + 1})
        result = replace(self, limits=limits).in_box(task, on_message=answer)
        if len(messages) == 2 and messages[1].startswith(UNSUPPORTED):
            why = messages[1].removeprefix(UNSUPPORTED).decode(errors="replace")
            return result.model_copy(update={"ok": False, "reason": "unsupported", "stderr": why})
        return result if messages == [b"ready", nonce.encode()] else _without_nonce(result)

    def in_box(
        self,
        task: dict[str, Any],
        *,
        on_message: Callable[[bytes], bytes | None] = lambda _message: None,
        jobs: Sequence[dict[str, Any]] = (),
        job_limits: Limits | None = None,
    ) -> SandboxResult:
        try:
            return run_in_box(self, task, on_message=on_message, jobs=jobs, job_limits=job_limits)
        except BoxNotMade as error:
            raise EnvironmentFailure(
                f"the sandbox ({self.kind}) could not be made: {error}",
                why="generated code runs nowhere else",
                fix="docs/sandbox.md says what each way needs of the machine",
            ) from error


def run_in_box(
    sandbox: Sandbox,
    task: dict[str, Any],
    *,
    on_message: Callable[[bytes], bytes | None] = lambda _message: None,
    jobs: Sequence[dict[str, Any]] = (),
    job_limits: Limits | None = None,
) -> SandboxResult:
    """Raises BoxNotMade if isolation failed; then nothing was run. With `jobs`, each within `job_limits`,
    `task` is their prelude: code of ours that is loaded once for all.
    """
    kind, limits, tasks = sandbox.kind, sandbox.limits, (task, *jobs)
    for name in (name for message in tasks for name in message["files"]):
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise UserError(
                f"{name!r} is not the name of a file within the sandbox",
                why="files are only written into the code's own folder",
                fix="use a relative name without ..",
            )
    started_at = time.monotonic()
    with ExitStack() as stack:
        near, far = socket.socketpair()
        stack.enter_context(near)
        folder = FOLDER
        status_near, status_far = os.pipe()
        with os.fdopen(status_near, "rb") as status, far:
            if kind in _ON_THIS_MACHINE:
                folder = stack.enter_context(_own_folder())
            pipes = (far.fileno(), status_far)
            try:
                command = command_for(
                    kind,
                    pipes,
                    limits=limits,
                    folder=folder,
                    packages=sandbox.packages,
                    jobs=len(jobs),
                    job_limits=job_limits,
                )
                _give_to_user(folder, uid_of(command), kind)
                process = _start(command, pipes, folder=folder)
            finally:
                os.close(status_far)
            far.close()
            outgoing = bytearray(b"".join(frame(marshal.dumps(message)) for message in tasks))
            talk = Talk(near, on_message, outgoing=outgoing)
            assert process.stdout is not None
            assert process.stderr is not None
            outputs = {"stdout": process.stdout.fileno(), "stderr": process.stderr.fileno()}
            try:
                follow(
                    talk,
                    process.pid,
                    pipes={**outputs, "status": status.fileno()},
                    deadline=started_at + limits.wall_seconds,
                    limits=limits,
                    folder=folder if kind in _ON_THIS_MACHINE else None,
                )
            finally:
                _end(process, kind)
    return _conclude(talk, limits=limits, seconds=time.monotonic() - started_at)


@contextmanager
def _own_folder() -> Iterator[str]:
    """What the code leaves there is removed without following any of its links, however deep it is nested."""
    try:
        folder = tempfile.mkdtemp(prefix=f"graft-box-{os.getpid()}-")
    except OSError as error:
        raise BoxNotMade(f"no folder can be made in {tempfile.gettempdir()}: {error.strerror}") from error
    try:
        yield folder
    finally:
        try:
            remove_folder(folder)
        except FileNotFoundError:
            pass  # the first process of the box removes it too where it is asked to end
        except OSError as error:
            log.warning("%s could not be removed: %s", folder, error)


def _give_to_user(folder: str, uid: int | None, kind: SandboxKind) -> None:
    if uid is None and kind in _BY_USER:
        raise BoxNotMade(
            "the code cannot run as a separate user: this user namespace maps too few users"
            if os.geteuid() == 0
            else "the code cannot run as a separate user: that needs root"
        )
    if folder != FOLDER and uid is not None:
        try:
            os.chown(folder, uid, uid)
        except OSError as error:
            raise BoxNotMade(f"the code cannot run as a separate user: {error.strerror}") from error


def _start(command: list[str], pipes: tuple[int, int], *, folder: str) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=scrubbed_environment(folder),
            pass_fds=pipes,
            cwd="/",
            start_new_session=True,
            # A worker may have a private umask: the user that the code runs as must reach the interpreter.
            umask=0o022,
        )
    except OSError as error:
        raise BoxNotMade(f"{Path(command[0]).name} does not start: {error.strerror}") from error


def _end(process: "subprocess.Popen[bytes]", kind: SandboxKind) -> None:
    """End the whole tree. Ending the outermost process ends the first one of the box, and that one all
    others.
    """
    if kind in _ON_THIS_MACHINE:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    else:
        process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _conclude(talk: Talk, *, limits: Limits, seconds: float) -> SandboxResult:
    stdout, stderr, status = (
        bytes(talk.heard[name]).decode(errors="replace") for name in ("stdout", "stderr", "status")
    )
    # What the first process of the sandbox reported; only it holds the pipe.
    report = {word: details for word, _, details in (line.partition(" ") for line in status.splitlines())}
    if "failed" in report:
        raise BoxNotMade(report["failed"] or "it does not say why")
    if "started" not in report and not talk.reason:
        raise BoxNotMade((stderr.strip().splitlines() or ["it ended without a message"])[-1])
    # Without one although it had started: the box itself was killed, by a machine that ran out of memory.
    code, peak, spent = report.get("ended", "none 0 0").split()
    return _result(
        talk.reason,
        None if talk.reason or code == "none" else int(code),
        stdout,
        stderr,
        seconds=seconds,
        peak_bytes=max(talk.peak_bytes, int(peak)),
        spent=float(spent) >= limits.cpu_seconds * _NEARLY,
    )


def _result(
    reason: Reason,
    exit_code: int | None,
    stdout: str,
    stderr: str,
    *,
    seconds: float,
    peak_bytes: int,
    spent: bool,
) -> SandboxResult:
    """`spent`: nearly all of its CPU time."""
    reason = reason or reason_of(exit_code, stderr, spent=spent)
    return SandboxResult(
        ok=not reason,
        exit_code=exit_code,
        stdout=stdout,
        stderr=stderr,
        reason=reason,
        seconds=seconds,
        peak_bytes=peak_bytes,
    )


def reason_of(exit_code: int | None, stderr: str, *, spent: bool) -> Reason:
    if exit_code == 0:
        return ""
    if exit_code is None:
        return "signal"
    if exit_code < 0:
        by_limit = -exit_code == signal.SIGXCPU or (spent and -exit_code == signal.SIGKILL)
        return "cpu" if by_limit else "signal"
    lines = stderr.strip().splitlines()
    return "memory" if lines and lines[-1].startswith("MemoryError") else "exit"


def _without_nonce(result: SandboxResult) -> SandboxResult:
    """It did not run to the end, whatever its exit code says."""
    return result.model_copy(update={"ok": False, "reason": result.reason or "no_nonce"})


class CodeJob(NamedTuple):
    """Without tests: only whether it compiles."""

    source: str
    tests: str | None = None


def run_jobs(
    jobs: Iterable[CodeJob], *, sandbox: Sandbox, at_once: int | None = None
) -> Iterator[SandboxResult]:
    """At most `at_once` boxes live at any moment; as many as there are cores without it."""
    count = max(1, at_once or count_cores())
    waiting = iter(jobs)
    # Threads: each only waits for a box, and a box is tied to the thread that started it.
    with ThreadPoolExecutor(count, thread_name_prefix="sandbox") as pool:
        running: deque[Future[SandboxResult]] = deque()
        try:
            running.extend(pool.submit(run_job, job, sandbox) for job in islice(waiting, 2 * count))
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(run_job, job, sandbox) for job in islice(waiting, 1))
        finally:
            for future in running:
                future.cancel()


def run_job(job: CodeJob, sandbox: Sandbox) -> SandboxResult:
    return sandbox.compile(job.source) if job.tests is None else sandbox.test(job.source, job.tests)


WAYS = (
    SandboxKind.BUBBLEWRAP,
    SandboxKind.NAMESPACES,
    SandboxKind.USER_NAMESPACES,
    SandboxKind.LANDLOCK,
)
_TRIAL = """
import json, os, sys
open("word", "w").write("found")
for folder in sys.path[1:]:
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        # A link may lead out of the box, where nothing is.
        if not os.path.islink(path) and not os.access(path, os.R_OK):
            raise SystemExit("the user of the sandbox cannot read " + path)
print(open("word").read())
"""
_USUAL = Limits()
_TRIAL_SECONDS = 60.0
"""Cached, so that a busy machine does not cause a different mechanism, or none, to be chosen."""


@lru_cache(maxsize=8)
def available(limits: Limits = _USUAL, packages: tuple[str, ...] = ()) -> SandboxKind:
    """The strongest mechanism that works with these limits and packages."""
    reasons = []
    for kind in WAYS:
        lacking = why_not(kind, limits, packages)
        if not lacking:
            return kind
        reasons.append(f"{kind}: {lacking}")
    raise EnvironmentFailure(
        "generated code cannot be sandboxed on this machine",
        why="; ".join(reasons),
        fix="install bubblewrap (apt install bubblewrap), allow user namespaces, or run as root; "
        "evaluate.sandbox.mode: off runs the code unprotected, at your own risk",
    )


def open_sandbox(settings: SandboxSettings) -> Sandbox:
    """Open the sandbox of graft.yaml; EnvironmentFailure if it requires one and none is available."""
    off = settings.mode == "off"
    kind = SandboxKind.OFF if off else available(settings.limits, settings.packages)
    return Sandbox(kind, settings.limits, settings.packages)


@lru_cache(maxsize=32)
def why_not(kind: SandboxKind, limits: Limits = _USUAL, packages: tuple[str, ...] = ()) -> str:
    """Empty if this mechanism works: a program has run in it and reported back."""
    if sys.platform != "linux":
        return "needs Linux"
    if kind is SandboxKind.BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    if kind in (SandboxKind.NAMESPACES, SandboxKind.LANDLOCK) and os.geteuid() != 0:
        return "needs root"
    task = {"action": "run", "name": "main.py", "source": _TRIAL, "files": {}}
    patient = {"wall_seconds": _TRIAL_SECONDS, "cpu_seconds": int(_TRIAL_SECONDS)}
    try:
        result = run_in_box(Sandbox(kind, limits.model_copy(update=patient), packages), task)
    except BoxNotMade as error:
        return str(error)
    works = result.ok and result.stdout == "found\n"
    return "" if works else f"a trial ended with {result.reason}: {result.stderr}"


START_SECONDS = 10.0
JOBS_PER_BOX = 64
_WITH_USERS = (SandboxKind.BUBBLEWRAP, SandboxKind.NAMESPACES)
"""Mechanisms with a process that may become another user for every job."""


class Prelude(NamedTuple):
    """Code of ours that jobs import by `name`, and modules to import before it."""

    name: str
    source: str
    modules: tuple[str, ...] = ()


class BatchJob(NamedTuple):
    """A program that may import the prelude; `files` are written into its folder first."""

    source: str
    files: tuple[tuple[str, str], ...] = ()


def run_batch(
    jobs: Sequence[BatchJob], *, sandbox: Sandbox, prelude: Prelude, at_once: int | None = None
) -> list[SandboxResult]:
    """`sandbox.limits` are those of one job."""
    count = max(1, at_once or count_cores())
    size = max(1, min(JOBS_PER_BOX, MOST_JOBS, -(-len(jobs) // count))) if can_share(sandbox) else 1
    parts = [range(first, min(first + size, len(jobs))) for first in range(0, len(jobs), size)]
    by_number: dict[int, SandboxResult] = {}

    def run_part(part: range) -> dict[int, SandboxResult]:
        """Effects of a job on the whole sandbox do not count against the others: those run again, alone."""
        together = [jobs[number] for number in part] if can_share(sandbox) else []
        shared = dict(_run_box(together, sandbox, prelude)) if together else {}
        return {
            number: shared[index] if index in shared else _run_alone(jobs[number], sandbox, prelude)
            for index, number in enumerate(part)
        }

    with ThreadPoolExecutor(count, thread_name_prefix="sandbox") as pool:
        for results in pool.map(run_part, parts):
            by_number.update(results)
    return [by_number[number] for number in range(len(jobs))]


def can_share(sandbox: Sandbox) -> bool:
    """Return whether one sandbox can run several jobs isolated from each other."""
    return sandbox.kind in _WITH_USERS and choose_uid() is not None


def _run_alone(job: BatchJob, sandbox: Sandbox, prelude: Prelude) -> SandboxResult:
    if can_share(sandbox):
        for _place, result in _run_box([job], sandbox, prelude):
            return result
    loaded = "".join(f"import {name}\n" for name in prelude.modules)
    source = (
        f"import sys, types\n{loaded}"
        f"module = sys.modules[{prelude.name!r}] = types.ModuleType({prelude.name!r})\n"
        f"exec(compile({prelude.source!r}, {prelude.name + '.py'!r}, 'exec'), vars(module))\n"
        f"exec(compile({job.source!r}, 'main.py', 'exec'))\n"
    )
    return sandbox.run(source, files=dict(job.files))


def _run_box(jobs: list[BatchJob], sandbox: Sandbox, prelude: Prelude) -> Iterator[tuple[int, SandboxResult]]:
    limits = sandbox.limits
    tasks = [
        {"action": "job", "name": "main.py", "source": job.source, "files": dict(job.files)} for job in jobs
    ]
    # The jobs run one after the other: memory and files are those of one, time and output of all. The output
    # is hexadecimal, and both outputs.
    wall = min(3600.0, limits.wall_seconds * len(jobs) + START_SECONDS)
    output = (limits.output_bytes * 2 + 4096) * 2 * len(jobs)
    box = replace(sandbox, limits=limits.model_copy(update={"wall_seconds": wall, "output_bytes": output}))
    loaded = {"action": "prelude", "files": {}, **prelude._asdict()}
    whole = box.in_box(loaded, jobs=tasks, job_limits=limits)
    for line in whole.stdout.split("\n")[:-1]:
        ended = marshal.loads(bytes.fromhex(line))
        yield (
            ended["number"],
            _result(
                ended["reason"],
                None if ended["reason"] else ended["exit_code"],
                ended["stdout"].decode(errors="replace"),
                ended["stderr"].decode(errors="replace"),
                seconds=ended["seconds"],
                peak_bytes=ended["peak_bytes"],
                spent=ended["cpu_seconds"] >= limits.cpu_seconds * _NEARLY,
            ),
        )
    # Ended from outside: the job that was running is the next one, and is blamed only if it was alone.
    if len(jobs) == 1 and not whole.stdout.endswith("\n"):
        yield 0, whole.model_copy(update={"ok": False, "stdout": "", "reason": whole.reason or "signal"})
