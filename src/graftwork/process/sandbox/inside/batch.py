"""The first process of a sandbox that runs several jobs, one after the other, each as a user of its own.

In: one argument; over a socket one frame for each job, read by the process that runs it and by no other, so
that no job finds the code of another in memory. Out: a line on standard output for each job that has ended.
Jobs have neither that output nor the socket. When a job ends, its processes are killed and its files removed.
"""

# pathlib takes longer to load than everything else here together.
# ruff: noqa: PTH101, PTH102, PTH108, PTH118, PTH208

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the signal module builds enums first
import atexit
import gc
import marshal
import os
import select
import sys
import time

from graftwork.process.sandbox.inside import walls
from graftwork.process.sandbox.inside.folder import remove_folder
from graftwork.process.sandbox.inside.init import (
    FAILED,
    become,
    enter,
    error_name,
    raise_failure,
    receive,
    run_task,
    run_to_end,
    shut_in,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_PIECE = 65536


def main() -> NoReturn:
    box = marshal.loads(bytes.fromhex(sys.argv[1]))
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    try:
        enter(box)
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
    except Exception as error:
        os.write(box["status"], f"failed {error_name(error)}\n".encode())
    os._exit(FAILED)


def _run_one(box: dict[str, Any], number: int) -> dict[str, Any]:
    uid = box["uid"] + number
    report_read, report_write = os.pipe()
    outputs = [os.pipe(), os.pipe()]
    begun = time.monotonic()
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
        child, [read for read, _ in outputs], limits["output_bytes"], begun + limits["wall_seconds"]
    )
    clean_up(uid, box["folder"])
    code, peak, spent = _reap(child)
    return {
        "number": number,
        "reason": ended,
        "exit_code": code,
        "stdout": bytes(heard[0]),
        "stderr": bytes(heard[1]),
        "seconds": time.monotonic() - begun,
        "peak_bytes": peak,
        "cpu_seconds": spent,
    }


def _follow(child: int, pipes: list[int], most_output: int, deadline: float) -> tuple[str, list[bytearray]]:
    """Until the job's own process ends or a limit is reached. Leftovers may hold the pipes open."""
    heard, reason = [bytearray(), bytearray()], ""
    ends = os.pidfd_open(child)
    waiting = {*pipes, ends}
    while not reason:
        left = deadline - time.monotonic()
        if left <= 0:
            reason = "wall_clock"
            break
        ready = select.select(list(waiting), [], [], left)[0]
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
    """Kill every process of a user and remove what it wrote; only that user itself has the right to both."""
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


def _reap(child: int) -> tuple[int, int, float]:
    """The job's own process; orphans that it left were adopted by this one, and are dead by now."""
    found = (FAILED, 0, 0.0)
    while True:
        try:
            ended, status, used = os.wait4(-1, 0)
        except ChildProcessError:
            return found
        if ended == child:
            spent = used.ru_utime + used.ru_stime
            found = (os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024, spent)


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
