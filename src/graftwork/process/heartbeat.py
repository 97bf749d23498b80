"""The heartbeat file: written by the worker inside its work, read by whoever asks.

`Heart` also beats from a thread, so that a long single operation (a model that loads, a step that
takes a minute) does not look like death; `done` moves only when the work itself moves.
"""

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from graftwork.files.whole import write_whole
from graftwork.records.job import Beat, Health

HEARTBEAT_FILE = "heartbeat.json"
SLOW_FACTOR = 3.0
STUCK_FACTOR = 10.0
DEAD_AFTER_SECONDS = 30.0


class Heart:
    """Use as a context manager around the work; call `beat` whenever the work moves."""

    def __init__(self, folder: Path, *, interval: float = 2.0) -> None:
        self._path = folder / HEARTBEAT_FILE
        self._interval = interval
        self._started = time.time()
        self._moved = self._started
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        self._beat = Beat(
            pid=os.getpid(), phase="starting", done=0, total=0, at=self._started, started=self._started
        )

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
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
        now = time.time()
        with self._lock:
            self._moved = now
            self._beat = Beat(
                pid=os.getpid(),
                phase=phase,
                done=done,
                total=total,
                at=now,
                started=self._started,
                seconds_left=seconds_left,
                detail=detail,
            )
        self._write()

    def move(self) -> None:
        """The work moves, within what the last beat named: nothing is written, the thread will."""
        with self._lock:
            self._moved = time.time()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._write()

    def _write(self) -> None:
        with self._lock:
            still = time.time() - self._moved
            beat = self._beat.model_copy(
                update={"at": time.time(), "detail": {**self._beat.detail, "seconds_since_move": still}}
            )
        write_whole(self._path, beat.to_json(), durable=False)


def read_beat(folder: Path) -> Beat | None:
    path = folder / HEARTBEAT_FILE
    return Beat.from_json(path.read_bytes()) if path.exists() else None


def judge(beat: Beat | None, *, alive: bool, now: float, expected_seconds: float) -> tuple[Health, str]:
    """Working, slow, stuck or gone, with the reason. Pure: the caller brings the clock."""
    if beat is None:
        return ("starting", "no heartbeat yet") if alive else ("gone", "it left no heartbeat")
    if not alive:
        return "gone", f"process {beat.pid} is not running; it last did: {beat.phase}"
    silent = now - beat.at
    if silent > DEAD_AFTER_SECONDS:
        return "stuck", f"no heartbeat for {silent:.0f} s: the process is frozen or starved"
    still = float(beat.detail.get("seconds_since_move", 0.0))
    if still > STUCK_FACTOR * expected_seconds:
        return "stuck", f"{beat.phase} has not moved for {still:.0f} s (expected {expected_seconds:.1f} s)"
    if still > SLOW_FACTOR * expected_seconds:
        return "slow", f"{beat.phase} has not moved for {still:.0f} s (expected {expected_seconds:.1f} s)"
    return "working", f"{beat.phase} {beat.done:.0f} of {beat.total:.0f}"
