"""The heartbeat file of a worker, and the health that follows from it: working, slow, stuck or gone.

`Heart` also beats from a thread, so that a long single operation (a model that loads, a step that
takes a minute) does not look like death; `done` moves only when the work itself moves. `move` says
what is being done inside a step, and with `vitals` the thread takes those of the machine too.

Whether a worker is stuck is judged from its last heartbeat and the age of it, the state of its process and
what the plan expected; the caller brings the clock and the processes.
"""

import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graftwork.files.disk import Journal, read_record, write_atomic
from graftwork.process import clock
from graftwork.process import clock as steady_clock
from graftwork.process.machine import (
    Probe,
    busiest,
    count_cores,
    find_probe,
    machine_memory,
    resident_gib,
    swapped_pages,
)
from graftwork.records.base import MIB, Record
from graftwork.records.errors import GraftError
from graftwork.records.fleet import Beat, Health, Vitals

VITALS_FILE = "vitals.jsonl"
SAMPLE_SECONDS = 5.0
GROWTH_WINDOW_SECONDS = 300.0
GROWTH_LEAST_SECONDS = 60.0
"""A shorter time proves nothing: the first steps of a run allocate their buffers once."""
LINES_AT_FULL_RATE = 2000
"""After this many, lines become rarer, down to one a minute."""


class Sampler:
    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] | None = None,
        probe: Probe | None = None,
        sample_seconds: float = SAMPLE_SECONDS,
    ) -> None:
        self._journal = Journal(folder / VITALS_FILE)
        self._clock = clock or steady_clock.steady
        self._probe = probe or find_probe()
        self._every = sample_seconds
        self._started_at = self._clock()
        self._sampled_at = float("-inf")
        self._written_at = float("-inf")
        self._resident: deque[tuple[float, float]] = deque()
        self._last: tuple[float, float, int | None] | None = None
        self.latest: Vitals | None = None

    def due(self) -> bool:
        return self._clock() - self._sampled_at >= self._every

    def begin_phase(self) -> None:
        """Other work needs other memory: growth is measured from zero again."""
        self._resident.clear()

    def sample(self, *, data_share: float | None = None) -> Vitals:
        """Take a sample; write it to the file if a line is due."""
        now = self._sampled_at = self._clock()
        machine = machine_memory()
        resident = resident_gib()
        self._resident.append((now, resident))
        while now - self._resident[0][0] > GROWTH_WINDOW_SECONDS:
            self._resident.popleft()
        # Cores kept busy and MiB swapped per second, since the sample before.
        used, pages = time.process_time(), swapped_pages()
        before, self._last = self._last, (now, used, pages)
        cores: float | None = None
        swapped: float | None = None
        if before is not None and now > before[0]:
            seconds = now - before[0]
            cores = (used - before[1]) / seconds
            if pages is not None and before[2] is not None:
                swapped = (pages - before[2]) * resource.getpagesize() / MIB / seconds
        self.latest = Vitals(
            at=time.time(),
            memory_gib=resident,
            memory_growth_gib_per_minute=growth_per_minute(list(self._resident)),
            memory_limit_gib=machine.get("limit"),
            memory_free_gib=machine.get("free"),
            swap_used_gib=machine.get("swap_used"),
            swapped_mib_per_second=swapped,
            cpu_cores=cores,
            load=os.getloadavg()[0],
            cores=count_cores(),
            data_share=data_share,
            devices=self._probe() if self._probe else (),
        )
        if now - self._written_at >= seconds_between_lines(now - self._started_at, every=self._every):
            self._written_at = now
            # A full disk is the work's own trouble, and it will say so.
            with suppress(GraftError):
                self._journal.append(self.latest.model_dump(mode="json", exclude_none=True))
        return self.latest


def seconds_between_lines(elapsed: float, *, every: float = SAMPLE_SECONDS) -> float:
    """The pause between two lines of the file after this many seconds of work: a minute at most."""
    return max(every * 0.9, min(elapsed / LINES_AT_FULL_RATE, 60.0))


def growth_per_minute(samples: list[tuple[float, float]]) -> float:
    """GiB per minute of memory growth: the minimum of the later half compared with that of the earlier one.
    Memory that is allocated and freed in every step raises single samples, not the minimum.
    """
    if len(samples) < 4 or samples[-1][0] - samples[0][0] < GROWTH_LEAST_SECONDS:
        return 0.0
    middle = len(samples) // 2
    early, late = samples[:middle], samples[middle:]
    minutes = (late[0][0] + late[-1][0] - early[0][0] - early[-1][0]) / 2 / 60
    return (min(gib for _, gib in late) - min(gib for _, gib in early)) / minutes if minutes > 0 else 0.0


HEARTBEAT_FILE = "heartbeat.json"
WAITING_FOR_DATA = "data"
LEAST_SECONDS = 0.2
"""Seconds between two writes of quick beats: steps of milliseconds must not wait for the file."""


class Heart:
    """Use as a context manager around the work; call `beat` whenever the work makes progress."""

    def __init__(self, folder: Path, *, interval: float = 2.0, vitals: bool = False) -> None:
        self._path = folder / HEARTBEAT_FILE
        self._interval = interval
        self._started = clock.now()
        self._moved = self._started.steady
        self._doing, self._doing_since = "", self._started.steady
        self._spent: dict[str, float] = {}
        self._written_at = float("-inf")
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """Separate from the other lock: progress within a step never waits for the disk."""
        self._stop = threading.Event()
        self._sampler = Sampler(folder) if vitals else None
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        self._beat = self._make("starting", 0, 0)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        with suppress(GraftError):
            self._write()

    def beat(
        self,
        phase: str,
        done: float,
        total: float,
        *,
        seconds_left: float | None = None,
        **detail: float | str,
    ) -> None:
        """Record progress of the work."""
        now = clock.steady()
        with self._lock:
            self._enter("", now)
            due = phase != self._beat.phase or done == total or now - self._written_at >= LEAST_SECONDS
            if self._sampler is not None and phase != self._beat.phase:
                self._sampler.begin_phase()
            self._beat = self._make(phase, done, total, seconds_left=seconds_left, detail=detail)
        if due:
            # Work continues on a full disk; it fails by itself where that matters.
            with suppress(GraftError):
                self._write()

    def move(self, doing: str = "") -> None:
        """Record progress within what the last beat named: the thread writes it later."""
        with self._lock:
            self._enter(doing, clock.steady())

    def _make(self, phase: str, done: float, total: float, **fields: Any) -> Beat:
        return Beat(
            pid=os.getpid(),
            phase=phase,
            done=done,
            total=total,
            at=self._started.at,
            started=self._started.at,
            started_steady=self._started.steady,
            boot=self._started.boot,
            **fields,
        )

    def _enter(self, doing: str, now: float) -> None:
        self._count(now)
        self._moved, self._doing = now, doing

    def _count(self, now: float) -> None:
        """Add the elapsed time to the current activity."""
        if self._doing:
            self._spent[self._doing] = self._spent.get(self._doing, 0.0) + now - self._doing_since
        self._doing_since = now

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()
            # The disk may have room again the next time; the work itself will say it if not.
            with suppress(GraftError):
                self._write()

    def _sample(self) -> None:
        if self._sampler is None or not self._sampler.due():
            return
        with self._lock:
            # The current activity counts too: a long forward pass after a short wait is not waiting.
            self._count(clock.steady())
            spent, self._spent = self._spent, {}
        inside = sum(spent.values())
        share = spent.get(WAITING_FOR_DATA, 0.0) / inside if inside else None
        self._sampler.sample(data_share=share)

    def _write(self) -> None:
        # From the state to the file without another write between: an older beat would replace a newer one.
        with self._writing:
            with self._lock:
                now = clock.now()
                self._written_at = now.steady
                beat = self._beat.model_copy(
                    update={
                        "at": now.at,
                        "steady": now.steady,
                        "doing": self._doing,
                        "detail": {**self._beat.detail, "seconds_since_move": now.steady - self._moved},
                        "vitals": self._sampler.latest if self._sampler else None,
                    }
                )
            write_atomic(self._path, beat.to_json(), durable=False)


def remove_beat(folder: Path) -> None:
    """Before a worker starts: the beat of an earlier one is meaningless for it."""
    (folder / HEARTBEAT_FILE).unlink(missing_ok=True)


def read_beat(folder: Path) -> Beat | None:
    """Read the last beat; None if there is none, or one that this version cannot read."""
    return read_record(Beat, folder / HEARTBEAT_FILE)


SLOW_FACTOR = 3.0
STUCK_FACTOR = 10.0
BETWEEN_STEPS_SECONDS = 30.0
"""An evaluation, a checkpoint, a model that loads or compiles: plans do not know how long one takes."""
FEW_STEPS = 2
"""Number of first steps of a process that compile and fill caches, and are ignored."""

LITTLE_FREE = 0.05
SOON_MINUTES = 15.0
SWAPPING_MIB_PER_SECOND = 1.0
IDLE_PERCENT = 5.0
DATA_SHARE = 0.5
HOT_C = 86.0

STEP_PHASES = ("data", "forward", "backward", "update")
FROZEN = {
    "T": "the process was stopped by a signal; `kill -CONT` resumes it",
    "D": "the process waits for a disk or a driver that does not answer",
}
"""By the letter that the system gives to its state."""


class Patience(Record):
    """Minimum times: below these nothing is called slow or stuck, so that short steps do not raise alarms."""

    slow_seconds: float = 10.0
    stuck_seconds: float = 60.0
    silent_seconds: float = 30.0


class HealthReport(Record):
    """`evidence` is what in the machine's figures may explain it; `reason` summarizes it in one sentence."""

    health: Health
    reason: str
    evidence: tuple[str, ...] = ()
    expected_seconds: float | None = None
    """What the plan expected a step to take."""
    measured_seconds: float | None = None
    """What the last steps took."""


def assess_health(
    beat: Beat | None,
    *,
    alive: bool,
    age: float,
    expected_seconds: float,
    process_state: str = "",
    patience: Patience | None = None,
) -> HealthReport:
    """Judge a worker. `age` is the age of the heartbeat in seconds. `process_state` is the system's letter: T
    stopped, D waiting for disk or driver.
    """
    patience = patience or Patience()
    if beat is None:
        health: Health = "starting" if alive else "gone"
        return HealthReport(health=health, reason="no heartbeat yet" if alive else "it left no heartbeat")
    measured = _number(beat, "step_seconds")
    times = {"expected_seconds": expected_seconds, "measured_seconds": measured}
    if not alive:
        why = f"process {beat.pid} is not running; it last did: {_what(beat)}"
        return HealthReport(health="gone", reason=why, **times)
    if age > patience.silent_seconds:
        frozen = FROZEN.get(process_state.upper(), "the process is frozen or starved")
        why = f"no heartbeat for {age:.0f} s: {frozen}"
        return HealthReport(health="stuck", reason=why, **times)
    observations = evidence(beat)
    because = "; ".join(observations) or "nothing in the machine's figures explains it"
    still = _number(beat, "seconds_since_move") or 0.0
    # How long what is being done now should take at most before it moves.
    settled = (_number(beat, "steps_here") or 0.0) >= FEW_STEPS
    within_step = beat.phase == "training" and beat.doing in STEP_PHASES and settled
    expected = expected_seconds if within_step else max(expected_seconds, BETWEEN_STEPS_SECONDS)
    for health, factor, least in (
        ("stuck", STUCK_FACTOR, patience.stuck_seconds),
        ("slow", SLOW_FACTOR, patience.slow_seconds),
    ):
        if still > max(factor * expected, least):
            planned = format_seconds(expected)
            why = f"{_what(beat)} has not moved for {still:.0f} s (expected {planned}): {because}"
            return HealthReport(health=health, reason=why, evidence=observations, **times)
    if measured is not None and measured > SLOW_FACTOR * expected:
        planned = format_seconds(expected_seconds)
        why = f"a step takes {format_seconds(measured)}, the plan expected {planned}: {because}"
        return HealthReport(health="slow", reason=why, evidence=observations, **times)
    how_far = f"{beat.phase} {beat.done:.0f} of {beat.total:.0f}" if beat.total > 1 else beat.phase
    well: Health = "starting" if beat.phase == "starting" else "working"
    return HealthReport(
        health=well, reason="; ".join((how_far, *observations)), evidence=observations, **times
    )


def evidence(beat: Beat) -> tuple[str, ...]:
    """Return unusual figures of the machine, the most serious first."""
    vitals = beat.vitals
    observations: list[str] = []
    if vitals is not None:
        observations += _of_memory(vitals)
    if beat.doing == WAITING_FOR_DATA or (vitals and (vitals.data_share or 0.0) > DATA_SHARE):
        share = f" ({100 * vitals.data_share:.0f} % of the time)" if vitals and vitals.data_share else ""
        observations.append(f"it waits for data{share}")
    if vitals is not None and beat.phase == "training":
        observations += _of_devices(vitals) if vitals.devices else _of_cores(vitals)
    return tuple(observations)


def _of_memory(vitals: Vitals) -> list[str]:
    observations = []
    if (vitals.swapped_mib_per_second or 0.0) >= SWAPPING_MIB_PER_SECOND:
        observations.append(f"the machine is swapping ({vitals.swapped_mib_per_second:.0f} MiB/s)")
    free, limit = vitals.memory_free_gib, vitals.memory_limit_gib
    if free is None or limit is None:
        return observations
    if free < LITTLE_FREE * limit:
        observations.append(f"only {free:.1f} GiB of {limit:.1f} GiB memory are free")
    growth = vitals.memory_growth_gib_per_minute
    if growth > 0 and free / growth < SOON_MINUTES:
        observations.append(
            f"memory grows by {growth:.2f} GiB a minute: the limit is reached in {free / growth:.0f} min"
        )
    return observations


def _of_devices(vitals: Vitals) -> list[str]:
    observations = []
    device = busiest(vitals.devices)
    if device is not None and (device.use_percent or 0.0) < IDLE_PERCENT:
        observations.append(f"the device is idle ({device.use_percent:.0f} % use)")
    hot = [device for device in vitals.devices if (device.temperature_c or 0.0) >= HOT_C]
    observations += [
        f"device {device.index} is at {device.temperature_c:.0f} °C and may slow itself down"
        for device in hot
    ]
    return observations


def _of_cores(vitals: Vitals) -> list[str]:
    """Other processes use the cores, or nothing is computed at all. With a device its utilization is more
    informative.
    """
    if vitals.cpu_cores is None:
        return []
    if vitals.load is not None and vitals.load > 2 * vitals.cores:
        return [f"others use the CPU too (load {vitals.load:.0f} on {vitals.cores} cores)"]
    if vitals.cpu_cores < 0.05:
        return ["the CPU is idle: it waits for something"]
    return []


def _what(beat: Beat) -> str:
    return f"{beat.phase} ({beat.doing})" if beat.doing else beat.phase


def _number(beat: Beat, name: str) -> float | None:
    value = beat.detail.get(name)
    return float(value) if value is not None else None


def format_seconds(value: float) -> str:
    """Short times with their fraction, long ones without."""
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def process_state(pid: int) -> str:
    """The letter that Linux gives (R, S, D, T, Z); empty if the system does not report it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name before it is in brackets and may contain anything.
    return text.rpartition(")")[2].split()[0]
