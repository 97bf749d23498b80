"""Compares places for a run: offers of the catalog and own GPUs, ranked, with what changes the winner.

Input: what is trained how (the machine of the question does not matter), the terms. Output: a
PlaceComparison: each offer with its bill, its drawbacks and a verdict; and for each thing that may
be otherwise (a price, the hours, the interruptions, the deadline, the budget, the worth of an hour of
waiting) the smallest change that makes another place win: everything is recomputed under it, nothing is
linearised. Reads the catalog and asks the fit.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.prices import (
    STALE_AFTER_DAYS,
    age_days,
    as_commitment,
    list_offers,
    list_places,
)
from graftwork.plan.cost import (
    ASSUMED_SPOT_RATE,
    ASSUMED_SPREAD,
    CRASH_RATE,
    PLAIN,
    Bill,
    Billing,
    DiskNeed,
    GpuRun,
    MeasuredRun,
    OfferCandidate,
    PlaceComparison,
    PlaceRow,
    RunEstimator,
    Terms,
    Tweak,
    WinnerChange,
    compute_bill,
    describe_intervals,
    describe_run,
    house_of,
    is_recommended,
    need_disk,
)
from graftwork.records.base import Figure
from graftwork.records.errors import UserError
from graftwork.records.hardware import Gpu, Offer, PlaceTerms
from graftwork.records.plan import FitQuestion
from graftwork.text.wording import plural

FOREVER = 1e9
"""Hours that mean never: JSON has no infinity."""


def assess(candidate: OfferCandidate, *, terms: Terms, disk: DiskNeed, rows: float) -> PlaceRow:
    age = age_days(candidate.offer.dated, today=terms.today)
    provider, run = candidate.place, candidate.run
    guessed = candidate.billing == "spot" and terms.preemptions_per_hour is None
    spread = ASSUMED_SPREAD if guessed else (1.0, 1.0)
    bills = tuple(
        compute_bill(candidate, terms=terms, disk=disk, rows=rows, hours=hours, tweak=Tweak(rate=rate))
        for hours, rate in ((run.hours.value, 1.0), (run.hours.low, spread[0]), (run.hours.high, spread[1]))
    )
    middle = bills[0]

    def figure(of: Callable[[Bill], float], unit: str) -> Figure:
        return _figure([of(bill) for bill in bills], unit)

    cost = figure(lambda bill: bill.cost, "USD")
    clock = figure(lambda bill: bill.clock, "h")
    paid_first = figure(lambda bill: bill.paid_first, "USD")
    fits = run.fits and middle.possible
    why_not = "" if middle.possible else "a session is over before the machine is set up"
    in_budget = None
    if fits and terms.budget_usd is not None and candidate.billing != "free":
        counts = [float(int(terms.budget_usd / bill.cost + 1e-9)) if bill.cost > 0 else 0.0 for bill in bills]
        in_budget = _figure(counts, "runs")
    gain = ratio = None
    if terms.value_usd is not None:
        # What a run brings over what it costs; people's hours are not included.
        worth = terms.value_usd * terms.success_share
        gain = Figure(value=worth - cost.value, low=worth - cost.high, high=worth - cost.low, unit="USD")
        if cost.low > 0:
            ratio = Figure(
                value=worth / cost.value - 1,
                low=worth / cost.high - 1,
                high=worth / cost.low - 1,
                unit="of the cost",
            )
    return PlaceRow(
        place=provider.name,
        title=provider.title,
        kind=provider.kind,
        gpu=run.gpu,
        gpus=run.gpus,
        instance=candidate.offer.instance,
        billing=candidate.billing,
        fits=fits,
        why_not=why_not if run.fits else run.why_not or "it does not fit the GPU",
        training_hours=run.hours,
        machine_hours=figure(lambda bill: bill.machine, "h"),
        hours_to_result=clock,
        usd_per_hour=_price(candidate, middle, terms),
        price_source=candidate.offer.source,
        price_dated=candidate.offer.dated,
        price_age_days=age,
        stale=age > STALE_AFTER_DAYS and candidate.billing != "electricity",
        cost_usd=cost,
        cost_parts_usd={
            name: _figure([bill.parts.get(name, 0.0) for bill in bills], "USD") for name in middle.parts
        },
        bill_usd=paid_first,
        preemptions_per_hour=figure(lambda bill: bill.hazard.rate, "1/h"),
        rate_source=rate_source(candidate, terms),
        interruptions=figure(lambda bill: bill.interruptions, ""),
        lost_hours=figure(lambda bill: bill.lost, "h"),
        sessions=figure(lambda bill: float(bill.sessions), "sessions"),
        runs_in_budget=in_budget,
        disk_gib=disk.total_gib,
        return_usd=gain,
        return_ratio=ratio,
        intervals=describe_intervals(middle, run=run),
        limits=limits_of(candidate, middle),
        driven_by=provider.driven_by,
        meets_deadline=None if terms.deadline_hours is None else clock.value <= terms.deadline_hours,
        within_budget=None if terms.budget_usd is None else paid_first.value <= terms.budget_usd,
        recommended=is_recommended(provider),
        certainty=run.certainty,
        strategy=run.strategy,
        notes=provider.notes,
    )


def rate_source(candidate: OfferCandidate, terms: Terms) -> str:
    """Source of the interruption rate."""
    if candidate.billing != "spot":
        return "assumed: a crash in 500 hours"
    if terms.preemptions_per_hour is not None:
        return "stated"
    if candidate.place.preemptions_per_hour is None:
        return "assumed"
    return "the catalog's assumption" if "preemptions" in candidate.place.notes else "the catalog's"


def limits_of(candidate: OfferCandidate, bill: Bill) -> tuple[str, ...]:
    """The place's rules that affect this run."""
    provider, limits = candidate.place, []
    if provider.session_hours:
        limits.append(f"{plural(bill.sessions, 'session')} of at most {provider.session_hours:g} h")
    for quota, unit, hours in (
        (provider.free_hours_per_week, "week", 168),
        (provider.free_hours_per_day, "day", 24),
    ):
        if quota:
            periods = math.ceil(bill.clock / hours) if math.isfinite(bill.clock) else 0
            limits.append(f"{quota:g} h a {unit}: {plural(periods, unit)}")
    if candidate.billing == "subscription" and candidate.offer.hours_per_month:
        limits.append(f"{candidate.offer.hours_per_month:g} h of this GPU a month")
    if provider.driven_by == "by hand":
        limits.append("by hand: no API")
    return tuple(limits)


def _price(candidate: OfferCandidate, bill: Bill, terms: Terms) -> Figure:
    """Price as listed, or as computed."""
    if candidate.billing in {"on-demand", "spot", "free"}:
        return Figure.exact(candidate.usd_per_hour, "USD/h")
    if candidate.billing == "electricity":
        watts = candidate.run.watts + terms.host_watts
        return Figure.exact(watts / 1000 * terms.electricity_usd_kwh, "USD/h")
    hours, a_month = candidate.offer.hours_per_month, candidate.offer.usd_per_month or 0.0
    worth = paid = a_month / hours if hours else 0.0
    if bill.possible:
        paid = (bill.cost - bill.parts["storage"] - bill.parts["transfer"]) / bill.machine
    return Figure(value=paid, low=min(worth, paid), high=max(worth, paid, a_month), unit="USD/h")


def _figure(values: list[float], unit: str) -> Figure:
    """The first is the value, all of them form the range."""
    bounded = [min(value, FOREVER) for value in values]
    return Figure(value=bounded[0], low=min(bounded), high=max(bounded), unit=unit)


def order(rows: Sequence[PlaceRow], terms: Terms) -> tuple[PlaceRow, ...]:
    """Best first, each with its verdict."""
    ranked = sorted(rows, key=lambda row: rank_key(row, terms))
    best = ranked[0] if ranked and ranked[0].eligible else None
    return tuple(row.model_copy(update={"verdict": _word(row, best, terms)}) for row in ranked)


def rank_key(row: PlaceRow, terms: Terms) -> tuple[int, float, float, str]:
    """Eligible, then too late or too expensive, then what does not fit; within these by the goal."""
    tier = 0 if row.eligible else 1 if row.fits else 2
    return (tier, *goal_key(row.cost_usd.value, row.hours_to_result.value, terms), row.label)


def goal_key(cost: float, clock: float, terms: Terms) -> tuple[float, float]:
    """Less is better: by the goal, then by the other criterion."""
    return (score_of(cost, clock, terms), clock if terms.goal == "cost" else cost)


def score_of(cost: float, clock: float, terms: Terms) -> float:
    """Less is better."""
    if terms.goal == "time":
        return clock
    return cost + terms.waiting_usd_per_hour * clock


def best_of_each_place(rows: Sequence[PlaceRow]) -> tuple[PlaceRow, ...]:
    """The best line of each place and billing mode, in order."""
    best: dict[tuple[str, str], PlaceRow] = {}
    for row in rows:
        # Own GPUs are listed one by one.
        own_gpu = f"{row.gpus} {row.gpu}" if row.billing == "electricity" else ""
        best.setdefault((row.place, own_gpu or ("spot" if row.billing == "spot" else "")), row)
    return tuple(best.values())


def verdict(rows: Sequence[PlaceRow], terms: Terms) -> tuple[str, str]:
    """The answer in one sentence, and its reason."""
    eligible = [row for row in rows if row.eligible]
    if not eligible:
        return "No place will do.", _why_none(rows, terms)
    best = eligible[0]
    head = (
        f"{best.label}: {dollars(best.cost_usd.value)} a run, done in {duration(best.hours_to_result.value)}."
    )
    reasons = [_why_best(terms)]
    rival = next((row for row in eligible[1:] if house_of(row.place) != house_of(best.place)), None)
    if rival is not None:
        reasons.append(f"Next is {rival.label} at {_cost_and_time(rival)}.")
    # The soonest where cost was asked for; the cheapest where time was.
    if terms.goal == "cost":
        word, end = "soonest", min(eligible, key=lambda row: (row.hours_to_result.value, row.cost_usd.value))
        figures = f"{duration(end.hours_to_result.value)} for {dollars(end.cost_usd.value)}"
    else:
        word, end = "cheapest", min(eligible, key=lambda row: (row.cost_usd.value, row.hours_to_result.value))
        figures = _cost_and_time(end)
    too = end.label == best.label
    reasons.append(f"It is the {word} too." if too else f"The {word} is {end.label}: {figures}.")
    if best.driven_by == "by hand":
        api = next((row for row in eligible if row.driven_by == "api"), None)
        instead = (
            f"; the best that a program can start is {api.label} at {dollars(api.cost_usd.value)}"
            if api
            else ""
        )
        reasons.append(f"It is started by hand{instead}.")
    if best.stale:
        reasons.append(f"Its price is {best.price_age_days} days old: check it before you pay.")
    return head, " ".join(reasons)


def _cost_and_time(row: PlaceRow) -> str:
    return f"{dollars(row.cost_usd.value)} in {duration(row.hours_to_result.value)}"


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


def _why_best(terms: Terms) -> str:
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


def _why_none(rows: Sequence[PlaceRow], terms: Terms) -> str:
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return "It fits none of the GPUs; the lines say by how much."
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
    if obstacle or best is None or row is best:
        return obstacle or "best"
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
        return row.why_not if "session" in row.why_not else f"does not fit: {row.why_not}"
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
"""Steps of the outward search, which is followed by bisection."""


class ComparisonInputs(NamedTuple):
    """What stays the same while one thing is changed."""

    candidates: tuple[OfferCandidate, ...]
    terms: Terms
    disk: DiskNeed
    rows: float

    def bill(self, candidate: OfferCandidate, *, tweak: Tweak = PLAIN) -> Bill:
        return compute_bill(candidate, terms=self.terms, disk=self.disk, rows=self.rows, tweak=tweak)

    def score(self, candidate: OfferCandidate, *, tweak: Tweak = PLAIN) -> float:
        bill = self.bill(candidate, tweak=tweak)
        return score_of(bill.cost, bill.clock, self.terms)

    def may_win(
        self, candidate: OfferCandidate, *, tweak: Tweak = PLAIN, terms: Terms | None = None
    ) -> Bill | None:
        """Whether it breaks no limit."""
        terms = terms or self.terms
        if not candidate.run.fits or not is_recommended(candidate.place):
            return None
        bill = self.bill(candidate, tweak=tweak)
        late = terms.deadline_hours is not None and bill.clock > terms.deadline_hours
        dear = terms.budget_usd is not None and bill.paid_first > terms.budget_usd
        return None if late or dear or not bill.possible else bill


def winner(
    inputs: ComparisonInputs,
    *,
    tweak_of: Callable[[OfferCandidate], Tweak] = lambda _: PLAIN,
    terms: Terms | None = None,
) -> OfferCandidate | None:
    """The best candidate when each is computed with its tweak."""
    terms = terms or inputs.terms
    eligible = [
        (*goal_key(bill.cost, bill.clock, terms), candidate.label, number)
        for number, candidate in enumerate(inputs.candidates)
        if (bill := inputs.may_win(candidate, tweak=tweak_of(candidate), terms=terms)) is not None
    ]
    return inputs.candidates[min(eligible)[-1]] if eligible else None


def find_changes(inputs: ComparisonInputs) -> tuple[WinnerChange, ...]:
    """The smallest changes, one thing at a time; empty if nothing wins in the first place."""
    best = winner(inputs)
    if best is None:
        return ()
    return (
        *_price_changes(inputs, best),
        *_hours_changes(inputs, best),
        *_rate_changes(inputs, best),
        *_limit_changes(inputs, best),
        *_waiting_changes(inputs, best),
    )


def _search(
    wins: Callable[[float], OfferCandidate | None], best: OfferCandidate, *, up: bool
) -> tuple[float, OfferCandidate | None] | None:
    """The factor nearest to 1 at which `best` no longer wins, and the new winner."""
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


def _same(first: OfferCandidate | None, second: OfferCandidate) -> bool:
    """Another GPU, or another offer of the same provider, is not another place."""
    return first is not None and house_of(first.place.name) == house_of(second.place.name)


def _price_changes(inputs: ComparisonInputs, best: OfferCandidate) -> Iterator[WinnerChange]:
    """The winner's place asks more for all that it offers; a rival asks less for its own offer."""
    if best.billing != "free":
        turning_point = _search(
            lambda factor: winner(
                inputs, tweak_of=lambda item: Tweak(price=factor) if _same(item, best) else PLAIN
            ),
            best,
            up=True,
        )
        explanation = f"{best.place.title} stays the best at {FARTHEST:g} times its prices"
        if turning_point is not None:
            increase = f"{100 * (turning_point[0] - 1):.0f} % more"
            explanation = f"if {best.place.title} asked {increase}, {_named(turning_point[1])} would win"
        yield _factor_change(
            "price of the winner", "× the listed price", turning_point, best=best, explanation=explanation
        )
    if inputs.terms.goal == "time":
        return
    # The rival that needs the smallest cut.
    nearest: tuple[float, OfferCandidate] | None = None
    to_beat = inputs.score(best)
    for rival in inputs.candidates:
        if _same(rival, best) or rival.billing in {"free", "electricity"} or not inputs.may_win(rival):
            continue
        # Dollars are linear in the price: two points give the line.
        full, nothing = inputs.score(rival), inputs.score(rival, tweak=Tweak(price=0.0))
        if nothing >= to_beat or full <= nothing:
            continue
        factor = (to_beat - nothing) / (full - nothing)
        if nearest is None or factor > nearest[0]:
            nearest = factor, rival
    if nearest is not None:
        factor, rival = nearest
        explanation = f"if {rival.label} cost {100 * (1 - factor):.0f} % less, it would win"
        yield _factor_change(
            "price of a rival", "× its listed price", nearest, best=best, explanation=explanation
        )


def _factor_change(
    what: str,
    unit: str,
    turning_point: tuple[float, OfferCandidate | None] | None,
    *,
    best: OfferCandidate,
    explanation: str,
) -> WinnerChange:
    return WinnerChange(
        what=what,
        now=Figure.exact(1.0, unit),
        then=None if turning_point is None else Figure.exact(turning_point[0], unit),
        winner=best.label if turning_point is None else _named(turning_point[1]),
        words=explanation,
    )


def _hours_changes(inputs: ComparisonInputs, best: OfferCandidate) -> Iterator[WinnerChange]:
    """The run takes longer, or less long, everywhere: more rows, an estimate that was off."""
    for up in (True, False):
        turning_point = _search(
            lambda factor: winner(inputs, tweak_of=lambda _: Tweak(hours=factor)), best, up=up
        )
        if turning_point is not None:
            longer = (
                f"{turning_point[0]:.1f} times as long"
                if up
                else f"{100 * turning_point[0]:.0f} % of the time"
            )
            explanation = f"if the run took {longer} everywhere, {_named(turning_point[1])} would win"
            yield _factor_change(
                "hours of the run", "× the hours", turning_point, best=best, explanation=explanation
            )


def _rate_changes(inputs: ComparisonInputs, best: OfferCandidate) -> Iterator[WinnerChange]:
    """More interruptions where a spot machine wins, fewer where one might."""
    spot_wins = best.billing == "spot"
    if not spot_wins and not any(
        candidate.billing == "spot" and candidate.run.fits for candidate in inputs.candidates
    ):
        return

    def wins(factor: float) -> OfferCandidate | None:
        winner_name = winner(inputs, tweak_of=lambda _: Tweak(rate=factor))
        # The same place on demand is another answer here, and another spot machine is none: what is asked is
        # whether spot pays.
        return (
            best if winner_name is not None and (winner_name.billing == "spot") == spot_wins else winner_name
        )

    turning_point = _search(wins, best, up=spot_wins)
    if turning_point is not None:
        factor, who = turning_point
        rate = inputs.bill(best).hazard.rate if spot_wins else None
        stated = f" ({rate * factor:.2f} an hour)" if rate else ""
        many = "as many interruptions" if spot_wins else "of the interruptions"
        explanation = f"with {factor:.2g} × {many}{stated} {_named(who)} would win"
    elif spot_wins:
        explanation = f"{best.label} stays the best at {FARTHEST:g} times as many interruptions"
    else:
        explanation = "no spot machine would win if it were interrupted less"
    yield _factor_change(
        "interruptions of spot machines", "× the rate", turning_point, best=best, explanation=explanation
    )


def _limit_changes(inputs: ComparisonInputs, best: OfferCandidate) -> Iterator[WinnerChange]:
    """Beyond this the winner is late; below it the budget is exceeded. No budget changes what costs
    nothing.
    """
    bill, terms = inputs.bill(best), inputs.terms
    for what, field, now, needed, unit, suffix in (
        ("deadline", "deadline_hours", terms.deadline_hours, bill.clock, "h", "to the result"),
        ("budget", "budget_usd", terms.budget_usd, bill.paid_first, "USD", ""),
    ):
        if needed <= 0:
            continue
        winner_name = winner(inputs, terms=terms.model_copy(update={field: needed * (1 - 1e-9)}))
        less = f"{duration(needed)} {suffix}" if unit == "h" else dollars(needed)
        then = "no place will do" if winner_name is None else f"{winner_name.label} would win"
        yield WinnerChange(
            what=what,
            now=Figure.exact(needed, f"{unit} (no {what})") if now is None else Figure.exact(now, unit),
            then=Figure.exact(needed, unit),
            winner=_named(winner_name),
            words=f"with less than {less} {then}",
        )


def _waiting_changes(inputs: ComparisonInputs, best: OfferCandidate) -> Iterator[WinnerChange]:
    """The hourly value of waiting at which a faster place wins."""
    if inputs.terms.goal == "time":
        return
    now, mine = inputs.terms.waiting_usd_per_hour, inputs.bill(best)
    least: tuple[float, OfferCandidate] | None = None
    for rival in inputs.candidates:
        bill = None if _same(rival, best) else inputs.may_win(rival)
        if bill is None or bill.clock >= mine.clock:
            continue
        worth = (bill.cost - mine.cost) / (mine.clock - bill.clock)
        if worth > now and (least is None or worth < least[0]):
            least = worth, rival
    if least is not None:
        worth, rival = least
        yield WinnerChange(
            what="worth of an hour of waiting",
            now=Figure.exact(now, "USD/h"),
            then=Figure.exact(worth, "USD/h"),
            winner=rival.label,
            words=f"if an hour of waiting is worth more than {dollars(worth)}, {rival.label} wins",
        )


def _named(candidate: OfferCandidate | None) -> str:
    return "no place" if candidate is None else candidate.label


EstimateRun = Callable[[str, int, float | None], GpuRun]
"""A GPU's name, how many of them, the machine's memory: the run on it."""

OWN = PlaceTerms(
    name="own",
    title="own GPUs",
    kind="own",
    setup_minutes=1.0,
    notes="electricity only; the GPUs are paid for",
    source="stated by the user",
    dated="2026-01-01",
)


def list_candidates(
    offers: Iterable[Offer],
    providers: Iterable[PlaceTerms],
    *,
    estimate: EstimateRun,
    own_gpus: Iterable[tuple[str, int]] = (),
    today: str,
) -> tuple[OfferCandidate, ...]:
    """Every offer once per billing mode, then the team's own GPUs, by name and number."""
    by_name = {provider.name: provider for provider in providers}
    candidates = []
    for offer in offers:
        provider = by_name.get(offer.place)
        if provider is None:
            continue
        run = estimate(offer.gpu, offer.gpus, offer.memory_gib)
        candidates += [
            OfferCandidate(place=provider, offer=offer, billing=way, run=run) for way in ways(offer)
        ]
    provider = by_name.get(OWN.name, OWN)
    for gpu, gpus in own_gpus:
        offer = Offer(
            place=provider.name, gpu=gpu, gpus=gpus, usd_per_hour=None,
            source="electricity as stated", dated=today,
        )  # fmt: skip
        run = estimate(gpu, gpus, None)
        candidates.append(OfferCandidate(place=provider, offer=offer, billing="electricity", run=run))
    return tuple(candidates)


def within_disk(candidate: OfferCandidate, disk: DiskNeed) -> OfferCandidate:
    """Return the candidate; not possible if the place's disk is too small for the run."""
    disk_gib, needed = candidate.place.disk_gib, disk.total_gib
    if disk_gib is None or needed.value <= disk_gib or not candidate.run.fits:
        return candidate
    why = f"its disk is too small: {needed.value:.0f} GiB are needed, {disk_gib:.0f} are there"
    return candidate.model_copy(
        update={"run": candidate.run.model_copy(update={"fits": False, "why_not": why})}
    )


def ways(offer: Offer) -> tuple[Billing, ...]:
    """Billing modes of an offer."""
    billings: list[Billing] = []
    if offer.usd_per_month is not None:
        billings.append("subscription")
    if offer.usd_per_hour is not None:
        billings.append("on-demand" if offer.usd_per_hour > 0 else "free")
    usual, spot = offer.usd_per_hour, offer.spot_usd_per_hour
    if spot and (usual is None or spot < usual):
        billings.append("spot")
    return tuple(billings)


def compare(
    candidates: Sequence[OfferCandidate],
    *,
    terms: Terms,
    disk: DiskNeed,
    rows: float,
    run: dict[str, object],
    with_sensitivity: bool = True,
) -> PlaceComparison:
    """Compare candidates. `rows` are those of all epochs; `run` is passed through."""
    candidates = tuple(within_disk(candidate, disk) for candidate in candidates)
    lines = [assess(candidate, terms=terms, disk=disk, rows=rows) for candidate in candidates]
    ranked = order(lines, terms)
    head, reason = verdict(ranked, terms)
    changes = find_changes(ComparisonInputs(candidates, terms, disk, rows)) if with_sensitivity else ()
    return PlaceComparison(
        run=run,
        terms=terms,
        rows=ranked,
        best=next((row.label for row in ranked if row.eligible), None),
        verdict=head,
        reason=reason,
        sensitivity=changes,
        disk=disk,
        assumptions=_assumptions(terms),
        notes=_notes(ranked, candidates),
    )


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
        f"subscriptions are shared among {terms.runs_per_month:g} runs per month",
        f"electricity costs {terms.electricity_usd_kwh:g} USD a kWh, and {terms.host_watts:g} W go to the "
        "machine around own GPUs; the GPUs themselves are paid for (see `graft plan buy`)",
        "working hours are not included in the cost",
    )


def _notes(rows: Sequence[PlaceRow], candidates: Sequence[OfferCandidate]) -> tuple[str, ...]:
    notes = []
    stale = [row for row in rows if row.stale]
    if stale:
        oldest = max(row.price_age_days for row in stale)
        notes.append(
            f"{len(stale)} of {len(rows)} prices are over {STALE_AFTER_DAYS} days old, the oldest {oldest}: "
            "check them before you pay"
        )
    provider_notes = {candidate.place.title: candidate.place.notes for candidate in candidates}
    notes += [f"{title}: {note}" for title, note in sorted(provider_notes.items()) if note]
    return tuple(notes)


DEFAULT_GPUS = {"full": 8}
"""More GPUs than the smallest machine pay off for adapters only if time is short."""


def finder(overlay: Path | None) -> Callable[[str], Gpu]:
    """GPUs by name; the catalog is read once for each name."""

    @cache
    def find(name: str) -> Gpu:
        return find_gpu(name, overlay=overlay)

    return find


class OfferFilter(NamedTuple):
    """Which machines are compared: all of the catalog, or those of some places, one GPU, this many GPUs."""

    places: Sequence[str] = ()
    gpu: str | None = None
    gpus: int | None = None
    own: Sequence[tuple[str, int]] = ()
    """Existing GPUs, by name and number."""


def compare_places(
    question: FitQuestion,
    among: OfferFilter,
    *,
    terms: Terms,
    overlay: Path | None = None,
    measured: MeasuredRun | None = None,
    with_sensitivity: bool = True,
) -> PlaceComparison:
    """The question on every offer, and on own GPUs."""
    provider_names, gpu, gpus, stated_gpus = among
    find = finder(overlay)
    catalog = list_places(overlay=overlay)
    names = [provider.name for provider in catalog]
    for name in provider_names:
        if name not in names:
            raise UserError(
                f"the catalog has no place {name!r}",
                why="its prices and rules are needed",
                fix=f"one of: {', '.join(names)}",
                where="--place",
            )
    gpu_name = find(gpu).name if gpu else None
    offers = [
        offer
        for offer in list_offers(overlay=overlay)
        if (not provider_names or offer.place in provider_names)
        and (gpu_name is None or find(offer.gpu).name == gpu_name)
    ]
    offers += [reserved for offer in offers if (reserved := as_commitment(offer)) is not None]
    offers = of_size(offers, gpus=gpus if gpus is not None else DEFAULT_GPUS.get(question.method, 1))
    own_gpus = [(find(name).name, count) for name, count in stated_gpus]
    if not offers and not own_gpus:
        raise UserError(
            f"no place of the catalog offers {gpu}",
            why="there is nothing to compare",
            fix="see `graft plan catalog prices`, leave --gpu out, or add your own prices.csv with --catalog",
            where="--gpu",
        )
    candidates = list_candidates(
        offers,
        catalog,
        estimate=RunEstimator(question, find=find, measured=measured),
        own_gpus=own_gpus,
        today=terms.today.isoformat(),
    )
    run = candidates[0].run
    return compare(
        candidates,
        terms=terms,
        disk=need_disk(
            total_parameters=run.total_parameters,
            trainable=run.trainable_parameters,
            full=run.full,
            tokens=run.tokens,
        ),
        rows=question.rows * question.epochs,
        run={**describe_run(question), "measured": measured._asdict() if measured else None},
        with_sensitivity=with_sensitivity,
    )


def of_size(offers: Sequence[Offer], *, gpus: int) -> list[Offer]:
    """Machines of up to this many GPUs, and the smallest that a place has of a GPU."""
    smallest: dict[tuple[str, str], int] = {}
    for offer in offers:
        key = (offer.place, offer.gpu)
        smallest[key] = min(offer.gpus, smallest.get(key, offer.gpus))
    return [offer for offer in offers if offer.gpus <= max(gpus, smallest[offer.place, offer.gpu])]
