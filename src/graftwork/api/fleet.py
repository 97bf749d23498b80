"""Jobs at other places: places, the ledger, one job with its log, offers for the project's run.

Input: a project. Output: records. Asking a place may go over the network; the ledger is read from the
database.
"""

from graftwork.api.project import Project
from graftwork.fleet import jobs as fleet_jobs
from graftwork.fleet.jobs import CostSummary, list_offers, summarize_costs
from graftwork.fleet.jobs import FleetJobs as FleetJobs  # noqa: PLC0414
from graftwork.fleet.jobs import RunOffers as RunOffers  # noqa: PLC0414
from graftwork.fleet.project import FleetPlaces, list_places, place_names
from graftwork.records.base import Record
from graftwork.records.errors import GraftError
from graftwork.records.fleet import FleetJob

MOST_LOG_CHARACTERS = 20_000


class JobView(Record):
    """A job with the end of its log; `log_error` says why there is none."""

    job: FleetJob
    log: str = ""
    log_error: str = ""


def read_costs(project: Project) -> CostSummary:
    """Planned, reserved and actual cost of all jobs, and the caps."""
    with project.open() as work:
        return summarize_costs(work)


def name_places(project: Project) -> tuple[str, ...]:
    """The configured places, without querying them."""
    with project.open() as work:
        return place_names(work)


def ask_places(project: Project) -> FleetPlaces:
    """Ask every place whether it answers, for its GPUs and its prices."""
    with project.open() as work:
        return list_places(work)


def ask_offers(project: Project) -> RunOffers:
    """What the project's run would take and cost at each place, the cheapest first.

    Brings the pipeline up to the plan.
    """
    with project.open() as work:
        return list_offers(work)


def read_job(project: Project, job_id: str) -> JobView:
    with project.open() as work:
        job = fleet_jobs.get_job(work, job_id)
        try:
            log = fleet_jobs.read_log(work, job)
        except (GraftError, OSError) as error:
            return JobView(job=job, log_error=getattr(error, "what", str(error)))
    return JobView(job=job, log=log[-MOST_LOG_CHARACTERS:])


def stop_job(project: Project, job_id: str) -> FleetJob:
    """Stop a job at its next checkpoint."""
    with project.open() as work:
        return fleet_jobs.stop(work, fleet_jobs.get_job(work, job_id), at_once=False)
