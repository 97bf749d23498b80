"""Durations that clock changes do not affect, even between processes, and the waiting time of a run.

Input: a moment that another process wrote down. Output: the seconds since then. The clock that people read
may be set, by hand or by a time server, and then jumps by an hour. The steady one counts from the machine's
start and is the same for all its processes. It means nothing on another machine or after a restart, so a
moment names the start that it belongs to; where that is another one, the clock that people read is all there
is. What the process that watched an attempt measured is summed in a file of the run's folder and moves with
it.
"""

import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from graftwork.files.disk import write_atomic
from graftwork.records.fleet import Moment

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def steady() -> float:
    """Seconds of a monotonic clock. They stop while the machine sleeps, as its workers do."""
    return time.monotonic()


def now() -> Moment:
    return Moment(at=time.time(), steady=steady(), boot=boot_id())


def seconds_between(earlier: Moment, later: Moment) -> float:
    """Negative if the second moment is the earlier one."""
    if earlier.boot and earlier.boot == later.boot:
        return later.steady - earlier.steady
    return later.at - earlier.at


def seconds_since(moment: Moment) -> float:
    return seconds_between(moment, now())


def read_moment(line: Mapping[str, Any]) -> Moment:
    return Moment(at=float(line["at"]), steady=float(line["steady"]), boot=str(line["boot"]))


@cache
def boot_id() -> str:
    """Identifies this boot of this machine; empty if the system does not report it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


WAITED = "waited"


def read_waited(folder: Path) -> float:
    path = folder / WAITED
    return float(path.read_text()) if path.exists() else 0.0


def add_waited(folder: Path, seconds: float) -> float:
    """The seconds of all attempts, this one included."""
    total = read_waited(folder) + seconds
    write_atomic(folder / WAITED, repr(total))
    return total
