"""This machine as a plan sees it: cards by their driver, processor and memory by the system.

In: nothing. Out: a Machine. Starts `nvidia-smi` where there is one; needs no torch.
"""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from graftwork.model.probe import describe_device
from graftwork.plan.catalog.hardware import find_cpu, find_gpu
from graftwork.records.errors import UserMistake
from graftwork.records.hardware import Cpu, Gpu, Machine
from graftwork.records.plan import DeviceFacts

QUERY = ("--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")
PATIENCE_SECONDS = 10
GUESSED_GFLOPS_A_THREAD = 35.0
GUESSED_BANDWIDTH_GB_S = 40.0


class Card(NamedTuple):
    """A card as its driver tells it."""

    name: str
    memory_gib: float
    capability: float


def this_machine(*, overlay: Path | None = None) -> Machine:
    """Cards of one kind: the first one's. Others would wait for the slowest anyway."""
    device = describe_device()
    cards = read_cards(ask_driver())
    gpu = None
    same: list[Card] = []
    if cards:
        first = cards[0]
        same = [card for card in cards if card.name == first.name]
        gpu = _known(first, overlay=overlay)
    return Machine(
        gpu=gpu, gpus=len(same), cpu=_processor(device, overlay=overlay), ram_gib=device.memory_gib
    )


def ask_driver() -> str:
    """What nvidia-smi says; nothing where there is none or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *QUERY], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_cards(said: str) -> list[Card]:
    """Lines of `name, MiB, capability`; others are passed over."""
    cards = []
    for line in said.splitlines():
        cells = [cell.strip() for cell in line.rsplit(",", 2)]
        try:
            cards.append(Card(cells[0], float(cells[1]) / 1024, float(cells[2])))
        except (IndexError, ValueError):
            continue
    return cards


def _known(card: Card, *, overlay: Path | None) -> Gpu:
    """The catalog's figures with the memory that the driver shows."""
    gpu = find_gpu(card.name, overlay=overlay)
    return gpu.model_copy(update={"memory_gib": card.memory_gib, "capability": card.capability})


def _processor(device: DeviceFacts, *, overlay: Path | None) -> Cpu:
    """The catalog's, or a guess by the number of threads."""
    try:
        return find_cpu(device.name, overlay=overlay)
    except UserMistake:
        return Cpu(
            name=device.name,
            cores=device.threads,
            gflops=GUESSED_GFLOPS_A_THREAD * device.threads,
            bandwidth_gb_s=GUESSED_BANDWIDTH_GB_S,
            watts=15.0 * device.threads,
            source="guessed by the number of threads",
        )
