"""The whole comparison: candidates in, a table with a verdict out. Pure: all that it knows comes as facts."""

from collections.abc import Sequence
from datetime import date

from graftwork.plan.cost.assess import assess
from graftwork.plan.cost.bill import ASSUMED_SPOT_RATE, CRASH_RATE
from graftwork.plan.cost.candidates import within_disk
from graftwork.plan.cost.disk import DiskNeed
from graftwork.plan.cost.nouns import OfferCandidate, PlaceComparison, PlaceRow, Terms
from graftwork.plan.cost.rank import order, verdict
from graftwork.plan.cost.sensitivity import ComparisonInputs, find_changes


def compare(
    candidates: Sequence[OfferCandidate],
    *,
    terms: Terms,
    disk: DiskNeed,
    rows: float,
    run: dict[str, object],
    with_sensitivity: bool = True,
) -> PlaceComparison:
    """`rows` are those of all epochs; `run` is told on as it is."""
    candidates = [within_disk(one, disk) for one in candidates]
    lines = tuple(
        assess(one, terms=terms, disk=disk, rows=rows, age_days=_age(one.offer.dated, terms.today))
        for one in candidates
    )
    ranked = order(lines, terms)
    head, reason = verdict(ranked, terms)
    best = next((row.label for row in ranked if row.eligible), None)
    held = ComparisonInputs(tuple(candidates), terms, disk, rows)
    return PlaceComparison(
        run=run,
        terms=terms,
        rows=ranked,
        best=best,
        verdict=head,
        reason=reason,
        sensitivity=find_changes(held) if with_sensitivity else (),
        disk=disk,
        assumptions=_assumptions(terms),
        notes=_notes(ranked, candidates),
    )


def _age(dated: str, today: date) -> int:
    return max((today - date.fromisoformat(dated)).days, 0)


def _assumptions(terms: Terms) -> tuple[str, ...]:
    rate = terms.preemptions_per_hour
    stated = (
        f"spot machines are taken away {rate:g} times an hour, as stated"
        if rate is not None
        else f"spot machines are taken away {ASSUMED_SPOT_RATE:g} times an hour where the catalog is silent; "
        "a fifth to four times that is in the range"
    )
    return (
        stated,
        f"a new spot machine is there after {60 * terms.spot_wait_hours:.0f} minutes, unpaid",
        f"any other machine or process fails once in {1 / CRASH_RATE:.0f} hours",
        f"subscriptions are shared among {terms.runs_a_month:g} runs a month",
        f"electricity costs {terms.electricity_usd_kwh:g} USD a kWh, and {terms.host_watts:g} W go to the "
        "machine around own cards; the cards themselves are paid for (see `graft plan buy`)",
        "nobody's hours are counted as costs",
    )


def _notes(rows: Sequence[PlaceRow], candidates: Sequence[OfferCandidate]) -> tuple[str, ...]:
    found = []
    stale = [row for row in rows if row.stale]
    if stale:
        oldest = max(row.price_age_days for row in stale)
        found.append(
            f"{len(stale)} of {len(rows)} prices are over 60 days old, the oldest {oldest}: "
            "look before you pay"
        )
    noted = {one.place.title: one.place.notes for one in candidates if one.place.notes}
    found += [f"{title}: {words}" for title, words in sorted(noted.items())]
    return tuple(found)
