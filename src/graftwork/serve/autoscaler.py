"""Starts and stops replicas by load, and counts what idle ones cost.

In: the engines of an endpoint and the settings. Out: more or fewer replicas. Servers elsewhere are started
and stopped by the project's own command. `ScaleRule` decides how many
run; it is pure.
"""

import asyncio
import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from graftwork.records.units import GIB
from graftwork.serve.failover.settings import AutoscaleSettings
from graftwork.serve.replica_pool import ReplicaPool

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
RETRY_SECONDS = 30.0
"""How long a command that failed is not run again."""
_HOUR = 3600.0


class ScalableEngines(Protocol):
    pool: ReplicaPool
    on_retired: Callable[[str], None]
    """Gets the URL of a server when the replica that used it has ended."""

    @property
    def scale(self) -> int: ...

    @property
    def urls(self) -> list[str]:
        """The servers that may be used, in their order; empty where processes are started here."""
        ...

    def scale_to(self, replicas: int) -> None: ...


class Autoscaler:
    """Call `start` before the engines start, run `follow` while the endpoint serves, then call `close`."""

    def __init__(self, settings: AutoscaleSettings, *, engines: ScalableEngines) -> None:
        self._settings, self._engines = settings, engines
        self._rule = ScaleRule(settings)
        self._seen: float | None = None
        self._failed_at = float("-inf")
        self._servers: set[str] = set()
        """Servers that the command has started, or is starting."""
        self._starting: set[str] = set()
        self._stops: set[asyncio.Task[None]] = set()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One command at a time for each server."""
        engines.on_retired = self._stop_later
        self.started = 0
        self.stopped = 0
        self.replica_seconds = 0.0
        self.idle_seconds = 0.0
        """Seconds of replicas that were ready and had nothing to do."""

    async def start(self) -> None:
        """Start the servers that the first replicas use. An engine that finds none reports it by itself."""
        await asyncio.gather(*map(self._start_server, self._engines.urls[: self._engines.scale]))
        self._starting.clear()

    async def close(self) -> None:
        """Stop the servers that were started. Call it when nothing uses them any more."""
        await asyncio.gather(*self._stops)
        await asyncio.gather(*(self._run_command("stop", url) for url in sorted(self._servers)))
        self._servers.clear()

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                await self.step(time.monotonic())
            except Exception:
                log.exception("autoscale: it failed; the replicas stay as they are")

    async def step(self, now: float) -> None:
        """Count the time since the last step, and change the number of replicas if the load asks for it."""
        self._count(now)
        before = self._engines.scale
        under_way = sum(replica.outstanding for replica in self._engines.pool.replicas)
        wanted = self._rule.decide(replicas=before, under_way=under_way, now=now)
        if wanted > before:
            await self._start(before, wanted, now, under_way)
        elif wanted < before:
            self._engines.scale_to(wanted)
            self.stopped += before - wanted
            log.info("autoscale: %d replicas instead of %d: %d requests under way", wanted, before, under_way)

    async def _start(self, before: int, wanted: int, now: float, under_way: int) -> None:
        if now - self._failed_at < RETRY_SECONDS:
            return
        reached = before
        for url in self._engines.urls[before:wanted]:
            if not await self._start_server(url):
                self._failed_at = now
                break
            reached += 1
        else:
            reached = wanted
        if reached > before:
            self.started += reached - before
            log.info("autoscale: %d replicas: %d requests under way", reached, under_way)
            self._engines.scale_to(reached)
        self._starting.clear()

    async def _start_server(self, url: str) -> bool:
        self._starting.add(url)
        async with self._locks[url]:
            self._servers.add(url)
            started = await self._run_command("start", url)
            if not started:
                self._servers.discard(url)
            return started

    def _stop_later(self, url: str) -> None:
        task = asyncio.create_task(self._stop_server(url))
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def _stop_server(self, url: str) -> None:
        """Stop a server whose replica has ended, unless a new replica uses it."""
        async with self._locks[url]:
            used = {*self._engines.urls[: self._engines.scale], *self._starting}
            if url in self._servers and url not in used:
                await self._run_command("stop", url)
                self._servers.discard(url)

    def _count(self, now: float) -> None:
        passed = 0.0 if self._seen is None else now - self._seen
        self._seen = now
        for replica in self._engines.pool.replicas:
            if replica.engine.state == "ready":
                self.replica_seconds += passed
                self.idle_seconds += passed * (replica.outstanding == 0)

    async def _run_command(self, verb: str, url: str) -> bool:
        """Whether the command succeeded; True where there is none."""
        if not self._settings.command:
            return True
        try:
            process = await asyncio.create_subprocess_exec(
                *self._settings.command, verb, url, stdin=asyncio.subprocess.DEVNULL
            )
        except OSError as error:
            log.warning("autoscale: %s cannot be run: %s", self._settings.command[0], error)
            return False
        try:
            async with asyncio.timeout(self._settings.command_seconds):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            code = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            raise
        if code:
            log.error("autoscale: `%s %s %s` ended with %d", self._settings.command[0], verb, url, code)
        return code == 0

    def describe(self) -> dict[str, Any]:
        """For /health: how many run, and what idle ones cost so far."""
        idle = [r for r in self._engines.pool.replicas if r.engine.state == "ready" and r.outstanding == 0]
        hourly = self._settings.usd_per_hour
        return {
            "replicas": self._engines.scale,
            "min": self._settings.min,
            "max": self._settings.max,
            "started": self.started,
            "stopped": self.stopped,
            "replica_seconds": round(self.replica_seconds, 1),
            "idle_seconds": round(self.idle_seconds, 1),
            "idle_now": len(idle),
            "idle_memory_gib": _memory_gib([r.engine.describe()["pid"] for r in idle]),
            "idle_usd": None if hourly is None else round(self.idle_seconds / _HOUR * hourly, 6),
        }

    def gauges(self) -> dict[str, float]:
        return {
            "graft_replicas_wanted": float(self._engines.scale),
            "graft_replica_seconds_total": self.replica_seconds,
            "graft_replica_idle_seconds_total": self.idle_seconds,
        }


def _memory_gib(pids: list[int | None]) -> float | None:
    """Resident memory of these processes; None where the system does not say."""
    total = 0
    for pid in pids:
        try:
            found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        except OSError:
            return None
        total += 0 if found is None else int(found[1]) * 1024
    return round(total / GIB, 3)


@dataclass(slots=True)
class ScaleRule:
    """Starts what is needed after `up_seconds`, stops one replica after `idle_seconds`."""

    settings: AutoscaleSettings
    _busy_since: float | None = None
    _idle_since: float | None = None

    def decide(self, *, replicas: int, under_way: int, now: float) -> int:
        """How many replicas there should be from now on."""
        settings = self.settings
        needed = min(max(math.ceil(under_way / settings.queue), settings.min), settings.max)
        self._busy_since = _since(self._busy_since, now, needed > replicas)
        self._idle_since = _since(self._idle_since, now, needed < replicas)
        if self._busy_since is not None and now - self._busy_since >= settings.up_seconds:
            self._busy_since = None
            return needed
        if self._idle_since is not None and now - self._idle_since >= settings.idle_seconds:
            self._idle_since = None
            return replicas - 1
        return min(max(replicas, settings.min), settings.max)


def _since(before: float | None, now: float, holds: bool) -> float | None:
    if not holds:
        return None
    return now if before is None else before
