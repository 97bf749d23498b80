"""A provider of rented machines that misbehaves as scripted, with a clock of its own.

In: orders, and a schedule of faults. Out: machines that boot, work, are taken away and are billed until they
are ended. The stand-in servers of tests and the drill are built on it. It knows no ledger: what is
leaked or paid twice is seen in `machines`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal, get_args

from graftwork.fleet.place import PlaceUnreachable, Refused
from graftwork.records.fleet import JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

FaultKind = Literal[
    "slow create",
    "create after the timeout",
    "duplicate",
    "server error",
    "throttled",
    "other card",
    "preempted",
    "preempted with notice",
    "never boots",
    "stop ignored",
    "list lags",
    "clock skew",
    "quota",
    "price rises",
]
FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)
CARD, OTHER_GPU = "RTX 4090", "RTX 3090"
USD_PER_HOUR = 0.4
BOOT_SECONDS = 60.0
LATE_SECONDS = 120.0
"""How long after the client's timeout a creation may still happen."""
LAG_SECONDS = 90.0
"""How old a list may be."""
SKEW_SECONDS = 3600.0
NOTICE_SECONDS = 120.0


@dataclass
class SimulatedMachine:
    id: str
    label: str
    gpu: str
    usd_per_hour: float
    created_at: float
    boots_at: float | None
    """None: never."""
    seconds: float
    """The time limit of its job."""
    work_seconds: float
    taken_at: float | None = None
    """When it is preempted."""
    notice: bool = False
    ended_at: float | None = None

    @property
    def done_at(self) -> float | None:
        """When its job ends by itself."""
        return None if self.boots_at is None else self.boots_at + min(self.work_seconds, self.seconds)

    def saved_seconds(self, now: float) -> float:
        """The work that a job which was stopped in order has left in its checkpoint."""
        end = now if self.ended_at is None else min(self.ended_at, now)
        if self.boots_at is None:
            return 0.0
        if self.notice and self.taken_at is not None and end >= self.taken_at - NOTICE_SECONDS:
            end = self.taken_at - NOTICE_SECONDS
        elif end - self.boots_at < self.seconds:
            return 0.0
        return max(min(end - self.boots_at, self.seconds), 0.0)

    def is_there(self, now: float) -> bool:
        return self.created_at <= now and (self.ended_at is None or now < self.ended_at)

    def billed_usd(self, now: float) -> float:
        end = now if self.ended_at is None else min(self.ended_at, now)
        return max(end - self.created_at, 0.0) / 3600 * self.usd_per_hour


@dataclass
class SimulatedProvider:
    """The account of one customer. `faults` says how often each kind happens from now on."""

    faults: Counter[FaultKind] = field(default_factory=Counter)
    chance: Random = field(default_factory=Random)
    work_seconds: float = 1800.0
    now: float = 1_800_000_000.0
    machines: list[SimulatedMachine] = field(default_factory=list)
    usd_per_hour: float = USD_PER_HOUR
    jobs_only: bool = False
    """Machines end with their job, as those of providers that rent jobs instead of machines."""
    run_of: dict[str, str] = field(default_factory=dict)
    """The run of each label: its next job goes on from the checkpoint of one that stopped in order."""

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for machine in self.machines:
            if machine.taken_at is not None and machine.ended_at is None and machine.taken_at <= self.now:
                machine.ended_at = machine.taken_at
            done = machine.done_at
            if self.jobs_only and machine.ended_at is None and done is not None and done <= self.now:
                machine.ended_at = done

    def create(self, label: str, *, gpu: str, seconds: float) -> SimulatedMachine:
        """Raises Refused if nothing is made; after PlaceUnreachable a machine may be there, or come."""
        self._answer()
        if self._happens("quota"):
            raise Refused("the quota is used up", why="no machine was made", fix="wait, or ask for more")
        if self._happens("price rises"):
            self.usd_per_hour *= 1.5
        late = LATE_SECONDS * self.chance.random() if self._happens("create after the timeout") else None
        machine = self._make(label, gpu=gpu, seconds=seconds, delay=late or 0.0)
        if self._happens("duplicate"):
            self._make(label, gpu=gpu, seconds=seconds, delay=0.0)
        if self._happens("slow create"):
            self.advance(LATE_SECONDS * self.chance.random())
        if late is not None:
            raise PlaceUnreachable("no answer within 30 s", why="the machine may have been made")
        return machine

    def list(self) -> tuple[SimulatedMachine, ...]:
        self._answer()
        at = self.now - LAG_SECONDS * self.chance.random() if self._happens("list lags") else self.now
        return tuple(machine for machine in self.machines if machine.is_there(at))

    def get(self, machine_id: str) -> SimulatedMachine | None:
        self._answer()
        found = (machine for machine in self.machines if machine.id == machine_id)
        return next((machine for machine in found if machine.is_there(self.now)), None)

    def ended_by_itself(self, machine_id: str) -> SimulatedMachine | None:
        """A job that has run to its end and whose machine is gone with it."""
        for machine in self.machines:
            if self.jobs_only and machine.id == machine_id and machine.ended_at is not None:
                return machine if machine.ended_at == machine.done_at else None
        return None

    def terminate(self, machine_id: str) -> None:
        """Answers with success also if it does nothing."""
        self._answer()
        if self._happens("stop ignored"):
            return
        for machine in self.machines:
            if machine.id == machine_id and machine.ended_at is None:
                machine.ended_at = self.now

    def clock(self) -> float:
        """The time as the provider reports it."""
        return self.now + (SKEW_SECONDS if self.faults["clock skew"] else 0.0)

    def alive(self) -> tuple[SimulatedMachine, ...]:
        return tuple(machine for machine in self.machines if machine.ended_at is None)

    def billed_usd(self) -> float:
        return sum(machine.billed_usd(self.now) for machine in self.machines)

    def _make(self, label: str, *, gpu: str, seconds: float, delay: float) -> SimulatedMachine:
        created = self.now + delay
        boots = None if self._happens("never boots") else created + BOOT_SECONDS
        taken = notice = None
        if self._happens("preempted"):
            taken = created + self.chance.uniform(BOOT_SECONDS, self.work_seconds)
        elif self._happens("preempted with notice"):
            taken, notice = created + self.chance.uniform(BOOT_SECONDS, self.work_seconds), True
        machine = SimulatedMachine(
            id=f"pod-{len(self.machines):04d}",
            label=label,
            gpu=OTHER_GPU if self._happens("other card") else gpu,
            usd_per_hour=self.usd_per_hour,
            created_at=created,
            boots_at=boots,
            seconds=seconds,
            work_seconds=self._left(label),
            taken_at=taken,
            notice=bool(notice),
        )
        self.machines.append(machine)
        return machine

    def _left(self, label: str) -> float:
        """The work that the run of this label still has to do."""
        run = self.run_of.get(label)
        saved: dict[str, float] = {}
        for machine in self.machines:
            if run is not None and self.run_of.get(machine.label) == run and machine.label != label:
                found = machine.saved_seconds(self.now)
                saved[machine.label] = max(saved.get(machine.label, 0.0), found)
        return max(self.work_seconds - sum(saved.values()), 1.0)

    def _answer(self) -> None:
        """Every request takes a moment, and may fail."""
        self.advance(0.2)
        if self._happens("server error"):
            raise PlaceUnreachable("the server answered with status 500", why="it may have done it")
        if self._happens("throttled"):
            raise PlaceUnreachable("the server answered with status 429", why="too many requests")

    def _happens(self, kind: FaultKind) -> bool:
        """Use up one fault of this kind, at a random moment."""
        if not self.faults[kind] or self.chance.random() < 0.3:
            return False
        self.faults[kind] -= 1
        return True


class SimulatedPlace:
    """The provider as a place. A job ends by itself; its machine is billed until it is ended."""

    name = "simulated"
    paid = True

    def __init__(self, provider: SimulatedProvider) -> None:
        self._provider = provider

    def offer(self) -> tuple[Offer, ...]:
        price = self._provider.usd_per_hour
        return (Offer(place=self.name, gpu=CARD, usd_per_hour=price, source="simulated", dated="2026-11-16"),)

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        del secrets
        existing = next((job for job in self.list() if job.label == order.label), None)
        return existing or self._placed(
            self._provider.create(order.label, gpu=order.gpu, seconds=order.seconds)
        )

    def poll(self, job: PlacedJob) -> JobPoll:
        machine, now = self._provider.get(job.id), self._provider.now
        if machine is None:
            machine = self._provider.ended_by_itself(job.id)
        if machine is None:
            return JobPoll(phase="gone")
        if machine.boots_at is None or now < machine.boots_at:
            return JobPoll(phase="starting")
        worked = now - machine.boots_at
        if worked >= min(machine.work_seconds, machine.seconds):
            if machine.work_seconds <= machine.seconds:
                return JobPoll(phase="ended", exit_code=0, message="done")
            return JobPoll(phase="ended", exit_code=75, message="its time is over")
        if machine.notice and machine.taken_at is not None and now >= machine.taken_at - NOTICE_SECONDS:
            return JobPoll(phase="ended", exit_code=75, message="preempted with notice")
        return JobPoll(phase="running")

    def log(self, job: PlacedJob) -> str:
        return f"{job.label} at {self._provider.now:.0f}\n"

    def fetch(self, job: PlacedJob, folder: Path) -> None:
        """There are no files."""

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        self._provider.terminate(job.id)

    def list(self) -> tuple[PlacedJob, ...]:
        return tuple(self._placed(machine) for machine in self._provider.list())

    def _placed(self, machine: SimulatedMachine) -> PlacedJob:
        skew = self._provider.clock() - self._provider.now
        return PlacedJob(
            place=self.name,
            id=machine.id,
            label=machine.label,
            gpu=machine.gpu,
            usd_per_hour=machine.usd_per_hour,
            created_at=machine.created_at + skew,
        )


def random_faults(
    chance: Random, *, kinds: Iterable[FaultKind] = FAULTS, most: int = 2
) -> Counter[FaultKind]:
    """A schedule: some kinds, each a few times."""
    return Counter({kind: chance.randint(0, most) for kind in kinds if chance.random() < 0.4})
