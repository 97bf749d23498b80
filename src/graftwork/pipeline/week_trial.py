"""A week under other terms: more money, more hours, another order of importance, a faster gate.

In: a project and the terms to try. Out: the week as graft.yaml has it and the week under these terms, planned
with the same effort. Nothing is written.
"""

import math
from functools import lru_cache

from pydantic import Field

from graftwork.pipeline.week import WeekRequest, week_as_it_is
from graftwork.plan.week.plan import plan_week
from graftwork.plan.week.problem import STEP, Effort, WeekModel, WeekPlace, WeekProblem, require_name
from graftwork.project.load import ProjectFolder
from graftwork.records.base import Record
from graftwork.records.week import Scenario, WeekSchedule

MOST_SECONDS = 20.0
LEAST_WEIGHT = 0.001
"""Of a model that does not count: a weight of none would leave its hours to chance."""


class WeekTerms(Record):
    """What is tried. What is not named stays as it is."""

    spend_usd: float | None = Field(None, ge=0, description="Money for the week.")
    hours: dict[str, float] = Field({}, description="Hours a place has more, or fewer.")
    priority: dict[str, float] = Field({}, description="How much a model counts.")
    gate_minutes: float | None = Field(None, ge=0, description="What a gate takes.")

    @property
    def changes_value(self) -> bool:
        """Whether points mean something else: then they cannot be compared."""
        return bool(self.priority)


class WeekDial(Record):
    """A term that can be turned: what it is now, and how far it makes sense."""

    name: str
    label: str
    unit: str
    now: float
    least: float
    most: float
    step: float


class WeekTrial(Record):
    """`before` is the week as graft.yaml has it, `after` the one under other terms, if there are any."""

    terms: WeekTerms
    before: WeekSchedule
    after: WeekSchedule | None
    comparable: bool = True


def list_dials(project: ProjectFolder) -> tuple[WeekDial, ...]:
    """Every term that this week can be tried with."""
    problem, _ = week_as_it_is(project, WeekRequest())
    found = []
    if problem.cap_usd is not None and any(place.usd_per_hour > 0 for place in problem.places):
        most = max(20.0, 3 * problem.cap_usd)
        found.append(
            WeekDial(
                name="spend",
                label="Money for the week",
                unit="USD",
                now=problem.cap_usd,
                least=0,
                most=most,
                step=_step(problem.cap_usd, 1.0),
            )
        )
    found += [
        WeekDial(
            name=f"hours.{place.name}",
            label=f"Hours at {place.name}, more or fewer",
            unit="h",
            now=0,
            least=-math.floor(_free_hours(place) / 0.5) * 0.5,
            most=24,
            step=0.5,
        )
        for place in problem.places
        if place.periods or place.rolling
    ]
    gates = [model.gate for model in problem.models if model.gate]
    if gates:
        found.append(
            WeekDial(
                name="gate", label="A gate takes", unit="min", now=max(gates), least=0, most=240, step=STEP
            )
        )
    if len(problem.models) > 1:
        found += [
            WeekDial(
                name=f"priority.{model.name}",
                label=f"Importance of {model.name}",
                unit="",
                now=model.weight,
                least=0,
                most=max(5.0, 2 * model.weight),
                step=_step(model.weight, 0.5),
            )
            for model in problem.models
        ]
    return tuple(found)


def _step(value: float, usual: float) -> float:
    """A grid that the present value is on: a slider would move it otherwise."""
    return usual if (value / usual).is_integer() else 0.01


def try_week(
    project: ProjectFolder, terms: WeekTerms, *, seconds: float, scenario: Scenario | None = None
) -> WeekTrial:
    """Plan the week twice, each for so many seconds at most."""
    problem, _ = week_as_it_is(project, WeekRequest())
    effort = Effort(
        seconds=min(max(seconds, 1.0), MOST_SECONDS),
        workers=1,
        scenario=scenario or project.settings.plan.week.scenario,
        what_if=False,
    )
    before = _plan(problem.to_json(), effort.to_json())
    changed = change_terms(problem, terms)
    after = _plan(changed.to_json(), effort.to_json()) if changed != problem else None
    return WeekTrial(terms=terms, before=before, after=after, comparable=not terms.changes_value)


@lru_cache(maxsize=16)
def _plan(problem: str, effort: str) -> WeekSchedule:
    """The same question is answered once: sliders are moved back and forth."""
    return plan_week(WeekProblem.from_json(problem), effort=Effort.from_json(effort))


def change_terms(problem: WeekProblem, terms: WeekTerms) -> WeekProblem:
    """The problem under other terms. UserMistake for a place or a model that is not there."""
    for name in terms.hours:
        require_name(name, {place.name: place for place in problem.places}, kind="place", where="hours")
    for name in terms.priority:
        require_name(name, {model.name: model for model in problem.models}, kind="model", where="priority")
    return problem.model_copy(
        update={
            "cap_usd": problem.cap_usd if terms.spend_usd is None else terms.spend_usd,
            "places": tuple(
                _change_place(place, terms.hours.get(place.name, 0.0)) for place in problem.places
            ),
            "models": tuple(_change_model(model, terms) for model in problem.models),
        }
    )


def _change_place(place: WeekPlace, hours: float) -> WeekPlace:
    """More hours of every quota; a session may become as much longer."""
    more = round(hours * 60)
    if not more:
        return place
    periods = tuple(
        tuple(part.model_copy(update={"minutes": max(0, part.minutes + more)}) for part in quota)
        for quota in place.periods
    )
    rolling = tuple(
        quota.model_copy(update={"minutes": min(max(0, quota.minutes + more), quota.window)})
        for quota in place.rolling
    )
    return place.model_copy(update={"periods": periods, "rolling": rolling})


def _change_model(model: WeekModel, terms: WeekTerms) -> WeekModel:
    weight = max(terms.priority.get(model.name, model.weight), LEAST_WEIGHT)
    gate = model.gate
    if terms.gate_minutes is not None and gate:
        gate = math.ceil(terms.gate_minutes / STEP) * STEP
    return model.model_copy(update={"weight": weight, "gate": gate})


def _free_hours(place: WeekPlace) -> float:
    """The smallest quota, in hours: fewer than none cannot be had."""
    minutes = [part.minutes for quota in place.periods for part in quota]
    minutes += [quota.minutes for quota in place.rolling]
    return min(minutes, default=0) / 60
