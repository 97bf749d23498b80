"""What sessions are worth: hours of each model, hours it inherits, points of the objective, cost.

In: a problem of one scenario and sessions. Out: figures. Does not check any rule.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from graftwork.records.week import ScenarioResult, Session
from graftwork.week.problem import WeekModel, WeekProblem, WeekState, own_hours

POINTS = 100.0


class ModelScore(NamedTuple):
    own: float
    """Hours of training in the week."""
    kept: float
    """Those of them that count: some are lost with each move to another adapter."""
    inherited: float
    before: float
    """Share of what can be gained, before the week."""
    after: float
    value: float

    @property
    def hours(self) -> float:
        return self.kept + self.inherited


class WeekScore(NamedTuple):
    value: float
    cost_usd: float
    models: dict[str, ModelScore]

    @property
    def least(self) -> float:
        """The share that the worst-off model has learned: fairness."""
        return min((model.after for model in self.models.values()), default=0.0)


class ScenarioPlan(NamedTuple):
    """The best plan of one scenario."""

    problem: WeekProblem
    sessions: tuple[Session, ...]
    score: WeekScore
    result: ScenarioResult


def score(problem: WeekProblem, sessions: Iterable[Session]) -> WeekScore:
    listed = list(sessions)
    hours = own_hours(problem, listed)
    models = {model.name: score_model(problem, model, hours) for model in problem.models}
    return WeekScore(
        value=sum(model.value for model in models.values()), cost_usd=cost_of(problem, listed), models=models
    )


def cost_of(problem: WeekProblem, sessions: Iterable[Session]) -> float:
    return sum(
        problem.place(session.place).usd_per_hour * (session.end - session.start) / 60 for session in sessions
    )


def spent_so_far(problem: WeekProblem, state: WeekState) -> float:
    """In the week: by the sessions that have been or run, or by the ledger if that is more."""
    return max(cost_of(problem, state.fixed), state.spent_usd)


def score_model(problem: WeekProblem, model: WeekModel, hours: Mapping[tuple[str, int], float]) -> ModelScore:
    own = {number: value for (name, number), value in hours.items() if name == model.name and value > 0}
    last = max(own, default=0)
    kept = sum(value if number == last else model.carry * value for number, value in own.items())
    inherited = inherited_hours(model, own, hours)
    before = model.curve.learned(model.done_hours)
    after = model.curve.learned(model.done_hours + kept + inherited)
    value = POINTS * model.weight / problem.total_weight * (after - before)
    return ModelScore(sum(own.values()), kept, inherited, before, after, value)


def inherited_hours(
    model: WeekModel, own: Mapping[int, float], hours: Mapping[tuple[str, int], float]
) -> float:
    """A share of the parent's hours of each earlier round, at most as many as are trained from there on."""
    if model.inherits is None or model.share <= 0:
        return 0.0
    taken = trained = 0.0
    for number in range(max(own, default=0), 0, -1):
        trained += own.get(number, 0.0)
        taken += min(model.share * hours.get((model.inherits, number - 1), 0.0), trained - taken)
    return taken


def marginal(problem: WeekProblem, model: WeekModel, hours: float) -> float:
    """Points of one more reference hour."""
    weight = POINTS * model.weight / problem.total_weight
    return weight * model.curve.slope(model.done_hours + hours)
