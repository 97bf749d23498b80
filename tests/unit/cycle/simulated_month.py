"""A month of the coordinator in seconds: the real decisions on a simulated project, provider and clock.

In: a seed, the settings of a cycle and the caps. Out: spend, hours, gates, promotions, incidents, and what
was lost, doubled or leaked. Only the steps, the provider, the traffic and the clock are simulated; the
coordinator and the controller of jobs are the real ones, and they crash at random.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any

from fleet_drill import ControllerCrash, MemoryLedger
from fleet_simulator import CARD, USD_PER_HOUR, SimulatedPlace, SimulatedProvider, random_faults
from memory_cycles import MemoryCycles

from graftwork.cycle.coordinator import Coordinator, CycleStepResult
from graftwork.cycle.decide import Action, AwaitApproval, CycleFacts, Rest
from graftwork.cycle.settings import CYCLE_STEPS, CycleSettings, TriggerSettings
from graftwork.cycle.state import CoordinatorState, CycleState, Holder, LogEntry, Notice, approve, resume
from graftwork.fleet.control import Controller, Safety, affordable_seconds, largest_cost
from graftwork.fleet.place import make_label
from graftwork.fleet.settings import CapSettings
from graftwork.records.base import Record
from graftwork.records.errors import Busy, EnvironmentFailure, GraftError, NegativeResult, WorkerFailed
from graftwork.records.fleet import JobOrder

BEGIN = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
DAY = 86400.0
CENT = 0.01
MODEL = "main"
DEFAULT = CycleSettings(
    schedule="0 2 * * *", when=TriggerSettings(new_rows=500, drift=0.2), place="simulated"
)
STEP_SECONDS = {"prepare": 60.0, "evaluate": 300.0, "report": 5.0}
CRASH_CHANCE, FAULT_CHANCE, APPROVE_SECONDS = 0.02, 0.02, 3 * 3600.0
LAST_ROUNDS = 40
"""Reconciliations after the month; every fault is used up by then."""


class SimulatedMonth(Record):
    """One month. The four lists at the end are empty if every promise was kept."""

    seed: int
    days: int
    cycles: int
    outcomes: dict[str, int]
    gates: dict[str, int]
    promotions: int
    rollbacks: int
    rows: int
    quality_first: float
    quality_last: float
    """What the champion scores on the traffic of that day."""
    gpu_hours: float
    spent_usd: float
    cap_usd: float
    price_first: float
    price_last: float
    jobs: dict[str, int]
    incidents: dict[str, int]
    notices: dict[str, int]
    leaked: tuple[str, ...] = ()
    over_cap: tuple[str, ...] = ()
    ungated: tuple[str, ...] = ()
    """Champions that had not passed their gate."""
    lost_or_doubled: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        return not (self.leaked or self.over_cap or self.ungated or self.lost_or_doubled)


class CrashingCycles(MemoryCycles):
    """The process may be killed just before or just after each transaction."""

    def __init__(self, crash: Callable[[], None]) -> None:
        super().__init__()
        self._crash = crash

    def change(self, change: Callable[[CoordinatorState], CoordinatorState]) -> CoordinatorState:
        self._crash()
        changed = super().change(change)
        self._crash()
        return changed


@dataclass
class SimulatedProject:
    """Logs that grow, quality that drifts, and models that are gated: what the steps read and write.

    Every effect has a key and is kept once, as the real ones are: a dataset by its content, a run by its
    plan, a release by its files, an alias by its move.
    """

    chance: Random
    provider: SimulatedProvider
    caps: CapSettings
    settings: CycleSettings
    safety: Safety
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    rows: float = 2000.0
    rows_per_day: float = 150.0
    drift: float = 0.02
    drift_a_day: float = 0.01
    counted: int = 0
    champion: str = ""
    quality: dict[str, float] = field(default_factory=dict)
    """Of each release when it was trained."""
    trained_at: dict[str, float] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    champions: list[str] = field(default_factory=list)
    """Every release that went live, by a promotion or by a rollback to it."""
    promoted: list[str] = field(default_factory=list)
    effects: Counter[tuple[int, str]] = field(default_factory=Counter)
    """How often a step of a cycle had its effect."""
    incidents: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    sent_ids: set[str] = field(default_factory=set)
    numbers: int = 0
    crash: Callable[[], None] = lambda: None
    _memo: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return self.provider.now

    def advance(self, seconds: float) -> None:
        """Time passes: rows come in, prompts move away from what was trained on, the price walks."""
        left, most = seconds, self.safety.reconcile_seconds * 0.9
        while left > most and self._has_machines():
            self.provider.advance(most)
            left -= most
            self.controller.reconcile(now=self.now)
        self.provider.advance(left)
        days = seconds / DAY
        self.rows += self.rows_per_day * days * self.chance.uniform(0.5, 1.5)
        self.drift = min(self.drift + self.drift_a_day * days * self.chance.uniform(0.0, 2.0), 0.95)
        if self.chance.random() < days:
            # It comes back to the usual price in some days.
            usual = (USD_PER_HOUR / self.provider.usd_per_hour) ** 0.3
            self.provider.usd_per_hour *= usual * self.chance.uniform(0.9, 1.12)

    def _has_machines(self) -> bool:
        """As the real loop asks: an open job, or one that has ended within a day."""
        recent = self.now - DAY
        return any(job.is_open or job.updated_at > recent for job in self.ledger.list())

    @property
    def controller(self) -> Controller:
        return Controller(SimulatedPlace(self.provider), self.ledger, self.safety)

    def score(self, release: str) -> float:
        """What a release scores now: what it learned, less what has moved since."""
        if not release:
            return 0.5
        days = (self.now - self.trained_at[release]) / DAY
        return max(self.quality[release] - self.drift_a_day * days, 0.0)

    def measure_facts(self) -> CycleFacts:
        return CycleFacts(rows=int(self.rows), drift=self.drift)

    def do(self, step: str, cycle: CycleState) -> CycleStepResult:
        self.advance(STEP_SECONDS.get(step, 1.0) * self.chance.uniform(0.5, 2.0))
        if self.chance.random() < FAULT_CHANCE:
            self._fault(step)
        key = (cycle.number, step)
        if key in self._memo:
            # Killed after the effect and before it was noted: the effect is there and is taken as it is.
            return CycleStepResult(self._memo[key])
        self.crash()
        result = getattr(self, f"_{step}", self._nothing)(cycle)
        if result.again_at is None:
            self._memo[key] = result.summary
            self.effects[key] += 1
        self.crash()
        return result

    def find_missing(self, cycle: CycleState, place: str) -> str:
        return ""

    def abandon(self, cycle: CycleState) -> None:
        pass

    def watch(self, state: CoordinatorState) -> tuple[dict[str, Any], tuple[Notice, ...]]:
        return {}, ()

    def send(self, notice: Notice) -> str:
        if self.chance.random() < FAULT_CHANCE:
            self.incidents["notice not delivered"] += 1
            return "the webhook answered with status 500"
        if notice.id not in self.sent_ids:
            self.sent_ids.add(notice.id)
            self.sent[notice.kind] += 1
        return ""

    def _fault(self, step: str) -> None:
        kind = self.chance.choice(("worker killed", "disk full", "busy"))
        self.incidents[kind] += 1
        if kind == "busy":
            raise Busy("another command works on this project")
        raise (
            WorkerFailed(f"{step}: {kind}")
            if kind == "worker killed"
            else EnvironmentFailure("no space left")
        )

    def _nothing(self, _cycle: CycleState) -> CycleStepResult:
        return CycleStepResult({})

    def _collect(self, _cycle: CycleState) -> CycleStepResult:
        return CycleStepResult({"rows": int(self.rows)})

    def _plan(self, cycle: CycleState) -> CycleStepResult:
        same = self.counted == int(self.rows)
        self.counted = int(self.rows)
        return CycleStepResult({"run": f"run{cycle.number}", "same_as_last": same})

    def _train(self, cycle: CycleState) -> CycleStepResult:
        run = f"run{cycle.number}"
        if self.settings.place != "local":
            self._train_at_place(run)
        else:
            self.advance(self.provider.work_seconds)
        self.trained_at[run] = self.now
        learned = 0.55 + 0.35 * min(self.rows / 10_000, 1.0)
        self.quality[run] = learned + self.chance.gauss(0, 0.05)
        return CycleStepResult({"run": run})

    def _train_at_place(self, run: str) -> None:
        """What the real step does: follow the open job of the run, or start one; take a finished one."""
        followed = ""
        while True:
            known = [job for job in self.ledger.list() if job.run_id == run]
            if any(job.state == "done" for job in known):
                return
            opened = next((job for job in known if job.is_open), None)
            if opened is None and followed:
                self.incidents[f"job {known[-1].state}"] += 1
                raise WorkerFailed(f"job {followed} did not finish: {known[-1].reason}")
            followed = opened.id if opened is not None else self._start(self.controller, run)
            self.crash()
            self.advance(self.safety.reconcile_seconds * 0.8)
            self.controller.reconcile(now=self.now)
            self.crash()

    def _start(self, controller: Controller, run: str) -> str:
        self.numbers += 1
        job_id = f"{self.numbers:012x}"
        price = controller.place.offer()[0].usd_per_hour or 0.0
        seconds = affordable_seconds(self.caps.job_usd, price, self.safety)
        seconds = min(seconds, self.provider.work_seconds * 1.2)
        order = JobOrder(
            job_id=job_id,
            label=make_label(self.ledger.key, job_id),
            run_id=run,
            bundle="",
            gpu=CARD,
            seconds=seconds,
            usd_per_hour=price,
            max_usd=largest_cost(seconds, price, self.safety),
        )
        try:
            controller.start(order, caps=self.caps, now=self.now)
        except NegativeResult:
            self.incidents["cap reached"] += 1
            raise
        except GraftError:
            self.incidents["place failed"] += 1
            raise
        return job_id

    def _gate(self, cycle: CycleState) -> CycleStepResult:
        run = str(cycle.summary("train")["run"])
        gain = self.quality[run] - self.score(self.champion) + self.chance.gauss(0, 0.01)
        if self.quality[run] < 0.5:
            return CycleStepResult({"decision": "abort", "reason": "worse than the base"})
        if abs(gain) < 0.01:
            return CycleStepResult({"decision": "not_enough_evidence", "reason": "no difference seen"})
        if gain < 0:
            return CycleStepResult({"decision": "iterate", "reason": "worse than the champion"})
        self.passed.add(run)
        return CycleStepResult({"decision": "deploy", "reason": "The rule holds."})

    def _release(self, cycle: CycleState) -> CycleStepResult:
        return CycleStepResult({"id": cycle.summary("train")["run"]})

    def _canary(self, _cycle: CycleState) -> CycleStepResult:
        canary = self.settings.canary
        assert canary is not None
        self.advance(canary.minutes * 60)
        bad = self.chance.random() < 0.1
        return CycleStepResult(
            {"verdict": "roll_back" if bad else "promote", "why": "failures" if bad else ""}
        )

    def _promote(self, cycle: CycleState) -> CycleStepResult:
        release = str(cycle.summary("release")["id"])
        if cycle.summary("canary").get("verdict") == "roll_back":
            return CycleStepResult({"action": "rolled_back", "release": release, "why": "canary"})
        before = self.champion
        if self.champion != release:
            self.champion = release
            self.champions.append(release)
            self.promoted.append(release)
            self.drift = 0.02
        return CycleStepResult({"action": "promoted", "release": release, "previous": before})

    def _deliver(self, cycle: CycleState) -> CycleStepResult:
        release = str(cycle.summary("promote")["release"])
        if self.chance.random() < 0.05:
            self.incidents["first requests failed"] += 1
            previous = str(cycle.summary("promote")["previous"])
            self.champion = previous
            self.champions.append(previous)
            return CycleStepResult(
                {"action": "rolled_back", "release": release, "why": "first requests failed"}
            )
        return CycleStepResult({"action": "delivered", "release": release, "to": ["gpu1:/srv"]})


def simulate_month(
    seed: int,
    *,
    settings: CycleSettings | None = None,
    caps: CapSettings | None = None,
    days: int = 30,
    crashes: bool = True,
) -> SimulatedMonth:
    """Run the coordinator over some days. The same seed and settings are the same month."""
    chance = Random(seed)
    settings = settings or DEFAULT
    caps = caps or CapSettings()
    safety = Safety()
    provider = SimulatedProvider(chance=chance, now=BEGIN, work_seconds=chance.uniform(1800, 3 * 3600))
    world = SimulatedProject(chance, provider, caps, settings, safety)
    world.rows_per_day = chance.uniform(20, 400)
    world.drift_a_day = chance.uniform(0.0, 0.03)
    price, first_quality = provider.usd_per_hour, world.score("")

    def crash() -> None:
        if crashes and chance.random() < CRASH_CHANCE:
            world.incidents["coordinator killed"] += 1
            raise ControllerCrash

    world.crash = crash
    store = CrashingCycles(crash)
    end = BEGIN + days * DAY
    coordinator = _start(world, store, settings, number=0)
    restarts, day = 0, 0
    while provider.now < end:
        if provider.now - BEGIN > day * DAY:
            day += 1
            provider.faults.update(random_faults(chance, most=1))
        try:
            action = coordinator.tick()
        except ControllerCrash:
            restarts += 1
            coordinator = _start(world, store, settings, number=restarts)
            world.advance(chance.uniform(1, 120))
            continue
        _pass_time(world, store, action, end)
    _settle(world)
    return _judge(seed, days, world, store, price=price, first_quality=first_quality)


def _start(
    world: SimulatedProject, store: MemoryCycles, settings: CycleSettings, *, number: int
) -> Coordinator:
    """A coordinator process; each start may be on the same machine or on another one."""
    place = "host-a" if world.chance.random() < 0.7 else f"host-{number}"
    return Coordinator(
        store=store,
        runner=world,
        settings=settings,
        steps=CYCLE_STEPS,
        models=settings.models or (MODEL,),
        holder=Holder(f"coordinator {number}", place),
        version="simulated",
        clock=lambda: world.now,
    )


def _pass_time(world: SimulatedProject, store: MemoryCycles, action: Action, end: float) -> None:
    """Wait as the real loop does, but at once. People approve after some hours, and resume the next day."""
    if isinstance(action, AwaitApproval):
        world.advance(world.chance.uniform(0.1, 2.0) * APPROVE_SECONDS)
        entry = LogEntry(at=world.now, who="ada", action="approve", what=action.step)
        with suppress(GraftError):
            MemoryCycles.change(store, lambda state: approve(state, action.step, entry))
    elif isinstance(action, Rest):
        if store.read().paused is not None:
            world.incidents["paused"] += 1
            world.advance(world.chance.uniform(0.2, 1.0) * DAY)
            entry = LogEntry(at=world.now, who="ada", action="resume")
            MemoryCycles.change(store, lambda state: resume(state, entry))
            return
        world.advance(max(min(action.until, end) - world.now, 1.0))


def _settle(world: SimulatedProject) -> None:
    """After the month: reconcile until every fault is used up, as the loop would go on doing."""
    for _ in range(LAST_ROUNDS):
        world.provider.advance(world.safety.reconcile_seconds)
        world.controller.reconcile(now=world.now)


def _judge(
    seed: int, days: int, world: SimulatedProject, store: MemoryCycles, *, price: float, first_quality: float
) -> SimulatedMonth:
    ended = store.history(limit=10_000)
    summaries = [cycle.summary("gate") for cycle in ended]
    machines = world.provider.machines
    hours = sum(
        ((machine.ended_at or world.now) - machine.created_at) / 3600
        for machine in machines
        if machine.created_at <= world.now
    )
    return SimulatedMonth(
        seed=seed,
        days=days,
        cycles=len(ended),
        outcomes=dict(Counter(cycle.outcome for cycle in ended)),
        gates=dict(Counter(str(found["decision"]) for found in summaries if found)),
        promotions=sum(cycle.summary("promote").get("action") == "promoted" for cycle in ended),
        rollbacks=sum(cycle.outcome == "rolled_back" for cycle in ended),
        rows=int(world.rows),
        quality_first=first_quality,
        quality_last=world.score(world.champion),
        gpu_hours=hours,
        spent_usd=world.provider.billed_usd(),
        cap_usd=_cap(world.caps),
        price_first=price,
        price_last=world.provider.usd_per_hour,
        jobs=dict(Counter(job.state for job in world.ledger.list())),
        incidents=dict(world.incidents),
        notices=dict(world.sent),
        leaked=tuple(machine.id for machine in world.provider.alive()),
        over_cap=_over_cap(world),
        ungated=tuple(name for name in world.champions if name and name not in world.passed),
        lost_or_doubled=(*_find_doubled(world), *_find_lost(ended, world)),
    )


def _cap(caps: CapSettings) -> float:
    return min(caps.month_usd, caps.project_usd if caps.project_usd is not None else caps.month_usd)


def _over_cap(world: SimulatedProject) -> tuple[str, ...]:
    """Spend of a calendar month, and of all."""
    by_month: defaultdict[str, float] = defaultdict(float)
    by_label: defaultdict[str, float] = defaultdict(float)
    for machine in world.provider.machines:
        usd = machine.billed_usd(world.now)
        by_month[datetime.fromtimestamp(machine.created_at, UTC).strftime("%Y-%m")] += usd
        by_label[machine.label] += usd
    cap = world.caps.month_usd
    over = [f"{month}: ${usd:.2f} of ${cap:.2f}" for month, usd in by_month.items() if usd > cap + CENT]
    project, total = world.caps.project_usd, sum(by_month.values())
    if project is not None and total > project + CENT:
        over.append(f"project: ${total:.2f} of ${project:.2f}")
    most = world.caps.job_usd
    over += [f"{label}: ${usd:.2f} of ${most:.2f}" for label, usd in by_label.items() if usd > most + CENT]
    return tuple(over)


def _find_doubled(world: SimulatedProject) -> list[str]:
    done = Counter(job.run_id for job in world.ledger.list() if job.state == "done")
    found = [f"{run} was trained {count} times" for run, count in done.items() if count > 1]
    found += [
        f"{step} of cycle {number} had its effect {count} times"
        for (number, step), count in world.effects.items()
        if count > 1
    ]
    # A release may come back by rollbacks as often as it likes; it is promoted once.
    moves = Counter(world.promoted)
    return found + [f"{name} was promoted {count} times" for name, count in moves.items() if count > 1]


def _find_lost(ended: tuple[CycleState, ...], world: SimulatedProject) -> list[str]:
    found = []
    numbers = sorted(cycle.number for cycle in ended)
    if numbers != list(range(1, len(numbers) + 1)):
        found.append(f"cycles {numbers}")
    for cycle in ended:
        for step in cycle.steps:
            had = world.effects[cycle.number, step.name]
            refused = "refused" in step.summary
            if step.status == "done" and not had and not refused:
                found.append(f"{step.name} of cycle {cycle.number} is done and had no effect")
            finished = cycle.outcome not in ("failed", "refused", "canceled")
            if finished and step.status not in ("done", "skipped"):
                found.append(f"{step.name} of cycle {cycle.number} is {step.status}")
    return found
