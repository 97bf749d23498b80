"""What would change the week most: an hour more here, ten dollars there; and other curves than assumed.

In: a problem and its plan. Out: gains in points. Changes of the terms are solved with the plan's sessions
kept: times, lengths and further sessions are free, so that small gains are not lost in the search.
"""

from collections.abc import Iterator, Sequence

from graftwork.plan.week.calendar import Span, clip, union
from graftwork.plan.week.problem import WeekPlace, WeekProblem, WeekState, as_scenario, in_rounds, rounds_of
from graftwork.plan.week.sat import SearchLimits, solve
from graftwork.plan.week.score import ScenarioPlan, score
from graftwork.records.week import CurveCheck, Scenario, Session, WhatIf, share_missed

HOUR = 60
DOLLARS = 10.0
FASTER, SLOWER = 0.5, 2.0
"""Of the hours until half is learned."""


def try_changes(
    problem: WeekProblem,
    state: WeekState,
    sessions: Sequence[Session],
    scenario: Scenario,
    limits: SearchLimits,
) -> tuple[WhatIf, ...]:
    """Each change alone, the largest gain first."""
    keep = limits._replace(keep=True)
    state = in_rounds(state, rounds_of(problem, scenario))

    def best(changed: WeekProblem) -> float:
        own = as_scenario(changed, scenario)
        done = solve(own, state, rounds=rounds_of(changed, scenario), hint=sessions, limits=keep)
        return max(score(own, done.sessions or sessions).value, score(own, sessions).value)

    base = best(problem)
    found = [
        WhatIf(change=text, value=(value := best(changed)), gain=max(0.0, value - base))
        for text, changed in _changes(problem)
    ]
    return tuple(sorted(found, key=lambda change: -change.gain))


def _changes(problem: WeekProblem) -> Iterator[tuple[str, WeekProblem]]:
    for place in problem.places:
        for text, update in _changes_of_place(problem, place):
            yield text, _replace_place(problem, place.model_copy(update=update))
    if problem.cap_usd is not None and any(place.usd_per_hour > 0 for place in problem.places):
        yield (
            f"${DOLLARS:.0f} more to spend",
            problem.model_copy(update={"cap_usd": problem.cap_usd + DOLLARS}),
        )
    if any(place.starts is not None for place in problem.places):
        places = tuple(
            place
            if place.starts is None
            else place.model_copy(update={"starts": _longer(place.starts, problem.length)})
            for place in problem.places
        )
        yield "somebody there an hour longer each day", problem.model_copy(update={"places": places})
    parents = {name for model in problem.models for name in (*model.after, model.inherits) if name}
    for model in problem.models:
        if model.name in parents and model.gate > 0:
            models = tuple(
                other.model_copy(update={"gate": 0}) if other.name == model.name else other
                for other in problem.models
            )
            yield f"{model.name}: a gate that takes no time", problem.model_copy(update={"models": models})


def _changes_of_place(problem: WeekProblem, place: WeekPlace) -> Iterator[tuple[str, dict[str, object]]]:
    if place.periods or place.rolling:
        periods = tuple(
            tuple(p.model_copy(update={"minutes": p.minutes + HOUR}) for p in quota)
            for quota in place.periods
        )
        rolling = tuple(r.model_copy(update={"minutes": r.minutes + HOUR}) for r in place.rolling)
        longest = None if place.longest is None else place.longest + HOUR
        yield (
            f"{place.name}: one more hour of quota and session",
            {"periods": periods, "rolling": rolling, "longest": longest},
        )
    elif place.open != ((0, problem.length),):
        yield f"{place.name}: open an hour longer", {"open": _longer(place.open, problem.length)}
    if place.setup > 0:
        yield f"{place.name}: no set-up time", {"setup": 0}


def _longer(spans: Sequence[Span], length: int) -> tuple[Span, ...]:
    return clip(union((begin, end + HOUR) for begin, end in spans), (0, length))


def _replace_place(problem: WeekProblem, changed: WeekPlace) -> WeekProblem:
    places = tuple(changed if place.name == changed.name else place for place in problem.places)
    return problem.model_copy(update={"places": places})


def check_curves(
    problem: WeekProblem,
    state: WeekState,
    found: Sequence[ScenarioPlan],
    best: ScenarioPlan,
    limits: SearchLimits,
) -> tuple[CurveCheck, ...]:
    """The plan under other curves, against plans made for them."""
    made = []
    for assumption, changed in _assumptions(problem).items():
        mine = score(as_scenario(changed, best.result.scenario), best.sessions).value
        values: dict[Scenario, float] = {best.result.scenario: mine}
        for plan in found:
            scenario = plan.result.scenario
            own, rounds = as_scenario(changed, scenario), rounds_of(changed, scenario)
            done = solve(own, in_rounds(state, rounds), rounds=rounds, hint=plan.sessions, limits=limits)
            value = score(own, done.sessions or plan.sessions).value
            values[scenario] = max(value, values.get(scenario, 0.0))
        winner = max(values, key=lambda name: values[name])
        made.append(
            CurveCheck(
                assumption=assumption,
                value=mine,
                best_value=values[winner],
                best_scenario=winner,
                loss=share_missed(mine, values[winner]),
            )
        )
    return tuple(made)


def _assumptions(problem: WeekProblem) -> dict[str, WeekProblem]:
    """The problem under each other assumption."""
    changed = {
        "half is learned in half the hours": _with_curves(problem, FASTER),
        "half is learned in twice the hours": _with_curves(problem, SLOWER),
    }
    if any(model.inherits and model.share for model in problem.models):
        changed["starting from the main model brings nothing"] = _with_share(problem, 0.0)
        changed["starting from the main model brings twice as much"] = _with_share(problem, 2.0)
    return changed


def _with_curves(problem: WeekProblem, factor: float) -> WeekProblem:
    models = tuple(
        model.model_copy(
            update={"curve": model.curve.model_copy(update={"half_hours": model.curve.half_hours * factor})}
        )
        for model in problem.models
    )
    return problem.model_copy(update={"models": models})


def _with_share(problem: WeekProblem, factor: float) -> WeekProblem:
    models = tuple(
        model.model_copy(update={"share": min(1.0, model.share * factor)}) for model in problem.models
    )
    return problem.model_copy(update={"models": models})
