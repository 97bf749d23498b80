"""Places, their offers, jobs and costs; the bundle of a job and the image of a machine."""

import time
from datetime import date
from typing import TYPE_CHECKING

from graftwork.fleet.bundle import ImageFiles
from graftwork.records.fleet import FleetJob, Reconciled
from graftwork.text.wording import duration, size
from graftwork.views.document import Cell, Document, State, Table, quote

if TYPE_CHECKING:
    from graftwork.fleet.jobs import CostSummary, ExportedBundle, FleetJobs, RunOffers, RunQuote
    from graftwork.fleet.project import FleetPlaces, PlaceFacts

JOB_COLUMNS = ("job", "place", "run", "state", "age", "cost", "at most", "reason")
COLOURS = {"done": "green", "submitted": "cyan", "failed": "red", "lost": "red", "refused": "red"}


def view_places(found: "FleetPlaces") -> Document:
    viewed = Document("Places")
    viewed.table(
        ("place", "answers", "machines", "quota left", "price now", "open jobs"),
        [
            (
                place.name,
                State("yes", "green") if place.reachable else State("no", "red"),
                _machines(place),
                next(
                    (
                        f"{offer.quota_hours:.1f} h"
                        + (f", until {quote(offer.quota_until)}" if offer.quota_until else "")
                        for offer in place.offers
                        if offer.quota_hours is not None
                    ),
                    "",
                ),
                _price(place),
                place.open_jobs,
            )
            for place in found.places
        ],
        right=("open jobs",),
    )
    viewed.line(*(f"{place.name}: {quote(place.fix)}" for place in found.places if place.fix))
    if found.unconfigured:
        viewed.line(f"not configured: {', '.join(found.unconfigured)}")
    return viewed


def _machines(place: "PlaceFacts") -> str:
    if not place.reachable:
        return quote(place.note)
    machines = []
    for offer in place.offers:
        where = f" ({offer.instance})" if offer.instance and offer.place == "ssh" else ""
        count = f"{offer.gpus} × " if offer.gpus > 1 else ""
        machines.append(quote(f"{count}{offer.gpu}{where}") if offer.gpu else f"no GPU{where}")
    return ", ".join(dict.fromkeys(machines)) or "none"


def _price(place: "PlaceFacts") -> str:
    priced = [offer for offer in place.offers if offer.usd_per_hour]
    if not priced:
        return "" if not place.reachable else "free"
    cheapest = min(priced, key=lambda offer: offer.usd_per_hour or 0.0)
    try:
        days = (date.today() - date.fromisoformat(cheapest.dated)).days
        age = "today" if days <= 0 else f"{days} days old"
    except ValueError:
        age = quote(cheapest.dated)
    return f"from ${cheapest.usd_per_hour:.3f} an hour ({quote(cheapest.source)}, {age})"


def view_offers(found: "RunOffers") -> Document:
    viewed = Document("Offers")
    viewed.table(
        ("place", "GPU", "hours", "USD/h", "planned", "at most", "time limit", "price from"),
        [(offer.place, quote(offer.gpu) or "as it is", *_figures(offer)) for offer in found.quotes],
    )
    viewed.line(f"hours are planned for each place's machine; here: {found.planned_hours:.2f} h at most")
    for offer in found.quotes:
        name = quote(f"{offer.place}, {offer.gpu}")
        if offer.spot_usd_per_hour:
            viewed.line(f"{name}: spot about ${offer.spot_usd_per_hour:.3f} an hour")
        if offer.reserved_usd_per_hour:
            term = quote(offer.reserved_term)
            viewed.line(f"{name}: reserved for {term}: ${offer.reserved_usd_per_hour:.3f} an hour")
        if offer.storage_usd_gib_month:
            price = f"${offer.storage_usd_gib_month:.3f} a GiB and month"
            viewed.line(f"{name}: a volume that stays: {price}")
    viewed.line(*(f"[yellow]![/] {quote(note)}" for note in found.notes))
    return viewed


def _figures(offer: "RunQuote") -> tuple[str, ...]:
    limit, hours = duration(offer.seconds), f"{offer.planned_hours:.2f}"
    if not offer.usd_per_hour:
        quota = f" ({offer.quota_hours:.1f} h of quota)" if offer.quota_hours is not None else ""
        return (hours, f"free{quota}", "", "", limit, quote(offer.price_source))
    source = quote(f"{offer.price_source}, {offer.price_dated}")
    planned, most = f"${offer.planned_usd:.2f}", f"${offer.largest_usd:.2f}"
    return (hours, f"{offer.usd_per_hour:.3f}", planned, most, limit, source)


def view_jobs(found: "FleetJobs") -> Document:
    viewed = Document("Jobs")
    if found.jobs:
        links = [f"/fleet/{job.id}" for job in found.jobs]
        viewed.add(Table(JOB_COLUMNS, [_row(job) for job in found.jobs], links=links))
    if not found.jobs:
        viewed.line("no jobs")
    return viewed


def _row(job: FleetJob) -> tuple[Cell, ...]:
    host = job.placed.host if job.placed is not None else ""
    paid = bool(job.usd_per_hour)
    return (
        job.id,
        f"{job.place} ({quote(host)})" if host not in ("", job.place) else job.place,
        job.run_id,
        State(job.state, COLOURS.get(job.state, "yellow")),
        duration(max(time.time() - job.created_at, 0.0)),
        f"${job.actual_usd:.2f}" if paid else "free",
        f"${job.committed_usd:.2f}" if paid else "",
        quote(job.reason),
    )


def view_job(job: FleetJob) -> Document:
    viewed = Document(f"Job {job.id}")
    viewed.table(JOB_COLUMNS, [_row(job)])
    if job.is_open:
        viewed.line(f"follow:  graft fleet logs -f {job.id}", f"stop:    graft fleet stop {job.id}")
    return viewed


def view_reconciled(found: Reconciled) -> Document:
    viewed = Document("Jobs")
    viewed.line(f"{found.checked} open jobs compared, {found.open} still open")
    for title, lines in (
        ("closed", found.closed),
        ("ended", found.ended),
        ("unknown", found.unknown),
        ("no answer", found.unreachable),
    ):
        viewed.line(*(f"  {title:<10}{quote(line)}" for line in lines))
    return viewed


def view_costs(found: "CostSummary") -> Document:
    viewed = Document("Costs")
    viewed.table(JOB_COLUMNS, map(_row, found.lines))
    cap = f"${found.project_cap_usd:.2f}" if found.project_cap_usd is not None else "none"
    viewed.table(
        ("", "USD", "cap"),
        [
            ("planned", f"{found.planned_usd:.2f}", ""),
            ("reserved by open jobs", f"{found.committed_usd:.2f}", f"{found.job_cap_usd:.2f} a job"),
            ("actual", f"{found.actual_usd:.2f}", cap),
            (f"counted in {found.month}", f"{found.month_usd:.2f}", f"{found.month_cap_usd:.2f}"),
        ],
        right=("USD", "cap"),
    )
    return viewed


def view_bundle(found: "ExportedBundle") -> Document:
    viewed = Document("Bundle")
    resumes = f", resumes from step {found.resume_step}" if found.resume_step is not None else ""
    viewed.line(
        f"bundle {found.id} of run {found.run_id}: {found.files} files{resumes}",
        f"{size(found.size_bytes)} in {quote(found.folder)}",
        "run it there:  python bootstrap.py --work FOLDER",
    )
    return viewed


def view_image(found: ImageFiles) -> Document:
    viewed = Document("Image")
    viewed.line(
        f"{found.packages} pinned packages on {quote(found.image)} in {quote(found.folder)}",
        f"build it:  {quote(found.command)}",
    )
    return viewed
