"""Drills: jobs at a simulated provider that misbehaves, and a controller that crashes at any action.

In: a seed, caps and times. Out: what was leaked, paid twice or spent above a cap, and which run neither
finished nor states a reason. The controller is the one that runs real jobs; only the provider and the clock
are simulated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any, Literal

from fleet_simulator import (
    CARD,
    FAULTS,
    FaultKind,
    SimulatedPlace,
    SimulatedProvider,
    random_faults,
)

from graftwork.fleet.control import (
    UNSTATED,
    Controller,
    JobLedger,
    Safety,
    affordable_seconds,
    check_reservation,
    largest_cost,
    merge_update,
)
from graftwork.fleet.place import Place, make_label
from graftwork.fleet.settings import CapSettings
from graftwork.records.base import Record
from graftwork.records.errors import GraftError
from graftwork.records.fleet import FleetJob, JobOrder

ROUNDS = 40
"""Reconciliations with crashes, then without, then without new jobs; every fault is used up by then."""
CENT = 0.01
MOST_CRASHES = 20
Rented = Literal["machines", "jobs"]
"""Machines are billed until they are ended; jobs end by themselves, as at SageMaker or Hugging Face."""
UNSEEN_USD = 0.1
"""A duplicate that came and went between two lists is in no ledger."""


class MemoryLedger:
    """The ledger without a database."""

    def __init__(self, key: str = "0" * 8) -> None:
        self.key = key
        self._jobs: dict[str, FleetJob] = {}

    def reserve(self, job: FleetJob, caps: CapSettings) -> None:
        check_reservation(job, self._jobs.values(), caps)
        self._jobs[job.id] = job

    def update(self, job: FleetJob) -> FleetJob:
        self._jobs[job.id] = merge_update(self._jobs[job.id], job)
        return self._jobs[job.id]

    def get(self, job_id: str) -> FleetJob | None:
        return self._jobs.get(job_id)

    def list(self) -> tuple[FleetJob, ...]:
        return tuple(self._jobs.values())


class DrillOutcome(Record):
    """One schedule. All lists are empty if nothing was lost."""

    seed: int
    faults: dict[str, int]
    jobs: int
    crashes: int
    states: dict[str, int]
    leaked: tuple[str, ...] = ()
    """Machines that run after the last reconciliation."""
    paid_twice: tuple[str, ...] = ()
    """Runs that were paid for after they were done."""
    over_cap: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    """Jobs without a final state or a reason."""
    runs: dict[str, str] = {}
    """How each run ended: `done`, or the reason why it did not finish."""
    silent: tuple[str, ...] = ()
    """Runs that neither finished nor state a reason."""
    spent_usd: float = 0.0
    cap_usd: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not (self.leaked or self.paid_twice or self.over_cap or self.unfinished or self.silent)


class RunEnds(Record):
    """How runs ended, by their names."""

    ends: dict[str, str]
    """`done`, or the last reason that was stated for the run; empty: none was."""
    silent: tuple[str, ...]
    """What is wrong with each run that neither finished nor states a reason."""


def judge_runs(runs: Iterable[str], jobs: Iterable[FleetJob], refusals: Mapping[str, str]) -> RunEnds:
    """Whether every run is done or says why not. `refusals` is what starting a run again was answered."""
    ends: dict[str, str] = {}
    silent = []
    known = tuple(jobs)
    for run in runs:
        mine = [job for job in known if job.run_id == run]
        last = mine[-1] if mine else None
        if any(job.state == "done" for job in mine):
            ends[run] = "done"
            continue
        ends[run] = refusals.get(run) or (last.reason if last is not None else "")
        if last is not None and last.is_open:
            silent.append(f"{run}: its job {last.id} is {last.state} and never ended")
        elif not ends[run]:
            silent.append(f"{run}: {'no job was started' if last is None else last.state}, without a reason")
        elif UNSTATED in ends[run]:
            silent.append(f"{run}: {ends[run]}")
    return RunEnds(ends=ends, silent=tuple(silent))


class ControllerCrash(BaseException):
    """The controlling process is gone: nothing catches it on the way."""


class _Crashing:
    """Passes calls on to a place or a ledger; crashes before or after the call whose turn it is."""

    def __init__(self, wrapped: Any, fuse: "_Fuse") -> None:
        self._wrapped, self._fuse = wrapped, fuse

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._wrapped, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            self._fuse.burn()
            result = value(*arguments, **options)
            self._fuse.burn()
            return result

        return call


class _Fuse:
    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self.left: int | None = None
        self.crashes = 0

    def light(self) -> None:
        """Crash after a random number of actions, or not at all."""
        self.left = self._chance.randint(0, 30) if self._chance.random() < 0.6 else None

    def burn(self) -> None:
        if self.left is None:
            return
        if self.left == 0:
            self.left = None
            self.crashes += 1
            raise ControllerCrash
        self.left -= 1

    @contextmanager
    def process(self) -> Iterator[None]:
        """What one process of the controller does until it crashes or ends."""
        self.light()
        try:
            yield
        except ControllerCrash:
            pass
        finally:
            self.left = None


def run_drill(
    seed: int,
    *,
    runs: int = 3,
    caps: CapSettings | None = None,
    safety: Safety | None = None,
    rents: Rented = "machines",
    kinds: tuple[FaultKind, ...] = FAULTS,
    open_place: Callable[[SimulatedProvider], Place] = SimulatedPlace,
) -> DrillOutcome:
    """Submit some runs, each again until it is done, with random faults and crashes.

    `open_place` makes the place that speaks to the provider: the simulated one, or a client of its stand-in.
    """
    chance = Random(seed)
    caps = caps or CapSettings(job_usd=2.0, month_usd=8.0, project_usd=8.0)
    safety = safety or Safety()
    work_seconds = chance.uniform(600, 5400)
    provider = SimulatedProvider(chance=chance, work_seconds=work_seconds, jobs_only=rents == "jobs")
    provider.faults = random_faults(chance, kinds=kinds)
    planned: dict[str, int] = {kind: count for kind, count in provider.faults.items() if count}
    names = tuple(f"run{number}" for number in range(runs))
    ledger, fuse = MemoryLedger(), _Fuse(chance)
    controller = Controller(_as_place(open_place(provider), fuse), _as_ledger(ledger, fuse), safety)
    user = _User(controller, ledger, provider, caps)
    for _ in range(ROUNDS):
        for run in names:
            with fuse.process():
                user.submit(run)
        provider.advance(chance.uniform(0.2, 1.0) * safety.reconcile_seconds * 0.9)
        for _ in range(MOST_CRASHES):
            # A controller that crashed is started again at once; it has until the next round is due.
            crashes = fuse.crashes
            with fuse.process():
                controller.reconcile(now=provider.now)
            if fuse.crashes == crashes:
                break
    for number in range(2 * ROUNDS):
        if number < ROUNDS:
            for run in names:
                user.submit(run)
        if not provider.alive() and not any(job.is_open for job in ledger.list()):
            break
        provider.advance(safety.reconcile_seconds)
        controller.reconcile(now=provider.now)
    ends = judge_runs(names, ledger.list(), user.refusals)
    return _judge(seed, planned, provider, ledger, caps, fuse.crashes, ends)


def _as_place(place: Place, fuse: _Fuse) -> Place:
    crashing: Place = _Crashing(place, fuse)
    return crashing


def _as_ledger(ledger: MemoryLedger, fuse: _Fuse) -> JobLedger:
    wrapped: JobLedger = _Crashing(ledger, fuse)
    return wrapped


class _User:
    """Starts each run again until it is done, and remembers what the last refusal said."""

    def __init__(
        self, controller: Controller, ledger: MemoryLedger, provider: SimulatedProvider, caps: CapSettings
    ) -> None:
        self._controller, self._ledger, self._provider, self._caps = controller, ledger, provider, caps
        self._numbers = iter(range(10**6))
        self.refusals: dict[str, str] = {}
        """By run; one whose job is in the ledger has its reason there instead."""

    def submit(self, run: str) -> None:
        """What `graft fleet run` does: nothing for a run that is done, a new job for one that was stopped."""
        if any(job.run_id == run and (job.is_open or job.state == "done") for job in self._ledger.list()):
            return
        job_id = f"{next(self._numbers):012x}"
        label = make_label(self._ledger.key, job_id)
        self._provider.run_of[label] = run
        try:
            self._controller.start(self._order(run, job_id, label), caps=self._caps, now=self._provider.now)
        except GraftError as error:
            if self._ledger.get(job_id) is None:
                self.refusals[run] = error.what
                return
        self.refusals.pop(run, None)

    def _order(self, run: str, job_id: str, label: str) -> JobOrder:
        safety = self._controller.safety
        price = self._controller.place.offer()[0].usd_per_hour or 0.0
        seconds = self._provider.work_seconds * 1.2
        if price:
            seconds = min(affordable_seconds(self._caps.job_usd, price, safety), seconds)
        return JobOrder(
            job_id=job_id,
            label=label,
            run_id=run,
            bundle="",
            gpu=CARD,
            seconds=seconds,
            usd_per_hour=price,
            max_usd=largest_cost(seconds, price, safety),
        )


def _judge(
    seed: int,
    planned: dict[str, int],
    provider: SimulatedProvider,
    ledger: MemoryLedger,
    caps: CapSettings,
    crashes: int,
    ends: RunEnds,
) -> DrillOutcome:
    jobs = ledger.list()
    free = {job.label for job in jobs if not job.usd_per_hour}
    billed: dict[str, float] = {}
    for machine in provider.machines:
        if machine.label not in free:
            billed[machine.label] = billed.get(machine.label, 0.0) + machine.billed_usd(provider.now)
    committed = {job.label: job.committed_usd for job in jobs}
    over = [
        f"{label}: ${usd:.2f} of ${committed.get(label, 0.0):.2f}"
        for label, usd in billed.items()
        if usd > committed.get(label, 0.0) + CENT
    ]
    cap = min(caps.month_usd, caps.project_usd or caps.month_usd)
    spent = sum(billed.values())
    over += [f"all jobs: ${spent:.2f} of ${cap:.2f}"] if spent > cap + CENT else []
    over += [
        f"{job.id} is entered with ${job.actual_usd:.2f} and was billed ${billed.get(job.label, 0.0):.2f}"
        for job in jobs
        if job.counted_usd < billed.get(job.label, 0.0) - UNSEEN_USD
    ]
    done = [job.run_id for job in jobs if job.state == "done"]
    states = {state: sum(job.state == state for job in jobs) for state in sorted({job.state for job in jobs})}
    return DrillOutcome(
        seed=seed,
        faults=planned,
        jobs=len(jobs),
        crashes=crashes,
        states=states,
        leaked=tuple(machine.id for machine in provider.alive()),
        paid_twice=tuple(sorted({run for run in done if done.count(run) > 1})),
        over_cap=tuple(over),
        unfinished=tuple(job.id for job in jobs if job.is_open or not job.reason or UNSTATED in job.reason),
        runs=ends.ends,
        silent=ends.silent,
        spent_usd=spent,
        cap_usd=cap,
    )
