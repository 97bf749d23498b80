"""One candidate as a line of the table, every figure with its range.

In: a candidate and the terms. Out: a PlaceRow. The range comes of the range of the hours and, for spot
machines, of how little is known of their interruptions. Does not compare.
"""

import math
from collections.abc import Sequence

from graftwork.plan.catalog.prices import STALE_AFTER_DAYS
from graftwork.plan.cost.bill import ASSUMED_SPREAD, Bill, Tweak, compute_bill, describe
from graftwork.plan.cost.types import DiskNeed, OfferCandidate, PlaceRow, Terms, house_of, is_recommended
from graftwork.records.base import Figure
from graftwork.text.wording import plural

FOREVER = 1e9
"""Hours that mean never: JSON has no infinity."""


def assess(
    candidate: OfferCandidate, *, terms: Terms, disk: DiskNeed, rows: float, age_days: int
) -> PlaceRow:
    hours = candidate.run.hours
    guessed = candidate.billing == "spot" and terms.preemptions_per_hour is None
    spread = ASSUMED_SPREAD if guessed else (1.0, 1.0)
    bills = (
        compute_bill(candidate, terms=terms, disk=disk, rows=rows),
        compute_bill(
            candidate, terms=terms, disk=disk, rows=rows, hours=hours.low, tweak=Tweak(rate=spread[0])
        ),
        compute_bill(
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


def rate_source(candidate: OfferCandidate, terms: Terms) -> str:
    """Who says how often the machine is taken away."""
    if candidate.billing != "spot":
        return "assumed: a crash in 500 hours"
    if terms.preemptions_per_hour is not None:
        return "stated"
    if candidate.place.preemptions_per_hour is None:
        return "assumed"
    return "the catalog's assumption" if "preemptions" in candidate.place.notes else "the catalog's"


def limits_of(candidate: OfferCandidate, bill: Bill) -> tuple[str, ...]:
    """The rules of the place as they meet this run."""
    place, found = candidate.place, []
    if place.session_hours:
        found.append(f"{plural(bill.sessions, 'session')} of at most {place.session_hours:g} h")
    if place.free_hours_a_week:
        weeks = math.ceil(bill.clock / 168) if math.isfinite(bill.clock) else 0
        found.append(f"{place.free_hours_a_week:g} h a week: {plural(weeks, 'week')}")
    if place.free_hours_a_day:
        days = math.ceil(bill.clock / 24) if math.isfinite(bill.clock) else 0
        found.append(f"{place.free_hours_a_day:g} h a day: {plural(days, 'day')}")
    if candidate.billing == "subscription" and candidate.offer.hours_a_month:
        found.append(f"{candidate.offer.hours_a_month:g} h of this card a month")
    if place.driven_by == "by hand":
        found.append("by hand: no API")
    return tuple(found)


def _why_not(candidate: OfferCandidate, bill: Bill) -> str:
    if not candidate.run.fits:
        return candidate.run.why_not or "it does not fit the card"
    if not bill.possible:
        return "a session is over before the machine is set up"
    return ""


def _price(candidate: OfferCandidate, bill: Bill, terms: Terms) -> Figure:
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


def _runs(candidate: OfferCandidate, terms: Terms, bills: tuple[Bill, Bill, Bill]) -> Figure | None:
    """Whole runs that the budget pays for; None where nothing is paid or no budget is stated."""
    if terms.budget_usd is None or candidate.billing == "free":
        return None
    counts = [float(int(terms.budget_usd / bill.cost + 1e-9)) if bill.cost > 0 else 0.0 for bill in bills]
    return _figure(counts, "runs")


def _returned(terms: Terms, cost: Figure) -> dict[str, Figure | None]:
    """What a run brings over what it costs; people's hours are not included."""
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


def order(rows: Sequence[PlaceRow], terms: Terms) -> tuple[PlaceRow, ...]:
    """Best first, each with its verdict."""
    ranked = sorted(rows, key=lambda row: rank_key(row, terms))
    best = ranked[0] if ranked and ranked[0].eligible else None
    return tuple(row.model_copy(update={"verdict": _word(row, best, terms)}) for row in ranked)


def rank_key(row: PlaceRow, terms: Terms) -> tuple[int, float, float, str]:
    """Eligible before too late or too dear before what does not fit; then by the goal."""
    tier = 0 if row.eligible else 1 if row.fits else 2
    score = score_of(row.cost_usd.value, row.hours_to_result.value, terms)
    other = row.hours_to_result.value if terms.goal == "cost" else row.cost_usd.value
    return (tier, score, other, row.label)


def score_of(cost: float, clock: float, terms: Terms) -> float:
    """Less is better."""
    if terms.goal == "time":
        return clock
    return cost + terms.waiting_usd_per_hour * clock


def best_of_each_place(rows: Sequence[PlaceRow]) -> tuple[PlaceRow, ...]:
    """The first line of each place and way of billing it, in the order they have."""
    seen: set[tuple[str, str]] = set()
    kept = []
    for row in rows:
        key = (row.place, "spot" if row.billing == "spot" else "")
        # Own cards are listed one by one.
        if row.billing == "electricity":
            key = (row.place, f"{row.gpus} {row.gpu}")
        if key not in seen:
            seen.add(key)
            kept.append(row)
    return tuple(kept)


def verdict(rows: Sequence[PlaceRow], terms: Terms) -> tuple[str, str]:
    """The answer in one sentence, and its reason."""
    eligible = [row for row in rows if row.eligible]
    if not eligible:
        return "No place will do.", _why_none(rows, terms)
    best = eligible[0]
    head = (
        f"{best.label}: {dollars(best.cost_usd.value)} a run, done in {duration(best.hours_to_result.value)}."
    )
    reasons = [_why_best(best, terms)]
    rivals = [row for row in eligible[1:] if house_of(row.place) != house_of(best.place)]
    if rivals:
        next_one = rivals[0]
        reasons.append(
            f"Next is {next_one.label} at {dollars(next_one.cost_usd.value)} "
            f"in {duration(next_one.hours_to_result.value)}."
        )
    reasons += _other_ends(best, eligible, terms)
    if best.driven_by == "by hand":
        api = next((row for row in eligible if row.driven_by == "api"), None)
        reasons.append(
            "It is started by hand"
            + (
                f"; the best that a program can start is {api.label} at {dollars(api.cost_usd.value)}."
                if api
                else "."
            )
        )
    if best.stale:
        reasons.append(f"Its price is {best.price_age_days} days old: check it before you pay.")
    return head, " ".join(reasons)


def dollars(value: float) -> str:
    if value >= 100:
        return f"${value:,.0f}"
    return f"${value:.2f}" if value >= 0.01 or value == 0 else f"${value:.3f}"


def duration(hours: float) -> str:
    if not math.isfinite(hours) or hours >= 1e8:
        return "never"
    if hours < 1:
        return f"{60 * hours:.0f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def _why_best(best: PlaceRow, terms: Terms) -> str:
    bounds = []
    if terms.deadline_hours is not None:
        bounds.append(f"is done within {duration(terms.deadline_hours)}")
    if terms.budget_usd is not None:
        bounds.append(f"stays within {dollars(terms.budget_usd)}")
    of_those = f" of what {' and '.join(bounds)}" if bounds else " of what fits"
    if terms.goal == "time":
        return f"It is the soonest{of_those}."
    if terms.waiting_usd_per_hour:
        worth = dollars(terms.waiting_usd_per_hour)
        return f"Cost and waiting at {worth} an hour together are the least{of_those}."
    return f"It costs the least{of_those}."


def _other_ends(best: PlaceRow, eligible: Sequence[PlaceRow], terms: Terms) -> list[str]:
    """The soonest where cost was asked for; the cheapest where time was."""
    if terms.goal == "cost":
        other = min(eligible, key=lambda row: (row.hours_to_result.value, row.cost_usd.value))
        if other.label == best.label:
            return ["It is the soonest too."]
        return [
            f"The soonest is {other.label}: {duration(other.hours_to_result.value)} "
            f"for {dollars(other.cost_usd.value)}."
        ]
    other = min(eligible, key=lambda row: (row.cost_usd.value, row.hours_to_result.value))
    if other.label == best.label:
        return ["It is the cheapest too."]
    return [
        f"The cheapest is {other.label}: {dollars(other.cost_usd.value)} in "
        f"{duration(other.hours_to_result.value)}."
    ]


def _why_none(rows: Sequence[PlaceRow], terms: Terms) -> str:
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return "It fits none of the cards; the lines say by how much."
    soonest = min(fitting, key=lambda row: row.hours_to_result.value)
    cheapest = min(fitting, key=lambda row: row.bill_usd.value)
    limits = []
    if terms.deadline_hours is not None:
        limits.append(f"the soonest is {soonest.label} in {duration(soonest.hours_to_result.value)}")
    if terms.budget_usd is not None:
        limits.append(f"the least to pay is {dollars(cheapest.bill_usd.value)} at {cheapest.label}")
    return f"It fits, but {' and '.join(limits)}." if limits else "It fits nowhere under these rules."


def _word(row: PlaceRow, best: PlaceRow | None, terms: Terms) -> str:
    obstacle = _obstacle(row, terms)
    if obstacle:
        return obstacle
    if best is None or row is best:
        return "best"
    cost, clock = row.cost_usd.value, row.hours_to_result.value
    slower = f"{clock / best.hours_to_result.value:.1f} × the time"
    if not cost:
        return f"free{' too' * (not best.cost_usd.value)}, {slower}"
    if not best.cost_usd.value:
        return f"{dollars(cost)} more, {slower}"
    return f"{cost / best.cost_usd.value:.1f} × the cost, {slower}"


def _obstacle(row: PlaceRow, terms: Terms) -> str:
    """Why a line cannot win."""
    if not row.fits:
        return f"does not fit: {row.why_not}" if "session" not in row.why_not else row.why_not
    if not row.recommended:
        return "not recommended: " + row.notes.split(":")[0]
    if row.meets_deadline is False:
        return f"too late by {duration(row.hours_to_result.value - (terms.deadline_hours or 0.0))}"
    if row.within_budget is False:
        return f"over the budget by {dollars(row.bill_usd.value - (terms.budget_usd or 0.0))}"
    return ""
