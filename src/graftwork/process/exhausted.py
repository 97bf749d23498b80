"""Out of memory: how it is recognised, and what was measured when it happened.

In: an error, or how a process ended. Out: an OutOfMemory with figures in GiB, so that the next plan
knows better. Knows the errors of torch by name alone: it runs where torch is not installed.
"""

import re
import signal
import sys

from graftwork.process.memory import machine_memory, peak_memory_gib
from graftwork.records.errors import OutOfMemory
from graftwork.records.job import Vitals
from graftwork.records.units import GIB

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
    """The error in words, with what this process and its devices had taken."""
    return OutOfMemory(
        "out of memory",
        why=str(error).splitlines()[0][:300] if str(error) else type(error).__name__,
        fix=FIX,
        figures={**measure(), **asked_for(str(error))},
    )


def asked_for(message: str) -> dict[str, float]:
    """How much the allocator was asked for in vain, as its message says."""
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
