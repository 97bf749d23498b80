"""Memory and GPUs of this machine, and how much of them this process, its container and others use.

Output: figures in GiB and one DeviceVitals for each GPU that this process may use; None if the system does
not report them. Reads /proc and the control groups of both versions; elsewhere only the high-water mark is
known. GPUs are asked through NVML where its Python package is installed, else with the command `nvidia-smi`:
never raises and never waits long, since a worker must not suffer from being monitored. Says too whether an
error or a kill means that memory ran out.
"""

import csv
import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graftwork.files.disk import read_or_empty
from graftwork.records.base import GIB
from graftwork.records.errors import OutOfMemory
from graftwork.records.fleet import DeviceVitals, Vitals

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60
"""Control groups of version 1 say a number near 2^63 where they mean none."""


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def peak_memory_gib() -> float:
    """The high-water mark of resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bytes_ = peak if sys.platform == "darwin" else peak * 1024
    return float(bytes_ / GIB)


def resident_gib() -> float:
    """Resident memory of this process; the high-water mark if the system does not report it."""
    pages = read_or_empty(PROC / "self" / "statm").split()
    return int(pages[1]) * resource.getpagesize() / GIB if len(pages) > 1 else peak_memory_gib()


def release_free_memory() -> bool:
    """Return freed memory to the system; returns whether there was any. Otherwise the C library keeps it, and
    later large allocations come on top. Does nothing if the library has no such call.
    """
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def process_peak_gib(pid: int) -> float | None:
    """The high-water mark of another process; None if the system does not report it."""
    match = re.search(r"^VmHWM:\s+(\d+) kB", read_or_empty(PROC / str(pid) / "status"), re.M)
    return None if match is None else int(match[1]) * 1024 / GIB


def machine_memory() -> dict[str, float]:
    """`limit`, `free` and `swap_used` as far as known; a container's limit if it is lower."""
    figures = parse_meminfo(read_or_empty(PROC / "meminfo"))
    # Limit and use of the control group, without the file cache that the kernel would give back.
    if group := _own_group():
        names = ("memory.max", "memory.current", "inactive_file")
    else:
        group = CGROUPS / "memory"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    most, used = _number(group / names[0]), _number(group / names[1])
    cache = parse_counts(read_or_empty(group / "memory.stat")).get(names[2], 0)
    if most is not None and most < _NO_LIMIT and most / GIB < figures.get("limit", _NO_LIMIT):
        limit = figures["limit"] = most / GIB
        if used is not None:
            figures["free"] = min(figures.get("free", limit), max(limit - max(used - cache, 0) / GIB, 0.0))
    return figures


def parse_meminfo(text: str) -> dict[str, float]:
    """The lines of /proc/meminfo that matter, in GiB."""
    lines = {name: int(number) * 1024 / GIB for name, number in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    figures = {}
    if "MemTotal" in lines:
        figures["limit"] = lines["MemTotal"]
    if "MemAvailable" in lines:
        figures["free"] = lines["MemAvailable"]
    if "SwapTotal" in lines and "SwapFree" in lines:
        figures["swap_used"] = lines["SwapTotal"] - lines["SwapFree"]
    return figures


def swapped_pages() -> int | None:
    """Pages that the machine has moved in and out of swap since it started."""
    counts = parse_counts(read_or_empty(PROC / "vmstat"))
    return counts["pswpin"] + counts["pswpout"] if {"pswpin", "pswpout"} <= counts.keys() else None


def kernel_kills() -> int:
    """How often the kernel has killed a process because memory ran out, here and in this container."""
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
"""If less than this share of memory was free just before a kill, that was the reason."""
_UNITS = {"bytes": 2**-30, "B": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0, "TiB": 2.0**10}
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|B|KiB|MiB|GiB|TiB)")


def is_exhaustion(error: BaseException) -> bool:
    """Whether a device, or the CPU's allocator, had no memory left."""
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
    """Return whether a worker that ended with `code` was killed because the machine ran out of memory.
    `kills` is the number of such kills by the kernel while the worker ran, `vitals` its last sample.
    """
    if code != -signal.SIGKILL:
        return None
    free = vitals.memory_free_gib if vitals else None
    limit = vitals.memory_limit_gib if vitals else None
    starved = free is not None and limit is not None and free < NEARLY_NONE * limit
    if not kills and not starved:
        return None
    why = (
        "the kernel killed a process because memory ran out"
        if kills
        else f"only {free:.2f} GiB of memory were free"
    )
    figures = {"peak_memory_gib": vitals.memory_gib} if vitals else {}
    if limit is not None:
        figures["memory_limit_gib"] = limit
    return OutOfMemory("out of memory", why=why, fix=FIX, figures=figures)


Probe = Callable[[], tuple[DeviceVitals, ...]]

QUERY = (
    "index", "uuid", "name", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu",
    "power.draw",
)  # fmt: skip
PATIENCE_SECONDS = 5.0
COLD_DRIVER_SECONDS = 20.0
"""A driver's first answer after the machine has started takes long."""
FAILURES_BEFORE_REST = 3


def find_probe() -> Probe | None:
    """How devices can be asked on this machine, or None if there are none to ask."""
    nvml = _nvml_probe()
    if nvml is not None:
        return _resting(nvml)

    def ask_command() -> tuple[DeviceVitals, ...]:
        printed = ask_nvidia_smi(QUERY)
        if printed is None:
            raise OSError("nvidia-smi failed")
        return parse_smi(printed, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))

    return _resting(ask_command) if shutil.which("nvidia-smi") else None


def parse_smi(printed: str, *, visible: str | None = None) -> tuple[DeviceVitals, ...]:
    """Parse the output of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`. A garbled line is
    skipped.
    """
    devices = []
    for fields in csv.reader(printed.splitlines(), skipinitialspace=True):
        if len(fields) != len(QUERY) or not fields[0].strip().isdigit():
            continue
        index, uuid = int(fields[0]), fields[1].strip()
        if not is_visible(index, uuid, visible):
            continue
        use, used, total, temperature, power = (read_number(field) for field in fields[3:])
        devices.append(
            DeviceVitals(
                index=index,
                name=fields[2].strip(),
                use_percent=use,
                memory_gib=used / 1024 if used is not None else None,
                memory_total_gib=total / 1024 if total is not None else None,
                temperature_c=temperature,
                power_watts=power,
            )
        )
    return tuple(devices)


def is_visible(index: int, uuid: str, visible: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES, as it was given, lets this process use the device."""
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return any(str(index) == name or (name and uuid.startswith(name)) for name in names)


def read_number(field: str) -> float | None:
    """Parse a number; GPUs report `[N/A]` or `[Not Supported]` for unknown values."""
    try:
        return float(field)
    except ValueError:
        return None


def ask_nvidia_smi(fields: Sequence[str], *, seconds: float = PATIENCE_SECONDS) -> str | None:
    """Query these fields from `nvidia-smi`, one line per device; None if it is missing or fails. The only
    place that starts it.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=seconds, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def list_gpus() -> tuple[DeviceVitals, ...]:
    """The devices that this process may use; none if there are none to ask."""
    probe = find_probe()
    return probe() if probe is not None else ()


def _nvml_probe() -> Probe | None:
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except Exception:
        # No driver, or one that this package does not know: the command may still work.
        return None
    return lambda: ask_nvml(pynvml, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))


def ask_nvml(nvml: Any, *, visible: str | None) -> tuple[DeviceVitals, ...]:
    """The same figures through NVML, which starts no process."""
    devices = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if not is_visible(index, _text(nvml.nvmlDeviceGetUUID(handle)), visible):
            continue
        memory = _or_none(nvml.nvmlDeviceGetMemoryInfo, handle)
        use = _or_none(nvml.nvmlDeviceGetUtilizationRates, handle)
        power = _or_none(nvml.nvmlDeviceGetPowerUsage, handle)
        devices.append(
            DeviceVitals(
                index=index,
                name=_text(_or_none(nvml.nvmlDeviceGetName, handle) or ""),
                use_percent=use.gpu if use else None,
                memory_gib=memory.used / GIB if memory else None,
                memory_total_gib=memory.total / GIB if memory else None,
                temperature_c=_or_none(nvml.nvmlDeviceGetTemperature, handle, 0),
                power_watts=power / 1000 if power is not None else None,
            )
        )
    return tuple(devices)


def _or_none(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Each GPU rejects different queries, with errors of the library's own making."""
    try:
        return ask(*arguments)
    except Exception:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _resting(probe: Probe) -> Probe:
    """Stop asking once the driver has failed a few times in a row: each failure may cost seconds."""
    failures = 0

    def ask() -> tuple[DeviceVitals, ...]:
        nonlocal failures
        if failures >= FAILURES_BEFORE_REST:
            return ()
        try:
            devices = probe()
        except Exception:
            failures += 1
            return ()
        failures = 0
        return devices

    return ask


def busiest(devices: Sequence[DeviceVitals]) -> DeviceVitals | None:
    """The device with the highest utilization, of those that report it."""
    measured = [device for device in devices if device.use_percent is not None]
    return max(measured, key=lambda device: device.use_percent or 0.0, default=None)
