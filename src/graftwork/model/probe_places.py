"""What stands around a device: its context, the way to host memory, the disk. Measured.

In: a folder. Out: bytes and bytes a second. Leaves nothing behind.
"""

import os
import shutil
import subprocess
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from graftwork.model.probe_products import time_go
from graftwork.records.units import MIB

TRANSFERRED_BYTES = 2**28
DISK_BYTES, DISK_PIECE = 2**28, 2**23


class Transfers(NamedTuple):
    to_device: float
    from_device: float


class Disk(NamedTuple):
    write: float
    read: float | None
    """None where the system would answer from memory."""


def used_before() -> float | None:
    """Bytes of the first card that others hold; must be asked before this process touches the card."""
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=20).stdout
        return float(said.split()[0]) * MIB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def measure_context(before: float | None) -> float | None:
    """Bytes that this process's context takes beside what it asked for."""
    import torch

    if before is None:
        return None
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    held = total - free - before - torch.cuda.memory_reserved()
    return float(held) if held > 0 else None


def measure_transfers() -> Transfers:
    """Pinned host memory to the card and back."""
    import torch

    host = torch.empty(TRANSFERRED_BYTES, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(TRANSFERRED_BYTES, dtype=torch.uint8, device="cuda")
    there = time_go(lambda: card.copy_(host, non_blocking=True), device="cuda", least=0.02)
    back = time_go(lambda: host.copy_(card, non_blocking=True), device="cuda", least=0.02)
    return Transfers(TRANSFERRED_BYTES / there, TRANSFERRED_BYTES / back)


def measure_disk(folder: Path) -> Disk | None:
    """A file written through to the disk, then read past the system's cache; None where there is no room."""
    if shutil.disk_usage(folder).free < 4 * DISK_BYTES:
        return None
    file = folder / f".probe-{uuid.uuid4().hex[:8]}.part"
    piece = os.urandom(DISK_PIECE)
    try:
        begun = time.perf_counter()
        with file.open("wb", buffering=0) as handle:
            for _ in range(DISK_BYTES // DISK_PIECE):
                handle.write(piece)
            os.fsync(handle.fileno())
        return Disk(DISK_BYTES / (time.perf_counter() - begun), _read(file))
    finally:
        file.unlink(missing_ok=True)


def _read(file: Path) -> float | None:
    if not hasattr(os, "posix_fadvise"):
        return None
    with file.open("rb", buffering=0) as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()
        while handle.read(DISK_PIECE):
            pass
        return DISK_BYTES / (time.perf_counter() - begun)
