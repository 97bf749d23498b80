"""Compares places for a run: offers of the catalog and own cards, ranked, with what would change the winner.

In: what is trained how (the machine of the question does not matter), the terms. Out: a PlaceComparison.
Reads the catalog and asks the fit.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import NamedTuple

from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.prices import STALE_AFTER_DAYS, as_commitment, list_offers, list_places
from graftwork.plan.cost.assess import assess, order, verdict
from graftwork.plan.cost.bill import ASSUMED_SPOT_RATE, CRASH_RATE
from graftwork.plan.cost.runs import Brief, Fit, MeasuredRun, RunEstimator, describe_run, fit_in_brief
from graftwork.plan.cost.sensitivity import ComparisonInputs, find_changes
from graftwork.plan.cost.types import (
    Billing,
    CardRun,
    DiskNeed,
    OfferCandidate,
    PlaceComparison,
    PlaceRow,
    Terms,
    need_disk,
)
from graftwork.records.errors import UserMistake
from graftwork.records.hardware import Gpu, Machine, Offer, PlaceTerms
from graftwork.records.plan import FitQuestion


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
