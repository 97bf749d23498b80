"""One turn of a side of `rl_step.py`: a command that is watched, bounded in time, and summed up by step.

In: a command and the file in which it writes a line for each step. Out: figures of the steps that it did.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

GRACE_SECONDS = 20.0
"""From asking a process to end to ending it."""
LEAST_COUNTED = 2
"""Steps besides the first one without which a turn says nothing."""
POLL_SECONDS = 0.5


class TreeMonitor:
    """Processor time and memory of a process with all its descendants, read from /proc while it runs."""

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
        while not self._ended.is_set():
            tree = find_tree(self._pid)
            lines = len(find_lines(self._steps))
            self.cpu_seconds = max(self.cpu_seconds, sum(map(cpu_seconds_of, tree)))
            self.cpu_at_step += [self.cpu_seconds] * (lines - len(self.cpu_at_step))
            # Shared pages count once (proportional set size).
            sizes = [read_kib(pid, "smaps_rollup", "Pss:") for pid in tree]
            self.peak_gib = max(self.peak_gib, sum(sizes) / 2**20)
            self.largest_gib = max([self.largest_gib, *(read_kib(pid, "status", "VmHWM:") for pid in tree)])
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


def cpu_seconds_of(pid: int) -> float:
    """Of the process and of its descendants that have ended."""
    fields = stat_fields(pid)
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def read_kib(pid: int, file: str, name: str) -> float:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith(name)), 0.0)


@dataclass(frozen=True)
class Turn:
    """What one side did in one process tree, by step."""

    ends: list[float]
    """When each step ended."""
    tokens: list[float]
    cpu_seconds: list[float]
    """Of the whole tree, up to the end of each step."""
    peak_gib: float | None
    largest_gib: float
    stopped: bool = False
    """Whether it was stopped at the limit."""
    failed: str = ""
    """The end of its output, if it failed."""
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WatchedRun:
    lines: list[str]
    monitor: TreeMonitor
    stopped: bool
    failed: str


def run_turn(
    name: str,
    command: list[str],
    *,
    steps: Path,
    threads: int,
    limit: float,
    environment: Mapping[str, str] | None = None,
) -> WatchedRun:
    """Run the command for at most `limit` seconds, and print each step as it ends."""
    begun, seen, stopped = time.monotonic(), 0, False
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=variables, start_new_session=True
        )
        with TreeMonitor(process.pid, steps) as monitor:
            while process.poll() is None:
                seen = show_steps(name, find_lines(steps), seen, since=begun)
                if time.monotonic() - begun > limit:
                    stopped = True
                    stop(process)
                    break
                time.sleep(POLL_SECONDS)
            code = process.wait()
        lines = find_lines(steps)
        show_steps(name, lines, seen, since=begun)
        output.seek(0)
        failed = output.read()[-3000:] if code and not stopped else ""
    if failed:
        print(f"{name} ended with {code}:\n{failed}", file=sys.stderr, flush=True)
    return WatchedRun(lines, monitor, stopped, failed)


def show_steps(name: str, lines: list[str], seen: int, *, since: float) -> int:
    for number, line in enumerate(lines[seen:], seen + 1):
        at = f"{time.monotonic() - since:.0f} s"
        found = json.loads(line)
        took = found["at"] - json.loads(lines[number - 2])["at"] if number > 1 else None
        spent = "" if took is None else f", {took:.2f} s"
        print(f"{name}: step {number}{spent} (after {at})", file=sys.stderr, flush=True)
    return len(lines)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask the command to end, wait a little, then end it with everything that it started."""
    tree = find_tree(process.pid)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        tree = sorted({*tree, *find_tree(process.pid)})
    for pid in tree:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def summarize(turns: list[Turn]) -> dict[str, Any]:
    """Medians over the steps of all turns but their first, which records, compiles and allocates."""
    steps = [(turn, at) for turn in turns for at in range(1, min(len(turn.ends), len(turn.cpu_seconds)))]
    found: dict[str, Any] = {"steps_counted": len(steps)}
    if any(turn.stopped for turn in turns):
        found["stopped_at_the_limit"] = sum(turn.stopped for turn in turns)
    failures = [turn.failed for turn in turns if turn.failed]
    if failures:
        found["failed"] = failures[-1].strip().splitlines()[-1]
    peaks = [turn.peak_gib for turn in turns if turn.peak_gib is not None]
    if peaks:
        found["peak_gib"] = round(max(peaks), 2)
    found["largest_process_gib"] = round(max(turn.largest_gib for turn in turns), 2)
    for name in sorted({name for turn in turns for name in turn.extra}):
        found[name] = round(median([turn.extra[name] for turn in turns if name in turn.extra]), 2)
    if len(steps) < LEAST_COUNTED:
        return found | {"too_few_steps": True}
    seconds = [turn.ends[at] - turn.ends[at - 1] for turn, at in steps]
    spent = [turn.cpu_seconds[at] - turn.cpu_seconds[at - 1] for turn, at in steps]
    tokens = [turn.tokens[at] for turn, at in steps]
    found |= {
        "tokens_per_second": round(median(map(divide, tokens, seconds)), 1),
        "tokens_per_cpu_second": round(median(map(divide, tokens, spent)), 1),
        "seconds_per_step": round(median(seconds), 2),
        "cpu_seconds_per_step": round(median(spent), 2),
        "tokens_per_step": round(median(tokens)),
    }
    if "planned_seconds_per_step" in found:
        found["error_of_planned_seconds"] = relative(
            found["planned_seconds_per_step"], found["seconds_per_step"]
        )
    if "used_gib" in found:
        found["error_of_planned_gib"] = relative(found["planned_gib"], found["used_gib"])
    return found


def compare_sides(figures: Mapping[str, Any]) -> dict[str, float]:
    ours, theirs = figures.get("graftwork", {}), figures.get("trl", {})
    found = {}
    for by in ("second", "cpu_second"):
        rate = f"tokens_per_{by}"
        if ours.get(rate) and theirs.get(rate):
            found[f"times_as_many_{rate}"] = round(ours[rate] / theirs[rate], 2)
    if ours.get("peak_gib") and theirs.get("peak_gib"):
        found["share_of_memory"] = round(ours["peak_gib"] / theirs["peak_gib"], 2)
    return found


def relative(planned: float, real: float) -> float:
    return round(planned / real - 1, 3) if real else 0.0


def divide(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0
