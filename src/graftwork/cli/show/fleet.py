"""Places, jobs, offers and costs as tables."""

import time
from datetime import date

from rich.console import Console

from graftwork.fleet.image import ImageFiles
from graftwork.fleet.jobs import CostSummary, ExportedBundle, FleetJobs, RunOffers, RunQuote
from graftwork.fleet.project import FleetPlaces, PlaceFacts
from graftwork.records.fleet import FleetJob, Reconciled
from graftwork.records.hardware import Offer
from graftwork.text.wording import duration
from graftwork.views.document import quote
from graftwork.views.terminal import fit_words, print_line, table

COLOURS = {"done": "green", "submitted": "cyan", "failed": "red", "lost": "red", "refused": "red"}


def show_places(console: Console, found: FleetPlaces) -> None:
    made = table("place", "answers", "machines", "quota left", "price now", "open jobs", right=("open jobs",))
    for place in found.places:
        answers = "[green]yes[/]" if place.reachable else "[red]no[/]"
        quota = _quota(place)
        made.add_row(place.name, answers, _machines(place), quota, _prices(place), str(place.open_jobs))
    console.print(fit_words(console, made))
    for place in found.places:
        if place.fix:
            print_line(console, f"{place.name}: {quote(place.fix)}")
    if found.unconfigured:
        print_line(console, f"not configured: {', '.join(found.unconfigured)}")


def _quota(place: PlaceFacts) -> str:
    for offer in place.offers:
        if offer.quota_hours is not None:
            until = f", until {offer.quota_until}" if offer.quota_until else ""
            return f"{offer.quota_hours:.1f} h{quote(until)}"
    return ""


def _machines(place: PlaceFacts) -> str:
    if not place.reachable:
        return quote(place.note)
    return ", ".join(dict.fromkeys(_machine(offer) for offer in place.offers)) or "none"


def _machine(offer: Offer) -> str:
    where = f" ({offer.instance})" if offer.instance and offer.place == "ssh" else ""
    if not offer.gpu:
        return f"no GPU{where}"
    return quote(f"{offer.gpus} × {offer.gpu}{where}" if offer.gpus > 1 else f"{offer.gpu}{where}")


def _prices(place: PlaceFacts) -> str:
    priced = [offer for offer in place.offers if offer.usd_per_hour]
    if not priced:
        return "" if not place.reachable else "free"
    cheapest = min(priced, key=lambda offer: offer.usd_per_hour or 0.0)
    return f"from ${cheapest.usd_per_hour:.3f} an hour ({quote(cheapest.source)}, {_age(cheapest.dated)})"


def _age(dated: str) -> str:
    """How old a price is."""
    try:
        days = (date.today() - date.fromisoformat(dated)).days
    except ValueError:
        return quote(dated)
    return "today" if days <= 0 else f"{days} days old"


def show_offers(console: Console, found: RunOffers) -> None:
    made = table("place", "card", "hours", "USD/h", "planned", "at most", "time limit", "price from")
    for offered in found.quotes:
        made.add_row(offered.place, quote(offered.gpu) or "as it is", *_figures(offered))
    console.print(fit_words(console, made))
    print_line(
        console, f"hours are planned for each place's machine; here: {found.planned_hours:.2f} h at most"
    )
    for offered in found.quotes:
        for line in _terms(offered):
            print_line(console, f"{quote(f'{offered.place}, {offered.gpu}')}: {quote(line)}")
    for note in found.notes:
        print_line(console, f"[yellow]![/] {quote(note)}")


def _terms(offered: RunQuote) -> list[str]:
    """What else the offer says about money."""
    lines = []
    if offered.spot_usd_per_hour:
        lines.append(f"spot about ${offered.spot_usd_per_hour:.3f} an hour")
    if offered.reserved_usd_per_hour:
        lines.append(f"reserved for {offered.reserved_term}: ${offered.reserved_usd_per_hour:.3f} an hour")
    if offered.storage_usd_gib_month:
        lines.append(f"a volume that stays: ${offered.storage_usd_gib_month:.3f} a GiB and month")
    return lines


def _figures(offered: RunQuote) -> tuple[str, ...]:
    limit, hours = duration(offered.seconds), f"{offered.planned_hours:.2f}"
    if not offered.usd_per_hour:
        quota = f" ({offered.quota_hours:.1f} h of quota)" if offered.quota_hours is not None else ""
        return (hours, f"free{quota}", "", "", limit, quote(offered.price_source))
    source = quote(f"{offered.price_source}, {offered.price_dated}")
    planned, most = f"${offered.planned_usd:.2f}", f"${offered.largest_usd:.2f}"
    return (hours, f"{offered.usd_per_hour:.3f}", planned, most, limit, source)


def show_jobs(console: Console, found: FleetJobs) -> None:
    if not found.jobs:
        print_line(console, "no jobs")
        return
    made = table("job", "place", "run", "state", "age", "cost", "at most", "reason")
    for job in found.jobs:
        made.add_row(*_row(job))
    console.print(fit_words(console, made))


def _row(job: FleetJob) -> tuple[str, ...]:
    colour = COLOURS.get(job.state, "yellow")
    host = job.placed.host if job.placed is not None else ""
    where = f"{job.place} ({host})" if host not in ("", job.place) else job.place
    age = duration(max(time.time() - job.created_at, 0.0))
    paid = bool(job.usd_per_hour)
    return (
        job.id,
        where,
        job.run_id,
        f"[{colour}]{job.state}[/]",
        age,
        f"${job.actual_usd:.2f}" if paid else "free",
        f"${job.committed_usd:.2f}" if paid else "",
        quote(job.reason),
    )


def show_job(console: Console, job: FleetJob) -> None:
    show_jobs(console, FleetJobs(jobs=(job,)))
    if job.is_open:
        print_line(console, f"follow:  graft fleet logs -f {job.id}")
        print_line(console, f"stop:    graft fleet stop {job.id}")


def show_reconciled(console: Console, found: Reconciled) -> None:
    print_line(console, f"{found.checked} open jobs compared, {found.open} still open")
    groups = {
        "closed": found.closed,
        "ended": found.ended,
        "unknown": found.unknown,
        "no answer": found.unreachable,
    }
    for title, lines in groups.items():
        for line in lines:
            print_line(console, f"  {title:<10}{quote(line)}")


def show_costs(console: Console, found: CostSummary) -> None:
    if found.lines:
        show_jobs(console, FleetJobs(jobs=found.lines))
    cap = f"${found.project_cap_usd:.2f}" if found.project_cap_usd is not None else "none"
    made = table("", "USD", "cap", right=("USD", "cap"))
    made.add_row("planned", f"{found.planned_usd:.2f}", "")
    made.add_row("reserved by open jobs", f"{found.committed_usd:.2f}", f"{found.job_cap_usd:.2f} a job")
    made.add_row("actual", f"{found.actual_usd:.2f}", cap)
    made.add_row(f"counted in {found.month}", f"{found.month_usd:.2f}", f"{found.month_cap_usd:.2f}")
    console.print(made)


def show_bundle(console: Console, found: ExportedBundle) -> None:
    resumes = f", resumes from step {found.resume_step}" if found.resume_step is not None else ""
    print_line(console, f"bundle {found.id} of run {found.run_id}: {found.files} files{resumes}")
    print_line(console, f"{found.size_bytes / 1e6:.1f} MB in {quote(found.folder)}")
    print_line(console, "run it there:  python bootstrap.py --work FOLDER")


def show_image(console: Console, found: ImageFiles) -> None:
    print_line(console, f"{found.packages} pinned packages on {quote(found.image)} in {quote(found.folder)}")
    print_line(console, f"build it:  {quote(found.command)}")
