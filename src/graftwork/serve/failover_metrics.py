"""Replicas, retries and fallbacks as Prometheus text, from the status of the engine and counts."""

from collections import Counter
from collections.abc import Callable

from graftwork.serve.engine_protocol import EngineStatus, ReplicaStatus
from graftwork.serve.metrics import render_counts

FallbackCounts = Counter[tuple[str, str, str]]
"""Requests by the model that was asked for, the release that answered, and why."""


_OF_REPLICAS: dict[str, Callable[[ReplicaStatus], float]] = {
    "graft_replica_up": lambda replica: replica["state"] == "ready",
    "graft_replica_circuit_open": lambda replica: replica["circuit"] != "closed",
    "graft_replica_in_flight": lambda replica: replica["outstanding"],
    "graft_replica_failures_total": lambda replica: replica["failures"],
}


def render_failover(status: EngineStatus, fallbacks: FallbackCounts) -> str:
    lines: list[str] = []
    replicas = status.get("replicas", [])
    for name, read in _OF_REPLICAS.items():
        if replicas:
            lines += render_counts(name, ("replica",), [((r["name"],), read(r)) for r in replicas])
    lines += render_counts("graft_retries_total", (), [((), status.get("retries", 0))])
    lines += render_counts("graft_retries_refused_total", (), [((), status.get("retries_refused", 0))])
    if fallbacks:
        lines += render_counts("graft_fallbacks_total", ("model", "to", "why"), fallbacks.items())
    return "".join(f"{line}\n" for line in lines)
