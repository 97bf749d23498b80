"""Shadow traffic compared: what users got, and a challenger's answers to the same requests.

In: an open project, the release that users got, and the challenger: a release or the name of an endpoint.
Out: an ABResult by one metric, or a ShadowSummary by all checks of the project. Each session counts once, in
the order of the copies; both may be read at any time.
"""

import math
import statistics
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from graftwork.evaluate.ab import ABEvidence, ABResult, make_result
from graftwork.evaluate.statistics.anytime import MeanTest
from graftwork.grading.grade import grade
from graftwork.grading.interface import CannotGrade
from graftwork.grading.metrics import LOWER_IS_BETTER
from graftwork.pipeline.ab import as_case, choose_metric, grade_context, note_pair
from graftwork.pipeline.answer_checks import LiveChecks, find_live_checks
from graftwork.pipeline.evaluation import open_grading
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.releases import full_alias
from graftwork.records.errors import GraftError, UserMistake
from graftwork.records.interaction import INTERRUPTED, Capture
from graftwork.records.shadow import ShadowCheck, ShadowSummary
from graftwork.registry.aliases import find_release
from graftwork.serve.settings import ShadowSettings

MOST_INTERRUPTED = 0.1
"""The share of interrupted copies from which the comparison has a remark."""


def compare_shadow(work: OpenProject, a: str, b: str, *, metric: str | None = None) -> ABResult:
    """The current result of the copies that `b` answered of requests that `a` had answered."""
    pair = find_release(work.releases, a).id, _find_challenger(work, b)
    name = choose_metric(work, metric)
    lower, confidence = name in LOWER_IS_BETTER, work.settings.evaluate.confidence
    context = grade_context(work, open_grading(work, ()))
    test, used, ungraded, asked = MeanTest(1 - confidence), 0, 0, 0
    seen: set[str] = set()
    interrupted = 0

    def mark(capture: Capture) -> float | None:
        if capture.finish_reason == "error":
            return 1.0 if lower else 0.0
        return grade(name, as_case(capture), capture.reply, context=context)

    for _, copy in work.captures.read_on(releases=(pair[1],), copies_only=True):
        live = None if copy.shadow_of is None else work.captures.get(copy.shadow_of)
        if live is None or live.release != pair[0]:
            continue
        if copy.finish_reason == INTERRUPTED:
            interrupted += 1
            continue
        asked += 1
        if test.decided or (live.session is not None and live.session in seen):
            continue
        if live.session is not None:
            seen.add(live.session)
        of_a, of_b = mark(live), mark(copy)
        if of_a is None or of_b is None:
            ungraded += 1
            continue
        used += 1
        ahead = min(max(of_b, 0.0), 1.0) - min(max(of_a, 0.0), 1.0)
        test.update(-ahead if lower else ahead)
    remarks = note_pair(work, pair, metric=name, traffic="shadow") if used else ()
    if not asked:
        remarks = (f"no copies of requests to {a} were answered by {b}: set `serve.shadow`",)
    if interrupted > MOST_INTERRUPTED * (asked + interrupted):
        remarks = (
            *remarks,
            f"{interrupted} of {asked + interrupted} copies were interrupted and are not "
            "compared: long answers are missing more often",
        )
    return make_result(
        pair,
        name,
        "shadow",
        evidence=ABEvidence(
            winner=test.winner,
            used=used,
            ungraded=ungraded,
            asked=asked,
            counts={"wins": test.wins, "losses": test.losses, "ties": test.ties},
            e_value=test.e_value,
            p_value=test.p_value,
            interval=test.interval(confidence),
            confidence=confidence,
        ),
        remarks=remarks,
    )


MOST_PAIRS = 5000
"""Pairs that a summary reads: more would make `graft status` slow and hardly narrow the intervals."""


class _ShadowPair(NamedTuple):
    live: Capture
    copy: Capture


def summarize_shadow(work: OpenProject) -> ShadowSummary | None:
    """The pair of `serve.shadow` by every check of the project; None where no shadow is set up."""
    settings = work.project.settings.serve.shadow
    if settings is None:
        return None
    aliases = work.releases.aliases()
    champions = {aliases[name] for name in _names(work, settings) if name in aliases}
    challenger = aliases.get(settings.to, settings.to)
    found = list(islice(_pairs(work, champions, challenger), MOST_PAIRS))
    interrupted = [pair for pair in found if pair.copy.finish_reason == INTERRUPTED]
    pairs = _one_a_session([pair for pair in found if pair.copy.finish_reason != INTERRUPTED])
    names = find_live_checks(work)
    confidence = work.settings.evaluate.confidence
    checks = [_compare(work, name, pairs, 1 - (1 - confidence) / max(len(names), 1)) for name in names]
    answered = [pair for pair in pairs if pair.copy.finish_reason != "error"]
    return ShadowSummary(
        champion=", ".join(sorted(champions)),
        challenger=challenger,
        copies=len(found),
        sessions=len(pairs),
        failed=len(pairs) - len(answered),
        interrupted=len(interrupted),
        checks=tuple(check for check in checks if check is not None),
        confidence=confidence,
        champion_ms=_median([pair.live.total_ms for pair in answered]),
        challenger_ms=_median([pair.copy.total_ms for pair in answered]),
        remarks=_remarks(settings.to, found, interrupted, dict(zip(names, checks, strict=True))),
    )


def _names(work: OpenProject, settings: ShadowSettings) -> set[str]:
    """The aliases of the models that are copied: the name of the family stands for its members."""
    names, family = set(settings.models), work.project.settings.serve.family
    if family is not None and family.name in names:
        names |= {full_alias(work, model=name) for name in work.project.settings.all_models}
    return names


def _pairs(work: OpenProject, champions: set[str], challenger: str) -> Iterator[_ShadowPair]:
    for _, copy in work.captures.read_on(releases=(challenger,), copies_only=True):
        live = None if copy.shadow_of is None else work.captures.get(copy.shadow_of)
        if live is not None and live.release in champions:
            yield _ShadowPair(live, copy)


def _one_a_session(pairs: list[_ShadowPair]) -> list[_ShadowPair]:
    first: dict[str, _ShadowPair] = {}
    for pair in pairs:
        first.setdefault(pair.live.session or f"capture {pair.live.id}", pair)
    return list(first.values())


def _compare(work: OpenProject, name: str, pairs: list[_ShadowPair], confidence: float) -> ShadowCheck | None:
    """None where the check cannot be run here."""
    test, marks = MeanTest(1 - confidence), list[tuple[float, float]]()
    try:
        live = LiveChecks(work, [name])
        for pair in pairs:
            ours, theirs = _mark(live, name, pair.live), _mark(live, name, pair.copy)
            if ours is None or theirs is None:
                continue
            marks.append((ours, theirs))
            test.update(theirs - ours)
    except (CannotGrade, GraftError):
        return None
    interval, n = test.interval(confidence), len(marks)
    return ShadowCheck(
        check=name,
        pairs=n,
        champion=math.fsum(ours for ours, _ in marks) / n if n else None,
        challenger=math.fsum(theirs for _, theirs in marks) / n if n else None,
        wins=test.wins,
        losses=test.losses,
        ties=test.ties,
        low=interval.low,
        high=interval.high,
    )


def _mark(live: LiveChecks, name: str, capture: Capture) -> float | None:
    if capture.finish_reason == "error":
        return 0.0
    messages = [message.model_dump() for message in as_case(capture).messages]
    found = live.grade(name, messages, capture.reply)
    return None if found is None else min(max(found, 0.0), 1.0)


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _remarks(
    to: str, found: list[_ShadowPair], interrupted: list[_ShadowPair], checks: dict[str, ShadowCheck | None]
) -> tuple[str, ...]:
    remarks = []
    failing = [name for name, check in checks.items() if check is None]
    if not found:
        remarks.append(f"{to} has answered no copies of live requests yet")
    if not checks:
        remarks.append("no metric or check under `evaluate` can judge an answer without a reference")
    if failing:
        remarks.append(f"not graded here: {', '.join(failing)}")
    if interrupted and len(interrupted) > MOST_INTERRUPTED * len(found):
        remarks.append(
            f"{len(interrupted)} of {len(found)} copies were interrupted and are not compared: long answers "
            "are missing more often"
        )
    if len(found) == MOST_PAIRS:
        remarks.append(f"only the first {MOST_PAIRS:,} copies are compared")
    return tuple(remarks)


def _find_challenger(work: OpenProject, name: str) -> str:
    """The id of a release, or the name of an endpoint."""
    if name in work.project.settings.serve.failover.endpoints:
        return name
    try:
        return find_release(work.releases, name).id
    except UserMistake as error:
        known = ", ".join(work.project.settings.serve.failover.endpoints) or "none"
        raise UserMistake(
            error.what, why=f"endpoints of serve.failover: {known}", fix="name a release, alias or endpoint"
        ) from error
