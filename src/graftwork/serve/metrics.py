"""Counters of the gateway and their Prometheus text. Used from the event loop only, so nothing is locked."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from graftwork.serve.engine_interface import EngineStatus, ReplicaStatus

_SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Histogram:
    """Counts of values up to each bound."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._sum += value
        self._counts[bisect_left(self._bounds, value)] += 1

    def render(self, name: str) -> Iterator[str]:
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.tokens: Counter[tuple[str, str]] = Counter()
        self.assigned: Counter[tuple[str, str]] = Counter()
        """Requests by experiment and arm."""
        self.assigned_failures: Counter[tuple[str, str]] = Counter()
        """Those of them that got no answer."""
        self.routed: Counter[tuple[str, str]] = Counter()
        """Requests to the family by member and by what chose it."""
        self.escalated: Counter[tuple[str, str]] = Counter()
        """Answers that failed a check, by check and by what became of them."""
        self.chained: Counter[tuple[str, str]] = Counter()
        """Requests to chains by chain and by what became of them."""
        self.fell_back: Counter[tuple[str, str, str]] = Counter()
        """Requests by the model that was asked for, the release that answered instead, and why."""
        self.disconnects = 0
        self.in_flight = 0
        self.answer_seconds = Histogram(_SECONDS)
        self.first_token_seconds = Histogram(_SECONDS)
        self.queue_seconds = Histogram(_SECONDS)
        """How long requests waited in the engine, where it says so."""
        self.prompt_tokens = Histogram(_TOKENS)
        self.reply_tokens = Histogram(_TOKENS)

    def count_request(self, model: str, status: int) -> None:
        """`model` must be a known name: clients must not be able to create labels."""
        self.requests[model, status] += 1

    def count_answer(self, model: str, *, prompt_tokens: int, reply_tokens: int, seconds: float) -> None:
        self.tokens[model, "prompt"] += prompt_tokens
        self.tokens[model, "reply"] += reply_tokens
        self.answer_seconds.add(seconds)
        self.prompt_tokens.add(prompt_tokens)
        self.reply_tokens.add(reply_tokens)

    def render(self, gauges: dict[str, float]) -> str:
        lines = render_counts("graft_requests_total", ("model", "status"), self.requests.items())
        lines += render_counts("graft_tokens_total", ("model", "kind"), self.tokens.items())
        for name in (
            "answer_seconds",
            "first_token_seconds",
            "queue_seconds",
            "prompt_tokens",
            "reply_tokens",
        ):
            lines += getattr(self, name).render(f"graft_{name}")
        for name, labels, counts in (
            ("graft_split_requests_total", ("experiment", "arm"), self.assigned),
            ("graft_split_failures_total", ("experiment", "arm"), self.assigned_failures),
            ("graft_routed_total", ("model", "by"), self.routed),
            ("graft_escalations_total", ("check", "outcome"), self.escalated),
            ("graft_chains_total", ("chain", "outcome"), self.chained),
            ("graft_fallbacks_total", ("model", "to", "why"), self.fell_back),
        ):
            if counts:
                lines += render_counts(name, labels, counts.items())
        totals = {"graft_in_flight": self.in_flight, "graft_disconnects_total": self.disconnects}
        for name, value in {**totals, **gauges}.items():
            lines += render_counts(name, (), [((), value)])
        return "\n".join(lines) + "\n"


_OF_REPLICAS: dict[str, Callable[[ReplicaStatus], float]] = {
    "graft_replica_up": lambda replica: replica["state"] == "ready",
    "graft_replica_circuit_open": lambda replica: replica["circuit"] != "closed",
    "graft_replica_in_flight": lambda replica: replica["outstanding"],
    "graft_replica_failures_total": lambda replica: replica["failures"],
}


def render_replicas(status: EngineStatus) -> str:
    lines: list[str] = []
    replicas = status.get("replicas", [])
    for name, read in _OF_REPLICAS.items():
        if replicas:
            lines += render_counts(name, ("replica",), [((r["name"],), read(r)) for r in replicas])
    lines += render_counts("graft_retries_total", (), [((), status.get("retries", 0))])
    lines += render_counts("graft_retries_refused_total", (), [((), status.get("retries_refused", 0))])
    return "".join(f"{line}\n" for line in lines)


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def render_counts(
    name: str, labels: tuple[str, ...], counts: Iterable[tuple[tuple[str | int, ...], float]]
) -> list[str]:
    """Samples of a counter or gauge with their type; a name that ends in `_total` is a counter."""
    lines = [f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"]
    for values, count in sorted(counts):
        pairs = zip(labels, values, strict=True)
        label_text = ",".join(f'{label}="{str(value).translate(_ESCAPES)}"' for label, value in pairs)
        lines.append(f"{name}{{{label_text}}} {count:.15g}" if label_text else f"{name} {count:.15g}")
    return lines
