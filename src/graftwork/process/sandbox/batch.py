"""Many small programs in few sandboxes, isolated from each other.

In: jobs, and code of ours that all of them use. Out: how each ended, in order. Starting a sandbox costs more
than a small program takes, so one sandbox runs several jobs in turn, each as a user of its own that sees
neither code, files nor processes of the others. Where the code cannot run as a separate user, every job gets
a sandbox of its own.
"""

import marshal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from graftwork.process.pool import count_cores
from graftwork.process.sandbox.command import MOST_JOBS, BatchShape, choose_uid
from graftwork.process.sandbox.run import Batch, BoxNotMade, Sandbox, reason_of, run_in_box
from graftwork.process.sandbox.settings import Limits, SandboxKind, SandboxResult
from graftwork.records.errors import EnvironmentLacks

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
    found: dict[int, SandboxResult] = {}
    with ThreadPoolExecutor(count, thread_name_prefix="sandbox") as pool:
        for results in pool.map(lambda part: _run_part(jobs, part, sandbox, prelude), parts):
            found.update(results)
    return [found[number] for number in range(len(jobs))]


def can_share(sandbox: Sandbox) -> bool:
    """Whether one sandbox can run several jobs apart from each other."""
    return sandbox.kind in _WITH_USERS and choose_uid() is not None


def _run_part(
    jobs: Sequence[BatchJob], part: range, sandbox: Sandbox, prelude: Prelude
) -> dict[int, SandboxResult]:
    """What a job does to the whole sandbox is not held against the others: those run again, alone."""
    if not can_share(sandbox):
        return {number: _run_alone(jobs[number], sandbox, prelude) for number in part}
    found = dict(_run_box([jobs[number] for number in part], sandbox, prelude))
    results = {number: found[place] for place, number in enumerate(part) if place in found}
    for number in part:
        if number not in results:
            results[number] = _run_alone(jobs[number], sandbox, prelude)
    return results


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
    shape = BatchShape(len(jobs), limits.wall_seconds, limits.output_bytes)
    tasks = tuple(
        {"action": "job", "name": "main.py", "source": job.source, "files": dict(job.files)} for job in jobs
    )
    first = {"action": "prelude", "files": {}, **prelude._asdict()}
    try:
        whole = run_in_box(
            first,
            kind=sandbox.kind,
            limits=_limits_of_box(limits, len(jobs)),
            packages=sandbox.packages,
            asked=lambda _message: None,
            batch=Batch(shape, tasks),
        )
    except BoxNotMade as error:
        raise EnvironmentLacks(
            f"the sandbox ({sandbox.kind}) could not be made: {error}",
            why="generated code runs nowhere else",
            fix="docs/sandbox.md says what each way needs of the machine",
        ) from error
    for line in whole.stdout.split("\n")[:-1]:
        ended = marshal.loads(bytes.fromhex(line))
        yield ended["number"], _conclude(ended, limits)
    # Ended from outside: the job that was running is the next one, and is blamed only if it was alone.
    if len(jobs) == 1 and not whole.stdout.endswith("\n"):
        yield 0, whole.model_copy(update={"ok": False, "stdout": "", "reason": whole.reason or "signal"})


def _limits_of_box(limits: Limits, jobs: int) -> Limits:
    """The jobs run one after the other: memory and files are those of one, time and output of all."""
    wall = min(3600.0, limits.wall_seconds * jobs + START_SECONDS)
    # Hexadecimal, and both outputs.
    output = (limits.output_bytes * 2 + 4096) * 2 * jobs
    return limits.model_copy(update={"wall_seconds": wall, "output_bytes": output})


def _conclude(ended: dict[str, Any], limits: Limits) -> SandboxResult:
    stdout, stderr = (ended[name].decode(errors="replace") for name in ("stdout", "stderr"))
    spent = ended["cpu_seconds"] >= limits.cpu_seconds * 0.5
    reason = ended["reason"] or reason_of(ended["exit_code"], stderr, spent=spent)
    return SandboxResult(
        ok=not reason,
        exit_code=None if ended["reason"] else ended["exit_code"],
        stdout=stdout,
        stderr=stderr,
        reason=reason,
        seconds=ended["seconds"],
        peak_bytes=ended["peak_bytes"],
    )
