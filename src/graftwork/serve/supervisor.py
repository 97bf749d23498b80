"""Runs one engine process: starts it, restarts it after a crash, and talks to it by the engine protocol.

The first start must succeed. After that a crash is an event: the engine is started again, each time a little
later. An engine that lives but does not answer is frozen: it gets no more requests, and is killed and
restarted if it stays frozen; so is one that does not answer in time after its start. It ends with this
process, because it ends when its standard input does. Where workers are forked with their imports done, as in
`graft run`, the engine is too: importing torch and transformers takes longer than loading a small model.
"""

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

import orjson

from graftwork.engines.protocol import ENGINE_MODULES, EngineJob, LoadAdapter, PieceData, read_failure
from graftwork.files.disk import append_to, write_atomic
from graftwork.http.client import Client, ClientReply
from graftwork.http.messages import RETRY, ApiError
from graftwork.process.preload import SHARED, PreloadedWorker, PreloadedWorkers
from graftwork.process.worker import ERROR_FILE, WORKER_ENVIRONMENT
from graftwork.records.errors import Busy, Corrupted, EnvironmentFailure, GraftError, UserError, WorkerFailed
from graftwork.serve.api.call import ChatCall
from graftwork.serve.engine_interface import EngineState, EngineStatus
from graftwork.serve.settings import FailoverSettings

log = logging.getLogger(__name__)

JOB_FILE = "engine.json"
LOG_FILE = "engine.log"
_ASK_EVERY_SECONDS = 0.03
_STEADY_SECONDS = 60.0
_LOAD_SECONDS = 300.0
"""How long loading one adapter may take."""

# Errors that the engine reports keep their class, and with it the exit code.
_REPORTED_AS: dict[str, type[GraftError]] = {
    k.__name__: k for k in (Busy, Corrupted, EnvironmentFailure, UserError)
}


async def start_engine(
    module: str, job_file: Path, *, log: Path, workers: PreloadedWorkers = SHARED
) -> "EngineProcess":
    """Fork it from the process of `workers` if that is running; otherwise start a new interpreter."""
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
    """None if it has to be started as a new interpreter."""
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
    """A forked worker as a process of asyncio; it ends when `stdin`, our end of its pipe, is closed."""

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


EngineProcess = asyncio.subprocess.Process | ForkedEngine


class EngineClient(Client):
    """Speaks the engine protocol with one engine."""

    async def complete(self, call: ChatCall, *, model: str) -> PieceData:
        reply = await self._generate(call, model)
        piece: PieceData = orjson.loads(await reply.read())
        return piece

    async def stream(self, call: ChatCall, *, model: str) -> "JsonLineStream":
        return JsonLineStream(await self._generate(call, model))

    async def _generate(self, call: ChatCall, model: str) -> ClientReply:
        reply = await self.send("POST", "/generate", body=call.encode_for_engine(model))
        if reply.status != 200:
            raise _explain_refusal(reply.status, await reply.read())
        return reply


class JsonLineStream:
    """A ReplyStream over one JSON line per piece. Lines that arrive together stay together."""

    def __init__(self, reply: ClientReply) -> None:
        self._reply = reply
        self._failure: ApiError | None = None

    async def next_pieces(self) -> list[PieceData] | None:
        if self._failure is None:
            lines: list[bytes] | None = []
            while not lines:
                lines = await self._reply.next_lines()
                if lines is None:
                    return None
            pieces = [orjson.loads(line) for line in lines]
            self._failure = read_failure(pieces[-1])
            if self._failure is None:
                return pieces
            if len(pieces) > 1:
                return pieces[:-1]
        raise self._failure

    def close(self) -> None:
        self._reply.close()


class EngineSupervisor:
    """A ServingEngine in a child process. Call `start`, use it while `state` is "ready", then call `stop`."""

    def __init__(
        self,
        job: EngineJob,
        *,
        module: str = ENGINE_MODULES["embedded"],
        first_pause: float = 0.25,
        longest_pause: float = 30.0,
        probe: FailoverSettings = FailoverSettings(),  # noqa: B008
        name: str = "engine",
        on_change: Callable[[EngineState], None] = lambda _state: None,
    ) -> None:
        self._module, self._name = module, name
        self._folder = Path(job.folder)
        self._pauses = (first_pause, longest_pause)
        self._probe = probe
        self.on_change = on_change
        # Not in the folder of the job: the path of a unix socket is limited to about 100 characters.
        self._socket_folder = tempfile.TemporaryDirectory(prefix="graft-")
        socket = job.socket or str(Path(self._socket_folder.name) / "engine.sock")
        self.job = job.model_copy(update={"socket": socket})
        self.client: EngineClient | None = None
        self._process: EngineProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._silence: GraftError | None = None
        """Why it was killed, where it gave no answer after its start."""
        self.state: EngineState = "starting"
        self.reason = "it is loading the model"
        self.restarts = 0
        self.models: list[str] = []

    def describe(self) -> EngineStatus:
        pid = self._process.pid if self._process is not None and self.state == "ready" else None
        return {"state": self.state, "reason": self.reason, "restarts": self.restarts, "pid": pid}

    async def complete(self, call: ChatCall, *, model: str) -> PieceData:
        return await self._require_client().complete(call, model=model)

    async def stream(self, call: ChatCall, *, model: str) -> JsonLineStream:
        return await self._require_client().stream(call, model=model)

    def _require_client(self) -> EngineClient:
        if self.client is None:
            raise ConnectionError("the engine is not ready")
        return self.client

    async def start(self) -> None:
        """Start the engine and wait until it answers. If it exits first, raise the error that it reported."""
        self._starting = asyncio.get_running_loop().create_task(self._launch_until_ready())
        await self._starting
        self.keep_trying()

    async def _launch_until_ready(self) -> None:
        """Start the process; poll it until it answers or has ended, and kill it when its time is over."""
        self._silence = None
        self._set_state("starting", "it is loading the model")
        job_file = self._folder / JOB_FILE
        await asyncio.to_thread(write_atomic, job_file, self.job.to_json())
        Path(str(self.job.socket)).unlink(missing_ok=True)
        log_file = self._folder / LOG_FILE
        self._process = process = await start_engine(self._module, job_file, log=log_file)
        client, seconds = EngineClient(path=self.job.socket), self._probe.start_seconds
        try:
            async with asyncio.timeout(seconds):
                body = await self._poll_state(client, process)
        except TimeoutError:
            process.kill()
            await process.wait()
            self._silence = WorkerFailed(
                f"the engine did not answer within {seconds:g} s of its start",
                why=_last_line(log_file),
                fix="see its log; `serve.failover.start_seconds` gives a large model more time",
                where=str(log_file),
            )
            raise self._silence from None
        self.models = orjson.loads(body)["models"]
        self.client = client
        self._set_state("ready", "")

    def keep_trying(self) -> None:
        """Restart it from now on, whether its first start has succeeded or failed, unless it was stopped."""
        if self.state != "stopped":
            self._watch = asyncio.get_running_loop().create_task(self._keep_running())

    @property
    def adapters(self) -> dict[str, str]:
        return self.job.adapters

    def expect_adapter(self, name: str, folder: str) -> None:
        """Load the adapter at the next start."""
        self.job = self.job.model_copy(update={"adapters": {**self.job.adapters, name: folder}})

    def abort_running(self) -> None:
        """Break the connections of all requests that wait for the engine."""
        if self.client is not None:
            self.client.abort()

    async def load_adapter(self, name: str, folder: str, *, keep: Collection[str] = ()) -> None:
        """Load the adapter now, and after every restart."""
        if self.client is None:
            raise WorkerFailed("the engine is not ready", why=self.reason, fix="wait for it")
        body = LoadAdapter(name=name, folder=folder, keep=tuple(sorted(keep))).to_json().encode()
        status, answer = await self.client.fetch("POST", "/adapters", body=body, seconds=_LOAD_SECONDS)
        if status != 200:
            message = orjson.loads(answer)["error"]["message"]
            raise WorkerFailed(
                f"the release {name} could not be loaded",
                why=message,
                fix="check it with `graft release show`",
                where=folder,
            )
        self.models = orjson.loads(answer)["models"]
        loaded = {**self.job.adapters, name: folder}
        adapters = {release: path for release, path in loaded.items() if release in self.models}
        self.job = self.job.model_copy(update={"adapters": adapters})

    async def stop(self, *, seconds: float = 10.0) -> None:
        """Terminate the engine, and kill it if it does not end in time."""
        stopping = asyncio.get_running_loop().create_task(self._stop(seconds))
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await stopping  # otherwise nobody would wait for the process, or kill it
            raise

    async def _stop(self, seconds: float) -> None:
        self._set_state("stopped", "the server stops")  # first: nobody keeps trying from now on
        for task in (self._starting, self._watch):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._process is not None:
            await _end(self._process, seconds)
        self._socket_folder.cleanup()

    async def _poll_state(self, client: EngineClient, process: EngineProcess) -> bytes:
        while True:
            try:
                status, body = await client.fetch("GET", "/state")
                if status == 200:
                    return body
            except OSError:
                if process.returncode is not None:
                    raise self._explain_end(process.returncode) from None
            await asyncio.sleep(_ASK_EVERY_SECONDS)

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
            self._set_state("down", (self._silence or self._explain_end(code)).what)
            log.warning("%s: %s; starting it again in %.2f s", self._name, self.reason, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
            self.restarts += 1
            try:
                await self._launch_until_ready()
            except (GraftError, OSError) as error:
                # It failed again, or no process could be started; the loop continues.
                log.warning("%s: %s", self._name, error)

    async def _kill_if_frozen(self, process: EngineProcess) -> None:
        """Poll the engine; kill it if it stays silent."""
        clock = asyncio.get_running_loop().time
        probe = Client(path=self.job.socket, keep=0)
        answered = clock()
        while True:
            await asyncio.sleep(self._probe.probe_seconds)
            try:
                _, body = await probe.fetch("GET", "/state", seconds=self._probe.frozen_seconds)
            except OSError:
                silent = clock() - answered
                # An engine that is killed was frozen before, also where a busy machine looks this late.
                if silent >= self._probe.frozen_seconds and self.state == "ready":
                    log.warning("%s: no answer for %.0f s", self._name, silent)
                    self._set_state("frozen", f"it has not answered for {silent:.0f} s")
                if silent >= self._probe.restart_seconds:
                    log.warning("%s: no answer for %.0f s, killing it", self._name, silent)
                    process.kill()
                    return
            else:
                answered = clock()
                # Why the server behind the engine does not answer, where it is one.
                unreachable = orjson.loads(body).get("unreachable", "")
                if unreachable and self.state == "ready":
                    log.warning("%s: %s", self._name, unreachable)
                    self._set_state("unreachable", unreachable)
                elif not unreachable and self.state in ("frozen", "unreachable"):
                    self.client = EngineClient(path=self.job.socket)
                    self._set_state("ready", "")

    def _set_state(self, state: EngineState, reason: str) -> None:
        self.state, self.reason = state, reason
        self.on_change(state)
        if state != "ready" and self.client is not None:
            self.client.close()
            self.client = None

    def _explain_end(self, code: int) -> GraftError:
        """The error that the engine reported, or else its last line of output."""
        log_file = self._folder / LOG_FILE
        error_file = self._folder / ERROR_FILE
        last = error_file.read_text() if error_file.exists() else _last_line(log_file)
        try:
            reported = json.loads(last)
            kind = _REPORTED_AS.get(reported["error"], WorkerFailed)
            where = reported["where"] or str(log_file)
            return kind(reported["what"], why=reported["why"], fix=reported["fix"], where=where)
        except (ValueError, TypeError, KeyError):
            cause = f"signal {-code}" if code < 0 else f"exit code {code}"
            what = f"the engine ended with {cause}"
            return WorkerFailed(what, why=last, fix="see its log", where=str(log_file))


async def _end(process: EngineProcess, seconds: float) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        log.warning("engine: it did not stop within %.0f s, killing it", seconds)
        process.kill()
        await process.wait()


def _last_line(path: Path) -> str:
    lines = path.read_bytes()[-4000:].decode(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else ""


def _explain_refusal(status: int, body: bytes) -> ApiError:
    try:
        error = orjson.loads(body)["error"]
        headers = RETRY if status in (429, 503) else ()
        return ApiError(status, error["message"], param=error["param"], code=error["code"], headers=headers)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ApiError(502, f"the engine answered with status {status} and no reason", code="engine_error")
