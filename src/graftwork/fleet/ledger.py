"""The ledger of jobs and their cost: what it must keep, and the caps.

In: jobs with their largest possible cost. Out: a reservation, made in one step with the check of the caps, or
a refusal. An open job counts with the most that it may cost, a closed one with what it did cost.
"""

import csv
import io
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Protocol

from graftwork.fleet.settings import CapSettings
from graftwork.records.errors import AnswerIsNo, Busy
from graftwork.records.fleet import FleetJob, JobState

COLUMNS = (
    "id", "created", "place", "run", "state", "gpu", "usd_per_hour", "planned_usd", "committed_usd",
    "actual_usd", "hours", "reason",
)  # fmt: skip


_STEPS: dict[JobState, int] = {"intended": 0, "submitted": 1, "stopping": 2}
_FINAL = 3


class OverCap(AnswerIsNo):
    """The job could cost more than a cap allows."""


class JobLedger(Protocol):
    @property
    def key(self) -> str:
        """Eight characters that name this ledger's project in labels."""

    def reserve(self, job: FleetJob, caps: CapSettings) -> None:
        """Check the caps and write the intent in one step. Raises OverCap, or Busy if the run is open."""

    def update(self, job: FleetJob) -> FleetJob:
        """Replace the entry of the job, as `merge_update` allows; the entry as it is then."""

    def get(self, job_id: str) -> FleetJob | None: ...

    def list(self) -> tuple[FleetJob, ...]:
        """All jobs, the oldest first."""


def merge_update(stored: FleetJob, new: FleetJob) -> FleetJob:
    """The entry after an update. A process that read the job earlier does not undo a later state."""
    kept: dict[str, object] = {
        "fetched": stored.fetched or new.fetched,
        "placed": new.placed or stored.placed,
        "booted_at": new.booted_at if stored.booted_at is None else stored.booted_at,
        "machines": new.machines
        | {
            key: bill
            for key, bill in stored.machines.items()
            if key not in new.machines or new.machines[key].last_seen < bill.last_seen
        },
    }
    # Who submits it knows best whether there is a job; a slow answer may come after it was given up.
    answered = new.placed is not None or new.state == "refused"
    given_up_early = stored.state == "failed" and stored.placed is None and answered
    if not given_up_early:
        kept |= _decided(stored, new)
    return new.model_copy(update=kept)


def _decided(stored: FleetJob, new: FleetJob) -> dict[str, object]:
    """What of the stored entry an update does not change: a decision that the other process did not know."""
    known, late = (_STEPS.get(job.state, _FINAL) for job in (stored, new))
    if known > late or known == _FINAL:
        names = ("state", "outcome", "reason", "unseen_usd")
        return {name: getattr(stored, name) for name in names}
    outcome = new.outcome if late < _FINAL else new.state
    if known < _STEPS["stopping"] or stored.outcome in (None, outcome) or outcome == "done":
        return {}
    # Its machine was ended on purpose: who finds none any more must not take it for lost.
    state = stored.outcome if late == _FINAL else new.state
    return {"state": state, "outcome": stored.outcome, "reason": stored.reason}


def check_reservation(job: FleetJob, others: Iterable[FleetJob], caps: CapSettings) -> None:
    """Refuse a job of a run that is open, or one that could break a cap."""
    known = tuple(others)
    for other in known:
        same = other.run_id == job.run_id or (job.trains and other.trains == job.trains)
        if other.is_open and same:
            raise Busy(
                f"the run {job.run_id} is at {other.place} already (job {other.id})",
                why="two machines on one run would be paid for the same work",
                fix=f"follow it with `graft fleet logs {other.id}`, or stop it first",
            )
    if not job.committed_usd:
        return
    month = month_of(job.created_at)
    spent_month = sum(other.counted_usd for other in known if month_of(other.created_at) == month)
    _check("job", caps.job_usd, 0.0, job)
    _check("month", caps.month_usd, spent_month, job)
    _check("project", caps.project_usd, sum(other.counted_usd for other in known), job)


def _check(name: str, cap: float | None, counted: float, job: FleetJob) -> None:
    if cap is None or counted + job.committed_usd <= cap + 1e-9:
        return
    taken = f"; ${counted:.2f} of it is spent or reserved" if counted else ""
    raise OverCap(
        f"the job could cost ${job.committed_usd:.2f}, and the cap of a {name} is ${cap:.2f}",
        why=f"the largest possible cost counts, not the expected one{taken}",
        fix=f"order less time or a cheaper card, or raise `fleet.caps.{name}_usd`",
        where=f"fleet.caps.{name}_usd",
    )


def month_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m")


def export_csv(jobs: Iterable[FleetJob]) -> str:
    """One line a job, times in UTC, costs in dollars."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(COLUMNS)
    for job in jobs:
        created = datetime.fromtimestamp(job.created_at, UTC).isoformat(timespec="seconds")
        hours = sum(bill.last_seen - bill.created_at for bill in job.machines.values()) / 3600
        money = (job.usd_per_hour, job.planned_usd, job.committed_usd, job.actual_usd)
        head = (job.id, created, job.place, job.run_id, job.state, job.gpu)
        writer.writerow((*head, *(f"{value:.4f}" for value in money), f"{hours:.3f}", job.reason))
    return table.getvalue()
