"""Run this project's training at another place: offers, quote, start, follow, stop, fetch, reconcile, costs.

Input: an open project and the name of a place. Output: a job in the ledger, and its result in the run's
folder, from where `graft train` continues. Asks before money is spent: the caller confirms the quote.
"""

import json
import math
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from graftwork.fleet.bundle import JOB_FILE, OUTCOME
from graftwork.fleet.control import Controller, affordable_seconds, largest_cost, month_of, what_failed
from graftwork.fleet.place import Place, PlaceUnreachable, make_label
from graftwork.fleet.places.hosts import HostsPlace
from graftwork.fleet.places.manual import ManualPlace
from graftwork.fleet.places.rented import RentedPlace
from graftwork.fleet.plans import (
    BundleOptions,
    PlacePlanner,
    adopt_plan,
    identify_training,
    is_same_run,
    pack_run,
    require_mirror,
    require_packable,
    secrets_of,
    setup_minutes,
    storage_price,
)
from graftwork.fleet.project import control, open_place, place_names, safety_of
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.plan import WorkAhead, note_done, run_id_of
from graftwork.pipeline.table import run_pipeline
from graftwork.project.open_project import OpenProject, timestamp
from graftwork.records.base import Record
from graftwork.records.errors import (
    Busy,
    GracefulStop,
    GraftError,
    Interrupted,
    NegativeResult,
    UserError,
    WorkerFailed,
)
from graftwork.records.fleet import FleetJob, JobOrder, PlacedJob, Reconciled
from graftwork.records.hardware import Offer
from graftwork.records.plan import Plan
from graftwork.records.run import RunState

AUTO = "auto"
"""Chooses the place that suits the run."""
POLL_SECONDS = 2.0
PAID_POLL_SECONDS = 15.0
"""Providers limit the rate of requests."""
RECONCILE_SECONDS = 10.0
"""How often a running job is compared with its limits, at a place without a price."""
SPARE = 4.0
"""A job at a place without a price may take this many times the planned time."""
SPARE_SECONDS = 3600.0
SPARE_OF_LIMIT = 1.1
"""A run that is expected to take its whole time limit would end without a result."""
LEAST_SECONDS = 300.0
"""A job with less time than this would end before its first checkpoint."""


@dataclass(frozen=True)
class FleetRequest:
    """What `graft fleet run` asks for."""

    place: str
    max_usd: float | None = None
    deadline_seconds: float | None = None
    gpu: str = ""
    base_there: str = ""
    dataset_there: str = ""


class RunQuote(Record):
    """What a run at a place may take and cost, before it is started."""

    place: str
    gpu: str = ""
    usd_per_hour: float = 0.0
    price_source: str = ""
    price_dated: str = ""
    planned_hours: float
    """At most, by the plan for the machine of the offer."""
    device: str = ""
    """What the run was planned for."""
    setup_hours: float = 0.0
    """From the order to the first step, as the catalog has it."""
    instance: str = ""
    spot_usd_per_hour: float | None = None
    reserved_usd_per_hour: float | None = None
    reserved_term: str = ""
    storage_usd_gib_month: float | None = None
    quota_hours: float | None = None
    """What is left of a free quota."""
    planned_usd: float = 0.0
    seconds: float
    """The time limit of the job."""
    largest_usd: float = 0.0
    """If everything that the reserve covers goes wrong."""

    @property
    def named(self) -> str:
        return f"{self.place}, {self.gpu}" if self.gpu else self.place


class FleetJobs(Record):
    jobs: tuple[FleetJob, ...]


Confirm = Callable[[RunQuote], bool]


def quote_run(work: OpenProject, plan: Plan, request: FleetRequest, offer: Offer) -> RunQuote:
    """The time limit and the largest possible cost of this run on the machine of an offer."""
    price, safety, planned = offer.usd_per_hour or 0.0, safety_of(work), plan.minutes.high * 60
    if price:
        most = request.max_usd if request.max_usd is not None else work.settings.fleet.caps.job_usd
        seconds = affordable_seconds(most, price, safety)
    else:
        seconds = planned * SPARE + SPARE_SECONDS
    if request.deadline_seconds is not None:
        seconds = min(seconds, request.deadline_seconds)
    if offer.longest_hours is not None:
        seconds = min(seconds, offer.longest_hours * 3600)
    if seconds < LEAST_SECONDS:
        raise NegativeResult(
            f"{request.place} gives this run less than {LEAST_SECONDS / 60:.0f} minutes",
            why="its quota is nearly used up"
            if offer.quota_hours is not None
            else "the deadline is too near",
            fix="wait until the quota resets, or use another place",
        )
    return RunQuote(
        place=request.place,
        gpu=offer.gpu if request.gpu or price or offer.quota_hours is not None else "",
        usd_per_hour=price,
        price_source=offer.source,
        price_dated=offer.dated,
        planned_hours=planned / 3600,
        planned_usd=min(planned + setup_minutes(request.place) * 60, seconds) / 3600 * price,
        seconds=seconds,
        largest_usd=largest_cost(seconds, price, safety),
        device=plan.device.name,
        setup_hours=setup_minutes(request.place) / 60,
        storage_usd_gib_month=offer.storage_usd_gib_month or storage_price(request.place),
        instance=offer.instance,
        spot_usd_per_hour=offer.spot_usd_per_hour,
        reserved_usd_per_hour=offer.reserved_usd_per_hour,
        reserved_term=offer.reserved_term,
        quota_hours=offer.quota_hours,
    )


def choose_offer(place: Place, gpu: str) -> Offer:
    """The cheapest offer of the place, of this GPU or instance type if one is named."""
    known_offers = place.offer()
    offers = [offer for offer in known_offers if not gpu or gpu in (offer.gpu, offer.instance)]
    if not offers:
        gpus = sorted({offer.gpu or "no GPU" for offer in known_offers})
        raise NegativeResult(
            f"{place.name} offers no {gpu or 'machine'} now",
            why=f"it has: {', '.join(gpus) or 'nothing'}",
            fix="use another GPU or place; `graft fleet offers` lists them",
            where="--gpu",
        )
    return min(offers, key=lambda offer: offer.usd_per_hour or 0.0)


def start_run(
    work: OpenProject,
    request: FleetRequest,
    confirm: Confirm,
    *,
    outputs: StepOutputs | None = None,
    ahead: WorkAhead | None = None,
) -> FleetJob:
    """Plan, unless `outputs` holds the plan, pack and submit the run. Nothing is sent before the quote is
    confirmed. `ahead` is the work of a run whose rows are not on this machine."""
    controller = control(work, request.place)
    require_mirror(work)
    if outputs is None:
        # A wrong login or GPU is found before the data is prepared.
        choose_offer(controller.place, request.gpu)
    outputs = outputs if outputs is not None else run_pipeline(work, upto="plan")
    for twin in find_jobs(work, outputs.get("plan", Plan)):
        if twin.is_open:
            raise Busy(
                f"this run is already at {twin.place} (job {twin.id})",
                why="you would pay for two jobs with one result",
                fix=f"`graft fleet logs -f {twin.id}` follows it, `graft fleet stop {twin.id}` stops it",
            )
    if request.place != "local":
        require_packable(work)
    offer = choose_offer(controller.place, request.gpu)
    plan = PlacePlanner(work, outputs, ahead=ahead).plan(offer)
    quote = quote_run(work, plan, request, offer)
    if not confirm(quote):
        raise NegativeResult("nothing was started", why="the cost was not confirmed", fix="run it with --yes")
    planned = StepOutputs({**outputs.outputs, "plan": plan})
    options = BundleOptions(
        base_there=request.base_there,
        # This machine has the base already.
        base_travels=request.place != "local",
        dataset_there=request.dataset_there,
        seconds=quote.seconds,
        max_usd=quote.largest_usd or None,
    )
    folder, bundle = pack_run(work, planned, options)
    job_id = secrets.token_hex(6)
    order = JobOrder(
        job_id=job_id,
        label=make_label(work.jobs.key, job_id),
        run_id=bundle.run_id,
        # Checked again with the reservation: planning and packing may have taken minutes.
        trains=identify_training(plan),
        bundle=str(folder),
        gpu=quote.gpu,
        instance=quote.instance,
        seconds=quote.seconds,
        usd_per_hour=quote.usd_per_hour,
        max_usd=quote.largest_usd,
    )
    job = controller.start(
        order,
        caps=work.settings.fleet.caps,
        now=time.time(),
        planned_usd=quote.planned_usd,
        secrets=secrets_of(work, bundle.run_id),
    )
    work.runs.update(job.run_id, state="running", when=timestamp())
    place = controller.place
    sent = getattr(place, "sent_bytes", None)
    size = f", {sent / 1e6:.1f} of {bundle.size / 1e6:.1f} MB sent" if sent is not None else ""
    work.reporter.info(f"job {job.id} is at {job.place}{size}")
    if isinstance(place, ManualPlace) and job.placed is not None:
        readme = place.folder_of(job.placed) / "README.md"
        work.reporter.info(f"follow the steps in {readme}; then run `graft fleet fetch {job.id} RESULTS`")
    return job


def continue_job(work: OpenProject, place_name: str) -> FleetJob | None:
    """The open job of this run at the place, `auto` for any: a command that was interrupted continues with
    it.

    One whose submission was cut off is submitted again, where that costs nothing.
    """
    if not any(job.is_open for job in work.jobs.list()):
        return None
    plan = run_pipeline(work, upto="plan").get("plan", Plan)
    kind, _, host = place_name.partition(":")
    for job in find_jobs(work, plan):
        # Jobs of all SSH hosts are at one place.
        at_host = job.placed.host if job.placed is not None else host
        is_there = kind == job.place.partition(":")[0] and host in ("", at_host)
        if job.is_open and (place_name == AUTO or is_there):
            break
    else:
        return None
    controller = control(work, job.place)
    if job.state == "intended" and not controller.place.paid:
        job = controller.submit(job, _order_of(job), now=time.time(), secrets=secrets_of(work, job.run_id))
    work.reporter.info(f"job {job.id} of this run is at {job.place} already")
    return job


def follow(work: OpenProject, job: FleetJob, *, poll_seconds: float | None = None) -> FleetJob:
    """Report the job's progress until it has ended, and fetch its files. Ctrl-C leaves the job running."""
    controller, pause = collecting(work, job.place), threading.Event()
    place, unreached, reconciled = controller.place, False, float("-inf")
    if poll_seconds is None:
        poll_seconds = PAID_POLL_SECONDS if place.paid else POLL_SECONDS
    try:
        while job.is_open:
            has_waited = False
            try:
                # A host is asked to answer when the job is over, or after this many seconds.
                is_host, placed = isinstance(place, HostsPlace), placed_of(job)
                status = (
                    place.wait(placed, poll_seconds) if isinstance(place, HostsPlace) else place.poll(placed)
                )
                if (beat := status.beat) is not None:
                    phase, detail = f"{job.place}: {beat.phase}", dict(beat.detail)
                    work.reporter.progress(
                        phase, beat.done, beat.total, seconds_left=beat.seconds_left, detail=detail
                    )
                unreached = False
                has_waited = is_host and status.phase in ("starting", "running")
            except Exception as error:  # whatever a place may raise: nobody else watches the limits
                if not unreached:
                    work.reporter.info(f"{job.place}: {what_failed(error)}; the job continues, trying again")
                unreached = True
            if has_waited and time.monotonic() - reconciled < RECONCILE_SECONDS:
                continue
            controller.reconcile(now=time.time())
            reconciled = time.monotonic()
            job = get_job(work, job.id)
            if job.is_open and not has_waited:
                pause.wait(poll_seconds)
    except KeyboardInterrupt:
        raise Interrupted(
            f"no longer following; job {job.id} continues at {job.place}",
            fix=f"`graft fleet logs -f {job.id}` follows it, `graft fleet stop {job.id}` stops it",
        ) from None
    return fetch(work, job) if job.state == "done" and not job.fetched else bring(work, job)


def bring(work: OpenProject, job: FleetJob) -> FleetJob:
    """Fetch the files of an ended job if possible. A failed fetch must not hide why the job failed."""
    if not job.fetched:
        with suppress(GraftError):
            return fetch(work, job)
    return job


def train_there(
    work: OpenProject,
    outputs: StepOutputs,
    request: FleetRequest,
    *,
    confirm: Confirm = lambda _quote: True,
    require: Callable[[OpenProject, FleetJob], None] | None = None,
) -> str:
    """Train what `outputs` plans at a place, once: a finished run is taken, an open job is followed.

    Returns the id of the run, which is that of the plan for the device of the place. By default the caps of
    the fleet are the confirmation: the ledger refuses what could break one.
    """
    plan = outputs.get("plan", Plan)
    if (finished := find_finished(work, plan)) is not None:
        return finished
    job = follow(work, find_open(work, plan) or start_run(work, request, confirm, outputs=outputs))
    (require or require_done)(work, job)
    return job.run_id


class RunSet:
    """Runs that train at places at the same time, one job each. A job of an earlier process is found again.

    A run whose place has not answered for `patience_seconds` is given up; its job continues.
    """

    def __init__(self, *, patience_seconds: float = math.inf) -> None:
        self._patience_seconds = patience_seconds
        self._open: dict[str, tuple[OpenProject, str, FleetJob]] = {}
        self._silent_since: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def start(
        self,
        name: str,
        work: OpenProject,
        request: FleetRequest,
        outputs: StepOutputs,
        *,
        ahead: WorkAhead | None = None,
    ) -> None:
        """Train what `outputs` plans. The caps of the fleet are the confirmation."""
        job = find_open(work, outputs.get("plan", Plan))
        job = job or start_run(work, request, lambda _quote: True, outputs=outputs, ahead=ahead)
        # An earlier process may have sent it to another place. `ssh:HOST` is a part of the place `ssh`.
        is_there = request.place.partition(":")[0] == job.place
        self._open[name] = work, request.place if is_there else job.place, job

    def ended(self) -> Iterator[tuple[str, FleetJob, str]]:
        """Return the runs that have ended since, with their job and why there is no outcome; empty if it is
        here. The files of an ended job are fetched, and its run is recorded as done.
        """
        answered: dict[str, bool] = {}
        for name, (work, place_name, started) in list(self._open.items()):
            if place_name not in answered:
                answered[place_name] = self._reconcile(work, place_name)
            job, now = get_job(work, started.id), time.monotonic()
            if answered[place_name]:
                self._silent_since.pop(name, None)
            silent_seconds = 0.0 if answered[place_name] else now - self._silent_since.setdefault(name, now)
            if job.is_open and silent_seconds < self._patience_seconds:
                continue
            del self._open[name]
            self._silent_since.pop(name, None)
            if job.is_open:
                minutes = self._patience_seconds / 60
                yield name, job, f"{place_name} has not answered for {minutes:.0f} minutes"
                continue
            job = bring(work, job)
            if job.state == "done" and (work.project.runs / job.run_id / OUTCOME).exists():
                note_done(work, job.run_id)
                yield name, job, ""
            else:
                yield name, job, job.reason or job.state

    def _reconcile(self, work: OpenProject, place_name: str) -> bool:
        """Return whether the place answers."""
        try:
            return not collecting(work, place_name).reconcile(now=time.time()).unreachable
        except (Interrupted, GracefulStop):
            raise
        except GraftError as error:
            work.reporter.info(f"{place_name}: {error.what}; trying again")
            return False

    def wait(self) -> None:
        """Wait until the next poll makes sense."""
        threading.Event().wait(POLL_SECONDS)


@contextmanager
def jobs_go_on() -> Iterator[None]:
    """Ctrl-C ends the waiting for several jobs, but none of the jobs."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(
            "no longer following; the jobs continue at their places",
            fix="`graft fleet list` shows them, `graft fleet stop JOB` stops one; the same command resumes",
        ) from None


def find_finished(work: OpenProject, plan: Plan) -> str | None:
    """The run with an outcome that has trained what this plan does, here or at a place."""
    ids = (run_id_of(plan), *(job.run_id for job in reversed(find_jobs(work, plan))))
    return next((run_id for run_id in ids if (work.project.runs / run_id / OUTCOME).exists()), None)


def collecting(work: OpenProject, name: str) -> Controller:
    """A controller that sends bundles to machines that come up, and fetches files before they are
    released."""
    controller = control(work, name)
    place = controller.place

    def collect(job: FleetJob) -> None:
        place.fetch(placed_of(job), work.project.runs / job.run_id)
        _adopt(work, job)

    def deliver(job: FleetJob) -> bool:
        if not isinstance(place, RentedPlace):
            return False
        return place.deliver(_order_of(job), placed_of(job), secrets=secrets_of(work, job.run_id))

    controller.collect, controller.deliver = collect, deliver
    return controller


def _order_of(job: FleetJob) -> JobOrder:
    return JobOrder(
        job_id=job.id,
        label=job.label,
        run_id=job.run_id,
        bundle=job.bundle,
        gpu=job.gpu,
        seconds=job.seconds,
        usd_per_hour=job.usd_per_hour,
        max_usd=job.committed_usd,
    )


def fetch(work: OpenProject, job: FleetJob) -> FleetJob:
    """Fetch the files of the job into the folder of its run."""
    if job.state in ("refused", "lost") or job.placed is None:
        return job
    open_place(work, job.place).fetch(job.placed, work.project.runs / job.run_id)
    _adopt(work, job)
    if job.is_open:
        # What it will leave at its end is still to be brought, before its machine is given back.
        return job
    job = job.model_copy(update={"fetched": True})
    work.jobs.update(job)
    return job


def _adopt(work: OpenProject, job: FleetJob) -> None:
    """A run that was planned for another device is this project's run once it has a result."""
    if not (work.project.runs / job.run_id / OUTCOME).exists():
        return
    with suppress(OSError, ValueError, KeyError):
        stored = json.loads((Path(job.bundle) / JOB_FILE).read_bytes())
        adopt_plan(work, Plan.model_validate(stored["plan"]))


def require_done(work: OpenProject, job: FleetJob) -> None:
    """Record how the run ended; raise the error of a job that did not finish."""
    if job.state == "done":
        return
    state: RunState = "stopped" if job.state == "stopped" else "failed"
    error = {"what": job.reason, "where": job.place}
    work.runs.update(job.run_id, state=state, when=timestamp(), error=error)
    go_on = "run the same command again: it resumes from the last checkpoint, at this place or another"
    if job.state == "stopped":
        raise GracefulStop(f"job {job.id} was stopped at {job.place}: {job.reason}", fix=go_on)
    raise WorkerFailed(
        f"job {job.id} did not finish at {job.place}: {job.reason or job.state}",
        why="its saved work was fetched" if job.fetched else "nothing could be fetched",
        fix=f"`graft fleet logs {job.id}` shows its output; {go_on}",
    )


def finish(work: OpenProject) -> StepOutputs:
    """Use the result as that of the training step."""
    return run_pipeline(work, upto="train")


def find_jobs(work: OpenProject, plan: Plan) -> list[FleetJob]:
    """The jobs that train what this plan does, those that were planned for another device included."""
    run_id = run_id_of(plan)
    same: dict[str, bool] = {run_id: True}
    for job in work.jobs.list():
        if job.run_id not in same:
            placed_plan = planned_as(work, job.run_id)
            same[job.run_id] = placed_plan is not None and is_same_run(plan, placed_plan)
    return [job for job in work.jobs.list() if same[job.run_id]]


def find_open(work: OpenProject, plan: Plan) -> FleetJob | None:
    """The newest job that trains what this plan does and has not ended, wherever it is."""
    return next((job for job in reversed(find_jobs(work, plan)) if job.is_open), None)


def planned_as(work: OpenProject, run_id: str) -> Plan | None:
    """Return the plan of a run, which is that for the device it was trained on; None if it is no longer
    known.
    """
    entry = work.runs.get(run_id)
    with suppress(ValueError):
        return Plan.model_validate(entry.plan) if entry is not None else None
    return None


def get_job(work: OpenProject, job_id: str) -> FleetJob:
    """The job of this id, or of its first characters."""
    matches = [job for job in work.jobs.list() if job.id.startswith(job_id)]
    if len(matches) == 1:
        return matches[0]
    raise UserError(
        f"{'several jobs begin' if matches else 'no job begins'} with {job_id!r}",
        fix="`graft fleet list` names the jobs",
    )


def placed_of(job: FleetJob) -> PlacedJob:
    """The job at its place; one whose submission was cut off is looked for by its label."""
    return job.placed or PlacedJob(place=job.place, id=job.label, label=job.label)


def read_log(work: OpenProject, job: FleetJob) -> str:
    return open_place(work, job.place).log(placed_of(job))


def follow_log(work: OpenProject, job: FleetJob) -> Iterator[str]:
    """The output of the job, and what is added to it until it has ended. Only its own place is asked."""
    controller, pause = collecting(work, job.place), threading.Event()
    place, printed, reconciled = controller.place, "", time.monotonic()
    seconds = PAID_POLL_SECONDS if place.paid else POLL_SECONDS
    while True:
        # In this order: the output of a job that has ended is read before its machine is given back.
        has_ended = not job.is_open
        with suppress(PlaceUnreachable):
            has_ended = has_ended or place.poll(placed_of(job)).phase == "ended"
        with suppress(*([PlaceUnreachable] if printed else [])):
            # A machine that was given back has none; one that begins again, on another machine, is all new.
            if text := place.log(placed_of(job)):
                yield text.removeprefix(printed)
                printed = text
        if not job.is_open:
            return
        if has_ended or time.monotonic() - reconciled >= RECONCILE_SECONDS:
            controller.reconcile(now=time.time())
            reconciled = time.monotonic()
            job = get_job(work, job.id)
        if job.is_open:
            pause.wait(seconds)


def stop(work: OpenProject, job: FleetJob, *, at_once: bool) -> FleetJob:
    controller = collecting(work, job.place)
    job = controller.stop(job, now=time.time(), at_once=at_once)
    if isinstance(controller.place, ManualPlace):
        # Nothing of it is waited for.
        controller.reconcile(now=time.time())
        return get_job(work, job.id)
    return job


def receive(work: OpenProject, job: FleetJob, results: Path) -> FleetJob:
    """Accept the results of a job that was run manually."""
    place = open_place(work, job.place)
    if not isinstance(place, ManualPlace):
        raise UserError(
            f"job {job.id} is at {job.place}, not run manually",
            fix=f"`graft fleet fetch {job.id}` fetches it",
        )
    place.receive(placed_of(job), results)
    collecting(work, job.place).reconcile(now=time.time())
    return get_job(work, job.id)


def reconcile(work: OpenProject) -> Reconciled:
    """Compare the ledger with every place that has, or had, a job of this project."""
    reports = []
    for name in sorted({job.place for job in work.jobs.list()}):
        try:
            reports.append(collecting(work, name).reconcile(now=time.time()))
        except Exception as error:  # whatever a place may raise: the others have machines, too
            reports.append(Reconciled(unreachable=(f"{name}: {what_failed(error)}",)))
    return Reconciled(
        checked=sum(report.checked for report in reports),
        closed=tuple(line for report in reports for line in report.closed),
        ended=tuple(line for report in reports for line in report.ended),
        unknown=tuple(sorted({line for report in reports for line in report.unknown})),
        unreachable=tuple(line for report in reports for line in report.unreachable),
        open=sum(report.open for report in reports),
    )


class RunOffers(Record):
    """This project's run at each place, the cheapest first."""

    planned_hours: float
    """On this machine."""
    quotes: tuple[RunQuote, ...]
    notes: tuple[str, ...] = ()


def list_offers(work: OpenProject, *, only: str = "", request: FleetRequest | None = None) -> RunOffers:
    """A quote for every offer of every place that answers, planned for the machine of that offer."""
    outputs = run_pipeline(work, upto="plan")
    planner, base_request = PlacePlanner(work, outputs), request or FleetRequest("")
    quotes, notes = [], []
    for name in (only,) if only else place_names(work):
        try:
            offers = open_place(work, name).offer()
        except GraftError as error:
            notes.append(f"{name}: {error.what}")
            continue
        # One offer for each GPU: the one that `graft fleet run --gpu` takes.
        cheapest: dict[str, Offer] = {}
        for offer in sorted(offers, key=lambda offer: (offer.gpu, offer.usd_per_hour or 0.0)):
            cheapest.setdefault(offer.gpu, offer)
        for offer in cheapest.values():
            label = f"{name}, {offer.gpu}" if offer.gpu else name
            try:
                plan = planner.plan(offer)
                quotes.append(quote_run(work, plan, replace(base_request, place=name, gpu=offer.gpu), offer))
            except GraftError as error:
                notes.append(f"{label}: {error.what}")
                continue
            if not planner.knows(offer):
                notes.append(f"{label}: not in the catalog of GPUs, planned for this machine")
    ranked = sorted(quotes, key=lambda quote: (quote.planned_usd, quote.planned_hours, quote.place))
    return RunOffers(planned_hours=planner.here.minutes.high / 60, quotes=tuple(ranked), notes=tuple(notes))


def choose_place(
    quotes: Iterable[RunQuote], *, budget: float | None, deadline: float | None, notes: Iterable[str] = ()
) -> tuple[RunQuote, str, list[str]]:
    """Choose the cheapest place that finishes in time and within the budget; returns also why, and why not
    others. Of two with equal cost, the faster one. `deadline` is in seconds; `notes` are of places that gave
    no quote. Raises NegativeResult with all reasons if there is none.
    """
    good, refused = [], []
    for quote in quotes:
        hours, limit = quote.planned_hours + quote.setup_hours, quote.seconds / 3600
        against = ""
        if deadline is not None and hours * 3600 > deadline:
            against = f"takes {hours:.1f} h, later than the deadline"
        elif budget is not None and quote.largest_usd > budget + 1e-9:
            against = f"may cost ${quote.largest_usd:.2f}, more than the budget"
        elif hours * SPARE_OF_LIMIT > limit:
            against = f"takes {hours:.1f} h, and a job there ends after {limit:.1f} h"
        if against:
            refused.append(f"{quote.named}: {against}")
        else:
            good.append((quote.planned_usd, hours, quote.place, quote))
    refused += notes
    if not good:
        raise NegativeResult(
            "no place finishes this run within the limits",
            why="; ".join(refused) or "no place is configured",
            fix="allow a larger --budget or a later --deadline, or add a place under `fleet` in graft.yaml",
            where="--place auto",
        )
    good.sort(key=lambda weighed: weighed[:3])
    usd, hours, _, best = good[0]
    why = f"{f'${usd:.2f} expected' if usd else 'free'}, {hours:.1f} h at most"
    if len(good) == 1:
        return best, f"{why}; no other place finishes within the limits", refused
    usd, hours, _, second = good[1]
    price = f"${usd:.2f}" if usd else "free"
    return best, f"{why}; the next best, {second.named}, is {price} and takes {hours:.1f} h", refused


def find_place(work: OpenProject, request: FleetRequest) -> tuple[RunQuote, str, list[str]]:
    """The place for `--place auto`: the cheapest that finishes within budget and deadline."""
    offers = list_offers(work, request=request)
    quotes = (quote for quote in offers.quotes if quote.place != "manual")
    return choose_place(quotes, budget=request.max_usd, deadline=request.deadline_seconds, notes=offers.notes)


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
        raise UserError("the folder already exists", fix="specify a new one", where=str(target))
    require_packable(work)
    folder, bundle = pack_run(work, run_pipeline(work, upto="plan"), BundleOptions(base_there=base_there))
    shutil.copytree(folder, target)
    return ExportedBundle(
        id=bundle.id,
        folder=str(target),
        run_id=bundle.run_id,
        files=len(bundle.files),
        size_bytes=bundle.size,
        resume_step=bundle.resume_step,
    )
