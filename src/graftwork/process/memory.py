"""Memory of this process and of the machine, or the container, that it runs in.

Out: figures in GiB, None where the system does not report them. Reads /proc and the control groups of both
versions; elsewhere only the high-water mark is known.
"""

import ctypes
import re
import resource
import signal
import sys
from pathlib import Path

from graftwork.files.disk import read_or_empty
from graftwork.records.base import GIB
from graftwork.records.errors import OutOfMemory
from graftwork.records.fleet import Vitals

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60
"""Control groups of version 1 say a number near 2^63 where they mean none."""


def peak_memory_gib() -> float:
    """The high-water mark of resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bytes_ = peak if sys.platform == "darwin" else peak * 1024
    return float(bytes_ / GIB)


def resident_gib() -> float:
    """What this process holds now; the high-water mark where the system does not report it."""
    pages = read_or_empty(PROC / "self" / "statm").split()
    return int(pages[1]) * resource.getpagesize() / GIB if len(pages) > 1 else peak_memory_gib()


def release_free_memory() -> bool:
    """Give memory that was freed back to the system; whether any was. The C library keeps it otherwise, and
    what is allocated next in large pieces comes on top. Does nothing where the library has no such call."""
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def process_peak_gib(pid: int) -> float | None:
    """The high-water mark of another process; None where the system does not report it."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", read_or_empty(PROC / str(pid) / "status"), re.M)
    return None if found is None else int(found[1]) * 1024 / GIB


def machine_memory() -> dict[str, float]:
    """`limit`, `free` and `swap_used` as far as they are known; a container's limit where it is lower."""
    found = parse_meminfo(read_or_empty(PROC / "meminfo"))
    # Limit and use of the control group, without the file cache that the kernel would give back.
    if group := _own_group():
        names = ("memory.max", "memory.current", "inactive_file")
    else:
        group = CGROUPS / "memory"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    most, used = _number(group / names[0]), _number(group / names[1])
    cache = parse_counts(read_or_empty(group / "memory.stat")).get(names[2], 0)
    if most is not None and most < _NO_LIMIT and most / GIB < found.get("limit", _NO_LIMIT):
        limit = found["limit"] = most / GIB
        if used is not None:
            found["free"] = min(found.get("free", limit), max(limit - max(used - cache, 0) / GIB, 0.0))
    return found


def parse_meminfo(text: str) -> dict[str, float]:
    """The lines of /proc/meminfo that matter, in GiB."""
    lines = {name: int(number) * 1024 / GIB for name, number in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    found = {}
    if "MemTotal" in lines:
        found["limit"] = lines["MemTotal"]
    if "MemAvailable" in lines:
        found["free"] = lines["MemAvailable"]
    if "SwapTotal" in lines and "SwapFree" in lines:
        found["swap_used"] = lines["SwapTotal"] - lines["SwapFree"]
    return found


def swapped_pages() -> int | None:
    """Pages that the machine has moved in and out of swap since it started."""
    counts = parse_counts(read_or_empty(PROC / "vmstat"))
    return counts["pswpin"] + counts["pswpout"] if {"pswpin", "pswpout"} <= counts.keys() else None


def kernel_kills() -> int:
    """How often the kernel has killed for want of memory, here and in this container."""
    host = parse_counts(read_or_empty(PROC / "vmstat")).get("oom_kill", 0)
    group = _own_group()
    inside = parse_counts(read_or_empty(group / "memory.events")).get("oom_kill", 0) if group else 0
    return max(host, inside)


def parse_counts(text: str) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _own_group() -> Path | None:
    """The folder of this process's control group of version 2."""
    match = re.search(r"^0::(/.*)$", read_or_empty(PROC / "self" / "cgroup"), re.M)
    if match is None:
        return None
    for folder in (CGROUPS / match.group(1).lstrip("/"), CGROUPS):
        if (folder / "memory.max").exists():
            return folder
    return None


def _number(path: Path) -> int | None:
    text = read_or_empty(path).strip()
    return int(text) if text.isdigit() else None


FIX = "use fewer rows at a time, shorter rows, or a smaller base; or a machine with more memory"
NEARLY_NONE = 0.03
"""Less than this share of all memory free just before a kill: it was killed for that."""
_UNITS = {"bytes": 2**-30, "B": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0, "TiB": 2.0**10}
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|B|KiB|MiB|GiB|TiB)")


def is_exhaustion(error: BaseException) -> bool:
    """Whether a device, or the processor's allocator, had no memory left."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "MemoryError" in names or "OutOfMemoryError" in names:
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def explain_exhaustion(error: BaseException) -> OutOfMemory:
    """The error's text, with the memory of this process and its devices."""
    return OutOfMemory(
        "out of memory",
        why=str(error).splitlines()[0][:300] if str(error) else type(error).__name__,
        fix=FIX,
        figures={**measure(), **requested_gib(str(error))},
    )


def requested_gib(message: str) -> dict[str, float]:
    """The size of the failed allocation, from the error message."""
    match = _ASKED.search(message)
    return {"asked_gib": float(match.group(1)) * _UNITS[match.group(2)]} if match else {}


def measure() -> dict[str, float]:
    """The high-water marks of this process: in host memory, and on the device that torch uses."""
    figures = {"peak_memory_gib": peak_memory_gib()}
    machine = machine_memory()
    if "limit" in machine:
        figures["memory_limit_gib"] = machine["limit"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        figures["peak_memory_gib"] = torch.cuda.max_memory_reserved() / GIB
        figures["memory_limit_gib"] = torch.cuda.mem_get_info()[1] / GIB
    return figures


def peak_allocated_gib() -> float | None:
    """What the tensors of this process used at most of its device; None without one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return float(torch.cuda.max_memory_allocated()) / GIB


def killed_for_memory(code: int, *, kills: int, vitals: Vitals | None) -> OutOfMemory | None:
    """Whether a worker that ended with `code` was killed because the machine had no memory left.

    `kills` is how often the kernel killed for that while the worker ran, `vitals` its last ones.
    """
    if code != -signal.SIGKILL:
        return None
    free = vitals.memory_free_gib if vitals else None
    limit = vitals.memory_limit_gib if vitals else None
    starved = free is not None and limit is not None and free < NEARLY_NONE * limit
    if not kills and not starved:
        return None
    why = "the kernel killed for want of memory" if kills else f"only {free:.2f} GiB of memory were free"
    figures = {"peak_memory_gib": vitals.memory_gib} if vitals else {}
    if limit is not None:
        figures["memory_limit_gib"] = limit
    return OutOfMemory("out of memory", why=why, fix=FIX, figures=figures)
