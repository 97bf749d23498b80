"""Measures rates of a device with torch: products, copies, launches, transfers, the disk.

In: a shape, a device, a folder. Out: rates, each the median of several runs. Leaves nothing behind.
"""

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from graftwork.model.shape import joined_sizes
from graftwork.process.devices import COLD_DRIVER_SECONDS, ask_nvidia_smi
from graftwork.records.base import GIB, MIB
from graftwork.records.plan import ModelShape, ProductRate

GOES = 5
CARD_TOKENS = (256, 1024, 4096)
PROCESSOR_TOKENS = (64, 256)
CARD_GO_SECONDS, PROCESSOR_GO_SECONDS = 0.004, 0.02
COPIED_BYTES = {"cuda": GIB, "cpu": 2**27}
LAUNCHES = 2000


def measure_products(shape: ModelShape, *, device: str, eight: bool) -> Iterator[ProductRate]:
    """Each product of a block, in 16 bits on a card and 32 on a processor; in 8 bits where asked for."""
    import torch

    on_card = device == "cuda"
    whole = "float32"
    if on_card:
        whole = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
    for layer, (inputs, outputs) in joined_sizes(shape).items():
        for tokens in CARD_TOKENS if on_card else PROCESSOR_TOKENS:
            for dtype in (whole, "fp8") if eight else (whole,):
                multiply = _product(tokens, inputs, outputs, dtype, device)
                seconds = time_go(
                    multiply, device=device, least=CARD_GO_SECONDS if on_card else PROCESSOR_GO_SECONDS
                )
                yield ProductRate(
                    layer=layer,
                    tokens=tokens,
                    inputs=inputs,
                    outputs=outputs,
                    dtype=dtype,
                    flops=2.0 * tokens * inputs * outputs / seconds,
                )


def _product(tokens: int, inputs: int, outputs: int, dtype: str, device: str) -> Callable[[], Any]:
    import torch

    if dtype != "fp8":
        kind = getattr(torch, dtype)
        x = torch.randn(tokens, inputs, device=device, dtype=kind)
        w = torch.randn(outputs, inputs, device=device, dtype=kind)
        return lambda: torch.nn.functional.linear(x, w)
    codes = torch.randn(tokens, inputs, device=device).to(torch.float8_e4m3fn)
    weight = torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn)
    row, column = torch.ones(tokens, 1, device=device), torch.ones(1, outputs, device=device)
    return lambda: torch._scaled_mm(
        codes, weight.t(), scale_a=row, scale_b=column, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def measure_copy(*, device: str) -> float:
    """Bytes read and written a second, together, by a plain copy that no cache holds."""
    import torch

    count = COPIED_BYTES[device]
    source = torch.empty(count, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * count / time_go(lambda: target.copy_(source), device=device, least=0.01)


def measure_launch(*, device: str) -> float:
    """Seconds that launching one small kernel takes."""
    import torch

    x = torch.zeros(8, device=device)
    found = []
    for _ in range(GOES):
        wait(device)
        begun = time.perf_counter()
        for _ in range(LAUNCHES):
            x.add_(1)
        wait(device)
        found.append((time.perf_counter() - begun) / LAUNCHES)
    return median(found)


def time_go(work: Callable[[], Any], *, device: str, least: float) -> float:
    """Median seconds of one call, where a go is as many calls as take `least` seconds."""
    work()
    wait(device)
    begun = time.perf_counter()
    work()
    wait(device)
    calls = max(1, min(200, round(least / max(time.perf_counter() - begun, 1e-6))))
    found = []
    for _ in range(GOES):
        wait(device)
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        wait(device)
        found.append((time.perf_counter() - begun) / calls)
    return median(found)


def wait(device: str) -> None:
    """Wait until the card is done."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


TRANSFERRED_BYTES = 2**28
DISK_BYTES, DISK_PIECE = 2**28, 2**23


def used_before() -> float | None:
    """Bytes of the first card that others hold; must be asked before this process touches the card."""
    printed = ask_nvidia_smi(("memory.used",), seconds=COLD_DRIVER_SECONDS)
    try:
        return float((printed or "").split()[0]) * MIB
    except (ValueError, IndexError):
        return None


def measure_context(before: float | None) -> float | None:
    """Bytes that this process's context takes besides what it allocated."""
    import torch

    if before is None:
        return None
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    held = total - free - before - torch.cuda.memory_reserved()
    return float(held) if held > 0 else None


def measure_transfers() -> tuple[float, float]:
    """Bytes a second from pinned host memory to the card, and back."""
    import torch

    host = torch.empty(TRANSFERRED_BYTES, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(TRANSFERRED_BYTES, dtype=torch.uint8, device="cuda")
    there = time_go(lambda: card.copy_(host, non_blocking=True), device="cuda", least=0.02)
    back = time_go(lambda: host.copy_(card, non_blocking=True), device="cuda", least=0.02)
    return TRANSFERRED_BYTES / there, TRANSFERRED_BYTES / back


def measure_disk(folder: Path) -> tuple[float, float | None] | None:
    """Bytes a second of a file written through to the disk, and read past the system's cache (None where the
    system would answer from memory). None where there is no room."""
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
        written = DISK_BYTES / (time.perf_counter() - begun)
        if not hasattr(os, "posix_fadvise"):
            return written, None
        with file.open("rb", buffering=0) as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begun = time.perf_counter()
            while handle.read(DISK_PIECE):
                pass
        return written, DISK_BYTES / (time.perf_counter() - begun)
    finally:
        file.unlink(missing_ok=True)
