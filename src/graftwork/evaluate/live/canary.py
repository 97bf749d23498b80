"""The canary: a new release answers a share of the sessions until a test promotes it or rolls it back.

Input: an open project, a release, the share. Output: a `CanaryReport`. `decide_canary` is the rule,
`run_canary` carries it out. Endpoints read the running canary with the aliases. They stop it by themselves
when its command ends or dies: its lease runs out.
"""

import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from graftwork.evaluate.live.ab import ABResult, LiveAnswer, LiveTest, has_failed
from graftwork.evaluate.live.comparison import LiveComparison, Side, choose_live_metric
from graftwork.evaluate.statistics.anytime import TwoArms
from graftwork.files.disk import make_folder, write_atomic
from graftwork.project.open_project import OpenProject, current_user, timestamp
from graftwork.records.errors import Busy, UserError
from graftwork.records.interaction import Capture
from graftwork.records.live import CanaryArm, CanaryDecision, CanaryReport, RunningCanary
from graftwork.records.release import Release
from graftwork.registry.index import find_release
from graftwork.registry.project import full_alias, promote_release
from graftwork.serve.routing import make_experiment
from graftwork.serve.settings import SplitSettings
from graftwork.store.runs import StepEntry

CANARY = "canary"
LEDGER_ENTRY = "canary"
"""Each alias has its own entry: `canary/champion`."""
LEASE_SECONDS = 120.0
"""How long endpoints continue a canary that no process watches."""
FOLDER = "canaries"
QUIET_SECONDS = 30.0
"""After this long without a graded session the command says what may be wrong."""
_NO_SESSION = "no session was answered: is the endpoint running, and do requests ask for the alias?"
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*")


Winner = Literal["candidate", "baseline"]
CanaryStep = Literal["promote", "roll_back", "wait", "stop"]
"""`stop`: the arms cannot be compared, and more sessions do not change that."""


class CanaryTest:
    """Tests the metric and failed requests as sessions arrive; once decided, it stays decided. Only the
    metric promotes a canary. `lower_is_better` and `goes_on` apply to the metric, as in `LiveTest`.
    """

    def __init__(
        self, confidence: float = 0.95, *, lower_is_better: bool = False, goes_on: bool = False
    ) -> None:
        # Each of the two tests may have half of the error, so that together they keep the confidence.
        alpha = (1 - confidence) / 2
        self.metric = LiveTest(alpha, lower_is_better=lower_is_better, goes_on=goes_on)
        self.failures = LiveTest(alpha, lower_is_better=True)

    def take(self, answer: LiveAnswer, *, failed: bool) -> CanaryStep:
        """Add one more answer. A failed one also has the worst grade of the metric."""
        self.metric.take(answer)
        self.failures.take(answer._replace(grade=float(failed)))
        return self.step

    @property
    def step(self) -> CanaryStep:
        return decide_canary(self.metric.test.winner, self.failures.test)


def decide_canary(by_metric: Winner | None, failures: TwoArms, *, comparable: bool = True) -> CanaryStep:
    """Whatever the metric says, nothing is promoted while there is evidence that it fails more requests."""
    if "baseline" in (by_metric, failures.winner):
        return "roll_back"
    if not comparable:
        return "stop"
    if failures.difference < 0 and failures.log_e_value > 0:
        return "wait"
    return "promote" if by_metric == "candidate" else "wait"


class CanaryComparison(LiveComparison):
    """A live comparison that tests failed requests besides its metric; both together keep the confidence."""

    def __init__(
        self, work: OpenProject, pair: tuple[Release, Release], *, metric: str, experiment: str | None
    ) -> None:
        super().__init__(work, pair, metric=metric, experiment=experiment)
        self._canary = CanaryTest(
            work.settings.evaluate.confidence,
            lower_is_better=self._live.lower_is_better,
            goes_on=self._live.goes_on,
        )
        self._use_test(self._canary.metric)

    @property
    def failures(self) -> LiveTest:
        """Return whether one of the two fails more requests."""
        return self._canary.failures

    def decide(self, result: ABResult) -> CanaryStep:
        """Decide what a canary does next after this look."""
        winner: Winner | None = None
        if result.winner is not None:
            winner = "candidate" if result.winner == "B" else "baseline"
        return decide_canary(winner, self.failures.test, comparable=result.mismatch is None)

    def _see(self, capture: Capture, side: Side) -> None:
        super()._see(capture, side)
        self.failures.take(LiveAnswer(side, capture.session, float(has_failed(capture))))


@dataclass(frozen=True, kw_only=True)
class CanaryRequest:
    """The request of `graft release promote --canary`."""

    share: float
    alias: str | None = None
    metric: str | None = None
    reason: str = ""
    force: bool = False
    max_sessions: int | None = None
    """Sessions with a grade after which an undecided canary ends."""
    max_seconds: float | None = None
    every_seconds: float = 5.0


def parse_share(text: str) -> float:
    """`5%` or `0.05`, as a share."""
    match = _PERCENT.fullmatch(text)
    share = float(match[1]) / (100 if match[2] else 1) if match is not None else 0.0
    if not 0 < share < 1:
        raise UserError(
            f"{text!r} is not a share of the sessions",
            why="a canary gets more than none and less than all of them",
            fix="write it like 5% or 0.05",
            where="--canary",
        )
    return share


def find_canary(work: OpenProject, *, clock: Callable[[], float] = time.time) -> SplitSettings | None:
    """Return the experiment of the running canary, for endpoints; None if none runs or its lease has ended.
    Endpoints run one experiment at a time: the canary that began first.
    """
    entries = (work.ledger.get(name) for name in work.ledger.times() if _is_entry(name))
    canaries = _parse_running((entry for entry in entries if entry is not None), now=clock())
    return next((_split(running) for running in canaries if not running.is_starting), None)


def _entry_of(alias: str) -> str:
    return f"{LEDGER_ENTRY}/{alias}"


def _parse_running(entries: Iterable[StepEntry], *, now: float) -> list[RunningCanary]:
    """Canaries whose lease has not ended, in order of start."""
    canaries = []
    for entry in sorted(entries, key=lambda entry: (entry.fingerprint, entry.step)):
        try:
            running = RunningCanary.model_validate(entry.output) if _is_entry(entry.step) else None
        except ValidationError:
            continue  # of another version
        if running is not None and now < running.until:
            canaries.append(running)
    return canaries


def _is_entry(name: str) -> bool:
    return name.startswith(_entry_of(""))


def _split(running: RunningCanary) -> SplitSettings:
    return SplitSettings(
        alias=running.alias, challenger=running.canary, share=running.share, experiment=CANARY
    )


def run_canary(
    work: OpenProject,
    name: str,
    request: CanaryRequest,
    *,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
) -> CanaryReport:
    """Watch the canary until it is decided, then promote it or leave the champion where it is.

    Ctrl-C and errors end it: the champion answers everything again. The same command continues with the
    evidence that was collected before.
    """
    pair, alias = _find_pair(work, name, request)
    metric = choose_live_metric(work, request.metric)
    running = RunningCanary(
        alias=alias, canary=full_alias(work, CANARY, model=pair[1].model), share=request.share, until=0.0
    )
    started_at, began = timestamp(), clock()
    experiment = make_experiment(_split(running), champion=pair[0].id, challenger=pair[1].id).experiment
    look = CanaryComparison(work, pair, metric=metric, experiment=experiment)
    decision: CanaryDecision | None = None
    asked_for_traffic = False
    claim = _CanaryClaim(work, running, began=started_at)
    claim.take(until=began + LEASE_SECONDS, now=began)
    try:
        reason = request.reason or f"canary for {alias}"
        promote_release(work, pair[1].id, alias=CANARY, reason=reason, force=request.force)
        work.reporter.info(
            f"{pair[1].id[:12]} gets {request.share:.1%} of the sessions that ask for {alias}, "
            f"compared with {pair[0].id[:12]} by {metric}; Ctrl-C ends it"
        )
        while decision is None:
            claim.extend(until=clock() + LEASE_SECONDS + request.every_seconds)
            result = look.look()
            step = look.decide(result)
            live = work.releases.aliases().get(alias)
            timed_out = request.max_seconds is not None and clock() - began >= request.max_seconds
            if live != pair[0].id or step == "stop":
                decision = "undecided"
            elif step != "wait":
                decision = "promoted" if step == "promote" else "rolled_back"
            elif timed_out or (request.max_sessions is not None and result.used >= request.max_sessions):
                decision = "undecided"
            else:
                answered = {name: arm.sessions for name, arm in result.arms.items()}
                seconds = clock() - began
                state = f"canary less champion {result.low:+.1%} to {result.high:+.1%}, {seconds:.0f} s"
                work.reporter.progress(
                    f"{result.used} sessions graded (champion {answered['A']}, canary {answered['B']})",
                    result.used,
                    0,
                    seconds_left=None,
                    detail={"subject": state},
                )
                if not asked_for_traffic and not result.used and clock() - began >= QUIET_SECONDS:
                    asked_for_traffic = True
                    ungraded = f"sessions are answered, and none has a grade by {metric} yet"
                    work.reporter.info(ungraded if sum(answered.values()) else f"{_NO_SESSION} ({alias})")
                pause(request.every_seconds)
    finally:
        claim.release()
    champion, canary = _arm(result, "A", result.a), _arm(result, "B", result.b)
    difference = 0.0
    if champion.graded and canary.graded:
        difference = canary.successes / canary.graded - champion.successes / champion.graded
    moved = live != pair[0].id
    report = CanaryReport(
        alias=alias,
        champion=champion,
        canary=canary,
        share=request.share,
        metric=metric,
        decision=decision,
        reason=_explain_move(alias, live) if moved else _explain(decision, result, look),
        difference=difference,
        low=result.low,
        high=result.high,
        confidence=work.settings.evaluate.confidence,
        e_value=result.e_value,
        failures_e_value=look.failures.test.e_value,
        experiment=look.experiment,
        started_at=started_at,
        ended_at=timestamp(),
        seconds=clock() - began,
        remarks=result.remarks,
    )
    if decision == "promoted":
        report = _promote(work, pair, request, report)
    return _keep(work, report)


def _keep(work: OpenProject, report: CanaryReport) -> CanaryReport:
    """Write the report, and link it to the release."""
    folder, release = work.project.state / FOLDER, report.canary.release
    make_folder(folder)
    path = folder / f"{release[:12]}-{re.sub(r'[^0-9A-Za-z]', '', report.ended_at)}.json"
    report = report.model_copy(update={"file": str(path)})
    write_atomic(path, report.to_json())
    work.releases.note(release, report.reason, who=current_user(), when=report.ended_at)
    return report


def _promote(
    work: OpenProject, pair: tuple[Release, Release], request: CanaryRequest, report: CanaryReport
) -> CanaryReport:
    """Promote it in place of the release that it was compared with; undecided if another release is live by
    now.
    """
    try:
        promote_release(
            work,
            pair[1].id,
            alias=request.alias,
            reason=report.reason,
            force=request.force,
            instead_of=pair[0].id,
        )
    except Busy:
        live = work.releases.aliases().get(report.alias)
        if live == pair[0].id:
            raise
        return report.model_copy(
            update={"decision": "undecided", "reason": _explain_move(report.alias, live)}
        )
    return report


def _find_pair(work: OpenProject, name: str, request: CanaryRequest) -> tuple[tuple[Release, Release], str]:
    release = find_release(work.releases, name)
    alias = full_alias(work, request.alias, model=release.model)
    live = work.releases.aliases().get(alias)
    if live is None:
        raise UserError(
            f"{alias} points at no release yet",
            why="a canary is compared with the release that is live",
            fix=f"graft release promote {name}",
            where="--canary",
        )
    if live == release.id:
        raise UserError(
            f"{alias} already points at {release.id[:12]}",
            why="a release cannot be compared with itself",
            fix="specify the new release",
        )
    if not work.project.settings.serve.capture:
        raise UserError(
            "a canary needs captures",
            why="it is decided by the exchanges that the endpoint captures",
            fix="set `serve.capture: true`",
            where="serve.capture",
        )
    return (work.releases.get(live), release), alias


class _CanaryClaim:
    """The alias and its canary belong to one command: two would undo each other's evidence."""

    def __init__(self, work: OpenProject, running: RunningCanary, *, began: str) -> None:
        self._work, self._running = work, running
        # Endpoints begin with the canary that began first; two may begin within one second.
        self._mark = f"{began} {uuid.uuid4().hex[:8]}"

    def take(self, *, until: float, now: float) -> None:
        """Raises Busy if another command has it. Endpoints begin with it once it is extended."""

        def is_free(entries: Mapping[str, StepEntry]) -> bool:
            _require_free(self._work, self._running, _parse_running(entries.values(), now=now), now=now)
            return True

        self._work.ledger.put_if(self._entry(until, is_starting=True), is_free, among=LEDGER_ENTRY)

    def extend(self, *, until: float) -> None:
        """Raises Busy if another command took it over after a silence."""
        name = _entry_of(self._running.alias)

        def is_own(entries: Mapping[str, StepEntry]) -> bool:
            return name in entries and entries[name].fingerprint == self._mark

        if not self._work.ledger.put_if(self._entry(until), is_own):
            raise Busy(
                f"this canary of {self._running.alias} has ended: another canary took its place",
                why="the command that watches it did not renew its lease in time",
                fix="wait for the other one; the same command continues with the evidence so far",
                where="--canary",
            )

    def release(self) -> None:
        self._work.ledger.forget(_entry_of(self._running.alias), fingerprint=self._mark)

    def _entry(self, until: float, *, is_starting: bool = False) -> StepEntry:
        running = self._running.model_copy(update={"until": until, "is_starting": is_starting})
        output = running.model_dump(mode="json")
        return StepEntry(_entry_of(running.alias), self._mark, output, timestamp(), 0.0)


def _require_free(
    work: OpenProject, canary: RunningCanary, others: Sequence[RunningCanary], *, now: float
) -> None:
    for running in others:
        if canary.alias == running.alias or canary.canary == running.canary:
            raise Busy(
                f"a canary of {running.alias} already runs",
                why=f"{running.canary} gets {running.share:.1%} of its sessions",
                fix=f"wait for it; if its command was killed, try again in {running.until - now:.0f} s",
                where="--canary",
            )
    for running in others:
        work.reporter.info(
            f"a canary of {running.alias} already runs: endpoints start this one when it has ended"
        )


def _arm(result: ABResult, side: str, release: str) -> CanaryArm:
    facts, counts = result.arms[side], result.counts
    won, lost = counts[f"{side.lower()}_successes"], counts[f"{side.lower()}_failures"]
    return CanaryArm(
        release=release,
        sessions=facts.sessions,
        failures=facts.failures + facts.hung_up,
        failed_checks=facts.failed_checks,
        successes=won,
        graded=won + lost,
    )


def _explain(decision: CanaryDecision, result: ABResult, look: CanaryComparison) -> str:
    if not sum(arm.sessions for arm in result.arms.values()):
        return f"canary: {_NO_SESSION}"
    step = look.decide(result)
    if decision == "promoted":
        return f"canary: {explain_step(step, result, look)}"
    if decision == "undecided" and step != "stop":
        return f"canary: not decided after {result.used} sessions, the champion stays"
    return f"canary: {explain_step(step, result, look)}, the champion stays"


def explain_step(step: CanaryStep, result: ABResult, look: CanaryComparison) -> str:
    """The evidence for a decision."""
    if step == "stop":
        return result.mismatch or ""
    if step == "promote":
        return f"better by {result.metric} after {result.used} sessions"
    if result.winner == "A":
        return f"worse by {result.metric} after {result.used} sessions"
    return f"more failed requests after {look.failures.used} sessions"


def _explain_move(alias: str, live: str | None) -> str:
    now = "is gone" if live is None else f"now points at {live[:12]}"
    return f"canary: ended because {alias} {now}, which is not what the canary was compared with"
