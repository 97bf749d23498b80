"""`graft release ab`: two releases on live traffic, or on cases that both are asked.

In: an open workplace, two releases, a metric. Out: who won, if it is decided, with the evidence so far. What
is to be tested is written down before the first look, so that it shows how many metrics a pair was tried by.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from graftwork.coordinate.ab_evidence import Exchange, Scores, run_live, run_replay, units_of
from graftwork.coordinate.evaluate_context import Grading, open_grading
from graftwork.coordinate.evaluate_run import ask_subject
from graftwork.coordinate.evaluate_subjects import Asking, resolve_subject
from graftwork.coordinate.release_store import open_store
from graftwork.coordinate.steps.evaluate import put_cases
from graftwork.coordinate.workplace import Workplace, now
from graftwork.evaluate.cases import draw_cases, hash_cases
from graftwork.evaluate.metrics import LOWER_IS_BETTER, GradeContext, grade
from graftwork.evaluate.score import average
from graftwork.evaluate.statistics import Interval
from graftwork.evaluate.subjects.book import read_answers
from graftwork.evaluate.subjects.case_file import read_case_file
from graftwork.evaluate.subjects.named import parse_subject
from graftwork.files.whole import write_whole
from graftwork.records.base import Record, fingerprint
from graftwork.records.capture import Capture
from graftwork.records.errors import EXIT_DONE, EXIT_NOT_ENOUGH_EVIDENCE, UserMistake
from graftwork.records.interaction import Message, Origin
from graftwork.records.release import Release
from graftwork.records.report import Case
from graftwork.registry.promote import find_release

TRIED_FOLDER = "ab"
ROLES = ("system", "user", "assistant", "tool")


class ABResult(Record):
    """`low` to `high` is B less A: of the success rates in live traffic, of wins less losses in replay."""

    a: str
    b: str
    metric: str
    traffic: Literal["captures", "cases"]
    winner: Literal["A", "B"] | None
    used: int
    """Sessions that the test counted, up to the one that decided it."""
    ungraded: int
    asked: int
    """Cases that both releases were asked; 0 for live traffic."""
    counts: dict[str, int]
    e_value: float
    p_value: float
    low: float
    high: float
    confidence: float
    sentence: str
    remarks: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_DONE if self.winner is not None else EXIT_NOT_ENOUGH_EVIDENCE


def compare_replayed(
    work: Workplace, a: str, b: str, *, cases_file: Path, metric: str | None = None
) -> ABResult:
    """Ask both releases the cases of a file, in an order drawn by hash, until it is decided."""
    first, second = _find_pair(work, a, b)
    name = choose_metric(work, metric)
    cases = draw_cases(read_case_file(cases_file), most=None)
    grading = open_grading(work, cases)
    remarks = _note_trial(work, first, second, metric=name, traffic=hash_cases(cases))
    work.looks.log(hash_cases(cases), subject=second.adapter_hash, when=now())

    def grade_block(block: Sequence[Case]) -> tuple[Scores, Scores]:
        of_a = _ask(work, first, block, metric=name, grading=grading)
        return of_a, _ask(work, second, block, metric=name, grading=grading)

    confidence = work.settings.evaluate.confidence
    found = run_replay(
        units_of(cases), grade_block, alpha=1 - confidence, lower_is_better=name in LOWER_IS_BETTER
    )
    test = found.test
    return _tell(
        (first, second),
        name,
        "cases",
        winner=test.winner,
        used=found.used,
        ungraded=found.ungraded,
        asked=found.asked,
        counts={"wins": test.wins, "losses": test.losses, "ties": test.ties},
        evidence=(test.e_value, test.p_value),
        interval=test.difference_interval(confidence),
        confidence=confidence,
        remarks=remarks,
    )


def compare_live(work: Workplace, a: str, b: str, *, metric: str | None = None) -> ABResult:
    """Grade what the endpoint kept of both. Look as often as you like: it reads from the beginning."""
    first, second = _find_pair(work, a, b)
    name = choose_metric(work, metric)
    remarks = _note_trial(work, first, second, metric=name, traffic="captures")
    arms: dict[str, Literal["A", "B"]] = {first.id: "A", second.id: "B"}
    grading = open_grading(work, ())
    confidence = work.settings.evaluate.confidence
    found = run_live(
        _exchanges(work, arms, metric=name, grading=grading),
        alpha=1 - confidence,
        lower_is_better=name in LOWER_IS_BETTER,
    )
    test = found.test
    counts = {"a_successes": test.baseline[0], "a_failures": test.baseline[1]}
    counts |= {"b_successes": test.candidate[0], "b_failures": test.candidate[1]}
    if not sum(test.baseline) or not sum(test.candidate):
        remarks = (*remarks, "one of the two has not answered anything that can be graded yet")
    return _tell(
        (first, second),
        name,
        "captures",
        winner=test.winner,
        used=found.used,
        ungraded=found.ungraded,
        asked=0,
        counts=counts,
        evidence=(test.e_value, test.p_value),
        interval=test.interval(confidence),
        confidence=confidence,
        remarks=remarks,
    )


def choose_metric(work: Workplace, metric: str | None) -> str:
    """The one asked for, the gate's primary one, or the first that is graded."""
    graded = work.settings.evaluate.graded
    primary = work.settings.gate.primary_rule
    chosen = metric or (primary.metric if primary is not None else None) or graded[0]
    if chosen not in graded:
        raise UserMistake(
            f"{chosen} is not graded in this project",
            why=f"graded are: {', '.join(graded)}",
            fix="name one of these, or add it under evaluate.metrics or evaluate.checks",
            where="--metric",
        )
    return chosen


def _find_pair(work: Workplace, a: str, b: str) -> tuple[Release, Release]:
    first, second = find_release(work.releases, a), find_release(work.releases, b)
    if first.id == second.id:
        raise UserMistake(
            f"both are release {first.id[:12]}", why="there is nothing to compare", fix="name two releases"
        )
    return first, second


def _ask(
    work: Workplace, release: Release, cases: Sequence[Case], *, metric: str, grading: Grading
) -> dict[str, float | None]:
    """What the release answers, graded. Kept answers are not asked for again."""
    open_store(work).verify(release.id)
    asking = Asking(put_cases(work, tuple(cases)))
    subject = resolve_subject(work, parse_subject(f"release:{release.id}"), asking=asking, outcome=None)
    ask_subject(work, subject, cases)
    answers = read_answers(subject.folder)
    grading.prepare(cases, answers)
    context = _context(work, grading)
    by_id = {case.id: case for case in cases}
    grades: dict[str, list[float | None]] = {case.id: [] for case in cases}
    for answer in answers:
        if answer.case_id in by_id:
            said = grade(metric, by_id[answer.case_id], answer.text, context=context)
            grades[answer.case_id].append(said)
    return {case: average(values) if values else None for case, values in grades.items()}


def _exchanges(
    work: Workplace, arms: dict[str, Literal["A", "B"]], *, metric: str, grading: Grading
) -> Iterator[Exchange]:
    context = _context(work, grading)
    for capture in work.captures.export():
        if capture.release in arms:
            # Whoever hung up got no whole answer to grade.
            found = (
                None
                if capture.disconnected
                else grade(metric, as_case(capture), capture.reply, context=context)
            )
            yield Exchange(arms[capture.release], capture.session, found)


def as_case(capture: Capture) -> Case:
    """A served exchange as a case without a reference: only what an answer shows by itself is graded."""
    turns = capture.request.get("messages")
    messages = tuple(
        Message(role=turn["role"], content=turn["content"])
        for turn in (turns if isinstance(turns, list) else ())
        if isinstance(turn, dict) and turn.get("role") in ROLES and isinstance(turn.get("content"), str)
    )
    return Case(
        id=capture.id,
        origin=Origin(file="captures", line=1),
        messages=messages,
        reference="",
        session=capture.session,
    )


def _context(work: Workplace, grading: Grading) -> GradeContext:
    from dataclasses import replace

    checks = {check.name: check for check in work.settings.evaluate.checks}
    return replace(grading.context(), checks=checks)


def _note_trial(
    work: Workplace, first: Release, second: Release, *, metric: str, traffic: str
) -> tuple[str, ...]:
    """Write down, before looking, by what this pair is tested."""
    name = fingerprint([sorted((first.id, second.id)), traffic])[:16]
    path = work.project.state / TRIED_FOLDER / f"{name}.json"
    tried: list[str] = json.loads(path.read_bytes())["metrics"] if path.is_file() else []
    if metric not in tried:
        tried.append(metric)
        write_whole(path, json.dumps({"releases": [first.id, second.id], "metrics": tried}))
    if len(tried) == 1:
        return ()
    return (
        f"this pair was tried by {len(tried)} metrics ({', '.join(tried)}): by chance alone, one of "
        "them is decided wrongly that many times as often; the first one counts",
    )


def _tell(
    pair: tuple[Release, Release],
    metric: str,
    traffic: Literal["captures", "cases"],
    *,
    winner: str | None,
    used: int,
    ungraded: int,
    asked: int,
    counts: dict[str, int],
    evidence: tuple[float, float],
    interval: Interval,
    confidence: float,
    remarks: tuple[str, ...],
) -> ABResult:
    side: Literal["A", "B"] | None = None if winner is None else "B" if winner == "candidate" else "A"
    better = pair[1] if side == "B" else pair[0]
    sentence = (
        f"not decided after {used} sessions: go on, and look again as often as you like"
        if side is None
        else f"{side} ({better.id[:12]}) is better by {metric}: decided after {used} sessions"
    )
    return ABResult(
        a=pair[0].id,
        b=pair[1].id,
        metric=metric,
        traffic=traffic,
        winner=side,
        used=used,
        ungraded=ungraded,
        asked=asked,
        counts=counts,
        e_value=evidence[0],
        p_value=evidence[1],
        low=interval.low,
        high=interval.high,
        confidence=confidence,
        sentence=sentence,
        remarks=remarks,
    )
