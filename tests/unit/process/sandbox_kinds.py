"""The ways that work on this machine, and eyes outside the box. Shared by the tests of the sandbox."""

import os
import time
from pathlib import Path

import pytest

from graftwork.process.sandbox import Limits, Sandbox, SandboxKind, why_not
from graftwork.process.sandbox.run import WAYS
from graftwork.records.base import MIB

PATIENT = Limits(wall_seconds=120, memory_bytes=256 * MIB, processes=8)
"""For code that ends by itself: a busy machine must not look like a limit."""

NAME_ITSELF = "import ctypes; ctypes.CDLL(None).prctl(15, b'{name}')\n"
"""A name by which a process is found from outside, whatever it does."""


def require_way(kind: SandboxKind) -> SandboxKind:
    lacking = why_not(kind)
    if lacking:
        pytest.skip(f"{kind} does not work here: {lacking}")
    return kind


def each_way(test):
    return pytest.mark.parametrize("kind", WAYS, ids=str)(test)


def run_in(kind: SandboxKind, source: str, *, limits: Limits = PATIENT, **more):
    return Sandbox(require_way(kind), limits).run(source, **more)


def run_until_late(run, seconds: float, *, begun: str):
    """A run whose time ends after the program has printed that it began; with longer times on a slow machine.

    `run` takes the limits of time.
    """
    while True:
        result = run({"wall_seconds": seconds, "cpu_seconds": max(5, int(4 * seconds))})
        if begun in result.stdout or result.reason != "wall_clock" or seconds > 60:
            return result
        seconds *= 4


def processes_named(name: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == name:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def nobody_is_named(name: str) -> bool:
    return comes_true(lambda: not processes_named(name))


def comes_true(question, *, seconds: float = 120.0) -> bool:
    """Killed processes take the kernel a moment to bury; nothing is waited for once they are gone."""
    deadline = time.monotonic() + seconds
    while not question():
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True
