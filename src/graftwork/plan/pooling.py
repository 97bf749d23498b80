"""Pool an estimate with what past runs of the same kind took. Pure.

In: the estimate made without past runs (the prior) and the values seen. Out: one figure. Times and speeds
vary by factors, so everything is computed on the log scale. Past runs on one machine are few and share its
load of the hour: a range from them is a prediction interval with a prior for their spread, it always holds
every value that was seen, and one or two runs never narrow the prior's own range.
"""

import math
from collections.abc import Sequence
from statistics import median

from graftwork.records.base import Figure

ENOUGH_RUNS = 3
"""From so many runs on their own spread gives the range."""
USUAL_SPREAD = 0.12
"""Standard deviation of the log of a run's speed between runs on an otherwise idle machine."""
PRIOR_DEGREES = 2.0
"""Weight of `USUAL_SPREAD` against the spread seen, in degrees of freedom."""
RUN_SPREAD = 0.35
"""The same where other load comes and goes: how far a single run can be trusted against the prior."""
NORMAL_95 = 1.6449
"""Ranges are stated as 90 % intervals."""


def pool_runs(prior: Figure, seen: Sequence[float]) -> Figure:
    """The prior corrected by the values seen. Values that are not positive are ignored."""
    known = [value for value in seen if value > 0]
    if not known or prior.value <= 0:
        return prior
    logs = [math.log(value) for value in known]
    if len(known) < ENOUGH_RUNS:
        value, low, high = _weighted(prior, logs), prior.low, prior.high
    else:
        value, reach = median(known), math.exp(_half_width(logs))
        low, high = value / reach, value * reach
    low, high = min(low, *known), max(high, *known)
    return Figure(value=min(max(value, low), high), low=low, high=high, unit=prior.unit)


def _weighted(prior: Figure, logs: Sequence[float]) -> float:
    """Prior and runs, each by the inverse of its variance."""
    tau = math.log(prior.high / prior.low) / (2 * NORMAL_95) if prior.low > 0 else math.inf
    weight = (RUN_SPREAD / tau) ** 2 if tau > 0 else math.inf
    if math.isinf(weight):
        return prior.value
    return math.exp((weight * math.log(prior.value) + sum(logs)) / (weight + len(logs)))


def _half_width(logs: Sequence[float]) -> float:
    """Of a 90 % prediction interval for the next run, on the log scale."""
    mean = sum(logs) / len(logs)
    squares = sum((value - mean) ** 2 for value in logs)
    degrees = PRIOR_DEGREES + len(logs) - 1
    spread = math.sqrt((PRIOR_DEGREES * USUAL_SPREAD**2 + squares) / degrees)
    return student_95(degrees) * spread * math.sqrt(1 + 1 / len(logs))


def student_95(degrees: float) -> float:
    """The 95 % quantile of Student's t (within 1 % from 3 degrees of freedom on)."""
    z = NORMAL_95
    first = (z**3 + z) / (4 * degrees)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    return z + first + second + third
