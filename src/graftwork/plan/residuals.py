"""How far the plan was off, figure by figure and part by part; what caused it; what to learn from it. Pure.

In: a plan, what came of it, the residuals of earlier runs. Out: residuals, drifts that name their cause,
the bias of each kind of figure, and the factor by which the next plan corrects its memory.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from graftwork.costmodel.run import START_SECONDS
from graftwork.records.base import Figure
from graftwork.records.plan import Bias, Drift, LearnedMemory, Plan, Residual, RunParts
from graftwork.records.run import TrainOutcome

MEMORY, TIME, SPEED = "peak_memory_gib", "minutes", "tokens_per_second"
COMPUTED = f"{MEMORY}.computed"
LOADED, IN_A_STEP = "what is loaded", "what a step needs"
GROUPS = {
    LOADED: ("context", "runtime", "weights", "packed", "adapter", "adapters"),
    IN_A_STEP: ("gradients", "optimizer", "states", "activations", "logits", "workspace"),
}
"""A run shows its memory before the first step and at its peak; planned parts are put together likewise."""
WAITING, COMPUTE, ROLLOUTS = "waiting for data", "compute", "rollouts"
LEAST_FACTOR, MOST_FACTOR = 0.6, 1.8
"""Of memory that is learned: what is further off was another kind of run."""
LEAST_RANGE, UNSURE_RANGE = 0.05, 0.15
"""Around what was learned: from many runs, and from one."""
TITLES = {
    MEMORY: "peak memory",
    TIME: "time",
    SPEED: "speed",
    "steps": "steps",
    "trainable_parameters": "trainable parameters",
}


def compare(plan: Plan, outcome: TrainOutcome, *, minutes: float) -> tuple[Residual, ...]:
    """The plan compared with the outcome. `minutes` is the time that the user waited."""
    actual = {
        "trainable_parameters": float(outcome.trainable_parameters),
        MEMORY: outcome.peak_memory_gib,
        "steps": float(outcome.steps),
        SPEED: outcome.tokens_per_second,
        TIME: minutes,
    }
    return tuple(
        Residual(name=name, planned=getattr(plan, name), actual=value) for name, value in actual.items()
    )


def compare_parts(plan: Plan, outcome: TrainOutcome, parts: RunParts) -> tuple[Residual, ...]:
    """The parts of time and memory compared, where both sides know them."""
    found: list[Residual] = []
    for name, planned in planned_minutes(plan).items():
        actual = parts.seconds.get(name)
        if actual is not None:
            found.append(Residual(name=f"{TIME}.{name}", planned=planned, actual=actual / 60))
    for name, planned in planned_memory(plan).items():
        taken = parts.memory_gib.get(name)
        if taken is not None:
            found.append(Residual(name=f"{MEMORY}.{name}", planned=planned, actual=taken))
    if COMPUTED in plan.parts:
        found.append(Residual(name=COMPUTED, planned=plan.parts[COMPUTED], actual=outcome.peak_memory_gib))
    return tuple(found)


def planned_minutes(plan: Plan) -> dict[str, Figure]:
    """By parts. A plan that does not name them has at least its steps, the loading, and a rest."""
    named = _parts_of(plan, TIME)
    if not named:
        speed = plan.tokens_per_second
        compute = Figure(
            value=plan.tokens.value / speed.value / 60,
            low=plan.tokens.low / speed.high / 60,
            high=plan.tokens.high / speed.low / 60,
            unit="min",
        )
        load = Figure.about(START_SECONDS[plan.device.kind] / 60, down=0.5, up=2.0, unit="min")
        rest = max(0.0, plan.minutes.value - compute.value - load.value)
        named = {
            "load": load,
            COMPUTE: compute,
            "validation": Figure.about(rest, down=0.5, up=2.0, unit="min"),
        }
    # Waiting for data, evaluations or restarts is never planned: all of it exceeds the plan.
    unplanned = {name: Figure.exact(0.0, "min") for name in (WAITING, "looks", "restarts", "checkpoints")}
    return {**unplanned, **named}


def planned_memory(plan: Plan) -> dict[str, Figure]:
    """In the two groups that a run measures; empty where the plan names no parts."""
    named = _parts_of(plan, MEMORY)
    found: dict[str, Figure] = {}
    for group, names in GROUPS.items():
        members = [named[name] for name in names if name in named]
        if members:
            found[group] = Figure.total(members, "GiB")
    return found if len(found) == len(GROUPS) else {}


def _parts_of(plan: Plan, figure: str) -> dict[str, Figure]:
    head = f"{figure}."
    return {
        name.removeprefix(head): planned
        for name, planned in plan.parts.items()
        if name.startswith(head) and name != COMPUTED
    }


def find_drifts(residuals: Sequence[Residual], parts: Sequence[Residual]) -> tuple[Drift, ...]:
    """Every figure beyond its range, and the part that moved most in the same direction."""
    drifts = []
    for residual in residuals:
        if residual.inside:
            continue
        planned, title = residual.planned, TITLES.get(residual.name, residual.name)
        says = f"{title} came to {_number(residual.actual)} {planned.unit}".rstrip()
        says += f", planned {_number(planned.low)} … {_number(planned.high)}"
        if planned.low == planned.high:
            says = f"{title} came to {_number(residual.actual)}, planned {_number(planned.value)}"
        drift = Drift(figure=residual.name, planned=planned, actual=residual.actual, says=says)
        cause = _cause(residual, parts)
        if cause is not None:
            component = cause.name.partition(".")[2]
            says += (
                f": mostly {component}, {_number(cause.actual)} {cause.planned.unit} "
                f"in place of {_number(cause.planned.value)}"
            )
            changes = {
                "component": component,
                "component_planned": cause.planned.value,
                "component_actual": cause.actual,
                "says": says,
            }
            drift = drift.model_copy(update=changes)
        drifts.append(drift)
    return tuple(drifts)


def _cause(residual: Residual, parts: Sequence[Residual]) -> Residual | None:
    """The part whose difference is the largest in the drift's own direction."""
    own = [part for part in parts if part.name.startswith(f"{residual.name}.") and part.name != COMPUTED]
    more = residual.actual > residual.planned.value
    if residual.name == SPEED:
        # Tokens a second are the inverse of the steps' time: more of one is less of the other.
        in_steps = [f"{TIME}.{part}" for part in (COMPUTE, WAITING, ROLLOUTS)]
        own = [part for part in parts if part.name in in_steps]
        more = not more
    moved = [(residual.actual - residual.planned.value) * (1 if more else -1) for residual in own]
    if not moved or max(moved) <= 0:
        return None
    return own[moved.index(max(moved))]


def find_biases(runs: Iterable[Sequence[Residual]]) -> tuple[Bias, ...]:
    """Over past runs: the median of how far each kind of figure was off, and how often it held."""
    kinds: dict[str, list[Residual]] = {}
    for residuals in runs:
        for residual in residuals:
            if residual.planned.value:
                kinds.setdefault(residual.name, []).append(residual)
    biases = []
    for name, residuals in kinds.items():
        off = [residual.off for residual in residuals]
        inside = sum(residual.inside for residual in residuals) / len(residuals)
        biases.append(
            Bias(
                figure=name,
                runs=len(residuals),
                off=Figure(value=median(off), low=min(off), high=max(off)),
                inside=Figure.exact(inside),
            )
        )
    return tuple(biases)


def learned_memory(residuals: Sequence[Residual], *, most: int = 10) -> LearnedMemory | None:
    """From the latest runs of the same kind, newest first: the factor on the computed peak.

    Where plans name the peak as it was before correction, that is what counts: else a corrected plan that
    came true would unlearn its own correction.
    """
    kinds = {
        name: [residual for residual in residuals if residual.name == name and residual.planned.value > 0]
        for name in (COMPUTED, MEMORY)
    }
    found = (kinds[COMPUTED] or kinds[MEMORY])[:most]
    ratios = [residual.actual / residual.planned.value for residual in found]
    ratios = [ratio for ratio in ratios if LEAST_FACTOR <= ratio <= MOST_FACTOR]
    if not ratios:
        return None
    middle = median(ratios)
    room = LEAST_RANGE + (UNSURE_RANGE - LEAST_RANGE) / len(ratios)
    return LearnedMemory(
        factor=middle,
        low=min(*ratios, middle * (1 - room)),
        high=max(*ratios, middle * (1 + room)),
        runs=len(ratios),
    )


def correct_memory(figure: Figure, learned: LearnedMemory | None) -> Figure:
    """The computed peak, corrected by earlier runs."""
    if learned is None:
        return figure
    value = figure.value
    return Figure(
        value=value * learned.factor, low=value * learned.low, high=value * learned.high, unit=figure.unit
    )


def split_memory(*, loaded: float | None, peak: float) -> Mapping[str, float]:
    """The groups of a measured peak; empty where memory was not measured before the first step."""
    if loaded is None or not 0 < loaded <= peak:
        return {}
    return {LOADED: loaded, IN_A_STEP: peak - loaded}


def _number(value: float) -> str:
    if value >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


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
        # Prior and runs, each by the inverse of its variance.
        tau = math.log(prior.high / prior.low) / (2 * NORMAL_95) if prior.low > 0 else math.inf
        weight = (RUN_SPREAD / tau) ** 2 if tau > 0 else math.inf
        value, low, high = prior.value, prior.low, prior.high
        if math.isfinite(weight):
            value = math.exp((weight * math.log(prior.value) + sum(logs)) / (weight + len(logs)))
    else:
        # A 90 % prediction interval for the next run, on the log scale.
        mean = sum(logs) / len(logs)
        squares = sum((log - mean) ** 2 for log in logs)
        degrees = PRIOR_DEGREES + len(logs) - 1
        spread = math.sqrt((PRIOR_DEGREES * USUAL_SPREAD**2 + squares) / degrees)
        reach = math.exp(student_95(degrees) * spread * math.sqrt(1 + 1 / len(logs)))
        value = median(known)
        low, high = value / reach, value * reach
    low, high = min(low, *known), max(high, *known)
    return Figure(value=min(max(value, low), high), low=low, high=high, unit=prior.unit)


def student_95(degrees: float) -> float:
    """The 95 % quantile of Student's t (within 1 % from 3 degrees of freedom on)."""
    z = NORMAL_95
    first = (z**3 + z) / (4 * degrees)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    return z + first + second + third
