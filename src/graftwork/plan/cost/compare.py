"""Compares places for a run: offers of the catalog and own cards, ranked, with what changes the winner.

In: what is trained how (the machine of the question does not matter), the terms. Out: a PlaceComparison:
each offer with its bill, what speaks against it and a verdict; and for each thing that may be otherwise (a
price, the hours, the interruptions, the deadline, the budget, the worth of an hour of waiting) the smallest
change that makes another place win: everything is recomputed under it, nothing is linearised. Reads the
catalog and asks the fit.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import NamedTuple

from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.prices import STALE_AFTER_DAYS, as_commitment, list_offers, list_places
from graftwork.plan.cost.bill import (
    ASSUMED_SPOT_RATE,
    ASSUMED_SPREAD,
    CRASH_RATE,
    PLAIN,
    Bill,
    Billing,
    CardRun,
    DiskNeed,
    OfferCandidate,
    PlaceComparison,
    PlaceRow,
    Terms,
    Tweak,
    WinnerChange,
    compute_bill,
    describe,
    house_of,
    is_recommended,
    need_disk,
)
from graftwork.plan.cost.runs import Brief, Fit, MeasuredRun, RunEstimator, describe_run, fit_in_brief
from graftwork.records.base import Figure
from graftwork.records.errors import UserMistake
from graftwork.records.hardware import Gpu, Machine, Offer, PlaceTerms
from graftwork.records.plan import FitQuestion
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


FARTHEST = 20.0
"""Factors beyond this are not tried: the answer would be about another run."""
LINES = 33
"""Steps of the search outwards; then it is halved."""


class ComparisonInputs(NamedTuple):
    """What stays the same while one thing is changed."""

    candidates: tuple[OfferCandidate, ...]
    terms: Terms
    disk: DiskNeed
    rows: float

    def bill(self, candidate: OfferCandidate, *, tweak: Tweak = PLAIN) -> Bill:
        return compute_bill(candidate, terms=self.terms, disk=self.disk, rows=self.rows, tweak=tweak)


def winner(
    held: ComparisonInputs,
    *,
    tweak_of: Callable[[OfferCandidate], Tweak] = lambda _: PLAIN,
    terms: Terms | None = None,
) -> OfferCandidate | None:
    """The best candidate when each is computed with its tweak."""
    terms = terms or held.terms
    found: tuple[float, float, str] | None = None
    best = None
    for candidate in held.candidates:
        if not candidate.run.fits or not is_recommended(candidate.place):
            continue
        bill = held.bill(candidate, tweak=tweak_of(candidate))
        late = terms.deadline_hours is not None and bill.clock > terms.deadline_hours
        dear = terms.budget_usd is not None and bill.paid_first > terms.budget_usd
        if late or dear or not bill.possible:
            continue
        other = bill.clock if terms.goal == "cost" else bill.cost
        key = (score_of(bill.cost, bill.clock, terms), other, candidate.label)
        if found is None or key < found:
            found, best = key, candidate
    return best


def find_changes(held: ComparisonInputs) -> tuple[WinnerChange, ...]:
    """The smallest changes, one thing at a time; empty where nothing wins in the first place."""
    best = winner(held)
    if best is None:
        return ()
    changes = [
        _own_price(held, best),
        *_rival_price(held, best),
        _hours(held, best, up=True),
        _hours(held, best, up=False),
        _rate(held, best),
        _deadline(held, best),
        _budget(held, best),
        _waiting(held, best),
    ]
    return tuple(change for change in changes if change is not None)


def _search(
    wins: Callable[[float], OfferCandidate | None], best: OfferCandidate, *, up: bool
) -> tuple[float, OfferCandidate | None] | None:
    """The factor nearest to 1 at which `best` no longer wins, and who does then."""
    step = FARTHEST ** (1 / LINES)
    inner = 1.0
    for line in range(1, LINES + 1):
        outer = step**line if up else step**-line
        if not _same(wins(outer), best):
            for _ in range(14):
                middle = (inner * outer) ** 0.5
                inner, outer = (middle, outer) if _same(wins(middle), best) else (inner, middle)
            return outer, wins(outer)
        inner = outer
    return None


def _same(one: OfferCandidate | None, other: OfferCandidate) -> bool:
    """Another card, or another offer of the same provider, is not another place."""
    return one is not None and house_of(one.place.name) == house_of(other.place.name)


def _own_price(held: ComparisonInputs, best: OfferCandidate) -> WinnerChange | None:
    """The winner's place asks more for all that it offers."""
    if best.billing == "free":
        return None
    found = _search(
        lambda factor: winner(
            held,
            tweak_of=lambda item: Tweak(price=factor) if _same(item, best) else PLAIN,
        ),
        best,
        up=True,
    )
    now = Figure.exact(1.0, "× the listed price")
    if found is None:
        return WinnerChange(
            what="price of the winner", now=now, then=None, winner=best.label,
            words=f"{best.place.title} stays the best at {FARTHEST:g} times its prices",
        )  # fmt: skip
    factor, who = found
    return WinnerChange(
        what="price of the winner",
        now=now,
        then=Figure.exact(factor, now.unit),
        winner=_named(who),
        words=f"if {best.place.title} asked {100 * (factor - 1):.0f} % more, {_named(who)} would win",
    )


def _rival_price(held: ComparisonInputs, best: OfferCandidate) -> list[WinnerChange]:
    """The rival that needs the smallest cut of its own price."""
    nearest: tuple[float, OfferCandidate] | None = None
    if held.terms.goal == "time":
        return []
    to_beat = _score(held, best, PLAIN)
    for rival in held.candidates:
        if _same(rival, best) or not rival.run.fits or rival.billing in {"free", "electricity"}:
            continue
        if _breaks(held, rival):
            continue
        # Dollars are linear in the price: two points give the line.
        full, nothing = _score(held, rival, PLAIN), _score(held, rival, Tweak(price=0.0))
        if nothing >= to_beat or full <= nothing:
            continue
        factor = (to_beat - nothing) / (full - nothing)
        if nearest is None or factor > nearest[0]:
            nearest = factor, rival
    if nearest is None:
        return []
    factor, rival = nearest
    return [
        WinnerChange(
            what="price of a rival",
            now=Figure.exact(1.0, "× its listed price"),
            then=Figure.exact(factor, "× its listed price"),
            winner=rival.label,
            words=f"if {rival.label} cost {100 * (1 - factor):.0f} % less, it would win",
        )
    ]


def _score(held: ComparisonInputs, candidate: OfferCandidate, tweak: Tweak) -> float:
    bill = held.bill(candidate, tweak=tweak)
    return score_of(bill.cost, bill.clock, held.terms)


def _breaks(held: ComparisonInputs, candidate: OfferCandidate) -> bool:
    if not is_recommended(candidate.place):
        return True
    bill = held.bill(candidate)
    late = held.terms.deadline_hours is not None and bill.clock > held.terms.deadline_hours
    dear = held.terms.budget_usd is not None and bill.paid_first > held.terms.budget_usd
    return late or dear or not bill.possible


def _hours(held: ComparisonInputs, best: OfferCandidate, *, up: bool) -> WinnerChange | None:
    """The run takes longer, or less long, everywhere alike: more rows, an estimate that was off."""
    found = _search(lambda factor: winner(held, tweak_of=lambda _: Tweak(hours=factor)), best, up=up)
    if found is None:
        return None
    factor, who = found
    longer = f"{factor:.1f} times as long" if up else f"{100 * factor:.0f} % of the time"
    return WinnerChange(
        what="hours of the run",
        now=Figure.exact(1.0, "× the hours"),
        then=Figure.exact(factor, "× the hours"),
        winner=_named(who),
        words=f"if the run took {longer} everywhere, {_named(who)} would win",
    )


def _rate(held: ComparisonInputs, best: OfferCandidate) -> WinnerChange | None:
    """More interruptions where a spot machine wins, fewer where one might."""
    spot_wins = best.billing == "spot"
    if not spot_wins and not any(
        candidate.billing == "spot" and candidate.run.fits for candidate in held.candidates
    ):
        return None
    # The same place on demand is another answer here: what is asked is whether spot pays.
    found = _search_rate(held, best, up=spot_wins)
    rate = held.bill(best).rate if spot_wins else None
    if found is None:
        words = (
            f"{best.label} stays the best at {FARTHEST:g} times as many interruptions"
            if spot_wins
            else "no spot machine would win if it were interrupted less"
        )
        return WinnerChange(
            what="interruptions of spot machines", now=Figure.exact(1.0, "× the rate"), then=None,
            winner=best.label, words=words,
        )  # fmt: skip
    factor, who = found
    stated = f" ({rate * factor:.2f} an hour)" if rate else ""
    many = "as many interruptions" if spot_wins else "of the interruptions"
    return WinnerChange(
        what="interruptions of spot machines",
        now=Figure.exact(1.0, "× the rate"),
        then=Figure.exact(factor, "× the rate"),
        winner=_named(who),
        words=f"with {factor:.2g} × {many}{stated} {_named(who)} would win",
    )


def _search_rate(
    held: ComparisonInputs, best: OfferCandidate, *, up: bool
) -> tuple[float, OfferCandidate | None] | None:
    def wins(factor: float) -> OfferCandidate | None:
        who = winner(held, tweak_of=lambda _: Tweak(rate=factor))
        # Another spot machine is no other answer.
        return best if who is not None and (who.billing == "spot") == (best.billing == "spot") else who

    return _search(wins, best, up=up)


def _deadline(held: ComparisonInputs, best: OfferCandidate) -> WinnerChange | None:
    """The winner is late from here on."""
    clock = held.bill(best).clock
    who = winner(held, terms=held.terms.model_copy(update={"deadline_hours": clock * (1 - 1e-9)}))
    now = held.terms.deadline_hours
    return WinnerChange(
        what="deadline",
        now=Figure.exact(now if now is not None else clock, "h" if now is not None else "h (no deadline)"),
        then=Figure.exact(clock, "h"),
        winner=_named(who),
        words=f"with less than {duration(clock)} to the result {_would(who)}",
    )


def _budget(held: ComparisonInputs, best: OfferCandidate) -> WinnerChange | None:
    """The winner cannot be paid below this; where it costs nothing no budget changes it."""
    first = held.bill(best).paid_first
    if first <= 0:
        return None
    who = winner(held, terms=held.terms.model_copy(update={"budget_usd": first * (1 - 1e-9)}))
    now = held.terms.budget_usd
    return WinnerChange(
        what="budget",
        now=Figure.exact(now if now is not None else first, "USD" if now is not None else "USD (no budget)"),
        then=Figure.exact(first, "USD"),
        winner=_named(who),
        words=f"with less than {dollars(first)} {_would(who)}",
    )


def _waiting(held: ComparisonInputs, best: OfferCandidate) -> WinnerChange | None:
    """What an hour of waiting must be worth for a quicker place to win."""
    if held.terms.goal == "time":
        return None
    now = held.terms.waiting_usd_per_hour
    mine = held.bill(best)
    least: tuple[float, OfferCandidate] | None = None
    for rival in held.candidates:
        if _same(rival, best) or not rival.run.fits or _breaks(held, rival):
            continue
        bill = held.bill(rival)
        if bill.clock >= mine.clock:
            continue
        worth = (bill.cost - mine.cost) / (mine.clock - bill.clock)
        if worth > now and (least is None or worth < least[0]):
            least = worth, rival
    if least is None:
        return None
    worth, rival = least
    return WinnerChange(
        what="worth of an hour of waiting",
        now=Figure.exact(now, "USD/h"),
        then=Figure.exact(worth, "USD/h"),
        winner=rival.label,
        words=f"if an hour of waiting is worth more than {dollars(worth)}, {rival.label} wins",
    )


def _would(candidate: OfferCandidate | None) -> str:
    return "no place will do" if candidate is None else f"{candidate.label} would win"


def _named(candidate: OfferCandidate | None) -> str:
    return "no place" if candidate is None else candidate.label


class OwnCards(NamedTuple):
    """Cards that the team has."""

    gpu: Gpu
    cards: int


EstimateRun = Callable[[str, int, float | None], CardRun]
"""A card's name, how many of them, the machine's memory: the run on it."""

OWN = PlaceTerms(
    name="own",
    title="own cards",
    kind="own",
    setup_minutes=1.0,
    notes="electricity alone; the cards are paid for",
    source="stated by the user",
    dated="2026-01-01",
)


def list_candidates(
    offers: Iterable[Offer],
    places: Iterable[PlaceTerms],
    *,
    estimate: EstimateRun,
    own: Iterable[OwnCards] = (),
    today: str,
) -> tuple[OfferCandidate, ...]:
    """Every offer as often as it has ways of being billed, then the team's own cards."""
    by_name = {place.name: place for place in places}
    found = []
    for offer in offers:
        place = by_name.get(offer.place)
        if place is None:
            continue
        run = estimate(offer.gpu, offer.gpus, offer.memory_gib)
        found += [OfferCandidate(place=place, offer=offer, billing=way, run=run) for way in ways(offer)]
    mine = by_name.get(OWN.name, OWN)
    for kind in own:
        offer = Offer(
            place=mine.name, gpu=kind.gpu.name, gpus=kind.cards, usd_per_hour=None,
            source="electricity as stated", dated=today,
        )  # fmt: skip
        run = estimate(kind.gpu.name, kind.cards, None)
        found.append(OfferCandidate(place=mine, offer=offer, billing="electricity", run=run))
    return tuple(found)


def within_disk(candidate: OfferCandidate, disk: DiskNeed) -> OfferCandidate:
    """The candidate; not possible where the place's disk is too small for what the run needs."""
    there, needed = candidate.place.disk_gib, disk.total_gib
    if there is None or needed.value <= there or not candidate.run.fits:
        return candidate
    why = f"its disk is too small: {needed.value:.0f} GiB are needed, {there:.0f} are there"
    return candidate.model_copy(
        update={"run": candidate.run.model_copy(update={"fits": False, "why_not": why})}
    )


def ways(offer: Offer) -> tuple[Billing, ...]:
    """How an offer can be paid."""
    found: list[Billing] = []
    if offer.usd_per_month is not None:
        found.append("subscription")
    if offer.usd_per_hour is not None:
        found.append("on-demand" if offer.usd_per_hour > 0 else "free")
    usual, spot = offer.usd_per_hour, offer.spot_usd_per_hour
    if spot and (usual is None or spot < usual):
        found.append("spot")
    return tuple(found)


def compare(
    candidates: Sequence[OfferCandidate],
    *,
    terms: Terms,
    disk: DiskNeed,
    rows: float,
    run: dict[str, object],
    with_sensitivity: bool = True,
) -> PlaceComparison:
    """`rows` are those of all epochs; `run` is passed on as it is."""
    candidates = [within_disk(candidate, disk) for candidate in candidates]
    lines = tuple(
        assess(
            candidate, terms=terms, disk=disk, rows=rows, age_days=_age(candidate.offer.dated, terms.today)
        )
        for candidate in candidates
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
        "working hours are not included in the cost",
    )


def _notes(rows: Sequence[PlaceRow], candidates: Sequence[OfferCandidate]) -> tuple[str, ...]:
    found = []
    stale = [row for row in rows if row.stale]
    if stale:
        oldest = max(row.price_age_days for row in stale)
        found.append(
            f"{len(stale)} of {len(rows)} prices are over {STALE_AFTER_DAYS} days old, the oldest {oldest}: "
            "check them before you pay"
        )
    noted = {
        candidate.place.title: candidate.place.notes for candidate in candidates if candidate.place.notes
    }
    found += [f"{title}: {note}" for title, note in sorted(noted.items())]
    return tuple(found)


DEFAULT_CARDS = {"full": 8}
"""More cards than the smallest machine has pay for adapters only where time is short: then ask for them."""


def asker(question: FitQuestion) -> Fit:
    """The fit of this training on any machine."""

    def ask(machine: Machine) -> Brief:
        return fit_in_brief(question.model_copy(update={"machine": machine}))

    return ask


def finder(overlay: Path | None) -> Callable[[str], Gpu]:
    """Cards by name; the catalog is read once for each name."""

    @cache
    def find(name: str) -> Gpu:
        return find_gpu(name, overlay=overlay)

    return find


class OfferFilter(NamedTuple):
    """Which machines are compared: all of the catalog, or those of some places, one card, so many cards."""

    places: Sequence[str] = ()
    gpu: str | None = None
    cards: int | None = None
    own: Sequence[tuple[str, int]] = ()
    """Cards that are there, by name and number."""


def compare_places(
    question: FitQuestion,
    among: OfferFilter,
    *,
    terms: Terms,
    overlay: Path | None = None,
    measured: MeasuredRun | None = None,
    with_sensitivity: bool = True,
) -> PlaceComparison:
    """The question on every offer, and on own cards."""
    places, gpu, cards, own = among
    find = finder(overlay)
    known = list_places(overlay=overlay)
    _require_places(places, [place.name for place in known])
    wanted = find(gpu).name if gpu else None
    offers = [
        offer
        for offer in list_offers(overlay=overlay)
        if (not places or offer.place in places) and (wanted is None or find(offer.gpu).name == wanted)
    ]
    offers += [reserved for offer in offers if (reserved := as_commitment(offer)) is not None]
    offers = of_size(offers, cards=cards if cards is not None else DEFAULT_CARDS.get(question.method, 1))
    mine = [OwnCards(find(name), count) for name, count in own]
    if not offers and not mine:
        raise UserMistake(
            f"no place of the catalog offers {gpu}",
            why="there is nothing to compare",
            fix="see `graft plan catalog prices`, leave --gpu out, or add your own prices.csv with --catalog",
            where="--gpu",
        )
    estimate = RunEstimator(
        asker(question), find=find, measured=measured, all_ram_matters=question.method == "full"
    )
    candidates = list_candidates(offers, known, estimate=estimate, own=mine, today=terms.today.isoformat())
    return compare(
        candidates,
        terms=terms,
        disk=disk_of(candidates[0].run),
        rows=question.rows * question.epochs,
        run={**describe_run(question), "measured": measured._asdict() if measured else None},
        with_sensitivity=with_sensitivity,
    )


def of_size(offers: Sequence[Offer], *, cards: int) -> list[Offer]:
    """Machines of up to so many cards, and the smallest that a place has of a card."""
    smallest: dict[tuple[str, str], int] = {}
    for offer in offers:
        key = (offer.place, offer.gpu)
        smallest[key] = min(offer.gpus, smallest.get(key, offer.gpus))
    return [offer for offer in offers if offer.gpus <= max(cards, smallest[offer.place, offer.gpu])]


def disk_of(run: CardRun) -> DiskNeed:
    return need_disk(
        total_parameters=run.total_parameters,
        trainable=run.trainable_parameters,
        full=run.full,
        tokens=run.tokens,
    )


def _require_places(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UserMistake(
                f"the catalog has no place {name!r}",
                why="its prices and rules are needed",
                fix=f"one of: {', '.join(known)}",
                where="--place",
            )
