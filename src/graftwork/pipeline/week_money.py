"""What a week may cost: its own limit, and what is left of the caps of the fleet.

In: settings, jobs of the ledger, the week. Out: dollars for the week, and from when on paid places may be
used. A month is one of the calendar in UTC, as the ledger counts it.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from graftwork.fleet.control import Safety
from graftwork.fleet.ledger import month_of
from graftwork.fleet.settings import CapSettings, FleetSettings
from graftwork.pipeline.open_project import use_project
from graftwork.pipeline.reporter import NullReporter
from graftwork.plan.week.calendar import minutes_since
from graftwork.project.load import ProjectFolder


class PaidJob(NamedTuple):
    """A job of the ledger, as the caps count it."""

    created_at: datetime
    usd: float


class WeekMoney(NamedTuple):
    cap_usd: float
    paid_from: int = 0
    """Minutes: paid places are used from then on."""
    notes: tuple[str, ...] = ()


def list_paid_jobs(project: ProjectFolder) -> tuple[PaidJob, ...]:
    """Nothing is created: a project without a state has no jobs."""
    if not project.state.is_dir():
        return ()
    with use_project(project, NullReporter()) as work:
        return tuple(
            PaidJob(datetime.fromtimestamp(job.created_at, UTC), job.counted_usd)
            for job in work.jobs.list()
            if job.counted_usd > 0
        )


def spent_since(jobs: Sequence[PaidJob], start: datetime) -> float:
    return sum(job.usd for job in jobs if job.created_at >= start)


def week_money(
    caps: CapSettings, limit: float | None, jobs: Sequence[PaidJob], *, start: datetime, length: int
) -> WeekMoney:
    """Dollars for the week. What was spent in it is not subtracted: it counts against them."""
    before = [job for job in jobs if job.created_at < start]
    project = None if caps.project_usd is None else caps.project_usd - sum(job.usd for job in before)
    most = min(value for value in (limit, project, caps.month_usd) if value is not None)
    last = start.astimezone(UTC) + timedelta(minutes=length - 1)
    first_left = _left_of_month(caps, before, start)
    if first_left.usd >= most:
        return WeekMoney(max(0.0, most))
    if first_left.month == month_of(last.timestamp()):
        return WeekMoney(max(0.0, first_left.usd), notes=(first_left.note,))
    # The week ends in another month, which has its whole cap.
    turn = minutes_since(start, last.replace(day=1, hour=0, minute=0, second=0, microsecond=0))
    if first_left.usd >= most * (length - turn) / length:
        return WeekMoney(max(0.0, first_left.usd), notes=(first_left.note,))
    waits = f"{first_left.note}; paid places are used from {last:%Y-%m}-01 on"
    return WeekMoney(max(0.0, most), turn, (waits,))


class _MonthLeft(NamedTuple):
    month: str
    usd: float
    note: str


def _left_of_month(caps: CapSettings, before: Sequence[PaidJob], start: datetime) -> _MonthLeft:
    month = month_of(start.timestamp())
    spent = sum(job.usd for job in before if month_of(job.created_at.timestamp()) == month)
    left = caps.month_usd - spent
    note = (
        f"${max(0.0, left):.2f} of fleet.caps.month_usd are left in {month}: "
        f"${spent:.2f} are spent or reserved"
    )
    return _MonthLeft(month, left, note)


def longest_paid_minutes(fleet: FleetSettings, usd_per_hour: float) -> int:
    """How long a session may be at this price, so that its job keeps fleet.caps.job_usd."""
    safety = Safety(boot_seconds=fleet.boot_minutes * 60, reconcile_seconds=fleet.reconcile_minutes * 60)
    seconds = fleet.caps.job_usd / usd_per_hour * 3600 - safety.reserve_seconds
    return max(0, int(seconds // 60))
