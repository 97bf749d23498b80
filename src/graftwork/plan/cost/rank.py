"""Who wins, and why.

In: the lines of the table and the terms. Out: the lines in order, each with its verdict, and the whole's
verdict in words. What does not fit, misses the deadline or breaks the budget stands below what does not.
"""

import math
from collections.abc import Sequence

from graftwork.plan.cost.nouns import PlaceRow, Terms, house_of


def order(rows: Sequence[PlaceRow], terms: Terms) -> tuple[PlaceRow, ...]:
    """Best first, with a word on each."""
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
        # Own cards are named one by one: whoever has two kinds wants to see both.
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
        reasons.append(f"Its price is {best.price_age_days} days old: look before you pay.")
    return head, " ".join(reasons)


def dollars(value: float) -> str:
    if value >= 100:
        return f"${value:,.0f}"
    return f"${value:.2f}" if value >= 0.01 or value == 0 else f"${value:.3f}"


def count(number: object, noun: str) -> str:
    return f"{number:g} {noun}" + ("" if number == 1 else "s")


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
    told = []
    if terms.deadline_hours is not None:
        told.append(f"the soonest is {soonest.label} in {duration(soonest.hours_to_result.value)}")
    if terms.budget_usd is not None:
        told.append(f"the least to pay is {dollars(cheapest.bill_usd.value)} at {cheapest.label}")
    return f"It fits, but {' and '.join(told)}." if told else "It fits nowhere under these rules."


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
