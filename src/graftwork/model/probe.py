"""What this machine gives: a matrix rate, measured in a second in a process of its own.

In: nothing. Out: one JSON line with the device's facts. Run as `python -m graftwork.model.probe`.
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from graftwork.records.plan import DeviceFacts


def describe_device(*, threads: int | None = None) -> DeviceFacts:
    """What can be known without torch."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return DeviceFacts(kind="cpu", name=_processor(), memory_gib=pages / 2**30, threads=threads or available)


def probe_device(*, threads: int | None = None) -> DeviceFacts:
    """The same with a measured matrix rate; without it where torch is not installed."""
    facts = describe_device(threads=threads)
    command = [sys.executable, "-m", "graftwork.model.probe", str(facts.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return facts
    gflops = float(json.loads(done.stdout.splitlines()[-1])["gflops"])
    return facts.model_copy(update={"gflops": gflops, "certainty": "probed"})


def measure_gflops(threads: int) -> float:
    """Median rate of products the size of a small decoder's layers."""
    import torch

    torch.set_num_threads(threads)
    x, w = torch.randn(1024, 576), torch.randn(1536, 576)
    rates: list[float] = []
    stop = time.perf_counter() + 0.8
    while time.perf_counter() < stop:
        begun = time.perf_counter()
        for _ in range(4):
            torch.nn.functional.linear(x, w)
        rates.append(4 * 2 * 1024 * 576 * 1536 / (time.perf_counter() - begun) / 1e9)
    return sorted(rates)[len(rates) // 2]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    print(json.dumps({"gflops": measure_gflops(int(sys.argv[1]))}))
