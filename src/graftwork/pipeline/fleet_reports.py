"""What the fleet can be asked: offers for this project's run, costs, a bundle to carry away.

In: an open project. Out: records for people and programs. Starts nothing.
"""

import shutil
import time
from dataclasses import replace
from pathlib import Path

from graftwork.fleet.ledger import month_of
from graftwork.pipeline.fleet_jobs import FleetRequest, RunQuote, quote_run
from graftwork.pipeline.fleet_places import open_place, place_names
from graftwork.pipeline.fleet_plans import (
    BundleOptions,
    ChosenPlace,
    PlaceOption,
    PlacePlanner,
    choose_place,
    pack_run,
    require_packable,
)
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.table import run_pipeline
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, UserMistake
from graftwork.records.fleet import FleetJob
from graftwork.records.hardware import Offer


class RunOffers(Record):
    """This project's run at each place, the cheapest first."""

    planned_hours: float
    """On this machine."""
    quotes: tuple[RunQuote, ...]
    notes: tuple[str, ...] = ()


def list_offers(work: OpenProject, *, only: str = "", request: FleetRequest | None = None) -> RunOffers:
    """A quote for every offer of every place that answers, planned for the machine of that offer."""
    made = run_pipeline(work, upto="plan")
    planner, asked = PlacePlanner(work, made), request or FleetRequest("")
    quotes, notes = [], []
    for name in (only,) if only else place_names(work):
        try:
            offers = open_place(work, name).offer()
        except GraftError as error:
            notes.append(f"{name}: {error.what}")
            continue
        for offer in _cheapest(offers):
            named = f"{name}, {offer.gpu}" if offer.gpu else name
            try:
                plan = planner.plan(offer)
                quotes.append(quote_run(work, plan, replace(asked, place=name, gpu=offer.gpu), offer))
            except GraftError as error:
                notes.append(f"{named}: {error.what}")
                continue
            if not planner.knows(offer):
                notes.append(f"{named}: not in the catalog of cards, planned for this machine")
    ranked = sorted(quotes, key=lambda quote: (quote.planned_usd, quote.planned_hours, quote.place))
    return RunOffers(planned_hours=planner.here.minutes.high / 60, quotes=tuple(ranked), notes=tuple(notes))


def _cheapest(offers: tuple[Offer, ...]) -> list[Offer]:
    """One offer for each card: the one that `graft fleet run --gpu` takes."""
    found: dict[str, Offer] = {}
    for offer in sorted(offers, key=lambda offer: (offer.gpu, offer.usd_per_hour or 0.0)):
        found.setdefault(offer.gpu, offer)
    return [*found.values()]


def find_place(work: OpenProject, request: FleetRequest) -> ChosenPlace:
    """The place for `--place auto`: the cheapest that finishes within budget and deadline."""
    found = list_offers(work, request=request)
    options = [
        PlaceOption(
            place=quote.place,
            gpu=quote.gpu,
            hours=quote.planned_hours + quote.setup_hours,
            planned_usd=quote.planned_usd,
            largest_usd=quote.largest_usd,
            limit_hours=quote.seconds / 3600,
        )
        for quote in found.quotes
        if quote.place != "manual"
    ]
    return choose_place(options, budget=request.max_usd, deadline=request.deadline_seconds, notes=found.notes)


class CostSummary(Record):
    """The ledger in figures: dollars."""

    jobs: int
    open_jobs: int
    planned_usd: float
    committed_usd: float
    """The largest possible cost of open jobs."""
    actual_usd: float
    month: str
    month_usd: float
    """Counted against the cap of this month."""
    month_cap_usd: float
    project_cap_usd: float | None
    job_cap_usd: float
    lines: tuple[FleetJob, ...]


def summarize_costs(work: OpenProject) -> CostSummary:
    jobs, caps, month = work.jobs.list(), work.settings.fleet.caps, month_of(time.time())
    return CostSummary(
        jobs=len(jobs),
        open_jobs=sum(job.is_open for job in jobs),
        planned_usd=sum(job.planned_usd for job in jobs),
        committed_usd=sum(job.committed_usd for job in jobs if job.is_open),
        actual_usd=sum(job.actual_usd for job in jobs),
        month=month,
        month_usd=sum(job.counted_usd for job in jobs if month_of(job.created_at) == month),
        month_cap_usd=caps.month_usd,
        project_cap_usd=caps.project_usd,
        job_cap_usd=caps.job_usd,
        lines=jobs,
    )


class ExportedBundle(Record):
    """A bundle in a folder of the user's choice."""

    id: str
    folder: str
    run_id: str
    files: int
    size_bytes: int
    resume_step: int | None = None


def export_bundle(work: OpenProject, target: Path, *, base_there: str = "") -> ExportedBundle:
    """Write the bundle of this project's run to a folder."""
    if target.exists():
        raise UserMistake("the folder exists already", fix="name a new one", where=str(target))
    require_packable(work)
    packed = pack_run(work, run_pipeline(work, upto="plan"), BundleOptions(base_there=base_there))
    shutil.copytree(packed.folder, target)
    return ExportedBundle(
        id=packed.bundle.id,
        folder=str(target),
        run_id=packed.bundle.run_id,
        files=len(packed.bundle.files),
        size_bytes=packed.bundle.size,
        resume_step=packed.bundle.resume_step,
    )
