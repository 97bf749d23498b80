"""Processor time and memory of a process with all its descendants, read from /proc while it runs.

In: a process id, a file that gets a line for each step. Out: the processor seconds of the whole tree when
each line appeared, and the peak of its memory. Shared pages count once (proportional set size).
"""

import os
import threading
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
POLL_SECONDS = 0.5
MEMORY_EVERY = 1
"""Reading the memory of a large process is dear: once in so many polls."""


class TreeMonitor:
    """Use as a context manager around the wait for the process."""

    def __init__(self, pid: int, steps: Path | None = None) -> None:
        self._pid = pid
        self._steps = steps
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.cpu_at_step: list[float] = []
        self.cpu_seconds = 0.0
        """Of the whole tree, up to the last look at it."""
        self.peak_gib = 0.0
        self.largest_gib = 0.0
        """The peak of the largest single process, as the kernel counts it."""

    def __enter__(self) -> "TreeMonitor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        polls = 0
        while not self._ended.is_set():
            tree = find_tree(self._pid)
            lines = len(find_lines(self._steps))
            self.cpu_seconds = max(self.cpu_seconds, sum(map(processor_seconds, tree)))
            self.cpu_at_step += [self.cpu_seconds] * (lines - len(self.cpu_at_step))
            if polls % MEMORY_EVERY == 0:
                sizes = [read_kib(pid, "smaps_rollup", "Pss:") for pid in tree]
                self.peak_gib = max(self.peak_gib, sum(sizes) / 2**20)
                peaks = [read_kib(pid, "status", "VmHWM:") for pid in tree]
                self.largest_gib = max(self.largest_gib, *peaks, 0.0, 0.0) if peaks else self.largest_gib
            polls += 1
            time.sleep(POLL_SECONDS)
        self.largest_gib /= 2**20


def find_lines(path: Path | None) -> list[str]:
    """Whole lines of the file; a pattern in its name is resolved once the file exists."""
    if path is None:
        return []
    found = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    return found[0].read_text().split("\n")[:-1] if found else []


def find_tree(pid: int) -> list[int]:
    """The process and its descendants that live now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = stat_fields(int(entry.name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, open_ids = [], [pid]
    while open_ids:
        current = open_ids.pop()
        found.append(current)
        open_ids += children.get(current, [])
    return found


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def processor_seconds(pid: int) -> float:
    """Of the process and of its descendants that have ended."""
    fields = stat_fields(pid)
    return sum(map(int, fields[11:15])) / TICKS if fields else 0.0


def read_kib(pid: int, file: str, name: str) -> float:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith(name)), 0.0)
