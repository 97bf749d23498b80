"""Two releases compared while answers come in: stopped when it is decided, not before. Pure.

Input: graded answers in an order that does not depend on them; the captures of each arm. Output: who won, on
how many sessions, and how each arm did. Each session counts once. The tests are valid however often the
result is read (`statistics.anytime`). What a large model or a fallback answered in place of an arm counts for
that arm. Does not know who asked the models.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from graftwork.evaluate.cases import clusters_of
from graftwork.evaluate.statistics.anytime import MeanTest, TwoArms, share_interval
from graftwork.evaluate.statistics.intervals import Interval
from graftwork.records.base import Record
from graftwork.records.errors import EXIT_DONE, EXIT_NOT_ENOUGH_EVIDENCE
from graftwork.records.interaction import Capture
from graftwork.records.report import Case

Traffic = Literal["captures", "cases", "shadow"]
Scores = Mapping[str, float | None]
GradeBlock = Callable[[Sequence[Case]], tuple[Scores, Scores]]
"""The grades of A and of B on some cases; asks a release that has not answered yet."""
ReplayUnit = tuple[Case, ...]
"""An independent unit: the cases of a session, or a single case."""
FIRST_BLOCK = 16


class Replayed(NamedTuple):
    """`asked` are the cases that both were asked; a block is started before its answers can decide."""

    test: MeanTest
    used: int
    ungraded: int
    asked: int


class LiveAnswer(NamedTuple):
    """A live answer: its arm, its session, and its grade from 0 to 1."""

    arm: Literal["A", "B"]
    session: str | None
    grade: float | None


@dataclass
class LiveTest:
    """Takes graded answers as they arrive: the first of each session counts, and once decided, none. Answers
    are never removed, so it does not matter how many arrive at once or how often the result is read.
    """

    alpha: float
    lower_is_better: bool = False
    goes_on: bool = False
    """Whether answers are counted after the test is decided: user feedback is checked once more."""
    used: int = 0
    ungraded: int = 0
    test: TwoArms = field(init=False)
    _seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.test = TwoArms(self.alpha)

    def take(self, exchange: LiveAnswer) -> None:
        if self.test.decided and not self.goes_on:
            return
        if exchange.session is not None:
            if exchange.session in self._seen:
                return
            self._seen.add(exchange.session)
        if exchange.grade is None:
            self.ungraded += 1
            return
        self.used += not self.test.decided
        mark = min(max(exchange.grade, 0.0), 1.0)
        success = 1 - mark if self.lower_is_better else mark
        arm: Literal["candidate", "baseline"] = "candidate" if exchange.arm == "B" else "baseline"
        self.test.update(arm, successes=success, failures=1 - success)


def survives_silence(test: TwoArms, *, assigned: tuple[int, int]) -> bool:
    """Return whether the winner of a test by feedback still wins if unequal response rates are held against
    it. `assigned` are the sessions of A and of B. If users of one arm respond less often, the missing
    sessions count as successes of the loser or as failures of the winner.
    """
    spoken = sum(test.baseline), sum(test.candidate)
    if test.winner is None or not all(assigned) or not all(spoken):
        return False
    rates = [min(1.0, heard / sessions) for heard, sessions in zip(spoken, assigned, strict=True)]
    missing = [max(0.0, max(rates) - rate) * sessions for rate, sessions in zip(rates, assigned, strict=True)]
    won_by_b = test.winner == "candidate"
    baseline, candidate = test.baseline, test.candidate
    baseline = (baseline[0] + missing[0] * won_by_b, baseline[1] + missing[0] * (not won_by_b))
    candidate = (candidate[0] + missing[1] * (not won_by_b), candidate[1] + missing[1] * won_by_b)
    counterfactual = TwoArms(test.alpha, baseline=baseline, candidate=candidate)
    ahead = counterfactual.difference if won_by_b else -counterfactual.difference
    return ahead > 0 and counterfactual.log_evidence >= -math.log(test.alpha)


def units_of(cases: Sequence[Case]) -> tuple[ReplayUnit, ...]:
    """The sessions in an order drawn by hash; repeated questions share a unit.

    A file is often sorted by topic or by date. A test that looks after every unit is only valid if the
    order says nothing about the outcome, so the order of the file must not matter.
    """
    clusters = clusters_of(cases)
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(clusters.get(case.id, f"case {case.id}"), []).append(case)
    drawn = sorted(groups, key=lambda key: (hashlib.sha256(key.encode()).hexdigest(), key))
    return tuple(tuple(groups[key]) for key in drawn)


def run_replay(
    units: Sequence[ReplayUnit],
    grade_block: GradeBlock,
    *,
    alpha: float,
    lower_is_better: bool = False,
) -> Replayed:
    """Ask both, block by block, each twice as large as the last; stop when it is decided."""
    test = MeanTest(alpha)
    used = ungraded = asked_cases = start = 0
    size = FIRST_BLOCK
    while start < len(units):
        block = units[start : start + size]
        start, size = start + size, size * 2
        cases = [case for unit in block for case in unit]
        of_a, of_b = grade_block(cases)
        asked_cases += len(cases)
        for unit in block:
            difference = judge_unit(unit, of_a, of_b, lower_is_better=lower_is_better)
            if difference is None:
                ungraded += 1
                continue
            used += 1
            test.update(difference)
            if test.decided:
                return Replayed(test, used, ungraded, asked_cases)
    return Replayed(test, used, ungraded, asked_cases)


def judge_unit(unit: ReplayUnit, of_a: Scores, of_b: Scores, *, lower_is_better: bool) -> float | None:
    """The mean score of B less that of A in this session; None if no case of it has both grades."""
    both = [
        (first, second)
        for case in unit
        if (first := of_a.get(case.id)) is not None and (second := of_b.get(case.id)) is not None
    ]
    if not both:
        return None
    ahead = math.fsum(min(max(b, 0.0), 1.0) - min(max(a, 0.0), 1.0) for a, b in both) / len(both)
    # A sum of floats that ought to be nothing is a tie.
    ahead = 0.0 if abs(ahead) < 1e-12 else min(max(ahead, -1.0), 1.0)
    return -ahead if lower_is_better else ahead


class ArmFacts(Record):
    """Statistics of one release in live traffic, besides what is tested. Descriptive only."""

    release: str
    exchanges: int
    sessions: int
    failures: int
    """Exchanges that ended with an error instead of an answer."""
    hung_up: int
    """Clients that disconnected before the answer was complete."""
    failed_checks: int
    """Exchanges whose answer failed a check of `serve.escalate`, including those that another model
    answered.
    """
    feedback: int
    """Exchanges with feedback."""
    median_ms: float | None
    p95_ms: float | None
    first_token_ms: float | None
    """Median, of streamed answers."""


class ABResult(Record):
    """`low` to `high` is B less A: of the mean marks in live traffic, of wins less losses in replay."""

    a: str
    b: str
    metric: str
    traffic: Traffic
    winner: Literal["A", "B"] | None
    used: int
    """Sessions that the test counted, up to the one that decided it."""
    ungraded: int
    asked: int
    """Cases or copied requests that both were asked; 0 for sessions that were split."""
    counts: dict[str, int | float]
    e_value: float
    p_value: float
    low: float
    high: float
    confidence: float
    sentence: str
    remarks: tuple[str, ...] = ()
    experiment: str | None = None
    """The experiment that assigned sessions; None for cases, and for traffic that was not assigned."""
    arms: dict[str, ArmFacts] = {}
    """By "A" and "B"; empty for cases."""
    mismatch: str | None = None
    """Why neither can win: the sessions of the arms do not match the assigned shares."""

    @property
    def exit_code(self) -> int:
        return EXIT_DONE if self.winner is not None else EXIT_NOT_ENOUGH_EVIDENCE


class ABEvidence(NamedTuple):
    """Current evidence of a test. `asked` are the cases that both releases were asked."""

    winner: Literal["candidate", "baseline"] | None
    used: int
    ungraded: int
    asked: int
    counts: Mapping[str, int | float]
    e_value: float
    p_value: float
    interval: Interval
    confidence: float
    mismatch: str | None = None


def make_result(
    pair: tuple[str, str],
    metric: str,
    traffic: Traffic,
    *,
    evidence: ABEvidence,
    remarks: tuple[str, ...],
    experiment: str | None = None,
    arms: Mapping[str, ArmFacts] | None = None,
) -> ABResult:
    side: Literal["A", "B"] | None = None
    if evidence.winner is not None:
        side = "B" if evidence.winner == "candidate" else "A"
    used = evidence.used
    better = pair[1] if side == "B" else pair[0]
    if evidence.mismatch is not None:
        sentence = f"cannot be decided: {evidence.mismatch}"
    elif side is None:
        sentence = f"not decided after {used} sessions: continue, and look again as often as you like"
    else:
        sentence = f"{side} ({better[:12]}) is better by {metric}: decided after {used} sessions"
    return ABResult(
        a=pair[0],
        b=pair[1],
        metric=metric,
        traffic=traffic,
        winner=side,
        used=used,
        ungraded=evidence.ungraded,
        asked=evidence.asked,
        counts=dict(evidence.counts),
        e_value=evidence.e_value,
        p_value=evidence.p_value,
        low=evidence.interval.low,
        high=evidence.interval.high,
        confidence=evidence.confidence,
        sentence=sentence,
        remarks=remarks,
        experiment=experiment,
        arms=dict(arms or {}),
        mismatch=evidence.mismatch,
    )


SURE = 0.999
"""Confidence: shares are checked as often as the test, and a false alarm would cost the whole experiment."""


@dataclass
class ArmTally:
    release: str
    exchanges: int = 0
    failures: int = 0
    hung_up: int = 0
    failed_checks: int = 0
    share: float | None = None
    """The share of sessions assigned to this arm."""
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
        self.failed_checks += capture.failed_check is not None
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
            failed_checks=self.failed_checks,
            feedback=len(self.spoken_of),
            median_ms=_quantile(self.total_ms, 0.5),
            p95_ms=_quantile(self.total_ms, 0.95),
            first_token_ms=_quantile(self.first_token_ms, 0.5),
        )


def has_failed(capture: Capture) -> bool:
    """Return whether the release that was asked left the request without an answer fit to send."""
    return capture.disconnected or capture.finish_reason == "error" or capture.failed_check is not None


def find_mismatch(a: ArmTally, b: ArmTally) -> str | None:
    """Sample ratio mismatch: the sessions do not match the assigned shares."""
    assigned = b.share if b.share is not None else None if a.share is None else 1 - a.share
    if assigned is None or not a.units + b.units:
        return None
    share = share_interval(b.units, a.units, confidence=SURE)
    if share.low <= assigned <= share.high:
        return None
    return (
        f"B has {b.units / (a.units + b.units):.1%} of the sessions and {assigned:.1%} were assigned, so "
        "exchanges of one arm are missing (sample ratio mismatch); find out why, then begin a new experiment"
    )


def check_voices(a: ArmTally, b: ArmTally, *, spoken: tuple[int, int]) -> list[str]:
    """Check whether feedback is more frequent in one arm: users with feedback may be the unhappy ones."""
    if not (a.units and b.units):
        return []
    heard = [min(count, arm.units) for count, arm in zip(spoken, (a, b), strict=True)]
    first, second = (
        share_interval(count, arm.units - count, confidence=SURE)
        for count, arm in zip(heard, (a, b), strict=True)
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
