"""What changes the winner.

In: the candidates and the terms. Out: for each thing that may be otherwise (the winner's price, a rival's
price, the hours, the interruptions, the deadline, the budget, the worth of an hour of waiting) the smallest
change that makes another place win. Everything is recomputed under the change; nothing is linearised.
"""

from collections.abc import Callable
from typing import NamedTuple

from graftwork.plan.cost.assess import dollars, duration, score_of
from graftwork.plan.cost.bill import PLAIN, Bill, Tweak, compute_bill
from graftwork.plan.cost.types import DiskNeed, OfferCandidate, Terms, WinnerChange, house_of, is_recommended
from graftwork.records.base import Figure

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
