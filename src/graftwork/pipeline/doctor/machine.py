"""The machine itself: processor, memory, swap, disk, write access, limits, clock.

In: the folder that work is done in and how much disk it needs. Out: checks. Changes nothing but a file
that it removes.
"""

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from graftwork.files.private import make_folder
from graftwork.model.probe import describe_device
from graftwork.pipeline.doctor.check import Check, decide
from graftwork.process.memory import machine_memory
from graftwork.records.units import GIB

MEMORY_GIB = 3.0
DISK_GIB = 3.0
OPEN_FILES = 1024
SWAPPED_GIB = 1.0
MADE = 1_735_689_600
"""The beginning of 2025: a clock before that is wrong, and certificates and heartbeats with it."""


def look_at_machine(folder: Path, *, disk_gib: float | None) -> Iterator[Check]:
    device, memory = describe_device(), machine_memory()
    limit = memory.get("limit", device.memory_gib)
    free = memory.get("free", limit)
    yield decide(
        "memory",
        limit >= MEMORY_GIB,
        f"{limit:.1f} GiB, {free:.1f} free",
        f"training wants {MEMORY_GIB:.0f} GiB or more",
    )
    yield _container(limit, device.memory_gib)
    yield _swap(memory)
    yield Check(name="processor", result="note", found=f"{device.name}, {device.threads} threads")
    yield look_at_disk(folder, needed=disk_gib)
    yield _writable(folder)
    yield _open_files()
    yield decide(
        "clock",
        time.time() > MADE,
        time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "set the machine's clock; heartbeats, deadlines and certificates hang on it",
    )


def _container(limit: float, machine: float) -> Check:
    if limit < machine * 0.99:
        found = f"limited to {limit:.1f} of the machine's {machine:.1f} GiB"
        return Check(name="container", result="note", found=found)
    return Check(name="container", result="note", found="no memory limit below the machine's")


def _swap(memory: dict[str, float]) -> Check:
    used = memory.get("swap_used")
    if used is None:
        return Check(name="swap", result="note", found="not told by this system")
    fix = "end what fills the memory: a run that swaps takes many times as long"
    return decide("swap", used < SWAPPED_GIB, f"{used:.1f} GiB in use", fix, otherwise="note")


def look_at_disk(folder: Path, *, needed: float | None) -> Check:
    near = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(near).free / GIB
    least = max(DISK_GIB, needed or 0.0)
    against = f", the plan needs {needed:.1f}" if needed is not None else ""
    return decide("disk", free >= least, f"{free:.1f} GiB free{against}", f"free at least {least:.0f} GiB")


def _writable(folder: Path) -> Check:
    made = not folder.exists()
    try:
        make_folder(folder)
        with tempfile.NamedTemporaryFile(dir=folder) as handle:
            handle.write(b"x")
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        return Check(
            name="write access", result="missing", found=str(error), fix="work in a folder of your own"
        )
    if made:
        folder.rmdir()
    return Check(name="write access", result="ok", found=str(folder))


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{soft} open files"
    fix = f"`ulimit -n {OPEN_FILES}`" + ("" if hard >= OPEN_FILES else ", which needs an administrator here")
    return decide("open files", unlimited or soft >= OPEN_FILES, found, fix, otherwise="note")
