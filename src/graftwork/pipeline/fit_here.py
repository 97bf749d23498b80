"""This machine as a plan sees it, or the one that was named: cards by their driver, the rest by the system.

In: nothing, or names of the catalog. Out: a Machine. Starts `nvidia-smi` where there is one; needs no torch.
"""

import os
from pathlib import Path
from typing import NamedTuple

from graftwork.model.probe import describe_device
from graftwork.plan.catalog.hardware import USUAL_RAM_GIB, find_cpu, find_gpu, guess_cpu
from graftwork.process.devices import ask_nvidia_smi, is_visible
from graftwork.records.errors import UserMistake
from graftwork.records.hardware import Cpu, Gpu, Machine
from graftwork.records.plan import DeviceFacts

QUERY = ("index", "uuid", "name", "memory.total")
"""Old drivers refuse a query for compute_cap as a whole: that is the catalog's to know."""
PATIENCE_SECONDS = 10
ASSUMED_RAM = f"host memory is taken as {USUAL_RAM_GIB:g} GiB: state yours with --ram"


class DriverCard(NamedTuple):
    """A card as its driver reports it."""

    name: str
    memory_gib: float


def named_machine(
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    cpu: str | None = None,
    ram_gib: float | None = None,
    overlay: Path | None = None,
) -> Machine:
    """The machine that was named. Without a card and a processor it is this one; else host memory that is not
    stated is what such machines usually have, and `assumed` says so."""
    if gpu is None and cpu is None:
        machine = this_machine(overlay=overlay)
    else:
        # A processor alone was named: then it is about no card. A card says nothing of the processor.
        machine = Machine(
            gpu=find_gpu(gpu, overlay=overlay) if gpu is not None else None,
            gpus=1 if gpu is not None else 0,
            cpu=find_cpu(cpu, overlay=overlay) if cpu is not None else None,
            ram_gib=USUAL_RAM_GIB,
            assumed=() if ram_gib is not None else (ASSUMED_RAM,),
        )
    if gpus is not None and machine.gpu is None:
        raise UserMistake(
            f"{gpus} cards of which kind?",
            why="this machine has none, and none is named",
            fix='name it: --gpu "RTX 5060 Ti 16GB"',
            where="--gpus",
        )
    stated = {"gpus": gpus, "ram_gib": ram_gib}
    return machine.model_copy(update={name: value for name, value in stated.items() if value is not None})


def this_machine(*, overlay: Path | None = None) -> Machine:
    """Cards of one kind: the first one's. Others would wait for the slowest anyway."""
    device = describe_device()
    cards = read_cards(ask_driver(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpu = None
    same: list[DriverCard] = []
    if cards:
        first = cards[0]
        same = [card for card in cards if card.name == first.name]
        gpu = _known(first, overlay=overlay)
    return Machine(
        gpu=gpu, gpus=len(same), cpu=_processor(device, overlay=overlay), ram_gib=device.memory_gib
    )


def this_host() -> Machine:
    """This machine without its cards."""
    device = describe_device()
    return Machine(cpu=_processor(device, overlay=None), ram_gib=device.memory_gib)


def ask_driver() -> str:
    """What nvidia-smi says; nothing where there is none or it fails."""
    return ask_nvidia_smi(QUERY, seconds=PATIENCE_SECONDS) or ""


def read_cards(printed: str, *, visible: str | None = None) -> list[DriverCard]:
    """Lines of `index, uuid, name, MiB`; others, and cards that are hidden, are passed over."""
    cards = []
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.split(",", 2)]
        try:
            index, uuid, rest = int(cells[0]), cells[1], cells[2]
            name, mib = (cell.strip() for cell in rest.rsplit(",", 1))
            card = DriverCard(name, float(mib) / 1024)
        except (IndexError, ValueError):
            continue
        if is_visible(index, uuid, visible):
            cards.append(card)
    return cards


def _known(card: DriverCard, *, overlay: Path | None) -> Gpu:
    """The catalog's figures with the memory that the driver shows."""
    gpu = find_gpu(card.name, overlay=overlay)
    return gpu.model_copy(update={"memory_gib": card.memory_gib})


def _processor(device: DeviceFacts, *, overlay: Path | None) -> Cpu:
    """The catalog's, or a guess by the number of threads."""
    try:
        return find_cpu(device.name, overlay=overlay)
    except UserMistake:
        return guess_cpu(device.name, threads=device.threads)
