"""Why a week is impossible: the smallest set of rules that cannot be kept together.

In: a problem without a plan. Out: the rules as text. Each rule is left out in turn; what is still impossible
without it does not need it. Smaller sets are then tried while there is time: those that are no part of rules
that were kept together before.
"""

import time
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import NamedTuple

from graftwork.plan.week.bound import most_value
from graftwork.plan.week.problem import WeekModel, WeekPlace, WeekProblem, WeekState, rounds_of
from graftwork.plan.week.solver import SearchLimits, solve
from graftwork.records.week import Scenario

SECONDS_A_TRY = 2.0
SECONDS = 20.0


class WeekRule(NamedTuple):
    """A rule, and the problem without it."""

    text: str
    relax: Callable[[WeekProblem], WeekProblem]


def explain(problem: WeekProblem, state: WeekState, scenario: Scenario, *, workers: int = 2) -> list[str]:
    """An irreducible set of rules that conflict; empty if it was not shown that any do."""
    ends = time.monotonic() + SECONDS
    rules = list_rules(problem)

    possible: list[set[str]] = []

    def impossible(kept: Iterable[WeekRule]) -> bool:
        names = {rule.text for rule in kept}
        if any(names <= other for other in possible):
            return False  # fewer rules than can be kept
        relaxed = problem
        for rule in rules:
            if rule.text not in names:
                relaxed = rule.relax(relaxed)
        rounds = rounds_of(relaxed, scenario)
        if most_value(relaxed, state, rounds) is None:
            return True
        limits = SearchLimits(SECONDS_A_TRY, workers, enough=1.0)
        done = solve(relaxed, state, rounds=rounds, hint=None, limits=limits)
        if not done.impossible:
            possible.append(names)
        return done.impossible

    if not impossible(rules):
        return []
    kept = list(rules)
    for rule in rules:
        fewer = [other for other in kept if other.text != rule.text]
        if time.monotonic() < ends and impossible(fewer):
            kept = fewer
    for size in range(1, len(kept)):
        for chosen in combinations(rules, size):
            if time.monotonic() > ends:
                return [rule.text for rule in kept]
            if impossible(chosen):
                return [rule.text for rule in chosen]
    return [rule.text for rule in kept]


def list_rules(problem: WeekProblem) -> list[WeekRule]:
    """Every rule that a user could relax; those of places first: they are left out of the set first."""
    rules = [rule for place in problem.places for rule in _rules_of_place(place)]
    if problem.cap_usd is not None and any(place.usd_per_hour > 0 for place in problem.places):
        rules.append(
            WeekRule(
                f"spending at most ${problem.cap_usd:.2f}", lambda p: p.model_copy(update={"cap_usd": None})
            )
        )
    return rules + [rule for model in problem.models for rule in _rules_of_model(model)]


def _rules_of_place(place: WeekPlace) -> list[WeekRule]:
    name = place.name
    rules = []
    if place.periods or place.rolling:
        rules.append(WeekRule(f"{name}: quota", _on_place(name, periods=(), rolling=())))
    if place.starts is not None:
        rules.append(WeekRule(f"{name}: a person starts each session", _on_place(name, starts=None)))
    if place.longest is not None:
        text = f"{name}: sessions of at most {place.longest / 60:g} h"
        rules.append(WeekRule(text, _on_place(name, longest=None)))
    rules.append(WeekRule(f"{name}: opening times", _always_open(name)))
    return rules


def _rules_of_model(model: WeekModel) -> list[WeekRule]:
    name = model.name
    rules = []
    if model.after:
        rules.append(WeekRule(f"{name}: after {', '.join(model.after)}", _on_model(name, after=())))
    if model.inherits:
        text = f"{name}: starts from {model.inherits}"
        rules.append(WeekRule(text, _on_model(name, inherits=None, share=0.0)))
    if model.deadline is not None:
        rules.append(WeekRule(f"{name}: deadline", _on_model(name, deadline=None)))
    if model.most_hours is not None:
        rules.append(
            WeekRule(f"{name}: at most {model.most_hours:g} hours", _on_model(name, most_hours=None))
        )
    if model.least_hours > 0:
        rules.append(
            WeekRule(f"{name}: at least {model.least_hours:g} hours", _on_model(name, least_hours=0.0))
        )
    return rules


def _on_place(name: str, **update: object) -> Callable[[WeekProblem], WeekProblem]:
    def relax(problem: WeekProblem) -> WeekProblem:
        places = tuple(p.model_copy(update=update) if p.name == name else p for p in problem.places)
        return problem.model_copy(update={"places": places})

    return relax


def _always_open(name: str) -> Callable[[WeekProblem], WeekProblem]:
    return lambda problem: _on_place(name, open=((0, problem.length),))(problem)


def _on_model(name: str, **update: object) -> Callable[[WeekProblem], WeekProblem]:
    def relax(problem: WeekProblem) -> WeekProblem:
        models = tuple(m.model_copy(update=update) if m.name == name else m for m in problem.models)
        return problem.model_copy(update={"models": models})

    return relax
