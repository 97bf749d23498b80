"""The ledger of jobs with the caps on their cost; starting jobs, and reconciling them with the places.

Input: a place, the ledger, the time. A reservation is made in one step with the check of the caps: an open
job counts with the most that it may cost, a closed one with what it did cost. Every state of a job is in the
ledger before the place is asked for the next thing, so a crash between any two actions is harmless:
`reconcile` looks at what exists, adopts what was made for an open job, and ends duplicates and machines of
closed jobs until the list of the place no longer shows them. A machine whose job is not in the ledger is
reported, not ended. Whatever a place raises while it is reconciled counts as no answer: what one client fails
at must not keep the machines of other jobs.
"""

import csv
import io
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from graftwork.fleet.place import LABEL, HasHosts, KeepsForJobs, Place, PlaceUnreachable, Refused
from graftwork.fleet.settings import CapSettings
from graftwork.records.errors import EXIT_DONE, EXIT_RESUME, Busy, GraftError, NegativeResult, UserError
from graftwork.records.fleet import (
    FinalState,
    FleetJob,
    JobOrder,
    JobPoll,
    JobState,
    MachineBill,
    PlacedJob,
    Reconciled,
)

COLUMNS = (
    "id", "created", "place", "run", "state", "gpu", "usd_per_hour", "planned_usd", "committed_usd",
    "actual_usd", "hours", "reason",
)  # fmt: skip


_STEPS: dict[JobState, int] = {"intended": 0, "submitted": 1, "stopping": 2}
_FINAL = 3


class OverCap(NegativeResult):
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
    """Merge an update into an entry. A process that read the job earlier does not undo a later state."""
    settled: dict[str, object] = {
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
        settled |= _final_fields(stored, new)
    return new.model_copy(update=settled)


def _final_fields(stored: FleetJob, new: FleetJob) -> dict[str, object]:
    """Fields of the stored entry that an update does not change: a decision unknown to the other
    process."""
    old_step, new_step = (_STEPS.get(job.state, _FINAL) for job in (stored, new))
    if old_step > new_step or old_step == _FINAL:
        names = ("state", "outcome", "reason", "unseen_usd")
        return {name: getattr(stored, name) for name in names}
    outcome = new.outcome if new_step < _FINAL else new.state
    if old_step < _STEPS["stopping"] or stored.outcome in (None, outcome) or outcome == "done":
        return {}
    # Its machine was ended on purpose: who finds none any more must not take it for lost.
    state = stored.outcome if new_step == _FINAL else new.state
    return {"state": state, "outcome": stored.outcome, "reason": stored.reason}


def check_reservation(job: FleetJob, ledger_jobs: Iterable[FleetJob], caps: CapSettings) -> None:
    """Refuse a job of a run that is open, or one that could break a cap."""
    jobs = tuple(ledger_jobs)
    for earlier in jobs:
        same = earlier.run_id == job.run_id or (job.trains and earlier.trains == job.trains)
        if earlier.is_open and same:
            raise Busy(
                f"the run {job.run_id} is at {earlier.place} already (job {earlier.id})",
                why="you would pay for the same work on two machines",
                fix=f"follow it with `graft fleet logs {earlier.id}`, or stop it first",
            )
    if not job.committed_usd:
        return
    month = month_of(job.created_at)
    spent_month = sum(earlier.counted_usd for earlier in jobs if month_of(earlier.created_at) == month)
    _check("job", caps.job_usd, 0.0, job)
    _check("month", caps.month_usd, spent_month, job)
    _check("project", caps.project_usd, sum(earlier.counted_usd for earlier in jobs), job)


def _check(name: str, cap: float | None, counted: float, job: FleetJob) -> None:
    if cap is None or counted + job.committed_usd <= cap + 1e-9:
        return
    spent = f"; ${counted:.2f} of it is spent or reserved" if counted else ""
    raise OverCap(
        f"the job could cost ${job.committed_usd:.2f}, and the cap of a {name} is ${cap:.2f}",
        why=f"the largest possible cost counts, not the expected one{spent}",
        fix=f"order less time or a cheaper GPU, or raise `fleet.caps.{name}_usd`",
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


log = logging.getLogger(__name__)

STOP_ROUNDS = 3
"""Reconciliations until a machine is gone: one sees it, one repeats a stop that was ignored, one confirms."""

UNSTATED = "the place gives no reason"
"""Part of the reason of a job that ended without giving one."""
_UNKNOWN = "not in this ledger; a copied project or an old backup? end it at the provider if it is yours"


@dataclass(frozen=True)
class Safety:
    """Times that bound what a lost machine can cost."""

    boot_seconds: float = 900.0
    """A machine without a sign of life for this long is given back."""
    reconcile_seconds: float = 600.0
    """The longest time between two reconciliations."""
    settle_seconds: float = 300.0
    """How late a creation or an end may show in the list of a place."""

    @property
    def reserve_seconds(self) -> float:
        """Paid time besides the job's own: a slow boot, an end that is seen late, and a duplicate."""
        seen_late = STOP_ROUNDS * self.reconcile_seconds + self.settle_seconds
        return self.boot_seconds + 2 * seen_late


def largest_cost(seconds: float, usd_per_hour: float, safety: Safety) -> float:
    """The maximum cost of a job if everything that the reserve covers goes wrong."""
    return (seconds + safety.reserve_seconds) / 3600 * usd_per_hour if usd_per_hour else 0.0


def affordable_seconds(max_usd: float, usd_per_hour: float, safety: Safety) -> float:
    """How long a job may run so that its largest cost stays within `max_usd`."""
    seconds = max_usd / usd_per_hour * 3600 - safety.reserve_seconds
    if seconds <= 0:
        needed = safety.reserve_seconds / 3600 * usd_per_hour
        raise UserError(
            f"${max_usd:.2f} is not enough at ${usd_per_hour:.2f} an hour",
            why=f"${needed:.2f} are reserved for a machine that boots or is released late",
            fix="allow more, choose a cheaper machine, or reconcile more often (`fleet.reconcile_minutes`)",
            where="--max-usd",
        )
    return seconds


class Controller:
    """One place and the ledger. It holds no state of its own between calls."""

    def __init__(self, place: Place, ledger: JobLedger, safety: Safety | None = None) -> None:
        self.place, self.ledger, self.safety = place, ledger, safety or Safety()
        self.collect: Callable[[FleetJob], None] | None = None
        """Brings the files of an ended job, before its machine is given back."""
        self.deliver: Callable[[FleetJob], bool] | None = None
        """Sends the bundle to a machine that has come up, where the place does not do it in `submit`.

        Whether the machine has taken it: it has come up then, however long packages take to install there.
        """

    def start(
        self,
        order: JobOrder,
        *,
        caps: CapSettings,
        now: float,
        planned_usd: float = 0.0,
        secrets: Mapping[str, str] | None = None,
    ) -> FleetJob:
        """Write the intent, ask the place, and record its answer."""
        job = FleetJob(
            id=order.job_id,
            label=order.label,
            place=self.place.name,
            run_id=order.run_id,
            trains=order.trains,
            state="intended",
            bundle=order.bundle,
            created_at=now,
            updated_at=now,
            gpu=order.gpu,
            seconds=order.seconds,
            usd_per_hour=order.usd_per_hour,
            planned_usd=planned_usd,
            committed_usd=largest_cost(order.seconds, order.usd_per_hour, self.safety),
        )
        self.ledger.reserve(job, caps)
        return self.submit(job, order, now=now, secrets=secrets)

    def submit(
        self, job: FleetJob, order: JobOrder, *, now: float, secrets: Mapping[str, str] | None = None
    ) -> FleetJob:
        """Submit a recorded job to the place; an existing one is not created again."""
        try:
            placed = self.place.submit(order, secrets=secrets or {})
        except (Refused, UserError) as refused:
            self.ledger.update(_close(job, "refused", refused.what, now))
            raise
        # After any other error the job may exist: it stays intended, and `reconcile` finds out.
        job = _with_machine(job.model_copy(update={"state": "submitted", "placed": placed}), placed, now)
        return self.ledger.update(job)

    def stop(self, job: FleetJob, *, now: float, at_once: bool = False) -> FleetJob:
        """Ask it to stop gracefully; or end it, which `reconcile` repeats until it is confirmed."""
        if not job.is_open:
            return job
        if not at_once and job.placed is not None:
            self.place.stop(job.placed)
            return job
        job = self.ledger.update(_stopping(job, "stopped", "stopped by the user", now))
        if job.placed is not None:
            self.place.stop(job.placed, at_once=True)
        return job

    def reconcile(self, *, now: float) -> Reconciled:
        """Compare the ledger with the place and act on every difference."""
        was_open = [job for job in self.ledger.list() if job.place == self.place.name and job.is_open]
        try:
            listed = self.place.list()
        except Exception as error:  # whatever a place may raise
            known_error = isinstance(error, GraftError)
            unanswered = self.place.name if known_error else f"{self.place.name}: {what_failed(error)}"
            return Reconciled(
                checked=len(was_open), open=len(was_open), unreachable=(unanswered,) if was_open else ()
            )
        machines: dict[str, list[PlacedJob]] = defaultdict(list)
        key = self.ledger.key
        for machine in listed:
            match = LABEL.fullmatch(machine.label)
            # Accounts are shared: only labels with the key of this ledger can be ours.
            if match is not None and match["ledger"] == key:
                machines[machine.label].append(machine)
        ended: list[str] = []
        unreached = self.place.unreached if isinstance(self.place, HasHosts) else frozenset()
        for job in was_open:
            if unreached and (job.placed is None or job.placed.host in unreached):
                # Whether it is there is not known: it stays as it is.
                continue
            found_here = sorted(machines.pop(job.label, []), key=lambda one: (one.created_at, one.id))
            self._settle(job, found_here, now, ended)
        after = {job.id: job for job in self.ledger.list()}
        # Read after the list: a job that was started since is not an orphan.
        by_label = {job.label: job for job in after.values()}
        for label in sorted(machines.keys() & by_label.keys()):
            job, orphans = by_label[label], machines[label]
            # Of a closed job of this place; `ssh` also lists those of `ssh:HOST`.
            if not job.is_open and job.place == self.place.name:
                for machine in orphans:
                    job = _with_machine(job, machine, now)
                self.ledger.update(job)
                for machine in orphans:
                    self._end(machine, ended)
        closed = [after[job.id] for job in was_open if not after[job.id].is_open]
        return Reconciled(
            checked=len(was_open),
            closed=tuple(f"{job.id} {job.state}: {job.reason}" for job in closed),
            ended=tuple(ended),
            unknown=tuple(f"{label}: {_UNKNOWN}" for label in sorted(machines.keys() - by_label.keys())),
            unreachable=tuple(f"{self.place.name}: {host}" for host in sorted(unreached)),
            open=sum(after[job.id].is_open for job in was_open),
        )

    def _settle(self, job: FleetJob, machines: list[PlacedJob], now: float, ended: list[str]) -> None:
        """Advance one open job by one step."""
        for machine in machines:
            job = _with_machine(job, machine, now)
        if job.state == "intended" and machines:
            job = job.model_copy(update={"state": "submitted", "placed": machines[0]})
        if machines:
            job = job.model_copy(update={"absent_since": None})
        elif job.absent_since is None:
            # It was paid for until some moment before now: now is the upper bound.
            bills = {key: bill.model_copy(update={"last_seen": now}) for key, bill in job.machines.items()}
            job = job.model_copy(update={"absent_since": now, "machines": bills, "updated_at": now})
        if job.state == "submitted":
            job = self._judge(job, machines, now)
        elif job.state == "intended" and now - job.created_at > self.safety.settle_seconds:
            unseen = (now - job.created_at) / 3600 * job.usd_per_hour
            job = self._closed(job, "failed", "the place never showed it: no job was made", now)
            job = job if job.is_open else job.model_copy(update={"unseen_usd": unseen})
        # Before the place is asked: a crash after this line repeats the question. Another process may know
        # more of the job by now.
        job = self.ledger.update(job)
        keep_id = job.placed.id if job.placed is not None and job.state == "submitted" else None
        for machine in machines:
            if machine.id != keep_id:
                self._end(machine, ended)
        if job.state == "stopping" and not machines and self._is_absent(job, now):
            self.ledger.update(self._closed(job, job.outcome or "stopped", job.reason, now))

    def _judge(self, job: FleetJob, machines: list[PlacedJob], now: float) -> FleetJob:
        """Whether a submitted job may continue."""
        listed = {machine.id: machine for machine in machines}
        if job.placed is None or (machines and job.placed.id not in listed):
            # The one that was kept is gone; the next one has the same label and the same order.
            job = job.model_copy(update={"placed": machines[0]})
        placed = job.placed
        assert placed is not None
        if placed.id in listed and (wrong := _mismatch(job, listed[placed.id])):
            return _stopping(job, "failed", wrong, now)
        trouble = ""
        try:
            status = self.place.poll(placed)
        except Exception as error:  # whatever a place may raise
            # The limits below hold for a place that gives no answer, too.
            status, trouble = JobPoll(phase="starting"), what_failed(error)
        if status.phase in ("running", "ended") and job.booted_at is None:
            job = job.model_copy(update={"booted_at": now})
        if status.phase == "ended":
            job = self._collected(job)
            if self.collect is not None and not job.fetched and not self._is_over(job, now):
                return job
            outcome = _outcome(status)
            return _stopping(job, *outcome, now) if machines else self._closed(job, *outcome, now)
        if machines:
            if status.phase == "starting" and self.deliver is not None:
                try:
                    if self.deliver(job) and job.booted_at is None:
                        job = job.model_copy(update={"booted_at": now})
                except Exception as error:  # whatever a place, or the disk here, may raise
                    trouble = trouble or what_failed(error)
            return self._within_limits(job, now, trouble)
        # Where jobs cost money, one that is not listed ends with its time, whatever else the place says.
        is_over = self.place.paid and self._is_over(job, now)
        if self._is_absent(job, now) and (status.phase == "gone" or is_over):
            reason = "the machine was preempted; the run resumes from its mirror"
            return self._closed(job, "lost", reason, now)
        return job

    def _closed(self, job: FleetJob, state: FinalState, reason: str, now: float) -> FleetJob:
        """Return the job with its final state, once the place keeps nothing for it; until then unchanged."""
        if isinstance(self.place, KeepsForJobs):
            try:
                self.place.forget(job.label)
            except PlaceUnreachable:
                return job
            except GraftError as error:
                # A user without secrets needs no right to delete them.
                if job.placed is None:
                    log.warning("%s may still keep secrets of the job %s: %s", job.place, job.id, error.what)
            except Exception:  # whatever a place may raise
                return job
        return _close(job, state, reason, now)

    def _collected(self, job: FleetJob) -> FleetJob:
        """The job, fetched if its files could be brought."""
        if self.collect is None or job.fetched:
            return job
        try:
            self.collect(job)
        except Exception:  # whatever a place, or a full disk here, may raise
            return job
        return job.model_copy(update={"fetched": True})

    def _is_over(self, job: FleetJob, now: float) -> bool:
        """Return whether the time of the job has passed. Waiting for a machine without a price does not
        count.
        """
        billed_since = job.created_at if self.place.paid else job.booted_at
        return billed_since is not None and now - billed_since > self.safety.boot_seconds + job.seconds

    def _within_limits(self, job: FleetJob, now: float, trouble: str) -> FleetJob:
        """Return the job unchanged, or stopping because it takes too long; `trouble` is the current
        problem.
        """
        # Counted from the intent, by the clock of this side: that of the provider may be wrong.
        age = now - job.created_at
        if job.booted_at is None and self.place.paid and age > self.safety.boot_seconds:
            reason = f"the machine never came up: {trouble}" if trouble else "the machine never came up"
            return _stopping(job, "failed", reason, now)
        if self._is_over(job, now):
            # One attempt: what it has saved is on its machine, and the machine is paid for.
            return _stopping(self._collected(job), "stopped", "its time is over", now)
        return job

    def _is_absent(self, job: FleetJob, now: float) -> bool:
        """Whether the list has not shown it for longer than a list can lag."""
        waits = self.safety.settle_seconds if self.place.paid else 0.0
        return job.absent_since is not None and now - job.absent_since >= waits

    def _end(self, machine: PlacedJob, ended: list[str]) -> None:
        ended.append(f"{machine.label} ({machine.id})")
        try:
            self.place.stop(machine, at_once=True)
        except Exception:  # whatever a place may raise
            # The next reconciliation sees it again.
            return


def what_failed(error: Exception) -> str:
    """Return the message of an error of ours, but only the type of any other: its text may contain
    anything.
    """
    if isinstance(error, GraftError):
        return error.what
    return f"its client failed ({type(error).__name__})"


def _mismatch(job: FleetJob, placed: PlacedJob) -> str:
    if job.gpu and placed.gpu and placed.gpu != job.gpu:
        return f"the place gave {placed.gpu} instead of {job.gpu}"
    if placed.usd_per_hour > job.usd_per_hour * (1 + 1e-6):
        return f"the price rose from ${job.usd_per_hour:.3f} to ${placed.usd_per_hour:.3f} an hour"
    return ""


def _outcome(poll: JobPoll) -> tuple[FinalState, str]:
    if poll.exit_code == EXIT_DONE:
        return "done", poll.message or "done"
    if poll.exit_code == EXIT_RESUME:
        return "stopped", poll.message or f"stopped cleanly; {UNSTATED}"
    ended = "ended" if poll.exit_code is None else f"ended with exit code {poll.exit_code}"
    return "failed", poll.message or f"{ended}; {UNSTATED}"


def _with_machine(job: FleetJob, machine: PlacedJob, now: float) -> FleetJob:
    """Return the job with the time that this machine has been paid for until now, at most since the
    intent.
    """
    before = job.machines.get(machine.id)
    # A machine that was stopped is listed without a price; what it has cost stays.
    rate = max(machine.usd_per_hour, before.usd_per_hour if before is not None else 0.0)
    price = rate or job.usd_per_hour
    bill = MachineBill(created_at=job.created_at, last_seen=now, usd_per_hour=price)
    return job.model_copy(update={"machines": {**job.machines, machine.id: bill}, "updated_at": now})


def _stopping(job: FleetJob, outcome: FinalState, reason: str, now: float) -> FleetJob:
    update = {"state": "stopping", "outcome": outcome, "reason": reason, "updated_at": now}
    return job.model_copy(update=update)


def _close(job: FleetJob, state: FinalState, reason: str, now: float) -> FleetJob:
    return job.model_copy(update={"state": state, "reason": reason, "updated_at": now})
