"""What there is of memory: less than the name of a card says, less than the machine has.

In: a question. Out: GiB for torch's allocator on one card, and for the run on the host. The driver's
context, NCCL and a desktop lie outside the allocator. Knows nothing of what is trained.
"""

import re

from graftwork.records.base import Figure
from graftwork.records.fit import FitQuestion
from graftwork.records.hardware import Gpu

CONTEXT_GIB = (0.3, 0.4, 0.5)
"""CUDA's own on a card: least, usual, most (published)."""
NCCL_GIB = (0.2, 0.35, 0.5)
"""A communicator between cards (published: about 0.5)."""
DESKTOP_GIB = (0.0, 0.2, 0.6)
"""What a screen takes of a card that people play on too (guessed; `nvidia-smi` shows it)."""
SYSTEM_GIB = 4.0
"""What the operating system and its services keep of the host (guessed)."""
TIGHT = 0.90

_PLAYED_ON = re.compile(r"(?<!\d)[2-5]0[5-9]0(?!\d)")


def card_room(question: FitQuestion, *, cards: int) -> Figure:
    """GiB that the allocator may take of one card; of a processor, what the host has."""
    if question.memory_limit_gib is not None:
        return Figure.exact(question.memory_limit_gib, "GiB")
    gpu = question.machine.gpu
    if gpu is None:
        return Figure.exact(host_room(question), "GiB")
    taken = [CONTEXT_GIB]
    if cards > 1:
        taken.append(NCCL_GIB)
    if shows_a_desktop(gpu):
        taken.append(DESKTOP_GIB)
    least, usual, most = (sum(one[at] for one in taken) for at in range(3))
    total = gpu.memory_gib
    return Figure(
        value=max(total - usual, 0.0), low=max(total - most, 0.0), high=max(total - least, 0.0), unit="GiB"
    )


def host_room(question: FitQuestion) -> float:
    """GiB of the host that a run may take."""
    return max(question.machine.ram_gib - SYSTEM_GIB, 0.0)


def shows_a_desktop(gpu: Gpu) -> bool:
    """GeForce cards, by the number in their name."""
    return _PLAYED_ON.search(gpu.name) is not None
