"""What a week is worth, as CP-SAT variables: hours, hours inherited, points by tangents, fairness.

In: the sessions of a week as variables. Out: an objective. Tangents lie above the curve, and rounding goes
up: the solver's bound holds for the curves themselves.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graftwork.plan.week.problem import STEP, WeekModel, WeekPlace, own_hours
from graftwork.plan.week.sat_sessions import SessionModel
from graftwork.plan.week.score import POINTS
from graftwork.plan.week.tasks import RoundTask, tangent_points

SPEED_UNITS = 1000
"""Speeds are whole thousandths."""
VALUE_UNITS = 10**7
"""Of the solver, for one point."""
PER_HOUR = 60 // STEP * SPEED_UNITS
"""Units of training in a reference hour."""
FINER = 1000


class _Worth(NamedTuple):
    """The variable of a model's points, and the share that it has learned in the hint."""

    variable: Any
    learned: int


@dataclass
class WeekSatModel(SessionModel):
    """Sessions and their worth."""

    hours: "dict[RoundTask, Any]" = field(default_factory=dict)
    """Of each task, in steps of reference training times SPEED_UNITS."""
    value: Any = 0
    fairness: Any = 0
    hinted_value: int = 0
    past: dict[tuple[str, int], int] = field(default_factory=dict)

    def add_all(self, *, keep: bool) -> None:
        for place in self.problem.places:
            self._add_place(place, keep=keep)
        self._add_chains()
        self._add_rounds()
        self._add_waits()
        self._add_models()
        self._add_cap()
        for variable, value in self.known.values():
            self.model.add_hint(variable, value)

    def _add_models(self) -> None:
        past = own_hours(self.problem, self.state.fixed)
        self.past = {key: math.floor(hours * PER_HOUR) for key, hours in past.items()}
        for week_model in self.problem.models:
            for task in self.table.tasks_of(week_model.name):
                self.hours[task] = self._trained(task)
        fair = self.model.new_int_var(0, VALUE_UNITS, "")
        for week_model in self.problem.models:
            done = sum(hours for (name, _), hours in self.past.items() if name == week_model.name)
            own = sum(self.hours[task] for task in self.table.tasks_of(week_model.name)) + done
            if week_model.least_hours > 0:
                self.model.add(own >= math.ceil(week_model.least_hours * PER_HOUR - 1e-6))
            if week_model.most_hours is not None:
                most = math.floor(week_model.most_hours * PER_HOUR + 1e-6)
                self.model.add(own <= max(most, done))
            if week_model.deadline is not None:
                self._add_deadline(week_model)
        hinted = self._hinted_hours()
        worths = [self._add_value(week_model, fair, hinted) for week_model in self.problem.models]
        self._know(fair, max(0, min(VALUE_UNITS, *(worth.learned for worth in worths))))
        self.value, self.fairness = sum(worth.variable for worth in worths), fair
        self.hinted_value = sum(self._hinted(worth.variable) for worth in worths)

    def _trained(self, task: RoundTask) -> Any:
        return sum(
            _speed(position.cell.place, task.model) * position.trains[task]
            for position in self.positions
            if task in position.trains
        )

    def _hinted_hours(self) -> dict[RoundTask, int]:
        return {
            task: sum(
                _speed(position.cell.place, task.model) * self._hinted(position.trains[task])
                for position in self.positions
                if task in position.trains
            )
            for task in self.hours
        }

    def _add_deadline(self, week_model: WeekModel) -> None:
        last = ((week_model.deadline or 0) - week_model.gate) // STEP
        for position in self.positions:
            for task in self.table.tasks_of(week_model.name):
                if task in position.takes:
                    self.model.add(position.end <= last).only_enforce_if(position.takes[task])

    def _add_value(self, week_model: WeekModel, fair: Any, hinted: dict[RoundTask, int]) -> "_Worth":
        """Points by tangents of the curve, rounded up; and the share learned, for fairness."""
        weight = POINTS * week_model.weight / self.problem.total_weight
        before = week_model.curve.learned(week_model.done_hours)
        most = 2 * self.horizon * max([_speed(p, week_model.name) for p in self.problem.places] + [1])
        hours = self.model.new_int_var(0, most, "")
        kept, kept_hint = self._add_kept(week_model, hinted)
        inherited, inherited_hint = self._add_inherited(week_model, most, hinted)
        # Thousandths, rounded up: the bound stays a bound.
        self.model.add(1000 * hours <= kept + 1000 * inherited + 999)
        at_hint = min(most, -(-kept_hint // 1000) + inherited_hint)
        self._know(hours, at_hint)
        value = self.model.new_int_var(0, math.ceil(weight * VALUE_UNITS), "")
        lines: list[tuple[Any, int, int]] = []
        for at in tangent_points(week_model):
            slope = week_model.curve.slope(week_model.done_hours + at)
            height = week_model.curve.learned(week_model.done_hours + at) - slope * at
            for variable, scale, zero in (
                (value, weight * VALUE_UNITS, before),
                (fair, float(VALUE_UNITS), 0.0),
            ):
                # Coefficients are multiplied so that rounding them up costs little.
                tilt = math.ceil(scale * slope / PER_HOUR * FINER)
                offset = math.ceil(scale * (height - zero) * FINER)
                self.model.add(FINER * variable <= tilt * hours + offset)
                lines.append((variable, tilt, offset))
        reached = {
            index: min((tilt * at_hint + offset) // FINER for v, tilt, offset in lines if v.index == index)
            for index in (value.index, fair.index)
        }
        self._know(value, min(math.ceil(weight * VALUE_UNITS), reached[value.index]))
        return _Worth(value, reached[fair.index])

    def _add_kept(self, week_model: WeekModel, hinted: dict[RoundTask, int]) -> tuple[Any, int]:
        """Own hours; a part of those before a move is lost with it."""
        carry = math.ceil(week_model.carry * 1000)
        first = self.table.rounds[week_model.name][0]
        total: Any = 0
        hint = 0
        for task in self.table.tasks_of(week_model.name):
            part = carry if task.moves and task.round == first else 1000
            total, hint = total + part * self.hours[task], hint + part * hinted[task]
        for (name, number), done in self.past.items():
            if name == week_model.name:
                total, hint = total + 1000 * done, hint + 1000 * done
                if number == first and name in self.moved:
                    lost = (1000 - carry) * done
                    total = total - lost * self.moved[name]
                    hint -= lost * self._hinted(self.moved[name])
        return total, hint

    def _add_inherited(
        self, week_model: WeekModel, most: int, hinted: dict[RoundTask, int]
    ) -> tuple[Any, int]:
        """At most a share of the parent's earlier hours, and as many as are trained from there on."""
        if week_model.inherits is None or week_model.share <= 0:
            return 0, 0
        share = math.ceil(week_model.share * 1000)
        parts: list[Any] = []
        trained = taken = 0
        total: Any = 0
        for number in sorted((n for n in self.table.rounds[week_model.name] if n > 0), reverse=True):
            own = [task for task in self.table.tasks_of(week_model.name) if task.round == number]
            before = [task for task in self.table.tasks_of(week_model.inherits) if task.round == number - 1]
            done, parent_done = (
                self._past(week_model.name, number),
                self._past(week_model.inherits, number - 1),
            )
            variable = self.model.new_int_var(0, most, "")
            parts.append(variable)
            total = total + sum(self.hours[task] for task in own) + done
            self.model.add(
                1000 * variable <= share * (sum(self.hours[task] for task in before) + parent_done)
            )
            self.model.add(sum(parts) <= total)
            if week_model.name in self.moved:
                self.model.add(
                    variable <= self._most_inherited(week_model, share) * self.moved[week_model.name]
                )
            trained += sum(hinted[task] for task in own) + done
            parent_hours = sum(hinted[task] for task in before) + parent_done
            known = min(share * parent_hours // 1000, trained - taken)
            self._know(variable, known)
            taken += known
        return sum(parts), taken

    def _past(self, name: str, number: int) -> int:
        return self.past.get((name, number), 0)

    def _most_inherited(self, week_model: WeekModel, share: int) -> int:
        """The parent is trained by one session at a time."""
        parent = self.problem.model(week_model.inherits or "")
        fastest = max([_speed(place, parent.name) for place in self.problem.places], default=0)
        hours = max(0, self.horizon - self.state.now // STEP) * fastest + sum(
            done for (name, _), done in self.past.items() if name == parent.name
        )
        return share * hours // 1000 + 1


def _speed(place: WeekPlace, model: str) -> int:
    return round(place.speed_of(model) * SPEED_UNITS)
