"""Many runs, several at a time.

In: jobs. Out: their results, in the order of the jobs. Every run is a process of its own; here is only the
bound on how many there are at once. One that fails does not stop the others.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

from graftwork.process.pool import count_cores
from graftwork.process.sandbox.result import SandboxResult
from graftwork.process.sandbox.run import Sandbox


class Job(NamedTuple):
    """Without tests: only whether it compiles."""

    source: str
    tests: str | None = None


def run_jobs(jobs: Iterable[Job], *, sandbox: Sandbox, at_once: int | None = None) -> Iterator[SandboxResult]:
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


def run_job(job: Job, sandbox: Sandbox) -> SandboxResult:
    return sandbox.compile(job.source) if job.tests is None else sandbox.test(job.source, job.tests)
