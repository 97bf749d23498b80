"""The type that weights and activations are held in: what the device computes fast and safely.

In: what was asked for, and what the device has. Out: a type's name. bfloat16 where there is hardware
for it, float16 with loss scaling on older cards, float32 on processors without AMX: there bfloat16 is
emulated, or no faster, and rounds more.
"""

from pathlib import Path
from typing import Literal, cast

Precision = Literal["float32", "bfloat16", "float16"]

FIRST_WITH_BFLOAT16 = 8.0
"""Compute capability of Ampere."""

CPUINFO = Path("/proc/cpuinfo")


def choose_precision(
    asked: str, *, kind: Literal["cpu", "cuda"], amx: bool = False, capability: float | None = None
) -> Precision:
    """Pure. A card of unknown age is taken for an old one: float16 works on all of them."""
    if asked != "auto":
        return cast(Precision, asked)
    if kind == "cuda":
        return "bfloat16" if (capability or 0) >= FIRST_WITH_BFLOAT16 else "float16"
    return "bfloat16" if amx else "float32"


def has_amx_here() -> bool:
    """Whether this machine's processors have matrix units for bfloat16."""
    return has_amx(_read(CPUINFO))


def has_amx(cpuinfo: str) -> bool:
    """Whether all processors have matrix units for bfloat16."""
    flags = [line.split() for line in cpuinfo.splitlines() if line.startswith("flags")]
    return bool(flags) and all("amx_bf16" in words and "amx_tile" in words for words in flags)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
