"""Runs, places and offers for the tests of costs: plain numbers that can be checked by hand."""

from datetime import date

from graftwork.plan.cost import Billing, GpuRun, OfferCandidate, Terms, need_disk
from graftwork.records.base import Figure
from graftwork.records.hardware import Offer, PlaceTerms

TODAY = date(2026, 8, 22)
DISK = need_disk(total_parameters=7e9, trainable=40e6, full=False, tokens=10e6)
ROWS = 15000.0


def make_run(
    hours: float = 2.0, *, gpu: str = "A100 40GB", gpus: int = 1, fits: bool = True, spread=1.0
) -> GpuRun:
    return GpuRun(
        gpu=gpu,
        gpus=gpus,
        fits=fits,
        why_not="" if fits else "takes 20.0 of 15.6 GiB",
        hours=Figure(value=hours, low=hours / spread, high=hours * spread, unit="h"),
        steps=940,
        tokens=10e6,
        total_parameters=7e9,
        trainable_parameters=40e6,
        watts=300.0,
    )


def make_place(name: str = "cloud", **more) -> PlaceTerms:
    facts = {
        "title": name.title(),
        "kind": "cloud",
        "setup_minutes": 6.0,
        "source": "test",
        "dated": "2026-08-22",
    }
    return PlaceTerms(name=name, **{**facts, **more})


def make_offer(place: str = "cloud", **more) -> Offer:
    facts = {"gpu": "A100 40GB", "instance": "x1", "source": "test", "dated": "2026-08-22"}
    return Offer(place=place, **{**facts, **more})


def make_candidate(
    name: str = "cloud",
    *,
    usd: float = 1.0,
    billing: Billing = "on-demand",
    run: GpuRun | None = None,
    place: dict | None = None,
    offer: dict | None = None,
) -> OfferCandidate:
    prices = {"spot": {"spot_usd_per_hour": usd}}.get(billing, {"usd_per_hour": usd})
    return OfferCandidate(
        place=make_place(name, **(place or {})),
        offer=make_offer(name, **{**prices, **(offer or {})}),
        billing=billing,
        run=run or make_run(),
    )


def make_terms(**more) -> Terms:
    return Terms(today=TODAY, **more)
