"""Runs Python in a child process and measures how far its memory grew. Shared by the hostile tests.

A child, because the peak of a process never falls again, and because a bomb that goes off must not take the
test run with it: the child's address space is limited.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src"
_FRAME = """
import resource as _resource
_resource.setrlimit(_resource.RLIMIT_AS, ({most}, {most}))
def _kib(name):
    with open("/proc/self/status") as _status:
        return next(int(line.split()[1]) for line in _status if line.startswith(name))
{prepare}
with open("/proc/self/clear_refs", "w") as _file:
    _file.write("5")  # the peak counts from here on
_before = _kib("VmRSS")
try:
{attack}
finally:
    print("GREW", _kib("VmHWM") - _before, flush=True)
"""


def each(names: Iterable[str], *, quick: Collection[str]) -> pytest.MarkDecorator:
    """A test for each name; those that are not quick run in `make test-hostile` alone."""
    unknown = set(quick) - set(names)
    assert not unknown, unknown
    marks = {name: () if name in quick else pytest.mark.slow for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


class Measured(NamedTuple):
    """What the child printed, its exit code, and how many MiB its peak lay above its beginning."""

    output: str
    errors: str
    code: int
    grown: float


def measure(
    attack: str, *, prepare: str = "", most: int = 6 << 30, timeout: float = 300, **environment: str
) -> Measured:
    """Run `attack` after `prepare`, which is not measured: imports, and files that are written."""
    program = _FRAME.format(
        prepare=textwrap.dedent(prepare), attack=textwrap.indent(textwrap.dedent(attack), "    "), most=most
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
    )
    output, mark, grown = done.stdout.rpartition("GREW ")
    assert mark, done.stderr
    return Measured(output, done.stderr, done.returncode, int(grown) / 1024)
