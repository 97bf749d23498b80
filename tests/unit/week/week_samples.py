"""Weeks for tests: a small one by hand, and random ones."""

from datetime import UTC, datetime

from hypothesis import strategies as st

from graftwork.records.week import Session
from graftwork.week.problem import (
    GainCurve,
    QuotaPeriod,
    RollingQuota,
    WeekModel,
    WeekPlace,
    WeekProblem,
    WeekState,
)

START = datetime(2026, 11, 16, tzinfo=UTC)
DAY = 1440
WEEK = 7 * DAY


def place(name="card", **given):
    given.setdefault("open", ((0, WEEK),))
    return WeekPlace(name=name, **given)


def model(name="main", **given):
    given.setdefault("curve", GainCurve(half_hours=20))
    return WeekModel(name=name, **given)


def week(places, models, **given):
    return WeekProblem(start=START, length=WEEK, places=tuple(places), models=tuple(models), **given)


def session(place_name, model_name, start, end, **given):
    given.setdefault("train", end - start)
    return Session(place=place_name, model=model_name, start=start, end=end, **given)


def nights(begin=22 * 60, end=31 * 60):
    return tuple((day * DAY + begin, min(day * DAY + end, WEEK)) for day in range(7))


def daytime(begin=8 * 60, end=20 * 60):
    return tuple((day * DAY + begin, day * DAY + end) for day in range(7))


def small_week(**given):
    """Three kinds of places, a main model and two that start from it."""
    kaggle = place(
        "kaggle",
        periods=(
            (
                QuotaPeriod(start=-2 * DAY, end=5 * DAY, minutes=1800),
                QuotaPeriod(start=5 * DAY, end=12 * DAY, minutes=600),
            ),
        ),
        longest=720,
        setup=10,
        transfer=5,
    )
    lab = place(
        "lab",
        rolling=(RollingQuota(window=DAY, minutes=240),),
        longest=240,
        starts=daytime(),
        setup=10,
        by_hand=True,
    )
    rented = place("rented", speed=3.0, usd_per_hour=0.5, longest=720, setup=10)
    main = model("main", weight=3, gate=60)
    heirs = [model(name, inherits="main", share=0.25, carry=0.5, gate=30) for name in ("reads", "writes")]
    given.setdefault("cap_usd", 4.0)
    return week(
        [kaggle, lab, place("card", speed=2.0, open=nights(), setup=5), rented], [main, *heirs], **given
    )


@st.composite
def spans(draw, *, length=WEEK, most=4):
    edges = sorted(draw(st.sets(st.integers(0, length // 5), min_size=2, max_size=2 * most)))
    edges = edges[: len(edges) // 2 * 2]
    return tuple((5 * a, 5 * b) for a, b in zip(edges[::2], edges[1::2], strict=True))


@st.composite
def places(draw, name):
    quotas = draw(st.integers(0, 2))
    periods = ()
    if quotas == 1:
        reset = draw(st.integers(1, 6)) * DAY
        minutes = draw(st.integers(60, 2400))
        periods = (
            (
                QuotaPeriod(start=reset - WEEK, end=reset, minutes=minutes),
                QuotaPeriod(start=reset, end=reset + WEEK, minutes=minutes),
            ),
        )
    rolling = (RollingQuota(window=DAY, minutes=draw(st.integers(60, 600))),) if quotas == 2 else ()
    return place(
        name,
        speed=draw(st.sampled_from([0.5, 1.0, 1.37, 3.0])),
        lanes=draw(st.sampled_from([1, 1, 1, 2])),
        open=draw(st.one_of(st.just(((0, WEEK),)), spans())),
        starts=draw(st.one_of(st.none(), st.none(), spans())),
        periods=periods,
        rolling=rolling,
        longest=draw(st.sampled_from([None, 240, 725])),
        shortest=draw(st.sampled_from([30, 60])),
        setup=draw(st.sampled_from([0, 10])),
        transfer=draw(st.sampled_from([0, 5])),
        usd_per_hour=draw(st.sampled_from([0.0, 0.0, 0.7])),
        by_hand=draw(st.booleans()),
    )


@st.composite
def weeks(draw):
    """A random week without hours that a model must get: it can always be planned."""
    made = [draw(places(f"p{number}")) for number in range(draw(st.integers(1, 3)))]
    count = draw(st.integers(1, 4))
    models = [
        model("main", weight=draw(st.sampled_from([1.0, 3.0])), gate=draw(st.sampled_from([0, 37, 60])))
    ]
    for number in range(1, count):
        heir = draw(st.booleans())
        models.append(
            model(
                f"m{number}",
                weight=draw(st.sampled_from([0.5, 1.0])),
                curve=GainCurve(half_hours=draw(st.sampled_from([2.0, 20.0, 80.0]))),
                inherits="main" if heir else None,
                share=0.25 if heir else 0.0,
                carry=0.5 if heir else 1.0,
                after=("main",) if draw(st.integers(0, 4)) == 0 else (),
                deadline=draw(st.one_of(st.none(), st.none(), st.integers(DAY, WEEK))),
                most_hours=draw(st.sampled_from([None, None, 5.0])),
                done_hours=draw(st.sampled_from([0.0, 10.0])),
            )
        )
    return week(made, models, cap_usd=draw(st.sampled_from([None, 0.0, 3.0, 20.0])))


@st.composite
def states(draw, problem):
    """Some sessions that have been, and one that may run."""
    now = 5 * draw(st.integers(0, WEEK // 5))
    fixed = []
    for used in problem.places:
        at = 0
        for _ in range(draw(st.integers(0, 3))):
            start = at + draw(st.integers(0, 900))
            end = start + draw(st.integers(10, 600))
            if start >= now or end > WEEK:
                break
            chosen = draw(st.sampled_from(problem.models)).name
            if any(s.model == chosen and s.start < end and start < s.end for s in fixed):
                break
            begun = max((s.round for s in fixed if s.model == chosen), default=0)
            number = max(begun, draw(st.integers(0, 1)))
            fixed.append(session(used.name, chosen, start, end, fixed=True, round=number))
            at = end
    return WeekState(now=now, fixed=tuple(fixed))
