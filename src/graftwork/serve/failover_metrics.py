"""Replicas, retries and fallbacks as Prometheus text, from the status of the engine and counts."""

from collections import Counter
from collections.abc import Iterable

from graftwork.serve.engine_protocol import EngineStatus

FallbackCounts = Counter[tuple[str, str, str]]
"""Requests by the model that was asked for, the release that answered, and why."""


def render_failover(status: EngineStatus, fallbacks: FallbackCounts) -> str:
    lines: list[str] = []
    replicas = status.get("replicas", [])
    names = [f'replica="{replica["name"]}"' for replica in replicas]
    lines += _render("graft_replica_up", zip(names, (r["state"] == "ready" for r in replicas), strict=True))
    lines += _render(
        "graft_replica_circuit_open", zip(names, (r["circuit"] != "closed" for r in replicas), strict=True)
    )
    lines += _render("graft_replica_in_flight", zip(names, (r["outstanding"] for r in replicas), strict=True))
    lines += _render(
        "graft_replica_failures_total", zip(names, (r["failures"] for r in replicas), strict=True)
    )
    lines += _render("graft_retries_total", [("", status.get("retries", 0))])
    lines += _render("graft_retries_refused_total", [("", status.get("retries_refused", 0))])
    lines += _render("graft_hedges_total", [("", status.get("hedges", 0))])
    found = sorted(fallbacks.items())
    labels = [
        f'model="{_escape(model)}",to="{_escape(to)}",why="{_escape(why)}"' for (model, to, why), _ in found
    ]
    lines += _render("graft_fallbacks_total", zip(labels, (count for _, count in found), strict=True))
    return "".join(f"{line}\n" for line in lines)


def _render(name: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"{name}{{{labels}}} {value:g}" if labels else f"{name} {value:g}" for labels, value in samples]
    return [f"# TYPE {name} {kind}", *lines] if lines else []


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
