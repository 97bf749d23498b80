"""Which offers a run can be put on.

In: offers, places, the run on each machine. Out: candidates, one for each way in which an offer is billed. A
spot price that is the usual price, or nothing, is none: spot was withdrawn there or was never read.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from graftwork.plan.cost.disk import DiskNeed
from graftwork.plan.cost.nouns import Billing, Candidate, CardRun
from graftwork.records.hardware import Gpu, Offer, PlaceTerms


class OwnCards(NamedTuple):
    """Cards that the team has."""

    gpu: Gpu
    cards: int


Reckon = Callable[[str, int, float | None], CardRun]
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
    reckon: Reckon,
    own: Iterable[OwnCards] = (),
    today: str,
) -> tuple[Candidate, ...]:
    """Every offer as often as it has ways of being billed, then the team's own cards."""
    by_name = {place.name: place for place in places}
    found = []
    for offer in offers:
        place = by_name.get(offer.place)
        if place is None:
            continue
        run = reckon(offer.gpu, offer.gpus, offer.memory_gib)
        found += [Candidate(place=place, offer=offer, billing=way, run=run) for way in ways(offer)]
    mine = by_name.get(OWN.name, OWN)
    for kind in own:
        offer = Offer(
            place=mine.name, gpu=kind.gpu.name, gpus=kind.cards, usd_per_hour=None,
            source="electricity as stated", dated=today,
        )  # fmt: skip
        run = reckon(kind.gpu.name, kind.cards, None)
        found.append(Candidate(place=mine, offer=offer, billing="electricity", run=run))
    return tuple(found)


def within_disk(candidate: Candidate, disk: DiskNeed) -> Candidate:
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
