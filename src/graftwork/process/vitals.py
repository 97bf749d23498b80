"""Take the vitals of a worker and its machine, every few seconds, from inside the worker.

In: the clock and what the system tells. Out: a Vitals, and a line of them in `vitals.jsonl` at a
bounded rate: a run of a week leaves some thousand lines. Does not judge what it finds.
"""

import os
import resource
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from graftwork.files.journal import Journal
from graftwork.process import clock as steady_clock
from graftwork.process import memory
from graftwork.process.devices import Probe, find_probe
from graftwork.process.pool import count_cores
from graftwork.records.errors import GraftError
from graftwork.records.job import Vitals
from graftwork.records.units import MIB

VITALS_FILE = "vitals.jsonl"
SAMPLE_SECONDS = 5.0
GROWTH_WINDOW_SECONDS = 300.0
GROWTH_LEAST_SECONDS = 60.0
"""Less says nothing: the first steps of a run take their buffers once."""
LINES_AT_FULL_RATE = 2000
"""Afterwards lines come ever more seldom: the file grows with the logarithm of the time."""


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
        self._begun = self._clock()
        self._taken = float("-inf")
        self._written = float("-inf")
        self._resident: deque[tuple[float, float]] = deque()
        self._last: tuple[float, float, int | None] | None = None
        self.latest: Vitals | None = None

    def due(self) -> bool:
        return self._clock() - self._taken >= self._every

    def begin_phase(self) -> None:
        """Other work takes other memory: growth is counted anew."""
        self._resident.clear()

    def sample(self, *, data_share: float | None = None) -> Vitals:
        """Take them now; keep them in the file if it is time for a line."""
        now = self._taken = self._clock()
        machine = memory.machine_memory()
        resident = memory.resident_gib()
        self._resident.append((now, resident))
        while now - self._resident[0][0] > GROWTH_WINDOW_SECONDS:
            self._resident.popleft()
        cores, swapped = self._rates(now)
        self.latest = Vitals(
            at=time.time(),
            memory_gib=resident,
            memory_growth_gib_per_minute=growth_per_minute(list(self._resident)),
            memory_limit_gib=machine.get("limit"),
            memory_free_gib=machine.get("free"),
            swap_used_gib=machine.get("swap_used"),
            swapped_mib_per_second=swapped,
            processor_cores=cores,
            load=os.getloadavg()[0],
            cores=count_cores(),
            data_share=data_share,
            devices=self._probe() if self._probe else (),
        )
        self._keep(self.latest, now)
        return self.latest

    def _rates(self, now: float) -> tuple[float | None, float | None]:
        """Cores kept busy and MiB swapped a second, since the sample before."""
        used, pages = time.process_time(), memory.swapped_pages()
        before, self._last = self._last, (now, used, pages)
        if before is None or now <= before[0]:
            return None, None
        seconds = now - before[0]
        swapped = None
        if pages is not None and before[2] is not None:
            swapped = (pages - before[2]) * resource.getpagesize() / MIB / seconds
        return (used - before[1]) / seconds, swapped

    def _keep(self, vitals: Vitals, now: float) -> None:
        if now - self._written < seconds_between_lines(now - self._begun, every=self._every):
            return
        self._written = now
        try:
            self._journal.append(vitals.model_dump(mode="json", exclude_none=True))
        except GraftError:
            # A full disk is the work's own trouble, and it will say so.
            return


def seconds_between_lines(elapsed: float, *, every: float = SAMPLE_SECONDS) -> float:
    """The pause between two lines of the file, after so many seconds of work."""
    return max(every * 0.9, elapsed / LINES_AT_FULL_RATE)


def growth_per_minute(samples: list[tuple[float, float]]) -> float:
    """GiB a minute that memory grows by: the least of the later half over the least of the earlier one.

    What is taken and given back in every step lifts single samples, not the least of many.
    """
    if len(samples) < 4 or samples[-1][0] - samples[0][0] < GROWTH_LEAST_SECONDS:
        return 0.0
    middle = len(samples) // 2
    early, late = samples[:middle], samples[middle:]
    minutes = (late[0][0] + late[-1][0] - early[0][0] - early[-1][0]) / 2 / 60
    return (min(gib for _, gib in late) - min(gib for _, gib in early)) / minutes if minutes > 0 else 0.0
