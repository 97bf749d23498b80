"""The accelerators of this machine: utilization, memory, temperature, power.

In: nothing, or what `nvidia-smi` printed. Out: one DeviceVitals for each device that this process may use.
Asks NVML where its Python package is installed, else the command `nvidia-smi`. Never raises and never waits
long: a worker must not suffer from being monitored.
"""

import csv
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from graftwork.records.base import GIB
from graftwork.records.fleet import DeviceVitals

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
    """How devices can be asked on this machine, or None where there are none to ask."""
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
    """What `nvidia-smi --query-gpu=… --format=csv,noheader,nounits` printed. A line it garbled is skipped."""
    found = []
    for fields in csv.reader(printed.splitlines(), skipinitialspace=True):
        if len(fields) != len(QUERY) or not fields[0].strip().isdigit():
            continue
        index, uuid = int(fields[0]), fields[1].strip()
        if not is_visible(index, uuid, visible):
            continue
        use, used, total, temperature, power = (read_number(field) for field in fields[3:])
        found.append(
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
    return tuple(found)


def is_visible(index: int, uuid: str, visible: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES, as it was given, lets this process use the device."""
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return any(str(index) == name or (name and uuid.startswith(name)) for name in names)


def read_number(field: str) -> float | None:
    """Cards say `[N/A]` or `[Not Supported]` to what they do not know."""
    try:
        return float(field)
    except ValueError:
        return None


def ask_nvidia_smi(fields: Sequence[str], *, seconds: float = PATIENCE_SECONDS) -> str | None:
    """What `nvidia-smi` prints about these fields, one line a device; None where it is missing or fails.

    The only place that starts it.
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
    """The devices that this process may use; none where there are none to ask."""
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
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if not is_visible(index, _text(nvml.nvmlDeviceGetUUID(handle)), visible):
            continue
        memory = _or_none(nvml.nvmlDeviceGetMemoryInfo, handle)
        use = _or_none(nvml.nvmlDeviceGetUtilizationRates, handle)
        power = _or_none(nvml.nvmlDeviceGetPowerUsage, handle)
        found.append(
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
    return tuple(found)


def _or_none(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Each card refuses other questions, with errors of the library's own making."""
    try:
        return ask(*arguments)
    except Exception:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _resting(probe: Probe) -> Probe:
    """Ask no more once the driver has failed a few times in a row: each failure may cost seconds."""
    failures = 0

    def ask() -> tuple[DeviceVitals, ...]:
        nonlocal failures
        if failures >= FAILURES_BEFORE_REST:
            return ()
        try:
            found = probe()
        except Exception:
            failures += 1
            return ()
        failures = 0
        return found

    return ask


def busiest(devices: Sequence[DeviceVitals]) -> DeviceVitals | None:
    """The device that computes most, of those that say so."""
    known = [device for device in devices if device.use_percent is not None]
    return max(known, key=lambda device: device.use_percent or 0.0, default=None)
