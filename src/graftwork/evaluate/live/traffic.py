"""A new release in live traffic: a canary that answers a share of the sessions, or a shadow of another.

In: an open project, a release, the share. Out: a `CanaryReport`; of shadow traffic an ABResult by one metric,
or a ShadowSummary by all checks of the project, where each session counts once. Endpoints read the running
canary with the aliases. They stop it by themselves when its command ends or dies: its lease runs out.
"""

import re
import statistics
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from graftwork.evaluate.live.ab import ABEvidence, ABResult, CanaryStep, make_result
from graftwork.evaluate.live.answer_checks import LiveChecks, find_live_checks
from graftwork.evaluate.live.comparison import (
    LiveComparison,
    choose_live_metric,
    choose_metric,
    compare_live,
    compare_replayed,
    grade_own,
    note_pair,
    watch_live,
)
from graftwork.evaluate.project import Grading
from graftwork.evaluate.statistics.anytime import MeanTest
from graftwork.files.disk import make_folder, write_atomic
from graftwork.grading.checks import grade
from graftwork.grading.interface import CannotGrade
from graftwork.grading.metrics import LOWER_IS_BETTER
from graftwork.project.open_project import OpenProject, current_user, timestamp
from graftwork.records.errors import Busy, GraftError, UserError
from graftwork.records.interaction import INTERRUPTED, Capture
from graftwork.records.live import (
    CanaryArm,
    CanaryDecision,
    CanaryReport,
    RunningCanary,
    ShadowCheck,
    ShadowSummary,
)
from graftwork.records.release import Release
from graftwork.records.report import Case
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


@dataclass(frozen=True, kw_only=True)
class CanaryRequest:
    """What `graft release promote --canary` was asked."""

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
    """The experiment of the running canary, for endpoints; None where none runs or its lease has ended.

    Endpoints run one experiment at a time: the canary that began first.
    """
    entries = (work.ledger.get(name) for name in work.ledger.times() if _is_entry(name))
    canaries = _parse_running((entry for entry in entries if entry is not None), now=clock())
    return next((_split(running) for running in canaries if not running.is_starting), None)


def _entry_of(alias: str) -> str:
    return f"{LEDGER_ENTRY}/{alias}"


def _parse_running(entries: Iterable[StepEntry], *, now: float) -> list[RunningCanary]:
    """Those whose lease has not ended, in the order of their beginning."""
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

    Ctrl-C and errors end it: the champion answers everything again. The same command goes on with the
    evidence that was collected before.
    """
    pair, alias = _find_pair(work, name, request)
    metric = choose_live_metric(work, request.metric)
    running = RunningCanary(
        alias=alias, canary=full_alias(work, CANARY, model=pair[1].model), share=request.share, until=0.0
    )
    started_at, began = timestamp(), clock()
    experiment = make_experiment(_split(running), champion=pair[0].id, challenger=pair[1].id).experiment
    look = LiveComparison(work, pair, metric=metric, experiment=experiment, is_canary=True)
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
            over = request.max_seconds is not None and clock() - began >= request.max_seconds
            if live != pair[0].id or step == "stop":
                decision = "undecided"
            elif step != "wait":
                decision = "promoted" if step == "promote" else "rolled_back"
            elif over or (request.max_sessions is not None and result.used >= request.max_sessions):
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
    """Write the report, and note it at the release."""
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
    """Promote it instead of what it was compared with; undecided if another release is live by now."""
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
            fix="name the new release",
        )
    if not work.project.settings.serve.capture:
        raise UserError(
            "a canary needs captures",
            why="it is decided by the exchanges that the endpoint keeps",
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
                why="the command that watches it gave no sign of life until its lease had ended",
                fix="wait for the other one; the same command goes on with the evidence so far",
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
            f"a canary of {running.alias} already runs: endpoints begin with this one when it has ended"
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


def _explain(decision: CanaryDecision, result: ABResult, look: LiveComparison) -> str:
    if not sum(arm.sessions for arm in result.arms.values()):
        return f"canary: {_NO_SESSION}"
    step = look.decide(result)
    if decision == "promoted":
        return f"canary: {explain_step(step, result, look)}"
    if decision == "undecided" and step != "stop":
        return f"canary: not decided after {result.used} sessions, the champion stays"
    return f"canary: {explain_step(step, result, look)}, the champion stays"


def explain_step(step: CanaryStep, result: ABResult, look: LiveComparison) -> str:
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


MOST_INTERRUPTED = 0.1
"""The share of interrupted copies from which the comparison has a remark."""


ShadowPair = tuple[Capture, Capture]
"""A live request and its copy."""


class ShadowPairs:
    """Pairs of requests that one of the champions was asked and their copies, the first of each session.

    A champion whose answer failed a check of `serve.escalate` was asked all the same.
    """

    def __init__(self, work: OpenProject, champions: Collection[str], challenger: str) -> None:
        self._captures, self._champions, self._challenger = work.captures, champions, challenger
        self.copies = self.interrupted = self.sessions = 0

    def __iter__(self) -> Iterator[ShadowPair]:
        sessions: set[str] = set()
        for _, copy in self._captures.read_on(releases=(self._challenger,), copies_only=True):
            live = None if copy.shadow_of is None else self._captures.get(copy.shadow_of)
            if live is None or live.asked_release not in self._champions:
                continue
            self.copies += 1
            if copy.finish_reason == INTERRUPTED:
                self.interrupted += 1
                continue
            session = live.session or f"capture {live.id}"
            if session not in sessions:
                sessions.add(session)
                self.sessions = len(sessions)
                yield live, copy

    def find_interrupted(self) -> list[str]:
        """A remark where the pairs that are left are not a fair sample."""
        if self.interrupted <= MOST_INTERRUPTED * self.copies:
            return []
        return [
            f"{self.interrupted} of {self.copies} copies were interrupted and are not compared: long answers "
            "are missing more often"
        ]


@dataclass(frozen=True, kw_only=True)
class ABRequest:
    """What `graft release ab` was asked; shadow traffic needs no releases."""

    a: str | None = None
    b: str | None = None
    traffic: str = "captures"
    cases: Path | None = None
    metric: str | None = None
    experiment: str | None = None
    watch: bool = False
    every_seconds: float = 5.0


def compare(work: OpenProject, asked: ABRequest) -> ABResult | ShadowSummary:
    """Compare two releases on cases, on live traffic or on its copies; or every check of shadow traffic."""
    _require_fitting_options(asked)
    a, b, metric, experiment = asked.a, asked.b, asked.metric, asked.experiment
    if asked.traffic == "shadow" and a is None:
        summary = summarize_shadow(work)
        if summary is None:
            raise UserError(
                "no shadow traffic is set up",
                why="a challenger answers copies of live requests only if graft.yaml says so",
                fix="add `shadow: {to: challenger, models: [champion]}` under serve",
                where="serve.shadow",
            )
        return summary
    if a is None or b is None:
        raise UserError(
            "a comparison needs two releases",
            why="only `--traffic shadow` compares without naming them",
            fix="name two releases: `graft release ab champion challenger`",
        )
    if asked.cases is not None:
        return compare_replayed(work, a, b, cases_file=asked.cases, metric=metric)
    if asked.traffic == "shadow":
        return compare_shadow(work, a, b, metric=metric)
    if asked.watch:
        return watch_live(work, a, b, metric=metric, experiment=experiment, every_seconds=asked.every_seconds)
    return compare_live(work, a, b, metric=metric, experiment=experiment)


def _require_fitting_options(asked: ABRequest) -> None:
    is_live_only = asked.watch or asked.experiment is not None
    if asked.traffic not in ("captures", "shadow"):
        raise UserError(
            f"unknown traffic {asked.traffic!r}",
            fix="use --traffic captures, --traffic shadow, or --cases FILE",
            where="--traffic",
        )
    if asked.traffic == "shadow" and (asked.cases is not None or is_live_only):
        raise UserError(
            "--traffic shadow cannot be combined with --cases, --watch or --experiment",
            fix="omit them",
            where="--traffic",
        )
    if asked.cases is not None and is_live_only:
        raise UserError(
            "--cases cannot be combined with --watch or --experiment",
            why="--watch and --experiment are for live traffic",
            fix="omit --cases, or the other two",
            where="--cases",
        )
    if asked.traffic == "shadow" and asked.a is None and asked.metric is not None:
        raise UserError(
            "--metric needs two releases",
            why="without them every check is compared",
            fix="omit --metric, or name two releases",
            where="--metric",
        )


class PairedMarks:
    """Both marks of each pair, and the test of their mean difference."""

    def __init__(
        self, grade_case: Callable[[Case, str], float | None], *, alpha: float, lower_is_better: bool = False
    ) -> None:
        self._grade, self._lower = grade_case, lower_is_better
        self.test = MeanTest(alpha)
        self.champion: list[float] = []
        self.challenger: list[float] = []
        self.ungraded = 0

    def take(self, pair: ShadowPair) -> None:
        ours, theirs = (grade_own(capture, self._grade, worst=float(self._lower)) for capture in pair)
        if ours is None or theirs is None:
            self.ungraded += 1
            return
        ours, theirs = min(max(ours, 0.0), 1.0), min(max(theirs, 0.0), 1.0)
        self.champion.append(ours)
        self.challenger.append(theirs)
        self.test.update(ours - theirs if self._lower else theirs - ours)


def compare_shadow(work: OpenProject, a: str, b: str, *, metric: str | None = None) -> ABResult:
    """The current result of the copies that `b` answered of requests that `a` was asked."""
    challenger, endpoints = b, work.project.settings.serve.failover.endpoints
    if b not in endpoints:
        try:
            challenger = find_release(work.releases, b).id
        except UserError as error:
            raise UserError(
                error.what,
                why=f"endpoints of serve.failover: {', '.join(endpoints) or 'none'}",
                fix="name a release, alias or endpoint",
            ) from error
    pair = find_release(work.releases, a).id, challenger
    name = choose_metric(work, metric)
    confidence = work.settings.evaluate.confidence
    pairs = ShadowPairs(work, {pair[0]}, pair[1])
    grade_case = partial(grade, name, context=Grading(work, ()).context())
    marks = PairedMarks(grade_case, alpha=1 - confidence, lower_is_better=name in LOWER_IS_BETTER)
    for both in pairs:
        if not marks.test.decided:
            marks.take(both)
    test, used = marks.test, len(marks.champion)
    remarks = note_pair(work, pair, metric=name, traffic="shadow") if used else ()
    if pairs.copies == pairs.interrupted:
        remarks = (f"no copies of requests to {a} were answered by {b}: set `serve.shadow`",)
    return make_result(
        pair,
        name,
        "shadow",
        evidence=ABEvidence(
            winner=test.winner,
            used=used,
            ungraded=marks.ungraded,
            asked=pairs.copies - pairs.interrupted,
            counts={"wins": test.wins, "losses": test.losses, "ties": test.ties},
            e_value=test.e_value,
            p_value=test.p_value,
            interval=test.interval(confidence),
            confidence=confidence,
        ),
        remarks=(*remarks, *pairs.find_interrupted()),
    )


MOST_PAIRS = 5000
"""Sessions that a summary compares: more would make `graft status` slow and hardly narrow the intervals."""


def summarize_shadow(work: OpenProject) -> ShadowSummary | None:
    """The pair of `serve.shadow` by every check of the project; None where no shadow is set up."""
    settings = work.project.settings.serve.shadow
    if settings is None:
        return None
    aliases, family = work.releases.aliases(), work.project.settings.serve.family
    models = set(settings.models)
    if family is not None and family.name in models:
        # The name of the family stands for its members.
        models |= {full_alias(work, model=name) for name in work.project.settings.all_models}
    champions = {aliases[name] for name in models if name in aliases}
    challenger = aliases.get(settings.to, settings.to)
    copies = ShadowPairs(work, champions, challenger)
    pairs = list(islice(copies, MOST_PAIRS))
    names = find_live_checks(work)
    confidence = work.settings.evaluate.confidence
    checks = [_compare(work, name, pairs, 1 - (1 - confidence) / max(len(names), 1)) for name in names]
    answered = [pair for pair in pairs if pair[1].finish_reason != "error"]
    remarks = []
    if not copies.copies:
        remarks.append(f"{settings.to} has answered no copies of live requests yet")
    if not names:
        remarks.append("no metric or check under `evaluate` can judge an answer without a reference")
    failing = [name for name, check in zip(names, checks, strict=True) if check is None]
    if failing:
        remarks.append(f"not graded here: {', '.join(failing)}")
    remarks += copies.find_interrupted()
    if copies.sessions == MOST_PAIRS:
        remarks.append(f"only the first {MOST_PAIRS:,} sessions are compared")
    return ShadowSummary(
        champion=", ".join(sorted(champions)),
        challenger=challenger,
        copies=copies.copies,
        sessions=len(pairs),
        failed=len(pairs) - len(answered),
        interrupted=copies.interrupted,
        checks=tuple(check for check in checks if check is not None),
        confidence=confidence,
        champion_ms=_median([live.total_ms for live, _ in answered]),
        challenger_ms=_median([copy.total_ms for _, copy in answered]),
        remarks=tuple(remarks),
    )


def _compare(work: OpenProject, name: str, pairs: list[ShadowPair], confidence: float) -> ShadowCheck | None:
    """None where the check cannot be run here."""

    def grade_case(case: Case, reply: str) -> float | None:
        return live.grade(name, [message.model_dump() for message in case.messages], reply)

    try:
        live = LiveChecks(work, [name])
        marks = PairedMarks(grade_case, alpha=1 - confidence)
        for pair in pairs:
            marks.take(pair)
    except (CannotGrade, GraftError):
        return None
    test, interval = marks.test, marks.test.interval(confidence)
    return ShadowCheck(
        check=name,
        pairs=len(marks.champion),
        champion=statistics.fmean(marks.champion) if marks.champion else None,
        challenger=statistics.fmean(marks.challenger) if marks.challenger else None,
        wins=test.wins,
        losses=test.losses,
        ties=test.ties,
        low=interval.low,
        high=interval.high,
    )


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
