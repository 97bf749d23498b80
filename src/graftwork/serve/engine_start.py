"""Starts the process of an engine.

In: the module of the engine, its job file, its log. Out: a process whose standard input is a pipe that ends
with this process. Where workers are forked with their imports done, as in `graft run`, the engine is too:
importing torch and transformers takes longer than loading a small model.
"""

import asyncio
import contextlib
import os
import select
import signal
import sys
from pathlib import Path
from typing import Protocol

from graftwork.files.disk import append_to
from graftwork.process.preload import SHARED, PreloadedWorker, PreloadedWorkers
from graftwork.process.worker import WORKER_ENVIRONMENT


class EngineProcess(Protocol):
    """What a process of asyncio and a forked engine have in common."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


async def start_engine(
    module: str, job_file: Path, *, log: Path, workers: PreloadedWorkers = SHARED
) -> EngineProcess:
    """Fork it from the process of `workers` where that runs; else start a new interpreter."""
    environment = {**WORKER_ENVIRONMENT, **os.environ}
    loop = asyncio.get_running_loop()
    # In a thread: the process with the imports may still be busy with them.
    forking = loop.run_in_executor(None, _fork, workers, module, job_file, log, environment)
    try:
        forked = await asyncio.shield(forking)
    except asyncio.CancelledError:
        forking.add_done_callback(_abandon)
        raise
    if forked is not None:
        return forked
    with append_to(log) as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(job_file),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # Ctrl-C goes to us: we drain first, then end the engine
        )


def _fork(
    workers: PreloadedWorkers, module: str, job_file: Path, log: Path, environment: dict[str, str]
) -> "ForkedEngine | None":
    """None where it has to be started as a new interpreter."""
    theirs, ours = os.pipe()
    try:
        with append_to(log) as output:
            arguments = [str(job_file)]
            worker = workers.start(module, arguments, environment=environment, log=output, stdin=theirs)
    finally:
        os.close(theirs)
    if worker is None:
        os.close(ours)
        return None
    return ForkedEngine(worker, ours)


def _abandon(forking: "asyncio.Future[ForkedEngine | None]") -> None:
    """Nobody waits for it any more."""
    forked = None if forking.cancelled() or forking.exception() else forking.result()
    if forked is not None:
        forked.terminate()


class ForkedEngine:
    """An EngineProcess over a forked worker, which ends when `stdin`, our end of its pipe, is closed."""

    def __init__(self, worker: PreloadedWorker, stdin: int) -> None:
        self._worker, self._stdin = worker, stdin
        self._code: int | None = None
        self._ended: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int:
        return self._worker.pid

    @property
    def returncode(self) -> int | None:
        if self._code is None and select.select([self._worker], [], [], 0.0)[0]:
            self._end()
        return self._code

    async def wait(self) -> int:
        """The exit code; negative for a signal. Any number of tasks may wait."""
        if self.returncode is None:
            if self._ended is None:
                loop = asyncio.get_running_loop()
                self._ended = loop.create_future()
                loop.add_reader(self._worker.fileno(), self._end)
            await asyncio.shield(self._ended)
        assert self._code is not None
        return self._code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _end(self) -> None:
        """The exit code is there."""
        if self._ended is not None:
            self._ended.get_loop().remove_reader(self._worker.fileno())
        self._code = self._worker.wait()
        os.close(self._stdin)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
