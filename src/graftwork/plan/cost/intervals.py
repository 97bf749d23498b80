"""How often to save and to evaluate.

In: the hours of a run, its hazard, what an evaluation takes. Out: whole numbers of both, in minutes and
steps. Saves follow the interruptions (Young, Daly); evaluations follow what they cost and what they are for:
to see that a run goes wrong early enough to stop it. Does not know what is evaluated.
"""

from typing import NamedTuple

from graftwork.plan.cost.interruption import Hazard, choose_saves, young_interval
from graftwork.plan.cost.nouns import CardRun, Intervals
from graftwork.records.base import Figure

MOST_EVALUATIONS = 20
"""A curve of more points tells no more."""
EVALUATION_SHARE = 0.05
"""Of the training's time, the most that evaluations may take."""
FORWARD_SHARE = 0.4
"""Of a training row's time, what a row that is only read takes: one pass of about two and a half."""
MOST_ROWS_READ = 200


class Rhythm(NamedTuple):
    """What is done beside the training."""

    saves: int
    evaluations: int
    evaluation_hours: float
    """Of one."""


def choose_rhythm(
    *, hours: float, steps: float, rows: float, hazard: Hazard, evaluation_rows: int | None
) -> Rhythm:
    """Saves and evaluations of a run of `hours` over `rows` rows (of all epochs)."""
    read = evaluation_rows if evaluation_rows is not None else min(MOST_ROWS_READ, max(1.0, rows / 10))
    one = FORWARD_SHARE * hours * read / max(rows, 1.0)
    affordable = int(EVALUATION_SHARE * hours / one) if one > 0 else MOST_EVALUATIONS
    evaluations = max(1, min(MOST_EVALUATIONS, affordable, int(steps)))
    work = hours + evaluations * one
    saves = max(1, min(choose_saves(hazard, work=work), int(steps) or 1))
    return Rhythm(saves=saves, evaluations=evaluations, evaluation_hours=one)


def describe(rhythm: Rhythm, *, run: CardRun, hazard: Hazard) -> Intervals:
    """The rhythm in minutes and steps of this run."""

    def every(count: int) -> tuple[Figure, Figure]:
        minutes = Figure(
            value=60 * run.hours.value / count,
            low=60 * run.hours.low / count,
            high=60 * run.hours.high / count,
            unit="min",
        )
        return minutes, Figure.exact(max(1, round(run.steps / count)), "steps")

    save_minutes, save_steps = every(rhythm.saves)
    look_minutes, look_steps = every(rhythm.evaluations)
    return Intervals(
        checkpoints=rhythm.saves,
        checkpoint_minutes=save_minutes,
        checkpoint_steps=save_steps,
        young_minutes=Figure.exact(60 * young_interval(hazard), "min"),
        evaluations=rhythm.evaluations,
        evaluation_minutes=look_minutes,
        evaluation_steps=look_steps,
    )
