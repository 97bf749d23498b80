"""Builds the engines of an endpoint from its settings: a pool of replicas, and one for each remote API."""

from pathlib import Path

from graftwork.files.disk import make_folder
from graftwork.process.pool import count_cores
from graftwork.serve.engine_protocol import ENGINE_MODULES, EngineJob
from graftwork.serve.failover.settings import FailoverSettings
from graftwork.serve.replica_pool import Replica, ReplicaPool, breaker_limits
from graftwork.serve.settings import EngineSettings, ServeSettings
from graftwork.serve.supervisor import EngineSupervisor, ProbeTimes


def open_replicas(job: EngineJob, settings: ServeSettings, *, module: str | None = None) -> ReplicaPool:
    """The engine of the settings. Its first replica uses the job's folder, the others a folder below it."""
    chosen = settings.engine.split_replicas()
    job = _apply_limits(job, settings, replicas=len(chosen))
    jobs = []
    for number, (engine, weight) in enumerate(chosen, 1):
        folder = Path(job.folder) if number == 1 else Path(job.folder) / f"replica-{number}"
        socket = job.socket if number == 1 else None
        revised = job.model_copy(update={"engine": engine, "folder": str(folder), "socket": socket})
        jobs.append((revised, weight))
    return _open_pool(jobs, settings, module or ENGINE_MODULES[settings.engine.kind])


def open_endpoints(job: EngineJob, settings: ServeSettings) -> dict[str, ReplicaPool]:
    """The remote APIs of the fallback chains, by name."""
    found = {}
    for name, endpoint in settings.failover.endpoints.items():
        engine = EngineSettings(
            kind="endpoint", url=endpoint.url, model=endpoint.model, key_env=endpoint.key_env
        )
        folder = str(Path(job.folder) / f"endpoint-{name}")
        changes = {"engine": engine, "folder": folder, "socket": None, "adapters": {}}
        remote = _apply_limits(job, settings, replicas=1).model_copy(update=changes)
        found[name] = _open_pool([(remote, 1.0)], settings, ENGINE_MODULES["endpoint"])
    return found


def _open_pool(jobs: list[tuple[EngineJob, float]], settings: ServeSettings, module: str) -> ReplicaPool:
    replicas = []
    for number, (job, weight) in enumerate(jobs, 1):
        make_folder(Path(job.folder))
        engine = EngineSupervisor(job, module=module, probe=_probe_times(settings.failover))
        replicas.append(Replica(str(number), engine, weight=weight, limits=breaker_limits(settings.failover)))
    return ReplicaPool(replicas, settings.failover, burst=settings.queue_limit)


def _probe_times(settings: FailoverSettings) -> ProbeTimes:
    return ProbeTimes(settings.probe_seconds, settings.frozen_seconds, settings.restart_seconds)


def _apply_limits(job: EngineJob, settings: ServeSettings, *, replicas: int) -> EngineJob:
    threads = settings.threads
    if threads is None and replicas > 1:
        threads = max(1, count_cores() // replicas)
    return job.model_copy(
        update={
            "batch_size": settings.batch_size,
            "batch_wait_ms": settings.batch_wait_ms,
            "queue_limit": settings.queue_limit,
            "threads": threads,
        }
    )
