"""Shadow traffic: two releases compared by the requests that one answered and the other got copies of.

Input: an open project and what `serve.shadow` kept. Output: an ABResult by one metric, or a ShadowSummary by
all checks of the project. Each session counts once.
"""

import statistics
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import islice

from graftwork.evaluate.live.ab import ABEvidence, ABResult, make_result
from graftwork.evaluate.live.answer_checks import LiveChecks, find_live_checks
from graftwork.evaluate.live.comparison import choose_metric, grade_own, note_pair
from graftwork.evaluate.project import Grading
from graftwork.evaluate.statistics.anytime import MeanTest
from graftwork.grading.checks import grade
from graftwork.grading.interface import CannotGrade
from graftwork.grading.metrics import LOWER_IS_BETTER
from graftwork.project.open_project import OpenProject
from graftwork.records.errors import GraftError, UserError
from graftwork.records.interaction import INTERRUPTED, Capture, is_from_users
from graftwork.records.live import ShadowCheck, ShadowSummary
from graftwork.records.report import Case
from graftwork.registry.index import find_release
from graftwork.registry.project import full_alias

MOST_INTERRUPTED = 0.1
"""Share of interrupted copies from which the comparison adds a remark."""


ShadowPair = tuple[Capture, Capture]
"""A live request and its copy."""


class ShadowPairs:
    """Pairs of requests that one of the champions was asked and their copies, the first of each session. A
    champion whose answer failed a check of `serve.escalate` still counts as asked.
    """

    def __init__(self, work: OpenProject, champions: Collection[str], challenger: str) -> None:
        self._captures, self._champions, self._challenger = work.captures, champions, challenger
        self.copies = self.interrupted = self.sessions = 0

    def __iter__(self) -> Iterator[ShadowPair]:
        sessions: set[str] = set()
        for _, copy in self._captures.read_on(releases=(self._challenger,), copies_only=True):
            live = None if copy.shadow_of is None else self._captures.get(copy.shadow_of)
            if live is None or live.asked_release not in self._champions or not is_from_users(live.session):
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
        """Return a remark if the remaining pairs are not a fair sample."""
        if self.interrupted <= MOST_INTERRUPTED * self.copies:
            return []
        return [
            f"{self.interrupted} of {self.copies} copies were interrupted and are not compared: long answers "
            "are missing more often"
        ]


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
                fix="specify a release, an alias or an endpoint",
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
"""Limit on the sessions of a summary: more would slow down `graft status` and hardly narrow the intervals."""


def summarize_shadow(work: OpenProject) -> ShadowSummary | None:
    """The pair of `serve.shadow` by every check of the project; None if no shadow is set up."""
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
    """None if the check cannot be run here."""

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
