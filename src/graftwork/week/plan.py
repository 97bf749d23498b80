"""Plan a week: greedy plans, then the solver's from the best of them, for every scenario asked for.

Input: a `WeekProblem`, a `WeekState` of what has happened, an `Effort`. Output: a `WeekSchedule`, the best
plan that keeps every rule; with what would change it most (an hour more here, ten dollars there), solved with
the plan's sessions kept, so that small gains are not lost in the search; and what it is worth under other
curves than assumed. Raises `WeekImpossible` with the rules that the nearest plan breaks.
"""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, timedelta
from zoneinfo import ZoneInfo

from graftwork.records.errors import NegativeResult
from graftwork.records.week import (
    CurveCheck,
    ModelWeek,
    PlaceWeek,
    Scenario,
    ScenarioResult,
    Session,
    ShownSession,
    WeekSchedule,
    WhatIf,
    share_missed,
)
from graftwork.week.calendar import Span, clip, overlap, union
from graftwork.week.checker import check_week
from graftwork.week.greedy import plan_greedily
from graftwork.week.problem import (
    Effort,
    ScenarioPlan,
    WeekPlace,
    WeekProblem,
    WeekState,
    as_scenario,
    in_rounds,
    marginal,
    quota_left,
    reading_notes,
    rounds_of,
    scenarios_of,
    score,
    spent_so_far,
    window_use,
    with_models,
    without_complete,
)
from graftwork.week.sat import SearchLimits, refine, solve

HOUR = 60
DOLLARS = 10.0
FASTER, SLOWER = 0.5, 2.0
"""Factors on the hours until half is learned."""


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
        scenario_problem = as_scenario(changed, scenario)
        done = solve(scenario_problem, state, rounds=rounds_of(changed, scenario), hint=sessions, limits=keep)
        return max(
            score(scenario_problem, done.sessions or sessions).value, score(scenario_problem, sessions).value
        )

    base = best(problem)
    changes = [
        WhatIf(change=text, value=(value := best(changed)), gain=max(0.0, value - base))
        for text, changed in _changes(problem)
    ]
    return tuple(sorted(changes, key=lambda change: -change.gain))


def _changes(problem: WeekProblem) -> Iterator[tuple[str, WeekProblem]]:
    for provider in problem.places:
        changes: list[tuple[str, dict[str, object]]] = []
        if provider.periods or provider.rolling:
            periods = tuple(
                tuple(period.model_copy(update={"minutes": period.minutes + HOUR}) for period in quota)
                for quota in provider.periods
            )
            rolling = tuple(
                quota.model_copy(update={"minutes": quota.minutes + HOUR}) for quota in provider.rolling
            )
            longest = None if provider.longest is None else provider.longest + HOUR
            update: dict[str, object] = {"periods": periods, "rolling": rolling, "longest": longest}
            changes.append(("one more hour of quota and session", update))
        elif provider.open != ((0, problem.length),):
            changes.append(("open an hour longer", {"open": _longer(provider.open, problem.length)}))
        if provider.setup > 0:
            changes.append(("no set-up time", {"setup": 0}))
        for text, update in changes:
            changed = provider.model_copy(update=update)
            providers = tuple(changed if listed is provider else listed for listed in problem.places)
            yield f"{provider.name}: {text}", problem.model_copy(update={"places": providers})
    if problem.cap_usd is not None and any(provider.usd_per_hour > 0 for provider in problem.places):
        richer = problem.model_copy(update={"cap_usd": problem.cap_usd + DOLLARS})
        yield f"${DOLLARS:.0f} more to spend", richer
    if any(provider.starts is not None for provider in problem.places):
        providers = tuple(
            provider
            if provider.starts is None
            else provider.model_copy(update={"starts": _longer(provider.starts, problem.length)})
            for provider in problem.places
        )
        yield "somebody there an hour longer each day", problem.model_copy(update={"places": providers})

    def without_gate(name: str) -> WeekProblem:
        return with_models(problem, lambda model: {"gate": 0} if model.name == name else {})

    parents = {name for model in problem.models for name in (*model.after, model.inherits) if name}
    for model in problem.models:
        if model.name in parents and model.gate > 0:
            yield f"{model.name}: a gate that takes no time", without_gate(model.name)


def _longer(spans: Sequence[Span], length: int) -> tuple[Span, ...]:
    return clip(union((start, end + HOUR) for start, end in spans), (0, length))


def check_curves(
    problem: WeekProblem,
    state: WeekState,
    plans: Sequence[ScenarioPlan],
    best: ScenarioPlan,
    limits: SearchLimits,
) -> tuple[CurveCheck, ...]:
    """The plan under other curves, against plans made for them."""
    checks = []
    for assumption, changed in _assumptions(problem).items():
        mine = score(as_scenario(changed, best.result.scenario), best.sessions).value
        values: dict[Scenario, float] = {best.result.scenario: mine}
        for plan in plans:
            scenario = plan.result.scenario
            scenario_problem, rounds = as_scenario(changed, scenario), rounds_of(changed, scenario)
            done = solve(
                scenario_problem, in_rounds(state, rounds), rounds=rounds, hint=plan.sessions, limits=limits
            )
            value = score(scenario_problem, done.sessions or plan.sessions).value
            values[scenario] = max(value, values.get(scenario, 0.0))
        winner = max(values, key=lambda name: values[name])
        checks.append(
            CurveCheck(
                assumption=assumption,
                value=mine,
                best_value=values[winner],
                best_scenario=winner,
                loss=share_missed(mine, values[winner]),
            )
        )
    return tuple(checks)


def _assumptions(problem: WeekProblem) -> dict[str, WeekProblem]:
    """The problem under each other assumption."""

    def with_curves(factor: float) -> WeekProblem:
        return with_models(
            problem,
            lambda model: {
                "curve": model.curve.model_copy(update={"half_hours": model.curve.half_hours * factor})
            },
        )

    def with_share(factor: float) -> WeekProblem:
        return with_models(problem, lambda model: {"share": min(1.0, model.share * factor)})

    changed = {
        "half is learned in half the hours": with_curves(FASTER),
        "half is learned in twice the hours": with_curves(SLOWER),
    }
    if any(model.inherits and model.share for model in problem.models):
        changed["starting from the main model brings nothing"] = with_share(0.0)
        changed["starting from the main model brings twice as much"] = with_share(2.0)
    return changed


SHARES: dict[Scenario, float] = {"parallel": 0.1, "sequential": 0.3, "iterative": 0.6}
"""Share of the time for each scenario."""
GREEDY = 0.25
"""Largest share of the time for greedy plans."""
FITTING = 0.1
"""Share of the time to fit an earlier plan to other times."""
REFINING = 0.1
"""Share of the time to look for a cheaper and fairer plan of the same value."""
LEAST_FOR_SOLVER = 0.3
"""Seconds."""


class WeekImpossible(NegativeResult):
    """No week keeps every rule."""


def plan_week(
    problem: WeekProblem,
    state: WeekState | None = None,
    effort: Effort | None = None,
    earlier: Sequence[Session] = (),
) -> WeekSchedule:
    """The best week found, with its bound. `earlier`: the plan so far, never lost by replanning."""
    state, effort = state or WeekState(), effort or Effort()
    problem = without_complete(problem, state)
    started_at = time.monotonic()
    plans = find_plans(problem, state, effort, earlier)
    best = max(plans, key=lambda plan: (round(plan.score.value, 6), plan.result.scenario == "sequential"))
    limits = SearchLimits(max(0.5, effort.seconds / 30), effort.workers, 0.0, effort.seed)
    changes = (
        try_changes(problem, state, best.sessions, best.result.scenario, limits) if effort.what_if else ()
    )
    curves = check_curves(problem, state, plans, best, limits) if effort.what_if else ()
    schedule = describe(problem, state, best, plans)
    return schedule.model_copy(
        update={"what_if": changes, "curve_checks": curves, "seconds": time.monotonic() - started_at}
    )


def find_plans(
    problem: WeekProblem, state: WeekState, effort: Effort, earlier: Sequence[Session] = ()
) -> list[ScenarioPlan]:
    """The best plan of each requested scenario."""
    possible = scenarios_of(problem)
    scenarios = possible if effort.scenario == "auto" else (effort.scenario,)
    if effort.scenario != "auto" and effort.scenario not in possible:
        scenarios = possible  # without models that start from others, all strategies are the same
    share = sum(SHARES[name] for name in scenarios)
    found_plans: list[ScenarioPlan] = []
    for name in scenarios:
        seconds = effort.seconds * SHARES[name] / share
        hints = [tuple(earlier), *(finished.sessions for finished in found_plans)]
        limits = SearchLimits(seconds, effort.workers, effort.enough, effort.seed)
        plan = find_plan(problem, state, name, limits, hints)
        if plan is not None:
            found_plans.append(plan)
    if not found_plans:
        # Shown by the greedy plan that breaks the fewest rules.
        rounds = rounds_of(problem, scenarios[-1])
        plans = plan_greedily(as_scenario(problem, scenarios[-1]), in_rounds(state, rounds), rounds)
        nearest = min(plans, key=lambda plan: (len(plan.broken), -plan.score.value))
        raise WeekImpossible(
            f"no week that keeps every rule was found within {effort.seconds:.0f} s",
            why=f"the nearest one breaks: {'; '.join(nearest.broken)}",
            fix="relax one of these rules, give the week more hours, "
            "or give the search more time with --seconds",
            where="plan.week",
        )
    return found_plans


def find_plan(
    problem: WeekProblem,
    state: WeekState,
    scenario: Scenario,
    limits: SearchLimits,
    hints: Sequence[tuple[Session, ...]] = (),
) -> ScenarioPlan | None:
    """The best plan found; `hints` are plans to start from, as far as they fit."""
    started_at = time.monotonic()
    rounds = rounds_of(problem, scenario)
    problem, state = as_scenario(problem, scenario), in_rounds(state, rounds)
    plans: list[tuple[Session, ...]] = []
    first: float | None = None
    for greedy in plan_greedily(problem, state, rounds):
        if not greedy.broken:
            plans.append(greedy.sessions)
            first = first if first is not None else time.monotonic() - started_at
        if time.monotonic() - started_at > limits.seconds * GREEDY:
            break

    def value_of(plan: tuple[Session, ...]) -> float:
        return score(problem, plan).value

    greedy_value = max(map(value_of, plans), default=None)
    provider_names = {provider.name for provider in problem.places}
    for hint in hints:
        ahead = [s for s in hint if not s.fixed and s.start >= state.now and s.place in provider_names]
        if any(session.round not in rounds.get(session.model, ()) for session in ahead):
            continue
        whole = (*state.fixed, *ahead)
        if not check_week(problem, state, whole):
            plans.append(whole)
            continue
        brief = limits._replace(seconds=max(LEAST_FOR_SOLVER, limits.seconds * FITTING), keep=True)
        at_other_times = solve(problem, state, rounds=rounds, hint=ahead, limits=brief).sessions
        if at_other_times is not None:
            plans.append(at_other_times)
    best = max(plans, key=value_of, default=None)
    remaining = limits.seconds * (1 - REFINING) - (time.monotonic() - started_at)
    searching = limits._replace(seconds=max(LEAST_FOR_SOLVER, remaining))
    solved = solve(problem, state, rounds=rounds, hint=best, limits=searching)
    if solved.sessions is not None and (best is None or value_of(solved.sessions) > value_of(best)):
        best = solved.sessions
    if best is None:
        return None
    first = first if first is not None else time.monotonic() - started_at
    seconds = max(LEAST_FOR_SOLVER, limits.seconds - (time.monotonic() - started_at))
    refined = refine(
        problem, state, rounds=rounds, plan=best,
        limits=limits._replace(seconds=min(seconds, limits.seconds * 2 * REFINING)),
    )  # fmt: skip
    if value_of(refined) >= max(greedy_value or 0.0, value_of(best) * 0.998):
        best = refined
    broken = check_week(problem, state, best)
    if broken:
        raise RuntimeError(f"the solver's week breaks a rule: {broken[0]}")
    worth = score(problem, best)
    bound = max(solved.bound, worth.value)
    return ScenarioPlan(
        problem,
        best,
        worth,
        ScenarioResult(
            scenario=scenario,
            value=worth.value,
            bound=bound,
            cost_usd=worth.cost_usd,
            greedy_value=greedy_value,
            first_seconds=first,
            seconds=time.monotonic() - started_at,
            gap=share_missed(worth.value, bound),
            optimal=bound <= worth.value * (1 + 1e-6),
        ),
    )


def describe(
    problem: WeekProblem, state: WeekState, best: ScenarioPlan, plans: Sequence[ScenarioPlan] = ()
) -> WeekSchedule:
    """Convert the plan for people and programs."""
    zone = ZoneInfo(problem.timezone)
    start = problem.start.astimezone(UTC)
    notes = [note for provider in problem.places for note in reading_notes(provider, state)]

    def show(session: Session) -> ShownSession:
        provider = problem.place(session.place)
        return ShownSession(
            **session.model_dump(),
            starts_at=(start + timedelta(minutes=session.start)).astimezone(zone),
            ends_at=(start + timedelta(minutes=session.end)).astimezone(zone),
            hours=session.train * provider.speed_of(session.model) / 60,
            cost_usd=provider.usd_per_hour * (session.end - session.start) / 60,
            by_hand=provider.by_hand,
        )

    ordered = sorted(best.sessions, key=lambda s: (s.start, s.place, s.lane))
    return WeekSchedule(
        start=start.astimezone(zone),
        end=(start + timedelta(minutes=problem.length)).astimezone(zone),
        now=(start + timedelta(minutes=state.now)).astimezone(zone),
        timezone=problem.timezone,
        scenario=best.result.scenario,
        sessions=tuple(show(session) for session in ordered),
        models=tuple(_model_week(best, name) for name in best.score.models),
        places=tuple(_place_week(problem, state, provider, ordered) for provider in problem.places),
        value=best.score.value,
        bound=best.result.bound,
        gap=best.result.gap,
        optimal=best.result.optimal,
        cost_usd=best.score.cost_usd,
        cap_usd=problem.cap_usd,
        scenarios=tuple(plan.result for plan in plans or (best,)),
        assumptions=problem.assumptions,
        notes=tuple(notes),
    )


def _model_week(best: ScenarioPlan, name: str) -> ModelWeek:
    model, model_score = best.problem.model(name), best.score.models[name]
    return ModelWeek(
        model=name,
        sessions=sum(session.model == name for session in best.sessions),
        hours=model_score.own,
        inherited_hours=model_score.inherited,
        learned_before=model_score.before,
        learned_after=model_score.after,
        value=model_score.value,
        another_hour=marginal(best.problem, model, model_score.hours),
        curve=model.curve.source,
        half_hours=model.curve.half_hours,
    )


def _place_week(
    problem: WeekProblem, state: WeekState, provider: WeekPlace, sessions: Sequence[Session]
) -> PlaceWeek:
    place_sessions = [session for session in sessions if session.place == provider.name]
    used = sum(session.end - session.start for session in place_sessions)
    planned = sum(session.end - session.start for session in place_sessions if not session.fixed)
    trained = sum(session.train for session in place_sessions)
    offered = offered_minutes(problem, state, provider)
    return PlaceWeek(
        place=provider.name,
        sessions=len(place_sessions),
        used_hours=used / 60,
        trained_hours=trained / 60,
        overhead_hours=(used - trained) / 60,
        left_hours=max(0, offered - planned) / 60,
        offered_hours=(offered + used - planned) / 60,
        cost_usd=provider.usd_per_hour * used / 60,
    )


def offered_minutes(problem: WeekProblem, state: WeekState, provider: WeekPlace) -> int:
    """Open time from now on, within quotas and money."""
    free = clip(union(provider.open), (state.now, problem.length))
    most = [provider.lanes * sum(end - start for start, end in free)]
    for quota in quota_left(provider, state)[0]:
        most.append(
            sum(
                min(
                    period.minutes, provider.lanes * sum(overlap((period.start, period.end), s) for s in free)
                )
                for period in quota
            )
        )
    for rolling in provider.rolling:
        used = window_use(provider, state, rolling.window)
        windows = [
            (window_end - rolling.window, window_end)
            for window_end in range(problem.length, state.now, -rolling.window)
        ]
        most.append(
            sum(
                min(
                    max(0, rolling.minutes - sum(overlap(span, window) for span in used)),
                    sum(overlap(span, window) for span in free) * provider.lanes,
                )
                for window in windows
            )
        )
    if provider.usd_per_hour > 0 and problem.cap_usd is not None:
        budget_left = max(0.0, problem.cap_usd - spent_so_far(problem, state))
        most.append(int(budget_left / provider.usd_per_hour * 60))
    return min(most)
