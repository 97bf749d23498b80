"""Which device this machine has, asked without torch, so that it answers at once.

In: what the driver and the system show. Out: a DeviceName. Measures nothing.
"""

import os
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from graftwork.model.probe import describe_device
from graftwork.records.fit import DeviceName

CARDS = Path("/proc/driver/nvidia/gpus")
DRIVER = Path("/proc/driver/nvidia/version")


def name_device() -> DeviceName:
    """The first card where there is one that may be used, else the processor."""
    card = None if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") else _card()
    if card is None:
        return DeviceName(kind="cpu", name=describe_device().name, torch=torch_version())
    name, driver = card
    return DeviceName(kind="cuda", name=name, driver=driver, torch=torch_version())


def torch_version() -> str:
    """Empty where torch is not installed."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _card() -> tuple[str, str] | None:
    """Name and driver: from the driver's own files, else from its tool."""
    found = sorted(CARDS.glob("*/information")) if CARDS.is_dir() else []
    names = [read_model(file.read_text(errors="replace")) for file in found]
    if names and names[0] and DRIVER.exists():
        return names[0], read_driver(DRIVER.read_text(errors="replace"))
    if not Path("/dev/nvidiactl").exists():
        return None
    ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, driver = said.strip().partition(",")
    return (name.strip(), driver.strip()) if name.strip() else None


def read_model(information: str) -> str:
    """The card's name in the driver's file about it."""
    found = re.search(r"^Model:\s*(.+?)\s*$", information, re.M)
    return found.group(1) if found else ""


def read_driver(text: str) -> str:
    """The number in "NVRM version: NVIDIA UNIX … Kernel Module  580.95.05  Release …"."""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else ""
