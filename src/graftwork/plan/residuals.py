"""How far the plan was off, figure by figure. Pure."""

from graftwork.records.plan import Plan, Residual
from graftwork.records.run import TrainOutcome


def compare(plan: Plan, outcome: TrainOutcome, *, minutes: float) -> tuple[Residual, ...]:
    """The plan beside what came of it. `minutes` is the time that the user waited."""
    actual = {
        "trainable_parameters": float(outcome.trainable_parameters),
        "peak_memory_gib": outcome.peak_memory_gib,
        "steps": float(outcome.steps),
        "tokens_per_second": outcome.tokens_per_second,
        "minutes": minutes,
    }
    return tuple(
        Residual(name=name, planned=getattr(plan, name), actual=value) for name, value in actual.items()
    )
