"""The first process inside the sandbox: sets up isolation, runs the code in a child, reports how it ended.

Input: one argument; over a socket the source, its files and what to do with it. For code under test, a second
message follows once the code has been loaded in a process of its own: the tests and a nonce, which that
process never sees. Output: lines on the status pipe, which the code never holds: "started" and "ended", or
why isolation failed. When this process ends, all processes that the code left behind end with it.

A batch is several jobs, one after the other, each as a user of its own. Each job's frame is read by the
process that runs it and by no other, so that no job finds the code of another in memory. For each one that
has ended there is a line on standard output; jobs have neither that output nor the socket. When a job ends,
its processes are killed and its files removed.
"""

# pathlib takes longer to load than everything else here together.
# ruff: noqa: PTH101, PTH102, PTH103, PTH108, PTH112, PTH116, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the signal module builds enums first
import atexit
import builtins
import gc
import io
import marshal
import os
import select
import struct
import sys
import time
import types

from graftwork.process.sandbox.inside import walls
from graftwork.process.sandbox.inside.remote import (
    UNSUPPORTED,
    AnswerModule,
    AnswerNames,
    Lost,
    NotSupported,
    Peer,
    Printed,
)
from graftwork.process.sandbox.inside.walls import (
    bound_folder,
    build_root,
    hide_host_name,
    install_filter,
    leave_namespaces,
    remove_folder,
    set_limits,
    shut_files,
    write_rules,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_HEAD = struct.Struct("!I")
READY = b"ready"
COMPILED = b"compiled"


def run_task(task: dict[str, Any], channel: int, *, folder: str, search: list[str]) -> int:
    """Return the exit code. Propagates an exception of the code."""
    for name, text in task["files"].items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "x", encoding="utf-8", newline="") as file:
            file.write(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "graftwork"]:
        del sys.modules[name]
    sys.path[:] = [folder, *sys.path, *search]
    sys.argv[:] = [task["name"]]
    if task["action"] == "compile":
        compile(task["source"], task["name"], "exec", dont_inherit=True)
        _send(channel, COMPILED)
        return 0
    if task["action"] == "test":
        _run_tested(channel, task, folder)
    if task["action"] != "job":
        os.close(channel)
    exec(compile(task["source"], task["name"], "exec", dont_inherit=True), _module("__main__"))
    return 0


def _run_tested(channel: int, task: dict[str, Any], folder: str) -> NoReturn:
    """Load the answer in a separate process, then fetch the tests, run them here, and send the nonce back.
    The answer never shares a process with the tests or the nonce: it serves its names over a pipe.
    """
    ask_read, ask_write = os.pipe()
    reply_read, reply_write = os.pipe()
    child = os.fork()
    if child == 0:
        for number in (channel, ask_write, reply_read):
            os.close(number)
        walls.die_with_parent()
        _be_the_answer(task, Peer(ask_read, reply_write, guards=False))
    os.close(ask_read)
    os.close(reply_write)
    # The answer runs as the same user: it may end this process, and do nothing else to it.
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    walls.set_dumpable(False)
    # What the answer writes is not imported by the tests.
    sys.path[:] = [path for path in sys.path if path != folder]
    peer = Peer(reply_read, ask_write, guards=True)
    try:
        names = frozenset(peer.ask("names"))
        _send(channel, READY)
        second = marshal.loads(receive(channel))
        sys.modules["answer"] = AnswerModule(peer, names)
        exec(compile(second["tests"], "tests.py", "exec", dont_inherit=True), AnswerNames(peer, names))
    except NotSupported as error:
        _send(channel, UNSUPPORTED + str(error).encode()[:200])
        os._exit(1)
    except Lost:
        # A process that does not keep to the form finds nobody to wait for.
        os.close(ask_write)
        os.close(reply_read)
        # As the answer's process has ended, so that the reason of both is the same.
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            _signal.signal(-code, _signal.SIG_DFL) if -code != walls.SIGKILL else None
            os.kill(os.getpid(), -code)
        os._exit(code)
    _send(channel, second["nonce"].encode())
    sys.stdout.flush()
    os._exit(0)


def _be_the_answer(task: dict[str, Any], peer: Peer) -> NoReturn:
    code = 0
    peer.names = _module("answer")
    printed = peer.printed = Printed()
    sys.stdout = io.TextIOWrapper(printed, "utf-8", write_through=True)
    builtins.input = lambda prompt="": peer.ask("input", str(prompt))
    try:
        exec(compile(task["source"], "answer.py", "exec", dont_inherit=True), peer.names)
        peer.serve()
    except Lost:
        code = 0
    except SystemExit as leaving:
        code = exit_code_of(leaving)
    except BaseException:
        code = 1
        print_raised()
    os.write(1, printed.take().encode())
    os._exit(code)


def _module(name: str) -> dict[str, Any]:
    """A module that the code runs in, so that dataclasses, for example, find it by its name."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    return vars(module)


def receive(channel: int) -> bytes:
    return _read_exactly(channel, _HEAD.unpack(_read_exactly(channel, _HEAD.size))[0])


def _read_exactly(channel: int, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        piece = os.read(channel, count - len(parts))
        if not piece:
            raise EOFError
        parts += piece
    return parts


def _send(channel: int, message: bytes) -> None:
    os.write(channel, _HEAD.pack(len(message)) + message)


FAILED = 125


def main() -> NoReturn:
    # Only from our own process; nothing that the code writes is ever read this way.
    box = marshal.loads(bytes.fromhex(sys.argv[1]))
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    try:
        enter(box)
        if box["batch"]:
            _run_batch(box)
        _watch(box, _start_code(box))
    except Exception as error:
        os.write(box["status"], f"failed {error_name(error)}\n".encode())
    os._exit(FAILED)


def enter(box: dict[str, Any]) -> None:
    way, uid = box["way"], box["uid"]
    if way == "bubblewrap":
        # It has made the walls already, and ends us when its parent ends. The rest needs a right
        # that not even this process keeps.
        bound_folder(box["folder"], size=box["limits"]["disk_bytes"], files=box["limits"]["files"])
        hide_host_name()
        walls.drop_capabilities(but=walls.CAPS_TO_CHANGE_USER if uid is not None else ())
        return
    if way in ("namespaces", "user_namespaces"):
        if way == "user_namespaces" and uid is not None:
            become(uid)
            walls.set_dumpable(True)
        walls.die_with_parent(box["parent"])
        leave_namespaces(user=way == "user_namespaces")
        _go_on_as_first_process(box)
        owner = uid if way == "namespaces" else None
        build_root(
            box["views"],
            folder=box["folder"],
            owner=owner,
            size=box["limits"]["disk_bytes"],
            files=box["limits"]["files"],
            shared=box["batch"] > 0,
        )
        hide_host_name()
    else:
        # No world of processes of its own: nothing ends by itself, so this process is asked to end it.
        walls.adopt_orphans()
        _signal.signal(_signal.SIGTERM, lambda *_: _end_everything(box))
        walls.die_with_parent(box["parent"], by=walls.SIGTERM)
        os.chdir(box["folder"])


def _go_on_as_first_process(box: dict[str, Any]) -> None:
    """Only a child is in the new PID namespace; this process waits for it, outside."""
    alive, keep_open = os.pipe()
    child = os.fork()
    if child:
        os.close(alive)
        for number in (0, 1, 2, box["channel"], box["status"]):
            os.close(number)
        _, status = os.waitpid(child, 0)
        os._exit(0 if status == 0 else FAILED)
    os.close(keep_open)
    os.setsid()
    walls.die_with_parent()
    # The one outside may have died before the tie was made: then the pipe has ended.
    if select.select([alive], [], [], 0)[0]:
        os._exit(FAILED)
    os.close(alive)


def _start_code(box: dict[str, Any]) -> int:
    """Start the code and return the child's pid. The child reports through a pipe that it is isolated; only
    then it gets code to run.
    """
    report_read, report_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(report_read)
        os.close(box["status"])
        _be_the_code(box, report_write)
    os.close(report_write)
    os.close(box["channel"])
    raise_failure(report_read)
    os.write(box["status"], b"started\n")
    return child


def raise_failure(report: int) -> None:
    """Raise the error of a child that could not isolate itself, once it has closed the pipe."""
    failure = b""
    while piece := os.read(report, 4096):
        failure += piece
    os.close(report)
    if failure:
        raise OSError(0, failure.decode())


def _be_the_code(box: dict[str, Any], report_write: int) -> NoReturn:
    try:
        # A signal to its own group then reaches only itself.
        os.setsid()
        shut_in(box)
    except Exception as error:
        os.write(report_write, error_name(error).encode())
        os._exit(FAILED)
    os.close(report_write)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    channel = box["channel"]
    code = run_to_end(
        lambda: run_task(marshal.loads(receive(channel)), channel, folder=box["folder"], search=box["search"])
    )
    # As the interpreter itself would: threads are waited for, what is written is flushed.
    sys.exit(code)


def run_to_end(work: Callable[[], int]) -> int:
    """The exit code, including that of code that raises."""
    try:
        return work()
    except SystemExit as leaving:
        return exit_code_of(leaving)
    except BaseException:
        print_raised()
        return 1


def shut_in(box: dict[str, Any]) -> None:
    """Isolation that the code cannot undo. The order matters: each step needs a right that a later one
    drops.
    """
    uid, way, limits = box["uid"], box["way"], box["limits"]
    walls.no_new_privileges()
    if way == "off":
        walls.die_with_parent()
        set_limits(limits, processes=None)
        return
    rules, capability = _landlock_rules(box) if way == "landlock" else (None, None)
    walls.shut_capabilities()
    if uid is not None and way != "user_namespaces":
        walls.keep_capabilities()
        become(uid)
    walls.drop_capabilities(but=() if capability is None else (capability,))
    walls.set_dumpable(False)
    walls.die_with_parent()
    if rules is not None:
        shut_files(rules)
    # Ours that are the same user in the same user namespace: the first process, and the one outside it.
    ours = 2 if way == "user_namespaces" else 1 if uid is None else 0
    set_limits(limits, processes=limits["processes"] + ours)
    if not install_filter() and way == "landlock":
        raise OSError(0, "no filter of system calls is known for this machine")
    # Code that cannot import anything fails through no fault of its own.
    for path in (os.__file__, *box["search"]):
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError as error:
            raise OSError(0, f"the code cannot read {path}: {error.strerror}") from error


def _landlock_rules(box: dict[str, Any]) -> tuple[int, int | None]:
    """The rules, and the right to pass private folders if the interpreter is in one."""
    readable = [source for kind, source, _ in box["views"] if kind in ("folder", "file")]
    devices = [source for kind, source, _ in box["views"] if kind == "device"]
    rules = write_rules(readable=readable, devices=devices, writable=box["folder"])
    return rules, None if all(map(_open_to_all, readable)) else walls.CAP_DAC_READ_SEARCH


def _open_to_all(path: str) -> bool:
    while path != "/":
        mode = 0o5 if os.path.isdir(path) else 0o4
        if os.stat(path).st_mode & mode != mode:
            return False
        path = os.path.dirname(path)
    return True


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _watch(box: dict[str, Any], child: int) -> NoReturn:
    """Wait for the code's own process to end; then everything that it left behind ends too."""
    while True:
        ended, status, used = os.wait4(-1, 0)
        if ended == child:
            break
    _signal.signal(_signal.SIGTERM, _signal.SIG_IGN)
    _end_leftovers(box)
    spent = used.ru_utime + used.ru_stime
    ended_with = os.waitstatus_to_exitcode(status)
    os.write(box["status"], f"ended {ended_with} {used.ru_maxrss * 1024} {spent:.3f}\n".encode())
    os._exit(0)


def _end_everything(box: dict[str, Any]) -> NoReturn:
    """End everything on request, or because the parent is gone and cannot remove the folder."""
    _end_leftovers(box)
    try:
        remove_folder(box["folder"])
    finally:
        os._exit(FAILED)


def _end_leftovers(box: dict[str, Any]) -> None:
    if box["way"] == "landlock":
        _end_all_of(box["uid"])
        while _reap(0):
            pass
    elif box["way"] == "off":
        while below := _descendants(os.getpid()):
            for number in below:
                try:
                    os.kill(number, walls.SIGKILL)
                except ProcessLookupError:
                    continue
            while _reap(os.WNOHANG):
                pass


def _end_all_of(uid: int) -> None:
    """Kill every process of this user at once: such a signal reaches all that exist at that moment."""
    for _ in range(100):
        killer = os.fork()
        if killer == 0:
            os.setresuid(uid, uid, uid)
            os.kill(-1, walls.SIGKILL)
            os._exit(0)
        if os.waitpid(killer, 0)[1] == 0:
            return
        # One of them was quicker and killed the killer: again.


def _descendants(root: int) -> list[int]:
    descendants, waiting = [], [root]
    while waiting:
        number = waiting.pop()
        try:
            with open(f"/proc/{number}/task/{number}/children", encoding="ascii") as file:
                below = [int(child) for child in file.read().split()]
        except OSError:
            continue
        descendants += below
        waiting += below
    return descendants


def _reap(how: int) -> bool:
    try:
        return os.waitpid(-1, how)[0] > 0
    except ChildProcessError:
        return False


def error_name(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"


def exit_code_of(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def print_raised() -> None:
    """Print it like the interpreter, without our own lines above the code's."""
    import traceback

    kind, error, steps = sys.exc_info()
    while steps is not None and steps.tb_frame.f_code.co_filename not in ("main.py", "answer.py", "tests.py"):
        steps = steps.tb_next
    traceback.print_exception(kind, error, steps)


_PIECE = 65536


def _run_batch(box: dict[str, Any]) -> NoReturn:
    """Run several jobs, one after the other, each as a separate user."""
    # Our own code and what it imports, loaded once for all jobs.
    prelude = marshal.loads(receive(box["channel"]))
    for name in prelude["modules"]:
        __import__(name)
    module = sys.modules[prelude["name"]] = type(sys)(prelude["name"])
    exec(compile(prelude["source"], f"{prelude['name']}.py", "exec", dont_inherit=True), vars(module))
    # What is never collected is not copied into every job either.
    gc.collect()
    gc.freeze()
    os.write(box["status"], b"started\n")
    for number in range(box["batch"]):
        line = marshal.dumps(_run_one(box, number)).hex().encode() + b"\n"
        while line:
            line = line[os.write(1, line) :]
    os.write(box["status"], b"ended 0 0 0\n")
    os._exit(0)


def _run_one(box: dict[str, Any], number: int) -> dict[str, Any]:
    uid = box["uid"] + number
    report_read, report_write = os.pipe()
    outputs = [os.pipe(), os.pipe()]
    started_at = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(report_read)
        _be_the_job(box, number, report_write, [write for _, write in outputs])
    os.close(report_write)
    for _, write in outputs:
        os.close(write)
    raise_failure(report_read)
    limits = box["job_limits"]
    ended, heard = _follow(
        child, [read for read, _ in outputs], limits["output_bytes"], started_at + limits["wall_seconds"]
    )
    clean_up(uid, box["folder"])
    code, peak, spent = _reap_job(child)
    return {
        "number": number,
        "reason": ended,
        "exit_code": code,
        "stdout": bytes(heard[0]),
        "stderr": bytes(heard[1]),
        "seconds": time.monotonic() - started_at,
        "peak_bytes": peak,
        "cpu_seconds": spent,
    }


def _follow(child: int, pipes: list[int], most_output: int, deadline: float) -> tuple[str, list[bytearray]]:
    """Follow until the job's own process ends or a limit is reached. Leftovers may hold the pipes open."""
    heard, reason = [bytearray(), bytearray()], ""
    ends = os.pidfd_open(child)
    waiting = {*pipes, ends}
    while not reason:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            reason = "wall_clock"
            break
        ready = select.select(list(waiting), [], [], remaining)[0]
        for number in ready:
            if number == ends:
                continue
            output, piece = heard[pipes.index(number)], os.read(number, _PIECE)
            output += piece
            if not piece:
                waiting.discard(number)
            if len(output) > most_output:
                del output[most_output:]
                reason = "output"
        if ends in ready and ready == [ends]:
            break
    for number in (*pipes, ends):
        os.close(number)
    return reason, heard


def clean_up(uid: int, folder: str) -> None:
    """Kill every process of a user and remove its files; only that user itself has the right to both."""
    for _ in range(100):
        cleaner = os.fork()
        if cleaner == 0:
            try:
                become(uid)
                _kill_others()
                for name in os.listdir(folder):
                    _remove(os.path.join(folder, name), uid)
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(cleaner, 0)[1] == 0:
            return
        # A process of the job was quicker and killed the cleaner: again.
    raise OSError(0, "a job left processes or files behind that could not be removed")


def _kill_others() -> None:
    try:
        os.kill(-1, walls.SIGKILL)
    except ProcessLookupError:
        return


def _remove(path: str, uid: int) -> None:
    state = os.lstat(path)
    if state.st_uid != uid:
        return
    if state.st_mode & 0o170000 == 0o040000:
        os.chmod(path, 0o700)
        remove_folder(path)
    else:
        os.unlink(path)


def _reap_job(child: int) -> tuple[int, int, float]:
    """The job's own process; orphans that it left were adopted by this one, and are dead by now."""
    usage = (FAILED, 0, 0.0)
    while True:
        try:
            ended, status, used = os.wait4(-1, 0)
        except ChildProcessError:
            return usage
        if ended == child:
            spent = used.ru_utime + used.ru_stime
            usage = (os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024, spent)


def _be_the_job(box: dict[str, Any], number: int, report_write: int, outputs: list[int]) -> NoReturn:
    folder = os.path.join(box["folder"], str(number))
    try:
        os.setsid()
        task = marshal.loads(receive(box["channel"]))
        os.dup2(outputs[0], 1)
        os.dup2(outputs[1], 2)
        os.close(box["status"])
        shut_in({**box, "uid": box["uid"] + number})
        os.mkdir(folder, 0o700)
        os.chdir(folder)
        os.environ["HOME"] = os.environ["TMPDIR"] = folder
    except Exception as error:
        os.write(report_write, error_name(error).encode() or b"no reason")
        os._exit(FAILED)
    os.closerange(3, max(report_write, box["channel"], *outputs, 64) + 1)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    code = run_to_end(lambda: run_task(task, box["channel"], folder=folder, search=box["search"]))
    # As the interpreter ends, without taking itself apart, which takes longer than a small job.
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 1
    os._exit(code)
