"""What waits in host memory, and what it costs to fetch it. Pure.

In: how a run is shared and how many parameters it has. Out: GiB of the host, and seconds of transfers and of
Adam on the processor. The bytes a parameter are DeepSpeed's own (16 to 18); its estimators add half as
much again, which we say and do not reckon with.
"""

from typing import NamedTuple

from graftwork.model.shape import total_parameters
from graftwork.plan.fit.sharding import WIDTH, Shared
from graftwork.records.base import Figure
from graftwork.records.fit import FitQuestion, PlainSetup
from graftwork.records.hardware import Machine
from graftwork.records.units import GIB

PROCESS_GIB = (2.0, 2.5, 3.5)
"""Python, torch and CUDA of one process on the host: least, usual, most (measured on small runs)."""
OFFLOADED_BYTES = (16.0, 17.0, 18.0)
"""A learned parameter with its gradient, states and pinned buffers on the host."""
DEEPSPEED_PADS = 1.5
ADAM_TRAFFIC = 28.0
"""Bytes that Adam moves in host memory for a parameter."""
HOST_BANDWIDTH_SHARE = 0.6
GUESSED_HOST_GB_S = 60.0
"""Two channels of DDR5, for machines whose processor is not named."""
PCIE_SHARE = 0.8
"""Of a connector's rate, what pinned memory reaches."""


class Transfers(NamedTuple):
    """Seconds between card and host: of one pass, and of a step's end."""

    a_pass: float
    a_step: float
    adam: float


def host_memory(question: FitQuestion, shared: Shared, *, trainable: int, base_bytes: float) -> Figure:
    """GiB of the host over all processes."""
    low, usual, high = (gib * shared.cards for gib in PROCESS_GIB)
    least, most = base_bytes / GIB, base_bytes / GIB
    if shared.sharding in ("fsdp2", "zero3") and question.engine == "graft":
        # Every process reads the whole base itself: its hash is proven before it is cut up.
        most = least = shared.cards * base_bytes / GIB
    elif shared.offload != "weights":
        # Read shard by shard: of a file, pages that the system takes back where it must.
        least = 0.0
    down, middle, up = least, (least + most) / 2, most
    if shared.offload != "none":
        learned = tuple(trainable * one / GIB for one in OFFLOADED_BYTES)
        frozen = base_bytes / GIB if shared.offload == "weights" and question.method != "full" else 0.0
        # The reading is over when the states are made.
        down, middle, up = (
            max(read, one + frozen) for read, one in zip((down, middle, up), learned, strict=True)
        )
    return Figure(value=usual + middle, low=low + down, high=high + up, unit="GiB")


def transfers(
    machine: Machine, shared: Shared, setup: PlainSetup, *, trainable: int, base_bytes: float
) -> Transfers:
    """What offloading adds to a pass and to a step."""
    if shared.offload == "none" or machine.gpu is None:
        return Transfers(0.0, 0.0, 0.0)
    pcie = machine.gpu.pcie_gb_s * PCIE_SHARE * 1e9
    full = setup.method == "full"
    width = WIDTH[setup.dtype] if full else WIDTH[setup.adapter_dtype]
    gradients = trainable * width / shared.cards / pcie
    fetched = 0.0
    if shared.offload == "weights":
        # Forward and backward each fetch a card's own part; the rest comes from the other cards.
        held = trainable * width if full else base_bytes
        fetched = 2 * held / shared.cards / pcie
    back = trainable * width / shared.cards / pcie if shared.offload == "optimizer" else 0.0
    return Transfers(a_pass=fetched + gradients, a_step=back, adam=adam_seconds(machine, trainable))


def adam_seconds(machine: Machine, trainable: int) -> float:
    """All processes step at once, out of one memory."""
    rate = machine.cpu.bandwidth_gb_s if machine.cpu is not None else GUESSED_HOST_GB_S
    return trainable * ADAM_TRAFFIC / (rate * HOST_BANDWIDTH_SHARE * 1e9)


def padded_gb(question: FitQuestion) -> float:
    """What DeepSpeed's estimator would ask of the host for an offloaded optimizer, in 10⁹ bytes."""
    return total_parameters(question.shape) * OFFLOADED_BYTES[2] * DEEPSPEED_PADS / 1e9
