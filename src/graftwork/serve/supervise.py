"""Keeps one engine process running: starts it, notices its end, starts it again.

In: the engine's job. Out: a client for it while it is ready, and its state in words. The first
start must succeed; after that a crash is an event: it is started again, each time a little later,
and ready again as soon as it answers. One that lives and does not answer is frozen: it gets no more
requests, and is killed and started again if it stays so. The engine cannot outlive us: it ends when
its standard input does.
"""

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from graftwork.files.disk import append_to, write_atomic
from graftwork.process.worker import ERROR_FILE, WORKER_ENVIRONMENT
from graftwork.records.errors import Busy, Damaged, EnvironmentLacks, GraftError, UserMistake, WorkerFailed
from graftwork.serve.client import Client
from graftwork.serve.jobs import EngineJob
from graftwork.serve.protocol import LoadAdapter

log = logging.getLogger(__name__)

JOB_FILE = "engine.json"
LOG_FILE = "engine.log"
_ASK_EVERY_SECONDS = 0.03
_STEADY_SECONDS = 60.0
_LOAD_SECONDS = 300.0
"""How long loading one more adapter may take."""

# What the engine says of itself keeps its kind, and with it the exit code.
_SAID_AS: dict[str, type[GraftError]] = {
    k.__name__: k for k in (Busy, Damaged, EnvironmentLacks, UserMistake)
}

State = Literal["starting", "ready", "frozen", "down", "stopped"]


class ProbeTimes(NamedTuple):
    """When an engine that does not answer counts as frozen, and when it is killed."""

    every: float = 2.0
    frozen_after: float = 5.0
    killed_after: float = 20.0


class Supervisor:
    """Use `start`, then `client` for as long as `state` is "ready", then `stop`."""

    def __init__(
        self,
        job: EngineJob,
        *,
        module: str = "graftwork.serve.engine",
        first_pause: float = 0.25,
        longest_pause: float = 30.0,
        probe: ProbeTimes = ProbeTimes(),  # noqa: B008
        on_change: Callable[[State], None] = lambda _state: None,
    ) -> None:
        self._module = module
        self._folder = Path(job.folder)
        self._pauses = (first_pause, longest_pause)
        self._probe = probe
        self._on_change = on_change
        # Not in the job's folder: a unix socket's path may hold about 100 characters only.
        self._socket_folder = tempfile.TemporaryDirectory(prefix="graft-")
        socket = job.socket or str(Path(self._socket_folder.name) / "engine.sock")
        self.job = job.model_copy(update={"socket": socket})
        self._client: Client | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self.state: State = "starting"
        self.reason = "it is loading the model"
        self.restarts = 0
        self.models: list[str] = []

    @property
    def client(self) -> Client | None:
        return self._client

    def describe(self) -> dict[str, Any]:
        pid = self._process.pid if self._process is not None and self.state == "ready" else None
        return {"state": self.state, "reason": self.reason, "restarts": self.restarts, "pid": pid}

    async def start(self) -> None:
        """Start the engine and wait until it answers. Raises what it said if it ends before."""
        await self._launch()
        await self._await_ready()
        self._watch = asyncio.get_running_loop().create_task(self._keep_running())

    async def load_adapter(self, name: str, folder: str) -> None:
        """Let the running engine, and every later one, hold this adapter too."""
        if self._client is None:
            raise WorkerFailed("the engine is not ready", why=self.reason, fix="wait for it")
        body = LoadAdapter(name=name, folder=folder).to_json().encode()
        status, answer = await self._client.fetch("POST", "/adapters", body=body, seconds=_LOAD_SECONDS)
        if status != 200:
            message = orjson.loads(answer)["error"]["message"]
            raise WorkerFailed(f"the release {name} could not be loaded", why=message, where=folder)
        self.models = orjson.loads(answer)["models"]
        self.job = self.job.model_copy(update={"adapters": {**self.job.adapters, name: folder}})

    async def stop(self, *, seconds: float = 10.0) -> None:
        """End the engine: ask, wait, then kill. Leaves nothing behind."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self._set_state("stopped", "the server stops")
        if self._process is not None:
            await _end(self._process, seconds)
        self._socket_folder.cleanup()

    # -- one life ------------------------------------------------------------------------------

    async def _launch(self) -> None:
        self._set_state("starting", "it is loading the model")
        job_file = self._folder / JOB_FILE
        await asyncio.to_thread(write_atomic, job_file, self.job.to_json())
        Path(str(self.job.socket)).unlink(missing_ok=True)
        with append_to(self._folder / LOG_FILE) as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                str(job_file),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**WORKER_ENVIRONMENT, **os.environ},
                start_new_session=True,  # Ctrl-C is for us: we drain first, then end it
            )

    async def _await_ready(self) -> None:
        """Ask until it answers; raise as soon as it is known that it never will."""
        process = self._process
        assert process is not None
        client = Client(path=self.job.socket)
        while True:
            try:
                status, body = await client.fetch("GET", "/state")
                if status == 200:
                    break
            except OSError:
                if process.returncode is not None:
                    raise self._explain_end(process.returncode) from None
            await asyncio.sleep(_ASK_EVERY_SECONDS)
        self.models = orjson.loads(body)["models"]
        self._client = client
        self._set_state("ready", "")

    async def _keep_running(self) -> None:
        pause, longest = self._pauses
        while True:
            assert self._process is not None
            began = asyncio.get_running_loop().time()
            probing = asyncio.create_task(self._kill_if_frozen(self._process))
            try:
                code = await self._process.wait()
            finally:
                probing.cancel()
            if asyncio.get_running_loop().time() - began > _STEADY_SECONDS:
                pause = self._pauses[0]
            self._set_state("down", self._explain_end(code).what)
            log.warning("engine: %s; starting it again in %.2f s", self.reason, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
            self.restarts += 1
            try:
                await self._launch()
                await self._await_ready()
            except (GraftError, OSError) as error:
                # It failed again, or no process could be made; the loop goes on, the state says why.
                log.warning("engine: %s", error)

    async def _kill_if_frozen(self, process: asyncio.subprocess.Process) -> None:
        """Ask the engine for its state now and then; one that stays silent is killed."""
        clock = asyncio.get_running_loop().time
        probe = Client(path=self.job.socket, keep=0)
        answered = clock()
        while True:
            await asyncio.sleep(self._probe.every)
            try:
                await probe.fetch("GET", "/state", seconds=self._probe.frozen_after)
            except OSError:
                silent = clock() - answered
                if silent >= self._probe.killed_after:
                    log.warning("engine: it has not answered for %.0f s and is killed", silent)
                    process.kill()
                    return
                if silent >= self._probe.frozen_after and self.state == "ready":
                    log.warning("engine: it has not answered for %.0f s", silent)
                    self._set_state("frozen", f"it has not answered for {silent:.0f} s")
            else:
                answered = clock()
                if self.state == "frozen":
                    self._client = Client(path=self.job.socket)
                    self._set_state("ready", "")

    def _set_state(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        if state != "ready" and self._client is not None:
            self._client.close()
            self._client = None
        self._on_change(state)

    def _explain_end(self, code: int) -> GraftError:
        """What the engine left behind, as an error: its own words where it had any."""
        log_file = self._folder / LOG_FILE
        left = self._folder / ERROR_FILE
        last = left.read_text() if left.exists() else _last_line(log_file)
        try:
            said = json.loads(last)
            kind = _SAID_AS.get(said["error"], WorkerFailed)
            where = said["where"] or str(log_file)
            return kind(said["what"], why=said["why"], fix=said["fix"], where=where)
        except (ValueError, TypeError, KeyError):
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            what = f"the engine ended with {how}"
            return WorkerFailed(what, why=last, fix="its log says more", where=str(log_file))


async def _end(process: asyncio.subprocess.Process, seconds: float) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        log.warning("engine: it did not stop within %.0f s and is killed", seconds)
        process.kill()
        await process.wait()


def _last_line(path: Path) -> str:
    lines = path.read_bytes()[-4000:].decode(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else ""
