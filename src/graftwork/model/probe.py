"""Measures this machine: a matrix rate within a second, or all rates of a device.

`python -m graftwork.model.probe` prints the facts of the device as one line of JSON, with the matrix rate; it
is a process of its own, so that planning needs no torch. A full probe measures products, copies, launches,
transfers and the disk; each rate is the median of several runs. Leaves nothing behind.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from graftwork.model.shape import joined_sizes
from graftwork.process.machine import COLD_DRIVER_SECONDS, ask_nvidia_smi, count_cores
from graftwork.process.preload import SHARED
from graftwork.records.base import GIB, MIB
from graftwork.records.plan import FREE_SHARE, DeviceFacts, DeviceName, ModelShape, ProductRate


def describe_device(*, threads: int | None = None) -> DeviceFacts:
    """Describe the device without torch."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return DeviceFacts(kind="cpu", name=_cpu_name(), memory_gib=pages / GIB, threads=threads or count_cores())


def probe_device(*, threads: int | None = None) -> DeviceFacts:
    """Probe the GPU if there is one, else the CPU, with a measured matrix rate, or without it if torch is not
    installed. `CUDA_VISIBLE_DEVICES=` hides a GPU from everybody.
    """
    facts = describe_device(threads=threads)
    measured = _probe(facts.threads)
    return facts if measured is None else facts.model_copy(update={**measured, "certainty": "probed"})


@cache
def _probe(threads: int) -> dict[str, Any] | None:
    """Once per process: a project of seven models need not probe the same machine seven times."""
    preloaded = SHARED.run("graftwork.model.probe", [str(threads)])
    if preloaded is not None and preloaded[0] == 0:
        code, printed = preloaded
    else:
        command = [sys.executable, "-m", "graftwork.model.probe", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        code, printed = done.returncode, done.stdout
    return None if code else read_facts(printed)


def read_facts(printed: str) -> dict[str, Any] | None:
    """The last line that is an object: libraries print warnings too, even at the end of the process."""
    for line in reversed(printed.splitlines()):
        with suppress(ValueError):
            facts = json.loads(line)
            if isinstance(facts, dict):
                return facts
    return None


def measure(threads: int) -> dict[str, Any]:
    """Measure the device of this machine, and its matrix rate."""
    import torch

    if not torch.cuda.is_available():
        return _measure_cpu(threads)
    gpu = torch.cuda.get_device_properties(0)
    # Several GPUs share one run: the oldest decides.
    ages = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    return {
        "kind": "cuda",
        "name": gpu.name,
        "memory_gib": gpu.total_memory / GIB,
        "capability": min(major + minor / 10 for major, minor in ages),
        "gflops": _measure_gpu(),
    }


def _measure_gpu() -> float:
    """Median rate of half-precision products as large as those of a decoder's layers."""
    import torch

    x, w = (torch.randn(4096, 4096, device="cuda", dtype=torch.float16) for _ in range(2))
    rates: list[float] = []
    for _ in range(20):
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        for _ in range(8):
            torch.mm(x, w)
        torch.cuda.synchronize()
        rates.append(8 * 2 * 4096**3 / (time.perf_counter() - started_at) / 1e9)
    return sorted(rates)[len(rates) // 2]


def _measure_cpu(threads: int) -> dict[str, float]:
    """Median rate of products the size of a small decoder's layers, and the share of the cores they got; and
    how fast weights beyond the cache are read.
    """
    import torch

    x, w = torch.randn(1024, 576), torch.randn(1536, 576)
    torch.set_num_threads(1)
    of_core = _median_rate(lambda: torch.nn.functional.linear(x, w), 0.2, clock=time.process_time)
    torch.set_num_threads(threads)
    started, used = time.perf_counter(), time.process_time()
    rate = _median_rate(lambda: torch.nn.functional.linear(x, w), 0.5)
    share = min((time.process_time() - used) / (time.perf_counter() - started) / threads, 1.0)
    if share < FREE_SHARE:
        # Next to a busy process the threads of a product wait for each other in busy loops. A run that goes
        # on for longer notices it, and then gets what the cores that are left compute.
        rate = max(rate, of_core * threads * share)
    row, thin = x[:1], [torch.ones(7168, 576) for _ in range(THIN_MATRICES)]

    def read_weights() -> object:
        return [torch.nn.functional.linear(row, matrix) for matrix in thin]

    passes = _median_rate(read_weights, 0.2)
    torch.set_num_threads(1)
    passes_of_core = _median_rate(read_weights, 0.1, clock=time.process_time)
    if share < FREE_SHARE:
        # As above. One core may read as fast as all of them.
        passes = max(passes, passes_of_core * min(threads * share, 1.0))
    product, weights = 2 * 1024 * 576 * 1536 / 1e9, sum(matrix.nbytes for matrix in thin)
    return {
        "gflops": product * rate,
        "core_share": share,
        "weights_s": passes * weights,
        "core_gflops": product * of_core,
        "core_weights_s": passes_of_core * weights,
    }


THIN_MATRICES = 8
"""Number of 16 MiB matrices; together larger than a CPU's cache."""


def _median_rate(
    work: Callable[[], object], seconds: float, *, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Calls per second of the clock."""
    work()
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or not rates:
        started_at = clock()
        for _ in range(CALLS_TOGETHER):
            work()
        rates.append(CALLS_TOGETHER / max(clock() - started_at, 1e-9))
    return sorted(rates)[len(rates) // 2]


CALLS_TOGETHER = 4


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


GPUS = Path("/proc/driver/nvidia/gpus")
DRIVER = Path("/proc/driver/nvidia/version")


def name_device() -> DeviceName:
    """The first GPU if one may be used, else the CPU."""
    gpu = None if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") else _name_and_driver()
    if gpu is None:
        return DeviceName(kind="cpu", name=describe_device().name, torch=torch_version())
    name, driver = gpu
    return DeviceName(kind="cuda", name=name, driver=driver, torch=torch_version())


def torch_version() -> str:
    """Empty if torch is not installed."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _name_and_driver() -> tuple[str, str] | None:
    """Name and driver: from the driver's own files, else from its tool."""
    files = sorted(GPUS.glob("*/information")) if GPUS.is_dir() else []
    names = [read_model(file.read_text(errors="replace")) for file in files]
    if names and names[0] and DRIVER.exists():
        return names[0], read_driver(DRIVER.read_text(errors="replace"))
    if not Path("/dev/nvidiactl").exists():
        return None
    listed = (ask_nvidia_smi(("name", "driver_version"), seconds=COLD_DRIVER_SECONDS) or "").splitlines()
    name, _, driver = (listed or [""])[0].partition(",")
    return (name.strip(), driver.strip()) if name.strip() else None


def read_model(information: str) -> str:
    """Read the GPU's name from the driver's file."""
    match = re.search(r"^Model:\s*(.+?)\s*$", information, re.M)
    return match.group(1) if match else ""


def read_driver(text: str) -> str:
    """The number in "NVRM version: NVIDIA UNIX … Kernel Module  580.95.05  Release …"."""
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match.group(1) if match else ""


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))


GOES = 5
GPU_TOKENS = (256, 1024, 4096)
CPU_TOKENS = (64, 256)
GPU_GO_SECONDS, CPU_GO_SECONDS = 0.004, 0.02
COPIED_BYTES = {"cuda": GIB, "cpu": 2**27}
LAUNCHES = 2000


def measure_products(shape: ModelShape, *, device: str, eight: bool) -> Iterator[ProductRate]:
    """Each product of a block, in 16 bits on a GPU and 32 on a CPU; in 8 bits if asked for."""
    import torch

    on_gpu = device == "cuda"
    whole = "float32"
    if on_gpu:
        whole = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
    for layer, (inputs, outputs) in joined_sizes(shape).items():
        for tokens in GPU_TOKENS if on_gpu else CPU_TOKENS:
            for dtype in (whole, "fp8") if eight else (whole,):
                multiply = _product(tokens, inputs, outputs, dtype, device)
                seconds = time_go(multiply, device=device, least=GPU_GO_SECONDS if on_gpu else CPU_GO_SECONDS)
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
    """Bytes read and written per second by a plain copy that exceeds any cache."""
    import torch

    count = COPIED_BYTES[device]
    source = torch.empty(count, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * count / time_go(lambda: target.copy_(source), device=device, least=0.01)


def measure_launch(*, device: str) -> float:
    """Seconds that launching one small kernel takes."""
    import torch

    x = torch.zeros(8, device=device)
    durations = []
    for _ in range(GOES):
        wait(device)
        started_at = time.perf_counter()
        for _ in range(LAUNCHES):
            x.add_(1)
        wait(device)
        durations.append((time.perf_counter() - started_at) / LAUNCHES)
    return median(durations)


def time_go(work: Callable[[], Any], *, device: str, least: float) -> float:
    """Median seconds of one call, with as many calls per round as take `least` seconds."""
    work()
    wait(device)
    started_at = time.perf_counter()
    work()
    wait(device)
    calls = max(1, min(200, round(least / max(time.perf_counter() - started_at, 1e-6))))
    durations = []
    for _ in range(GOES):
        wait(device)
        started_at = time.perf_counter()
        for _ in range(calls):
            work()
        wait(device)
        durations.append((time.perf_counter() - started_at) / calls)
    return median(durations)


def wait(device: str) -> None:
    """Wait until the GPU is done."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


TRANSFERRED_BYTES = 2**28
DISK_BYTES, DISK_PIECE = 2**28, 2**23


def used_before() -> float | None:
    """Bytes of the first GPU used by other processes; must be read before this process uses the GPU."""
    printed = ask_nvidia_smi(("memory.used",), seconds=COLD_DRIVER_SECONDS)
    try:
        return float((printed or "").split()[0]) * MIB
    except (ValueError, IndexError):
        return None


def measure_context(before: float | None) -> float | None:
    """Bytes of this process's context besides what it allocated."""
    import torch

    if before is None:
        return None
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    size = total - free - before - torch.cuda.memory_reserved()
    return float(size) if size > 0 else None


def measure_transfers() -> tuple[float, float]:
    """Bytes per second from pinned host memory to the GPU, and back."""
    import torch

    host = torch.empty(TRANSFERRED_BYTES, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(TRANSFERRED_BYTES, dtype=torch.uint8, device="cuda")
    to_device = time_go(lambda: gpu.copy_(host, non_blocking=True), device="cuda", least=0.02)
    back = time_go(lambda: host.copy_(gpu, non_blocking=True), device="cuda", least=0.02)
    return TRANSFERRED_BYTES / to_device, TRANSFERRED_BYTES / back


def measure_disk(folder: Path) -> tuple[float, float | None] | None:
    """Bytes per second of a file written through to the disk, and read past the system's cache (None if the
    system would answer from memory). None if there is no room."""
    if shutil.disk_usage(folder).free < 4 * DISK_BYTES:
        return None
    file = folder / f".probe-{uuid.uuid4().hex[:8]}.part"
    piece = os.urandom(DISK_PIECE)
    try:
        started_at = time.perf_counter()
        with file.open("wb", buffering=0) as handle:
            for _ in range(DISK_BYTES // DISK_PIECE):
                handle.write(piece)
            os.fsync(handle.fileno())
        write_rate = DISK_BYTES / (time.perf_counter() - started_at)
        if not hasattr(os, "posix_fadvise"):
            return write_rate, None
        with file.open("rb", buffering=0) as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started_at = time.perf_counter()
            while handle.read(DISK_PIECE):
                pass
        return write_rate, DISK_BYTES / (time.perf_counter() - started_at)
    finally:
        file.unlink(missing_ok=True)
