"""Drills: jobs at a simulated provider that misbehaves, and a controller that crashes at any action.

In: a seed, caps and times. Out: what was leaked, paid twice or spent above a cap. The controller is the one
that runs real jobs; only the provider and the clock are simulated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from graftwork.fleet.control import Controller, Safety, affordable_seconds, largest_cost
from graftwork.fleet.ledger import JobLedger, MemoryLedger, OverCap
from graftwork.fleet.place import Place, make_label
from graftwork.fleet.settings import CapSettings
from graftwork.fleet.simulator import CARD, SimulatedPlace, SimulatedProvider, random_faults
from graftwork.records.base import Record
from graftwork.records.errors import GraftError
from graftwork.records.fleet import JobOrder

ROUNDS = 40
"""Reconciliations after the last job; every fault is used up by then."""
CENT = 0.01
MOST_CRASHES = 20
UNSEEN_USD = 0.1
"""A duplicate that came and went between two lists is in no ledger."""


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
    spent_usd: float = 0.0
    cap_usd: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not (self.leaked or self.paid_twice or self.over_cap or self.unfinished)


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
    seed: int, *, runs: int = 3, caps: CapSettings | None = None, safety: Safety | None = None
) -> DrillOutcome:
    """Submit some runs, each again until it is done, with random faults and crashes."""
    chance = Random(seed)
    caps = caps or CapSettings(job_usd=2.0, month_usd=8.0, project_usd=8.0)
    safety = safety or Safety()
    provider = SimulatedProvider(chance=chance, work_seconds=chance.uniform(600, 5400))
    provider.faults = random_faults(chance)
    planned: dict[str, int] = {kind: count for kind, count in provider.faults.items() if count}
    ledger, fuse = MemoryLedger(), _Fuse(chance)
    controller = Controller(_as_place(provider, fuse), _as_ledger(ledger, fuse), safety)
    numbers = iter(range(10**6))
    for _ in range(ROUNDS):
        for run in range(runs):
            with fuse.process():
                _submit(controller, ledger, f"run{run}", next(numbers), caps=caps, provider=provider)
        provider.advance(chance.uniform(0.2, 1.0) * safety.reconcile_seconds * 0.9)
        for _ in range(MOST_CRASHES):
            # A controller that crashed is started again at once; it has until the next round is due.
            crashes = fuse.crashes
            with fuse.process():
                controller.reconcile(now=provider.now)
            if fuse.crashes == crashes:
                break
    for _ in range(ROUNDS):
        provider.advance(safety.reconcile_seconds)
        controller.reconcile(now=provider.now)
    return _judge(seed, planned, provider, ledger, caps, fuse.crashes)


def _as_place(provider: SimulatedProvider, fuse: _Fuse) -> Place:
    place: Place = _Crashing(SimulatedPlace(provider), fuse)
    return place


def _as_ledger(ledger: MemoryLedger, fuse: _Fuse) -> JobLedger:
    wrapped: JobLedger = _Crashing(ledger, fuse)
    return wrapped


def _submit(
    controller: Controller,
    ledger: MemoryLedger,
    run: str,
    number: int,
    *,
    caps: CapSettings,
    provider: SimulatedProvider,
) -> None:
    """What `graft fleet run` does: nothing for a run that is done, a new job for one that was stopped."""
    if any(job.run_id == run and (job.is_open or job.state == "done") for job in ledger.list()):
        return
    price = controller.place.offer()[0].usd_per_hour or 0.0
    job_id = f"{number:012x}"
    try:
        seconds = min(affordable_seconds(caps.job_usd, price, controller.safety), provider.work_seconds * 1.2)
        order = JobOrder(
            job_id=job_id,
            label=make_label(ledger.key, job_id),
            run_id=run,
            bundle="",
            gpu=CARD,
            seconds=seconds,
            usd_per_hour=price,
            max_usd=largest_cost(seconds, price, controller.safety),
        )
        controller.start(order, caps=caps, now=provider.now)
    except (OverCap, GraftError):
        return


def _judge(
    seed: int,
    planned: dict[str, int],
    provider: SimulatedProvider,
    ledger: MemoryLedger,
    caps: CapSettings,
    crashes: int,
) -> DrillOutcome:
    jobs = ledger.list()
    by_label = {job.label: job for job in jobs}
    billed: dict[str, float] = {}
    for machine in provider.machines:
        billed[machine.label] = billed.get(machine.label, 0.0) + machine.billed_usd(provider.now)
    over = [
        f"{label}: ${usd:.2f} of ${by_label[label].committed_usd:.2f}"
        for label, usd in billed.items()
        if label not in by_label or usd > by_label[label].committed_usd + CENT
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
        unfinished=tuple(job.id for job in jobs if job.is_open or not job.reason),
        spent_usd=spent,
        cap_usd=cap,
    )
