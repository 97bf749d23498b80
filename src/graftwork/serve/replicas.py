"""The engines of an endpoint, from its settings: several replicas as one ServingEngine, and remote APIs.

Chooses the least loaded replica for each request, asks another one if it fails before its first byte, and
keeps away from those that fail. A budget limits retries. A replica that restarts gets the adapters that were
loaded meanwhile. Other settings can be applied while requests run: new engines start, and those that are not
wanted any more end with their last answer.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from graftwork.engines.protocol import ENGINE_MODULES, EngineJob, PieceData
from graftwork.engines.settings import EngineSettings
from graftwork.files.disk import make_folder
from graftwork.http.messages import ApiError
from graftwork.process.machine import count_cores
from graftwork.records.errors import GraftError, UserError, WorkerFailed
from graftwork.serve.api.call import ChatCall
from graftwork.serve.engine_interface import (
    OUT_OF_TIME,
    CircuitState,
    EngineState,
    EngineStatus,
    NoReplica,
    ReplicaStatus,
    ReplyStream,
    failure_code,
)
from graftwork.serve.settings import FailoverSettings, FallbackEndpoint, ServeSettings
from graftwork.serve.supervisor import EngineSupervisor

log = logging.getLogger(__name__)

T = TypeVar("T")
Attempt = Callable[["Replica", ChatCall, str], Awaitable[T]]

_LONGEST_PAUSE = 30.0
"""Seconds for which a replica that keeps failing is left alone at most."""
_PAUSE_SECONDS = 0.1
"""About how long to wait before a replica that just failed is asked again because there is no other."""
_IDLE_SECONDS = 0.05
"""How often a replica that is to end is asked whether it is idle."""
_STATES: tuple[EngineState, ...] = ("ready", "frozen", "unreachable", "starting", "down", "stopped")


def is_replica_fault(error: BaseException) -> bool:
    """Whether it counts against the replica. Being full does not."""
    if isinstance(error, ApiError):
        return error.status >= 500 and error.code != OUT_OF_TIME
    return isinstance(error, OSError)


class CircuitBreaker:
    """Outcomes of requests in, whether a replica may be asked out.

    Closed, all requests pass. `most` failures in a row open it: none pass for a pause. Then it is half open:
    one request tries. If that succeeds, the circuit closes; if not, the pause doubles. Call `begin` when a
    request starts, and give what it returns to one of the others when it ends.
    """

    def __init__(self, most: int, pause: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.first_pause = most, pause
        self._clock = clock
        self._failures = 0
        self._closed = True
        self._trying = False
        self._until = 0.0
        self._pause = pause
        self._period = 0
        """Counts the changes of state. What was begun in an earlier period says nothing about this one."""

    @property
    def state(self) -> CircuitState:
        if self._closed:
            return "closed"
        return "half_open" if self._trying or self._clock() >= self._until else "open"

    def allows(self) -> bool:
        return self._closed or (not self._trying and self._clock() >= self._until)

    def begin(self) -> int:
        """A request starts; on an open circuit it is the trial request."""
        if not self._closed:
            self._trying = True
            self._period += 1
        return self._period

    def succeed(self, period: int) -> None:
        if period != self._period:
            return
        self._failures = 0
        if not self._closed:
            self.reset()

    def fail(self, period: int) -> None:
        if period != self._period:
            return
        self._failures += 1
        if self._trying or self._failures >= self.most:
            self._open()

    def abandon(self, period: int) -> None:
        """The request ended without a verdict about the replica: its client disconnected."""
        if period == self._period and self._trying:
            self._trying = False
            self._period += 1

    def reset(self) -> None:
        """Close it: the replica answered, or it is a new process."""
        self._closed, self._trying = True, False
        self._failures = 0
        self._pause = self.first_pause
        self._period += 1

    def _open(self) -> None:
        self._closed = self._trying = False
        self._failures = 0
        self._until = self._clock() + self._pause
        self._pause = min(2 * self._pause, max(_LONGEST_PAUSE, self.first_pause))
        self._period += 1


DRAIN_SECONDS = 20.0
"""Time for running answers to finish when a server or a replica is stopped."""
RETRY_SHARE = 0.2
"""Retries per request, beyond the burst."""


class RetryBudget:
    """Retries are at most a burst plus a share of the requests, so that they cannot multiply an outage."""

    def __init__(self, *, burst: int) -> None:
        self.burst = burst
        self._balance = float(burst)
        self.spent = 0
        self.refused = 0

    def deposit(self) -> None:
        """A request arrived."""
        if self._balance < self.burst:
            self._balance = min(self._balance + RETRY_SHARE, float(self.burst))

    def withdraw(self) -> bool:
        """Whether one more retry may be sent; if so, it is counted."""
        if self._balance < 1:
            self.refused += 1
            return False
        self._balance -= 1
        self.spent += 1
        return True

    def revise(self, *, burst: int) -> None:
        self.burst = burst
        self._balance = min(self._balance, float(burst))


class Replica:
    """One engine that the pool starts and stops, its load and its circuit breaker."""

    def __init__(
        self, name: str, engine: EngineSupervisor, *, weight: float, settings: FailoverSettings
    ) -> None:
        self.name, self.engine, self.weight = name, engine, weight
        self.breaker = CircuitBreaker(settings.breaker_failures, settings.breaker_seconds)
        self.outstanding = 0
        self.assigned = 0
        self.failures = 0
        self.retiring = False
        """It answers only until another one can, then it ends."""

    def load(self) -> tuple[float, float]:
        """Running requests, then requests so far as a tie-breaker, which makes shares follow the weights."""
        return self.outstanding / self.weight, self.assigned / self.weight

    def begin(self) -> int:
        self.outstanding += 1
        self.assigned += 1
        return self.breaker.begin()

    def end(self, permit: int, error: BaseException | None = None) -> None:
        """A request has ended. One that was cancelled says nothing about the replica."""
        self.outstanding -= 1
        if error is None or (isinstance(error, ApiError) and not is_replica_fault(error)):
            self.breaker.succeed(permit)
        elif is_replica_fault(error):
            self.failures += 1
            self.breaker.fail(permit)
        else:
            self.breaker.abandon(permit)

    def describe(self) -> ReplicaStatus:
        status = self.engine.describe()
        return {
            "name": self.name,
            "state": status["state"],
            "reason": status["reason"],
            "restarts": status["restarts"],
            "pid": status["pid"],
            "circuit": self.breaker.state,
            "outstanding": self.outstanding,
            "requests": self.assigned,
            "failures": self.failures,
        }


class ReplicaPool:
    """Call `start`, use it as an engine, then call `stop`."""

    def __init__(self, replicas: Sequence[Replica], settings: FailoverSettings, *, burst: int = 128) -> None:
        self.replicas = list(replicas)
        self.budget = RetryBudget(burst=burst)
        self._settings = settings
        self._folders: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        for replica in self.replicas:
            self._watch(replica)

    def revise(self, settings: FailoverSettings, *, burst: int) -> None:
        """Use other settings from the next request on."""
        self._settings = settings
        self.budget.revise(burst=burst)
        for replica in self.replicas:
            replica.breaker.most, replica.breaker.first_pause = (
                settings.breaker_failures,
                settings.breaker_seconds,
            )

    # -- state ---------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        for replica in self.replicas:
            if replica.engine.state == "ready":
                return "ready"
        states = {replica.engine.state for replica in self.replicas}
        return next(state for state in _STATES if state in states)

    @property
    def models(self) -> list[str]:
        if len(self.replicas) == 1:
            return self.replicas[0].engine.models
        return list(dict.fromkeys(model for replica in self.replicas for model in replica.engine.models))

    def describe(self) -> EngineStatus:
        statuses = [replica.describe() for replica in self.replicas]
        state = self.state
        first = next(status for status in statuses if status["state"] == state)
        return {
            "state": state,
            "reason": first["reason"],
            "restarts": sum(status["restarts"] for status in statuses),
            "pid": first["pid"],
            "replicas": statuses,
            "retries": self.budget.spent,
            "retries_refused": self.budget.refused,
        }

    def _note_state(self, replica: Replica, state: EngineState) -> None:
        """A replica has changed its state."""
        if state == "ready":
            replica.breaker.reset()
            for peer in self.replicas:  # a new one must not get all requests until it has caught up
                peer.assigned = 0
            missing = {n: f for n, f in self._folders.items() if n not in replica.engine.models}
            if missing:
                self._run(self._catch_up(replica, missing))
        elif state in ("frozen", "unreachable"):
            peer_states = (peer.engine.state for peer in self.replicas if peer is not replica)
            if self._settings.fallback or "ready" in peer_states:
                # Requests that wait for it may be answered elsewhere.
                replica.engine.abort_running()

    # -- start and stop ------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all replicas; returns when one of them answers. Raises if all fail."""
        starting = {asyncio.create_task(replica.engine.start()): replica for replica in self.replicas}
        waiting = set(starting)
        try:
            while waiting and not any(_has_succeeded(task) for task in starting):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            raise
        if not any(_has_succeeded(task) for task in starting):
            next(iter(starting)).result()
        for task, replica in starting.items():
            if not _has_succeeded(task):
                self._run(self._start_later(task, replica))

    def start_in_background(self) -> None:
        """Start it without waiting; until it answers, its state is not `ready`."""
        for replica in self.replicas:
            self._run(self._start_later(asyncio.create_task(replica.engine.start()), replica))

    def add(self, replica: Replica) -> None:
        """One more replica, with the adapters that the others hold; it gets requests once it is ready."""
        for name, folder in self.replicas[0].engine.adapters.items():
            replica.engine.expect_adapter(name, folder)
        self._watch(replica)
        self.replicas.append(replica)
        self._run(self._start_later(asyncio.create_task(replica.engine.start()), replica))

    def retire(self, replica: Replica, *, seconds: float, on_end: Callable[[str], object]) -> None:
        """Once another replica answers, end it with its last answer, at the latest after `seconds`; then
        `on_end` gets its name.

        Until it leaves the pool, setting `retiring` to False keeps it.
        """
        replica.retiring = True
        self._run(self._retire(replica, seconds, on_end))

    async def _retire(self, replica: Replica, seconds: float, on_end: Callable[[str], object]) -> None:
        while replica.engine.state == "ready" and not self._has_successor(replica):
            await asyncio.sleep(_IDLE_SECONDS)
            if not replica.retiring or replica not in self.replicas:
                return
        self.replicas.remove(replica)
        try:
            await _wait_idle(replica, seconds)
        finally:
            await replica.engine.stop()
            on_end(replica.name)

    def _has_successor(self, replica: Replica) -> bool:
        """Whether a replica that stays is ready and holds the adapters that were loaded meanwhile."""
        needed = set(self._folders).intersection(replica.engine.models)
        return any(
            not peer.retiring and peer.engine.state == "ready" and needed.issubset(peer.engine.models)
            for peer in self.replicas
        )

    async def close(self, seconds: float) -> None:
        """Stop when the running requests have ended, at the latest after `seconds`."""
        try:
            await asyncio.gather(*(_wait_idle(replica, seconds) for replica in self.replicas))
        finally:
            await self.stop()

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await asyncio.gather(*(replica.engine.stop() for replica in self.replicas))

    async def _start_later(self, starting: "asyncio.Task[None]", replica: Replica) -> None:
        try:
            await starting
        except (GraftError, OSError) as error:
            log.warning("replica %s did not start: %s", replica.name, error)
            replica.engine.keep_trying()
        finally:
            starting.cancel()

    def _watch(self, replica: Replica) -> None:
        replica.engine.on_change = partial(self._note_state, replica)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- adapters ------------------------------------------------------------------------------

    async def load_adapter(self, name: str, folder: str, *, keep: Collection[str] = ()) -> None:
        """Load it in every running replica; the others load it when they start. One success is enough."""
        self._folders = {n: f for n, f in self._folders.items() if n in keep} | {name: folder}
        ready = [replica for replica in self.replicas if replica.engine.state == "ready"]
        for replica in self.replicas:
            if replica not in ready:
                replica.engine.expect_adapter(name, folder)
        if not ready:
            raise WorkerFailed("the engine is not ready", why=self.describe()["reason"], fix="wait for it")
        loads = [replica.engine.load_adapter(name, folder, keep=keep) for replica in ready]
        results = await asyncio.gather(*loads, return_exceptions=True)
        errors = [error for error in results if error is not None]
        for replica, error in zip(ready, results, strict=True):
            if isinstance(error, GraftError | OSError):
                log.warning("replica %s could not load %s: %s", replica.name, name, error)
        if len(errors) == len(ready):
            raise errors[0]

    async def _catch_up(self, replica: Replica, missing: dict[str, str]) -> None:
        for name, folder in missing.items():
            try:
                await replica.engine.load_adapter(name, folder, keep=self._folders)
            except (GraftError, OSError) as error:
                log.warning("replica %s could not load %s: %s", replica.name, name, error)

    # -- requests ------------------------------------------------------------------------------

    async def complete(self, call: ChatCall, *, model: str) -> PieceData:
        if not call.is_copy:
            return await self._ask(call, model, self._complete)
        # A copy is asked once, without the circuit breaker and the budget of retries.
        replica = self._choose(model)
        if replica is None:
            raise NoReplica(self._explain_absence(model))
        replica.outstanding += 1
        try:
            async with asyncio.timeout(self._settings.attempt_timeout_seconds):
                return await replica.engine.complete(call, model=model)
        finally:
            replica.outstanding -= 1

    async def stream(self, call: ChatCall, *, model: str) -> "ReplicaStream":
        return await self._ask(call, model, self._stream)

    async def _ask(self, call: ChatCall, model: str, attempt: Attempt[T]) -> T:
        """Ask one replica, and others if it fails. Raises the last error."""
        self.budget.deposit()
        replica = self._choose(model)
        if replica is None:
            raise NoReplica(self._explain_absence(model))
        tried: list[Replica] = []
        while True:
            try:
                return await attempt(replica, call, model)
            except (OSError, ApiError) as error:
                tried.append(replica)
                successor = await self._choose_again(error, model, tried)
                if successor is None:
                    raise
                replica = successor

    def _choose(self, model: str, tried: Sequence[Replica] = ()) -> Replica | None:
        ready = [
            replica
            for replica in self.replicas
            if replica.engine.state == "ready" and model in replica.engine.models and replica not in tried
        ]
        allowed = [replica for replica in ready if replica.breaker.allows()]
        if not allowed and not self._settings.fallback and not tried:
            allowed = ready  # there is no other answer: asking costs less than refusing
        allowed = [replica for replica in allowed if not replica.retiring] or allowed
        return min(allowed, key=Replica.load) if allowed else None

    async def _choose_again(self, error: Exception, model: str, tried: list[Replica]) -> Replica | None:
        """The replica to ask after a failure; None to give up."""
        if failure_code(error) is None or len(tried) > self._settings.retries:
            return None
        successor = self._choose(model, tried)
        if successor is None and isinstance(error, ApiError) and error.status not in (502, 503):
            # What fails on the request itself would fail again on the same replica.
            return None
        if not self.budget.withdraw():
            return None
        if successor is None:
            await asyncio.sleep(_PAUSE_SECONDS * (0.5 + random.random()))
            successor = self._choose(model)
        return successor

    async def _complete(self, replica: Replica, call: ChatCall, model: str) -> PieceData:
        permit = replica.begin()
        try:
            if self._settings.attempt_timeout_seconds is None:  # the hot path
                piece = await replica.engine.complete(call, model=model)
            else:
                async with asyncio.timeout(self._settings.attempt_timeout_seconds):
                    piece = await replica.engine.complete(call, model=model)
        except BaseException as error:
            replica.end(permit, error)
            raise
        replica.end(permit)
        if len(self.replicas) > 1:
            piece["replica"] = replica.name
        return piece

    async def _stream(self, replica: Replica, call: ChatCall, model: str) -> "ReplicaStream":
        permit = replica.begin()
        try:
            async with asyncio.timeout(self._settings.attempt_timeout_seconds):
                stream = await replica.engine.stream(call, model=model)
        except BaseException as error:
            replica.end(permit, error)
            raise
        return ReplicaStream(stream, replica, permit, is_named=len(self.replicas) > 1)

    def _explain_absence(self, model: str) -> str:
        if self.state == "ready":
            holding = any(model in replica.engine.models for replica in self.replicas)
            return "its replicas failed too often" if holding else f"no replica holds {model}"
        return self.describe()["reason"]


class ReplicaStream:
    """A ReplyStream that counts for its replica until it is closed."""

    def __init__(self, stream: ReplyStream, replica: Replica, permit: int, *, is_named: bool) -> None:
        self._stream, self._replica, self._permit = stream, replica, permit
        self._open = True
        self.replica = replica.name if is_named else None

    async def next_pieces(self) -> list[PieceData] | None:
        try:
            return await self._stream.next_pieces()
        except (OSError, ApiError) as error:
            self._end(error)
            raise

    def close(self) -> None:
        self._stream.close()
        self._end()

    def _end(self, error: BaseException | None = None) -> None:
        if self._open:
            self._open = False
            self._replica.end(self._permit, error)


async def _wait_idle(replica: Replica, seconds: float) -> None:
    until = asyncio.get_running_loop().time() + seconds
    while replica.outstanding and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(_IDLE_SECONDS)


def _has_succeeded(task: "asyncio.Task[None]") -> bool:
    return task.done() and task.exception() is None


class EndpointsOnly:
    """The engine of a server without a model of its own: it is ready when one of the endpoints is."""

    def __init__(self, endpoints: Mapping[str, ReplicaPool]) -> None:
        self._endpoints = endpoints
        self.models: list[str] = []

    @property
    def _best(self) -> ReplicaPool:
        return min(self._endpoints.values(), key=lambda pool: _STATES.index(pool.state))

    @property
    def state(self) -> EngineState:
        return self._best.state

    def describe(self) -> EngineStatus:
        return self._best.describe()

    async def complete(self, call: ChatCall, *, model: str) -> PieceData:
        raise NoReplica(_NO_ENGINE)

    async def stream(self, call: ChatCall, *, model: str) -> ReplyStream:
        raise NoReplica(_NO_ENGINE)

    async def load_adapter(self, name: str, folder: str, *, keep: Collection[str] = ()) -> None:
        raise WorkerFailed(
            f"release {name[:12]} is not served yet",
            why="`graft serve` was started when there was no release, without an engine of its own",
            fix="start `graft serve` again",
        )


_NO_ENGINE = "no model is loaded here: only endpoints answer"


class EngineSet:
    """`pool` answers, `endpoints` are the remote APIs by name. Without a base, only endpoints answer."""

    def __init__(self, job: EngineJob, settings: ServeSettings, *, module: str | None = None) -> None:
        self._job, self._settings = job, settings
        self._module = module or ENGINE_MODULES[settings.engine.kind]
        self._engines: dict[str, EngineSettings] = {}
        """The settings of each replica by its name."""
        self.endpoints: dict[str, ReplicaPool] = {}
        self._own: ReplicaPool | None = None
        if job.base_folder or settings.engine.kind == "endpoint":
            replicas = [self._open(engine, weight) for engine, weight in settings.engine.split_replicas()]
            self._own = ReplicaPool(replicas, settings.failover, burst=settings.queue_limit)
        self.pool: ReplicaPool | EndpointsOnly = self._own or EndpointsOnly(self.endpoints)
        self._opened: dict[str, FallbackEndpoint] = {}
        self._retired: set[asyncio.Task[None]] = set()
        # Before the server listens: what is asked while the engines start may ask for their state.
        self._revise_endpoints()

    @property
    def has_base(self) -> bool:
        return self._own is not None

    async def start(self) -> None:
        """Start all engines; returns when the first replica answers. Raises if no replica starts."""
        first = self._own or next(iter(self.endpoints.values()))
        for pool in self.endpoints.values():
            if pool is not first:
                pool.start_in_background()
        await first.start()

    async def stop(self) -> None:
        for task in self._retired:
            task.cancel()
        pools = [*self.endpoints.values(), *([] if self._own is None else [self._own])]
        await asyncio.gather(*(pool.stop() for pool in pools))
        await asyncio.gather(*self._retired, return_exceptions=True)

    def revise(self, settings: ServeSettings) -> None:
        """Use other settings from now on. Of the engine itself only the replicas may differ."""
        if self._own is None and not settings.failover.endpoints:
            raise UserError(
                "no engine would be left to answer",
                why="this server has no engine of its own, and the settings name no endpoint",
                fix="stop `graft serve` and start it again",
                where="serve.failover.endpoints",
            )
        self._settings = settings
        for pool in self.endpoints.values():
            pool.revise(settings.failover, burst=settings.queue_limit)
        if self._own is not None:
            self._revise_engine(self._own)
        for pool in self._revise_endpoints():
            pool.start_in_background()

    def _revise_engine(self, pool: ReplicaPool) -> None:
        settings = self._settings
        pool.revise(settings.failover, burst=settings.queue_limit)
        unused = sorted(pool.replicas, key=lambda r: (r.engine.state != "ready", r.retiring))
        for engine, weight in self._settings.engine.split_replicas():
            match = next((r for r in unused if self._engines[r.name] == engine), None)
            if match is None:
                pool.add(self._open(engine, weight))
            else:
                unused.remove(match)
                match.weight, match.retiring = weight, False
        for replica in unused:
            if not replica.retiring:
                pool.retire(replica, seconds=DRAIN_SECONDS, on_end=self._engines.pop)

    def _revise_endpoints(self) -> list[ReplicaPool]:
        """Open and close endpoints as the settings say; the new ones are to be started."""
        endpoints, opened = self._settings.failover.endpoints, list[ReplicaPool]()
        for name in [name for name, endpoint in self._opened.items() if endpoints.get(name) != endpoint]:
            del self._opened[name]
            task = asyncio.create_task(self.endpoints.pop(name).close(DRAIN_SECONDS))
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)
        for name, endpoint in endpoints.items():
            if name not in self._opened:
                self._opened[name] = endpoint
                self.endpoints[name] = self._open_endpoint(name, endpoint)
                opened.append(self.endpoints[name])
        return opened

    def _open(self, engine: EngineSettings, weight: float) -> Replica:
        """One more replica. The first one uses the folder of the job, the others a folder below it."""
        number = next(n for n in range(1, len(self._engines) + 2) if str(n) not in self._engines)
        self._engines[str(number)] = engine
        job = self._apply_limits(len(self._settings.engine.split_replicas()))
        changes: dict[str, object] = {"engine": engine}
        if number > 1:
            changes |= {"folder": str(Path(job.folder) / f"replica-{number}"), "socket": None}
        label = "engine" if number == 1 else f"engine, replica {number}"
        return self._make_replica(
            str(number), job.model_copy(update=changes), self._module, weight, label=label
        )

    def _open_endpoint(self, name: str, endpoint: FallbackEndpoint) -> ReplicaPool:
        engine = EngineSettings(
            kind="endpoint", url=endpoint.url, model=endpoint.model, api_key_env=endpoint.api_key_env
        )
        job = self._apply_limits(1)
        folder = str(Path(job.folder) / f"endpoint-{name}")
        changes = {"engine": engine, "folder": folder, "socket": None, "adapters": {}}
        replica = self._make_replica(
            name, job.model_copy(update=changes), ENGINE_MODULES["endpoint"], 1.0, label=f"endpoint {name}"
        )
        return ReplicaPool([replica], self._settings.failover, burst=self._settings.queue_limit)

    def _make_replica(self, name: str, job: EngineJob, module: str, weight: float, *, label: str) -> Replica:
        """`label` is its name in logs."""
        make_folder(Path(job.folder))
        failover = self._settings.failover
        engine = EngineSupervisor(job, module=module, probe=failover, name=label)
        return Replica(name, engine, weight=weight, settings=failover)

    def _apply_limits(self, replicas: int) -> EngineJob:
        settings = self._settings
        threads = settings.threads
        if threads is None and replicas > 1:
            threads = max(1, count_cores() // replicas)
        return self._job.model_copy(
            update={
                "batch_size": settings.batch_size,
                "queue_limit": settings.queue_limit,
                "threads": threads,
                "probe_seconds": settings.failover.probe_seconds,
                "restart_seconds": settings.failover.restart_seconds,
            }
        )
