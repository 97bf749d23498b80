"""What `graft release ab` tells, and what it writes down before it looks.

In: two releases, a metric, the evidence. Out: an ABResult. Which metrics a pair was tried by is kept in the
project, so that it shows how often somebody tried.
"""

import json
from collections.abc import Mapping
from typing import Literal

from graftwork.evaluate.statistics import Interval
from graftwork.files.disk import write_atomic
from graftwork.pipeline.open_project import OpenProject
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import EXIT_DONE, EXIT_NOT_ENOUGH_EVIDENCE, UserMistake
from graftwork.records.release import Release
from graftwork.registry.promote import find_release

TRIED_FOLDER = "ab"


class ArmFacts(Record):
    """How one release did in live traffic, beside what is tested. Describes; decides nothing."""

    release: str
    exchanges: int
    sessions: int
    failures: int
    """Exchanges that ended with an error instead of an answer."""
    hung_up: int
    """Callers who left before the answer was whole."""
    feedback: int
    """Exchanges that somebody said something about."""
    median_ms: float | None
    p95_ms: float | None
    first_token_ms: float | None
    """Median, of streamed answers."""


class ABResult(Record):
    """`low` to `high` is B less A: of the mean marks in live traffic, of wins less losses in replay."""

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
    counts: dict[str, int | float]
    e_value: float
    p_value: float
    low: float
    high: float
    confidence: float
    sentence: str
    remarks: tuple[str, ...] = ()
    experiment: str | None = None
    """The experiment that drew who answers; None for cases, and for traffic that nobody dealt."""
    arms: dict[str, ArmFacts] = {}
    """By "A" and "B"; empty for cases."""

    @property
    def exit_code(self) -> int:
        return EXIT_DONE if self.winner is not None else EXIT_NOT_ENOUGH_EVIDENCE


def choose_metric(work: OpenProject, metric: str | None, *, also: tuple[str, ...] = ()) -> str:
    """The one asked for, the gate's primary one, or the first that is graded."""
    graded = work.settings.evaluate.graded
    primary = work.settings.gate.primary_rule
    usual = primary.metric if primary is not None and primary.metric in graded else graded[0]
    chosen = metric or usual
    if chosen not in graded:
        raise UserMistake(
            f"{chosen} is not graded in this project",
            why=f"graded are: {', '.join((*graded, *also))}",
            fix="name one of these, or add it under evaluate.metrics or evaluate.checks",
            where="--metric",
        )
    return chosen


def find_pair(work: OpenProject, a: str, b: str) -> tuple[Release, Release]:
    first, second = find_release(work.releases, a), find_release(work.releases, b)
    if first.id == second.id:
        raise UserMistake(
            f"both are release {first.id[:12]}", why="there is nothing to compare", fix="name two releases"
        )
    return first, second


def note_trial(
    work: OpenProject, first: Release, second: Release, *, metric: str, traffic: str
) -> tuple[str, ...]:
    """Write down, before looking, by what this pair is tested."""
    name = fingerprint([sorted((first.id, second.id)), traffic])[:16]
    path = work.project.state / TRIED_FOLDER / f"{name}.json"
    tried: list[str] = json.loads(path.read_bytes())["metrics"] if path.is_file() else []
    if metric not in tried:
        tried.append(metric)
        write_atomic(path, json.dumps({"releases": [first.id, second.id], "metrics": tried}))
    if len(tried) == 1:
        return ()
    return (
        f"this pair was tried by {len(tried)} metrics ({', '.join(tried)}): by chance alone, one of "
        "them is decided wrongly that many times as often; the first one counts",
    )


def tell(
    pair: tuple[Release, Release],
    metric: str,
    traffic: Literal["captures", "cases"],
    *,
    winner: str | None,
    used: int,
    ungraded: int,
    asked: int,
    counts: Mapping[str, int | float],
    evidence: tuple[float, float],
    interval: Interval,
    confidence: float,
    remarks: tuple[str, ...],
    experiment: str | None = None,
    arms: Mapping[str, ArmFacts] | None = None,
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
        counts=dict(counts),
        e_value=evidence[0],
        p_value=evidence[1],
        low=interval.low,
        high=interval.high,
        confidence=confidence,
        sentence=sentence,
        remarks=remarks,
        experiment=experiment,
        arms=dict(arms or {}),
    )
