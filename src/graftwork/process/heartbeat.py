"""The heartbeat file: written by the worker inside its work, read by whoever asks.

`Heart` also beats from a thread, so that a long single operation (a model that loads, a step that
takes a minute) does not look like death; `done` moves only when the work itself moves. `move` says
what is being done inside a step, and with `vitals` the thread takes those of the machine too.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graftwork.files.whole import write_whole
from graftwork.process import clock
from graftwork.process.vitals import Sampler
from graftwork.records.errors import GraftError
from graftwork.records.job import Beat

HEARTBEAT_FILE = "heartbeat.json"
WAITING_FOR_DATA = "data"
LEAST_SECONDS = 0.2
"""Between two writes of quick beats: steps of milliseconds must not wait for the file."""


class Heart:
    """Use as a context manager around the work; call `beat` whenever the work moves."""

    def __init__(self, folder: Path, *, interval: float = 2.0, vitals: bool = False) -> None:
        self._path = folder / HEARTBEAT_FILE
        self._interval = interval
        self._started = clock.now()
        self._moved = self._started.steady
        self._doing, self._doing_since = "", self._started.steady
        self._spent: dict[str, float] = {}
        self._written = float("-inf")
        self._lock = threading.Lock()
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
        """The work moved."""
        now = clock.steady()
        with self._lock:
            self._enter("", now)
            due = phase != self._beat.phase or done == total or now - self._written >= LEAST_SECONDS
            if self._sampler is not None and phase != self._beat.phase:
                self._sampler.begin_phase()
            self._beat = self._make(phase, done, total, seconds_left=seconds_left, detail=detail)
        if due:
            # Work that stands on a full disk goes on; it will say so itself where that matters.
            with suppress(GraftError):
                self._write()

    def move(self, doing: str = "") -> None:
        """The work moves, within what the last beat named: nothing is written, the thread will."""
        with self._lock:
            self._enter(doing, clock.steady())

    def _make(self, phase: str, done: float, total: float, **more: Any) -> Beat:
        return Beat(
            pid=os.getpid(),
            phase=phase,
            done=done,
            total=total,
            at=self._started.at,
            started=self._started.at,
            started_steady=self._started.steady,
            boot=self._started.boot,
            **more,
        )

    def _enter(self, doing: str, now: float) -> None:
        """Add what was done until now to its account, and open that of what comes."""
        if self._doing:
            self._spent[self._doing] = self._spent.get(self._doing, 0.0) + now - self._doing_since
        self._moved, self._doing, self._doing_since = now, doing, now

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()
            try:
                self._write()
            except GraftError:
                # The disk may have room again the next time; the work itself will say it if not.
                continue

    def _sample(self) -> None:
        if self._sampler is None or not self._sampler.due():
            return
        with self._lock:
            spent, self._spent = self._spent, {}
        inside = sum(spent.values())
        share = spent.get(WAITING_FOR_DATA, 0.0) / inside if inside else None
        self._sampler.sample(data_share=share)

    def _write(self) -> None:
        with self._lock:
            now = clock.now()
            self._written = now.steady
            beat = self._beat.model_copy(
                update={
                    "at": now.at,
                    "steady": now.steady,
                    "doing": self._doing,
                    "detail": {**self._beat.detail, "seconds_since_move": now.steady - self._moved},
                    "vitals": self._sampler.latest if self._sampler else None,
                }
            )
        write_whole(self._path, beat.to_json(), durable=False)


def read_beat(folder: Path) -> Beat | None:
    """The last beat; None where there is none, or one that this version cannot read."""
    try:
        return Beat.from_json((folder / HEARTBEAT_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
