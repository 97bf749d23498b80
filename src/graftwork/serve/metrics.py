"""Counters of the gateway and their Prometheus text. Used from the event loop only, so nothing is locked."""

from collections import Counter
from dataclasses import dataclass, field

_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(slots=True)
class Metrics:
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    assigned: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests by experiment and arm."""
    assigned_failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Those of them that got no answer."""
    routed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests to the family by member and by what chose it."""
    escalated: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Answers that failed a check, by check and by what became of them."""
    disconnects: int = 0
    in_flight: int = 0
    _slots: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS) + 1))
    _seconds: float = 0.0

    def count_request(self, model: str, status: int) -> None:
        """`model` must be a known name: clients must not be able to create labels."""
        self.requests[model, status] += 1

    def count_answer(self, model: str, *, prompt_tokens: int, reply_tokens: int, seconds: float) -> None:
        self.tokens[model, "prompt"] += prompt_tokens
        self.tokens[model, "reply"] += reply_tokens
        self._seconds += seconds
        bucket = next((i for i, bound in enumerate(_BUCKETS) if seconds <= bound), len(_BUCKETS))
        self._slots[bucket] += 1

    def render(self, gauges: dict[str, float]) -> str:
        lines = ["# TYPE graft_requests_total counter"]
        for (model, status), count in sorted(self.requests.items()):
            lines.append(f'graft_requests_total{{model="{model}",status="{status}"}} {count}')
        lines.append("# TYPE graft_tokens_total counter")
        for (model, kind), count in sorted(self.tokens.items()):
            lines.append(f'graft_tokens_total{{model="{model}",kind="{kind}"}} {count}')
        lines.append("# TYPE graft_answer_seconds histogram")
        total = 0
        for bound, count in zip((*map(str, _BUCKETS), "+Inf"), self._slots, strict=True):
            total += count
            lines.append(f'graft_answer_seconds_bucket{{le="{bound}"}} {total}')
        lines += [f"graft_answer_seconds_sum {self._seconds:.6f}", f"graft_answer_seconds_count {total}"]
        for name, arms in (("requests", self.assigned), ("failures", self.assigned_failures)):
            if arms:
                lines.append(f"# TYPE graft_split_{name}_total counter")
            for (experiment, arm), count in sorted(arms.items()):
                labels = f'experiment="{experiment}",arm="{arm}"'
                lines.append(f"graft_split_{name}_total{{{labels}}} {count}")
        if self.routed:
            lines.append("# TYPE graft_routed_total counter")
        for (model, by), count in sorted(self.routed.items()):
            lines.append(f'graft_routed_total{{model="{model}",by="{by}"}} {count}')
        if self.escalated:
            lines.append("# TYPE graft_escalations_total counter")
        for (check, outcome), count in sorted(self.escalated.items()):
            lines.append(f'graft_escalations_total{{check="{check}",outcome="{outcome}"}} {count}')
        own = {"graft_in_flight": self.in_flight, "graft_disconnects_total": self.disconnects}
        for name, value in {**own, **gauges}.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE {name} {kind}", f"{name} {value:g}"]
        return "\n".join(lines) + "\n"
