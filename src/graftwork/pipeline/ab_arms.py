"""How each arm of a live comparison did, beside what is tested: speed, failures, who left, who spoke.

In: the captures of one release, one after another. Out: its ArmFacts; and a warning where the arms did not
get the shares that were dealt. Pure.
"""

from dataclasses import dataclass, field

from graftwork.evaluate.statistics.anytime import PairedTest
from graftwork.pipeline.ab_result import ArmFacts
from graftwork.records.interaction import Capture

SURE = 0.999
"""Shares are looked at as often as the test, and a false alarm would cost the whole experiment."""


@dataclass
class ArmTally:
    release: str
    exchanges: int = 0
    failures: int = 0
    hung_up: int = 0
    share: float | None = None
    """What was dealt to this arm."""
    alone: int = 0
    """Exchanges without a session: each is one of its own."""
    sessions: set[str] = field(default_factory=set)
    spoken_of: set[str] = field(default_factory=set)
    total_ms: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)

    def see(self, capture: Capture) -> None:
        self.exchanges += 1
        if capture.session is None:
            self.alone += 1
        else:
            self.sessions.add(capture.session)
        if capture.share is not None:
            self.share = capture.share if capture.arm == "challenger" else 1 - capture.share
        if capture.finish_reason == "error":
            self.failures += 1
        elif capture.disconnected:
            self.hung_up += 1
        else:
            self.total_ms.append(capture.total_ms)
            if capture.first_token_ms is not None:
                self.first_token_ms.append(capture.first_token_ms)

    def hear(self, capture_id: str) -> None:
        self.spoken_of.add(capture_id)

    @property
    def units(self) -> int:
        return len(self.sessions) + self.alone

    def facts(self) -> ArmFacts:
        return ArmFacts(
            release=self.release,
            exchanges=self.exchanges,
            sessions=self.units,
            failures=self.failures,
            hung_up=self.hung_up,
            feedback=len(self.spoken_of),
            median_ms=_quantile(self.total_ms, 0.5),
            p95_ms=_quantile(self.total_ms, 0.95),
            first_token_ms=_quantile(self.first_token_ms, 0.5),
        )


def check_shares(a: ArmTally, b: ArmTally) -> list[str]:
    """Lots that come out otherwise than they were drawn: exchanges of one arm got lost on the way."""
    dealt = b.share if b.share is not None else None if a.share is None else 1 - a.share
    if dealt is None or not a.units + b.units:
        return []
    seen = PairedTest(wins=b.units, losses=a.units).interval(SURE)
    if seen.low <= dealt <= seen.high:
        return []
    return [
        f"B got {b.units / (a.units + b.units):.1%} of the sessions and {dealt:.1%} were dealt: exchanges of "
        "one arm are missing, so what is left may not be alike; find out why before you believe it"
    ]


def check_voices(a: ArmTally, b: ArmTally, *, spoken: tuple[int, int]) -> list[str]:
    """Users of one arm who speak more often than those of the other: who speaks may be who is unhappy."""
    if not (a.units and b.units):
        return []
    heard = [min(said, arm.units) for said, arm in zip(spoken, (a, b), strict=True)]
    first, second = (
        PairedTest(wins=said, losses=arm.units - said).interval(SURE)
        for said, arm in zip(heard, (a, b), strict=True)
    )
    if first.low <= second.high and second.low <= first.high:
        return []
    return [
        f"users of A spoke in {heard[0] / a.units:.1%} of the sessions, those of B in "
        f"{heard[1] / b.units:.1%}: the silent ones may think otherwise, so a winner counts only if it wins "
        "with the missing voices held against it"
    ]


def _quantile(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
