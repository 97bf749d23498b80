"""The results file of a benchmark: its figures with the machine, the date and the versions.

In: a name and figures. Out: `benchmarks/results/<name>.json`, which is committed.
"""

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
PACKAGES = (
    "graftwork",
    "torch",
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "unsloth",
    "liger-kernel",
    "triton",
)


def save_results(name: str, figures: dict[str, Any], *, device: str | None = None) -> Path:
    """Write the file whole, over that of an earlier run."""
    path = FOLDER / f"{name}.json"
    FOLDER.mkdir(exist_ok=True)
    found = {
        "benchmark": name,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(device),
        "versions": {"python": platform.python_version(), **_versions()},
        "figures": figures,
    }
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.replace(path)
    return path


def describe_machine(device: str | None = None) -> dict[str, Any]:
    """Processor, cores, memory, and how busy others kept it when the run ended."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found: dict[str, Any] = {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 1),
    }
    return {"device": device, **found} if device else found


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
