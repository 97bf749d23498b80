"""One candidate as a line of the table, every figure with its range.

In: a candidate and the terms. Out: a PlaceRow. The range comes of the range of the hours and, for spot
machines, of how little is known of their interruptions. Does not compare.
"""

import math

from graftwork.plan.cost.bill import ASSUMED_SPREAD, Bill, Tweak, reckon_bill
from graftwork.plan.cost.disk import DiskNeed
from graftwork.plan.cost.intervals import describe
from graftwork.plan.cost.nouns import Candidate, PlaceRow, Terms, is_recommended
from graftwork.records.base import Figure

STALE_AFTER_DAYS = 60
FOREVER = 1e9
"""Hours that stand for never: JSON has no infinity."""


def assess(candidate: Candidate, *, terms: Terms, disk: DiskNeed, rows: float, age_days: int) -> PlaceRow:
    hours = candidate.run.hours
    guessed = candidate.billing == "spot" and terms.preemptions_per_hour is None
    spread = ASSUMED_SPREAD if guessed else (1.0, 1.0)
    bills = (
        reckon_bill(candidate, terms=terms, disk=disk, rows=rows),
        reckon_bill(
            candidate, terms=terms, disk=disk, rows=rows, hours=hours.low, tweak=Tweak(rate=spread[0])
        ),
        reckon_bill(
            candidate, terms=terms, disk=disk, rows=rows, hours=hours.high, tweak=Tweak(rate=spread[1])
        ),
    )
    middle = bills[0]
    cost = _figure([bill.cost for bill in bills], "USD")
    clock = _figure([bill.clock for bill in bills], "h")
    paid_first = _figure([bill.paid_first for bill in bills], "USD")
    fits = candidate.run.fits and middle.possible
    return PlaceRow(
        place=candidate.place.name,
        title=candidate.place.title,
        kind=candidate.place.kind,
        gpu=candidate.run.gpu,
        gpus=candidate.run.gpus,
        instance=candidate.offer.instance,
        billing=candidate.billing,
        fits=fits,
        why_not=_why_not(candidate, middle),
        training_hours=hours,
        machine_hours=_figure([bill.machine for bill in bills], "h"),
        hours_to_result=clock,
        usd_per_hour=_price(candidate, middle, terms),
        price_source=candidate.offer.source,
        price_dated=candidate.offer.dated,
        price_age_days=age_days,
        stale=age_days > STALE_AFTER_DAYS and candidate.billing != "electricity",
        cost_usd=cost,
        cost_parts_usd={
            name: _figure([bill.parts.get(name, 0.0) for bill in bills], "USD") for name in middle.parts
        },
        bill_usd=paid_first,
        preemptions_per_hour=_figure([bill.rate for bill in bills], "1/h"),
        rate_source=rate_source(candidate, terms),
        interruptions=_figure([bill.interruptions for bill in bills], ""),
        lost_hours=_figure([bill.lost for bill in bills], "h"),
        sessions=_figure([float(bill.sessions) for bill in bills], "sessions"),
        runs_in_budget=_runs(candidate, terms, bills) if fits else None,
        disk_gib=disk.total_gib,
        **_returned(terms, cost),
        intervals=describe(middle.rhythm, run=candidate.run, hazard=middle.hazard),
        limits=limits_of(candidate, middle),
        driven_by=candidate.place.driven_by,
        meets_deadline=None if terms.deadline_hours is None else clock.value <= terms.deadline_hours,
        within_budget=None if terms.budget_usd is None else paid_first.value <= terms.budget_usd,
        recommended=is_recommended(candidate.place),
        certainty=candidate.run.certainty,
        strategy=candidate.run.strategy,
        notes=candidate.place.notes,
    )


def rate_source(candidate: Candidate, terms: Terms) -> str:
    """Who says how often the machine is taken away."""
    if candidate.billing != "spot":
        return "assumed: a crash in 500 hours"
    if terms.preemptions_per_hour is not None:
        return "stated"
    if candidate.place.preemptions_per_hour is None:
        return "assumed"
    return "the catalog's assumption" if "preemptions" in candidate.place.notes else "the catalog's"


def limits_of(candidate: Candidate, bill: Bill) -> tuple[str, ...]:
    """The rules of the place as they meet this run."""
    place, found = candidate.place, []
    if place.session_hours:
        found.append(
            f"{bill.sessions} session{'s' * (bill.sessions != 1)} of at most {place.session_hours:g} h"
        )
    if place.free_hours_a_week:
        weeks = math.ceil(bill.clock / 168) if math.isfinite(bill.clock) else 0
        found.append(f"{place.free_hours_a_week:g} h a week: {weeks} week{'s' * (weeks != 1)}")
    if place.free_hours_a_day:
        days = math.ceil(bill.clock / 24) if math.isfinite(bill.clock) else 0
        found.append(f"{place.free_hours_a_day:g} h a day: {days} day{'s' * (days != 1)}")
    if candidate.billing == "subscription" and candidate.offer.hours_a_month:
        found.append(f"{candidate.offer.hours_a_month:g} h of this card a month")
    if place.driven_by == "by hand":
        found.append("by hand: no API")
    return tuple(found)


def _why_not(candidate: Candidate, bill: Bill) -> str:
    if not candidate.run.fits:
        return candidate.run.why_not or "it does not fit the card"
    if not bill.possible:
        return "a session is over before the machine is set up"
    return ""


def _price(candidate: Candidate, bill: Bill, terms: Terms) -> Figure:
    """Listed, or what it comes to."""
    if candidate.billing in {"on-demand", "spot", "free"}:
        return Figure.exact(candidate.usd_per_hour, "USD/h")
    if candidate.billing == "electricity":
        watts = candidate.run.watts + terms.host_watts
        return Figure.exact(watts / 1000 * terms.electricity_usd_kwh, "USD/h")
    held = candidate.offer.hours_a_month
    a_month = candidate.offer.usd_per_month or 0.0
    worth = a_month / held if held else 0.0
    paid = (
        (bill.cost - bill.parts["storage"] - bill.parts["transfer"]) / bill.machine
        if bill.possible
        else worth
    )
    return Figure(value=paid, low=min(worth, paid), high=max(worth, paid, a_month), unit="USD/h")


def _runs(candidate: Candidate, terms: Terms, bills: tuple[Bill, Bill, Bill]) -> Figure | None:
    """Whole runs that the budget pays for; None where nothing is paid or no budget is stated."""
    if terms.budget_usd is None or candidate.billing == "free":
        return None
    counts = [float(int(terms.budget_usd / bill.cost + 1e-9)) if bill.cost > 0 else 0.0 for bill in bills]
    return _figure(counts, "runs")


def _returned(terms: Terms, cost: Figure) -> dict[str, Figure | None]:
    """What a run brings over what it costs; nothing is said of what people's hours cost."""
    if terms.value_usd is None:
        return {}
    worth = terms.value_usd * terms.success_share
    gain = Figure(value=worth - cost.value, low=worth - cost.high, high=worth - cost.low, unit="USD")
    if cost.low <= 0:
        return {"return_usd": gain}
    ratio = Figure(
        value=worth / cost.value - 1, low=worth / cost.high - 1, high=worth / cost.low - 1, unit="of the cost"
    )
    return {"return_usd": gain, "return_ratio": ratio}


def _figure(values: list[float], unit: str) -> Figure:
    """The first is the value, all of them are the range."""
    held = [min(value, FOREVER) for value in values]
    return Figure(value=held[0], low=min(held), high=max(held), unit=unit)
