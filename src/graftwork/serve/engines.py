"""The engines of an endpoint, from its settings: a pool of replicas, and one pool for each remote API.

Other settings can be applied while requests run: new engines start, and those that are not wanted any more
end with their last answer.
"""

import asyncio
from pathlib import Path

from graftwork.engines.protocol import ENGINE_MODULES, EngineJob
from graftwork.engines.settings import EngineSettings
from graftwork.files.disk import make_folder
from graftwork.process.pool import count_cores
from graftwork.serve.replica_pool import Replica, ReplicaPool
from graftwork.serve.settings import FallbackEndpoint, ServeSettings
from graftwork.serve.supervisor import EngineSupervisor


class EngineSet:
    """`pool` answers, `endpoints` are the remote APIs of fallback chains by name."""

    def __init__(self, job: EngineJob, settings: ServeSettings, *, module: str | None = None) -> None:
        self._job, self._settings = job, settings
        self._module = module or ENGINE_MODULES[settings.engine.kind]
        self._engines: dict[str, EngineSettings] = {}
        """The settings of each replica by its name."""
        replicas = [self._open(engine, weight) for engine, weight in settings.engine.split_replicas()]
        self.pool = ReplicaPool(replicas, settings.failover, burst=settings.queue_limit)
        self.endpoints: dict[str, ReplicaPool] = {}
        self._opened: dict[str, FallbackEndpoint] = {}
        self._retired: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start all engines; returns when the first replica answers. Raises if no replica starts."""
        self._revise_endpoints()
        await self.pool.start()

    async def stop(self) -> None:
        for task in self._retired:
            task.cancel()
        pools = [self.pool, *self.endpoints.values()]
        await asyncio.gather(*(pool.stop() for pool in pools))
        await asyncio.gather(*self._retired, return_exceptions=True)

    def revise(self, settings: ServeSettings) -> None:
        """Use other settings from now on. Of the engine itself only the replicas may differ."""
        self._settings = settings
        self.pool.revise(settings.failover, burst=settings.queue_limit)
        for pool in self.endpoints.values():
            pool.revise(settings.failover, burst=settings.queue_limit)
        unused = sorted(self.pool.replicas, key=lambda r: (r.engine.state != "ready", r.retiring))
        for engine, weight in self._settings.engine.split_replicas():
            kept = next((r for r in unused if self._engines[r.name] == engine), None)
            if kept is None:
                self.pool.add(self._open(engine, weight))
            else:
                unused.remove(kept)
                kept.weight, kept.retiring = weight, False
        for replica in unused:
            if not replica.retiring:
                self.pool.retire(replica, seconds=self._settings.drain_seconds, on_end=self._engines.pop)
        self._revise_endpoints()

    def _revise_endpoints(self) -> None:
        wanted = self._settings.failover.endpoints
        for name in [name for name, endpoint in self._opened.items() if wanted.get(name) != endpoint]:
            del self._opened[name]
            task = asyncio.create_task(self.endpoints.pop(name).close(self._settings.drain_seconds))
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)
        for name, endpoint in wanted.items():
            if name not in self._opened:
                self._opened[name] = endpoint
                self.endpoints[name] = self._open_endpoint(name, endpoint)
                self.endpoints[name].start_in_background()

    def _open(self, engine: EngineSettings, weight: float) -> Replica:
        """One more replica. The first one uses the folder of the job, the others a folder below it."""
        number = next(n for n in range(1, len(self._engines) + 2) if str(n) not in self._engines)
        self._engines[str(number)] = engine
        job = self._apply_limits(len(self._settings.engine.split_replicas()))
        changes: dict[str, object] = {"engine": engine}
        if number > 1:
            changes |= {"folder": str(Path(job.folder) / f"replica-{number}"), "socket": None}
        shown = "engine" if number == 1 else f"engine, replica {number}"
        return self._make_replica(
            str(number), job.model_copy(update=changes), self._module, weight, shown=shown
        )

    def _open_endpoint(self, name: str, endpoint: FallbackEndpoint) -> ReplicaPool:
        engine = EngineSettings(
            kind="endpoint", url=endpoint.url, model=endpoint.model, api_key_env=endpoint.api_key_env
        )
        job = self._apply_limits(1)
        folder = str(Path(job.folder) / f"endpoint-{name}")
        changes = {"engine": engine, "folder": folder, "socket": None, "adapters": {}}
        replica = self._make_replica(
            name, job.model_copy(update=changes), ENGINE_MODULES["endpoint"], 1.0, shown=f"endpoint {name}"
        )
        return ReplicaPool([replica], self._settings.failover, burst=self._settings.queue_limit)

    def _make_replica(self, name: str, job: EngineJob, module: str, weight: float, *, shown: str) -> Replica:
        """`shown` is its name in logs."""
        make_folder(Path(job.folder))
        failover = self._settings.failover
        engine = EngineSupervisor(job, module=module, probe=failover, name=shown)
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
