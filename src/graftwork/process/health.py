"""Is it stuck? Working, slow, stuck or gone, with the reason from the evidence. Pure.

In: the last heartbeat with its vitals and its age, whether the process lives and in which state, and
what the plan expected. Out: a Judgement. The caller brings the clock and the processes.
"""

from pathlib import Path

from graftwork.process.devices import busiest
from graftwork.process.heartbeat import WAITING_FOR_DATA
from graftwork.records.base import Record
from graftwork.records.job import Beat, Health, Vitals

SLOW_FACTOR = 3.0
STUCK_FACTOR = 10.0
BETWEEN_STEPS_SECONDS = 30.0
"""An evaluation, a checkpoint, a model that loads or compiles: plans do not know how long one takes."""
FEW_STEPS = 2
"""So many first steps of a process compile and fill caches: their time says little."""

LITTLE_FREE = 0.05
SOON_MINUTES = 15.0
SWAPPING_MIB_PER_SECOND = 1.0
IDLE_PERCENT = 5.0
DATA_SHARE = 0.5
HOT_C = 86.0

INSIDE_A_STEP = ("data", "forward", "backward", "update")


class Patience(Record):
    """Short steps must not raise an alarm at every hiccup: below these nothing is called slow or stuck."""

    slow_seconds: float = 10.0
    stuck_seconds: float = 60.0
    silent_seconds: float = 30.0

    @classmethod
    def of(cls, stuck_seconds: float) -> "Patience":
        return cls(
            slow_seconds=stuck_seconds / 6, stuck_seconds=stuck_seconds, silent_seconds=stuck_seconds / 2
        )


class HealthReport(Record):
    """`evidence` is what in the machine's figures may explain it; `reason` says it in one sentence."""

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
    """`age` is how many seconds ago the heartbeat was.

    `process_state` is the letter that the system gives: T stopped, D waiting for disk or driver.
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
        why = f"no heartbeat for {age:.0f} s: {_frozen(process_state)}"
        return HealthReport(health="stuck", reason=why, **times)
    found = evidence(beat)
    because = "; ".join(found) or "nothing in the machine's figures explains it"
    still = _number(beat, "seconds_since_move") or 0.0
    expected = _expected_now(beat, expected_seconds)
    for health, factor, least in (
        ("stuck", STUCK_FACTOR, patience.stuck_seconds),
        ("slow", SLOW_FACTOR, patience.slow_seconds),
    ):
        if still > max(factor * expected, least):
            planned = format_seconds(expected)
            why = f"{_what(beat)} has not moved for {still:.0f} s (expected {planned}): {because}"
            return HealthReport(health=health, reason=why, evidence=found, **times)
    if measured is not None and measured > SLOW_FACTOR * expected:
        planned = format_seconds(expected_seconds)
        why = f"a step takes {format_seconds(measured)}, the plan expected {planned}: {because}"
        return HealthReport(health="slow", reason=why, evidence=found, **times)
    how_far = f"{beat.phase} {beat.done:.0f} of {beat.total:.0f}" if beat.total > 1 else beat.phase
    well: Health = "starting" if beat.phase == "starting" else "working"
    return HealthReport(health=well, reason="; ".join((how_far, *found)), evidence=found, **times)


def evidence(beat: Beat) -> tuple[str, ...]:
    """What in the machine's figures is out of the ordinary, the gravest first."""
    vitals = beat.vitals
    found: list[str] = []
    if vitals is not None:
        found += _of_memory(vitals)
    if beat.doing == WAITING_FOR_DATA or (vitals and (vitals.data_share or 0.0) > DATA_SHARE):
        share = f" ({100 * vitals.data_share:.0f} % of the time)" if vitals and vitals.data_share else ""
        found.append(f"it waits for data{share}")
    if vitals is not None and beat.phase == "training":
        found += _of_devices(vitals)
        found += _of_processor(vitals)
    return tuple(found)


def _of_memory(vitals: Vitals) -> list[str]:
    found = []
    if (vitals.swapped_mib_per_second or 0.0) >= SWAPPING_MIB_PER_SECOND:
        found.append(f"the machine is swapping ({vitals.swapped_mib_per_second:.0f} MiB/s)")
    free, limit = vitals.memory_free_gib, vitals.memory_limit_gib
    if free is None or limit is None:
        return found
    if free < LITTLE_FREE * limit:
        found.append(f"only {free:.1f} GiB of {limit:.1f} GiB memory are free")
    growth = vitals.memory_growth_gib_per_minute
    if growth > 0 and free / growth < SOON_MINUTES:
        found.append(
            f"memory grows by {growth:.2f} GiB a minute: the limit is reached in {free / growth:.0f} min"
        )
    return found


def _of_devices(vitals: Vitals) -> list[str]:
    found = []
    device = busiest(vitals.devices)
    if device is not None and (device.use_percent or 0.0) < IDLE_PERCENT:
        found.append(f"the device is idle ({device.use_percent:.0f} % use)")
    hot = [device for device in vitals.devices if (device.temperature_c or 0.0) >= HOT_C]
    found += [
        f"device {device.index} is at {device.temperature_c:.0f} °C and may slow itself down"
        for device in hot
    ]
    return found


def _of_processor(vitals: Vitals) -> list[str]:
    """Others take the cores, or nothing is computed at all. With a device its use says more."""
    if vitals.processor_cores is None or vitals.devices:
        return []
    if vitals.load is not None and vitals.load > 2 * vitals.cores:
        return [f"others use the processor too (load {vitals.load:.0f} on {vitals.cores} cores)"]
    if vitals.processor_cores < 0.05:
        return ["the processor is idle: it waits for something"]
    return []


def _expected_now(beat: Beat, step_seconds: float) -> float:
    """How long what is being done now should take at most before it moves."""
    settled = (_number(beat, "steps_here") or 0.0) >= FEW_STEPS
    if beat.phase == "training" and beat.doing in INSIDE_A_STEP and settled:
        return step_seconds
    return max(step_seconds, BETWEEN_STEPS_SECONDS)


def _what(beat: Beat) -> str:
    return f"{beat.phase} ({beat.doing})" if beat.doing else beat.phase


def _frozen(state: str) -> str:
    if state in ("T", "t"):
        return "the process was stopped by a signal; `kill -CONT` resumes it"
    if state == "D":
        return "the process waits for a disk or a driver that does not answer"
    return "the process is frozen or starved"


def _number(beat: Beat, name: str) -> float | None:
    value = beat.detail.get(name)
    return float(value) if value is not None else None


def format_seconds(value: float) -> str:
    """Short times with their fraction, long ones without."""
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def process_state(pid: int) -> str:
    """The letter that Linux gives (R, S, D, T, Z); empty where the system does not report it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name before it is in brackets and may contain anything.
    return text.rpartition(")")[2].split()[0]
