"""What each choice costs over the years, and when it has paid for itself.

In: what machines can, what must be paid, what renting costs. Out: choices. A purchase bears its price less
what it is sold for in the end, over all runs; power comes on top. Knows no catalog.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from graftwork.plan.buying.nouns import Choice, MachineReach, Payback, Rental
from graftwork.plan.buying.reach import news
from graftwork.records.base import Figure

WEEKS_A_YEAR = 365.25 / 7
WEEKS_A_MONTH = WEEKS_A_YEAR / 12
MOST_HOURS_A_WEEK = 0.9 * 168
"""More than that leaves no time for anything that goes wrong."""
ENDLESS = 1200.0
"""Months that stand for never: JSON has no infinity."""
RESIDUAL_SPREAD = (0.6, 1.3)
"""Of the residual share: what second-hand prices did within two years."""


class Use(NamedTuple):
    """How much, for how long, at which prices."""

    runs_a_week: float
    years: float
    electricity_usd_kwh: float
    residual_share: float
    host_watts: float
    waiting_usd_per_hour: float

    @property
    def runs(self) -> float:
        return self.runs_a_week * self.years * WEEKS_A_YEAR


class Price(NamedTuple):
    """What must be paid, and who says so."""

    usd: float
    source: str


def own_choice(
    machine: MachineReach,
    *,
    label: str,
    price: Price,
    use: Use,
    have: MachineReach,
    rentals: Sequence[Rental],
) -> Choice:
    """Keeping (price 0) or buying a machine."""
    power = _power(machine, use)
    down, up = RESIDUAL_SPREAD
    residual = Figure(
        value=price.usd * use.residual_share,
        low=price.usd * use.residual_share * down,
        high=min(price.usd * use.residual_share * up, price.usd),
        unit="USD",
    )
    # Several cards can each have a run of their own: the week is then shorter than its runs together.
    apart = _times(machine.alone_hours, 1 / machine.gpus, "h") if machine.alone_hours else machine.hours
    week = _times(min(machine.hours, apart, key=lambda one: one.value), use.runs_a_week, "h a week")
    in_week = week.value <= MOST_HOURS_A_WEEK
    too_slow = f"{use.runs_a_week:g} runs take {week.value:.0f} of a week's 168 hours"
    a_run = Figure(
        value=(price.usd - residual.value) / use.runs + power.value,
        low=(price.usd - residual.high) / use.runs + power.low,
        high=(price.usd - residual.low) / use.runs + power.high,
        unit="USD",
    )
    return Choice(
        label=label,
        machine=machine,
        price_usd=Figure.exact(price.usd, "USD"),
        price_source=price.source,
        residual_usd=residual,
        possible=machine.fits and in_week,
        why_not=machine.why_not if not machine.fits else "" if in_week else too_slow,
        hours_a_run=machine.hours,
        hours_a_week=week,
        speed_up=_speed_up(have, machine),
        **_at_once(have, machine),
        power_usd_a_run=power,
        cost_usd_a_run=a_run,
        total_usd=_times(a_run, use.runs, "USD"),
        becomes_possible=news(have, machine) if machine.label != have.label else (),
        paybacks=tuple(_payback(rental, price=price, power=power, use=use) for rental in rentals)
        if price.usd and machine.fits
        else (),
    )


def rent_choice(rental: Rental, *, use: Use, have: MachineReach) -> Choice:
    """Renting the best offer for every run."""
    hours = rental.hours_to_result
    nothing = Figure.exact(0.0, "USD")
    faster = have.fits and hours.low > 0
    return Choice(
        label=f"rent {rental.label}",
        machine=None,
        price_usd=nothing,
        price_source=f"prices of {rental.dated}",
        residual_usd=nothing,
        possible=True,
        hours_a_run=hours,
        hours_a_week=_times(hours, use.runs_a_week, "h a week"),
        speed_up=_ratio(have.hours, hours) if faster else None,
        power_usd_a_run=nothing,
        cost_usd_a_run=rental.cost_usd,
        total_usd=_times(rental.cost_usd, use.runs, "USD"),
    )


def score(choice: Choice, use: Use) -> float:
    """Dollars a run, waiting included: less is better."""
    return choice.cost_usd_a_run.value + use.waiting_usd_per_hour * choice.hours_a_run.value


def with_thresholds(choice: Choice, choices: Sequence[Choice]) -> Choice:
    """What an hour of waiting must be worth for a dearer choice to be the best: of all, and of own cards."""
    if not choice.possible:
        return choice
    able = [one for one in choices if one.possible and one.label != choice.label]
    found = {"pays_above_usd_per_hour": _best_above(choice, able)}
    if choice.machine is not None:
        kept = [one for one in able if one.machine is not None]
        found["pays_unrented_above_usd_per_hour"] = _best_above(choice, kept)
    return choice.model_copy(update=found)


def _best_above(choice: Choice, others: Sequence[Choice]) -> Figure | None:
    """From which worth of an hour on it beats them all; None where that is from nothing on, or never."""
    low, high = 0.0, float("inf")
    for other in others:
        dearer = choice.cost_usd_a_run.value - other.cost_usd_a_run.value
        quicker = other.hours_a_run.value - choice.hours_a_run.value
        if quicker > 0:
            low = max(low, dearer / quicker)
        elif quicker < 0:
            high = min(high, dearer / quicker)
        elif dearer > 0:
            return None
    return Figure.exact(low, "USD/h") if 0 < low < high else None


def _power(machine: MachineReach, use: Use) -> Figure:
    return _times(machine.hours, (machine.watts + use.host_watts) / 1000 * use.electricity_usd_kwh, "USD")


def _payback(rental: Rental, *, price: Price, power: Figure, use: Use) -> Payback:
    saved = rental.cost_usd.value - power.value
    low, high = rental.cost_usd.low - power.high, rental.cost_usd.high - power.low
    months = None
    if saved > 0:
        a_month = use.runs_a_week * WEEKS_A_MONTH
        value = price.usd / (saved * a_month)
        months = Figure(
            value=value,
            low=price.usd / (high * a_month),
            # A range that reaches no saving at all has no end.
            high=max(min(price.usd / (low * a_month), ENDLESS) if low > 0 else ENDLESS, value),
            unit="months",
        )
    return Payback(
        against=rental.label,
        place=rental.place,
        cost_usd=rental.cost_usd,
        saves_usd_a_run=Figure(value=saved, low=low, high=high, unit="USD"),
        months=months,
        in_time=months is not None and months.value <= 12 * use.years,
    )


def _speed_up(have: MachineReach, machine: MachineReach) -> Figure | None:
    if not have.fits or not machine.fits:
        return None
    # Errors of the same estimate cancel: the ratio is surer than either.
    value = have.hours.value / machine.hours.value
    if have.label == machine.label:
        return Figure.exact(1.0, "×")
    return Figure.about(value, down=0.85, up=1.15, unit="×")


def _at_once(have: MachineReach, machine: MachineReach) -> dict[str, Any]:
    """What several cards do with several runs."""
    if machine.alone_hours is None or not have.fits:
        return {}
    # What two runs on one host take from each other is not known: a tenth is allowed for.
    value = machine.gpus * have.hours.value / machine.alone_hours.value
    return {
        "runs_at_once": machine.gpus,
        "throughput": Figure.about(value, down=0.9, up=1.0, unit="×"),
    }


def _ratio(one: Figure, other: Figure) -> Figure:
    value = one.value / other.value
    return Figure(
        value=value, low=min(value, one.low / other.high), high=max(value, one.high / other.low), unit="×"
    )


def _times(figure: Figure, factor: float, unit: str) -> Figure:
    return Figure(value=figure.value * factor, low=figure.low * factor, high=figure.high * factor, unit=unit)
