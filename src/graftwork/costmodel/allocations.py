"""Memory that a step allocates, by purpose, in the sizes that kernels allocate. Pure.

Input: allocations and frees, in their order, by name. Output: an `AllocationStream`, which writes them down
as a `MemoryTrace`, and the sizes that attention, dequantizing, the loss and optimizers take.
"""

from collections.abc import Sequence
from typing import NamedTuple

from graftwork.costmodel.allocator import rounded
from graftwork.records.base import MIB, Record
from graftwork.records.plan import MemoryPeak, Optimizer


class MemoryTrace(Record):
    """The memory events of a run of steps."""

    peak: MemoryPeak
    sizes: tuple[int, ...]
    """Bytes of each tensor, in order of allocation."""
    events: tuple[int, ...]
    """n: the nth tensor was allocated; ~n: it was freed."""
    phases: dict[str, float]
    """Peak of each phase of the last step."""


class AllocationStream:
    """Records allocations and frees. Parts can be named later: a gradient is known once it is attached to its
    weight.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.parts: list[str] = []
        self.events: list[int] = []
        self.marks: list[tuple[int, str]] = []

    def take(self, size: int, part: str) -> int:
        self.sizes.append(size)
        self.parts.append(part)
        self.events.append(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def give_back(self, number: int) -> None:
        self.events.append(~number)

    def use(self, size: int, part: str = "workspace") -> None:
        """Allocate and free within one operation."""
        if size > 0:
            self.give_back(self.take(size, part))

    def use_together(self, sizes: Sequence[int]) -> None:
        """Allocate one after the other, and free in reverse order."""
        numbers = [self.take(size, "workspace") for size in sizes if size > 0]
        for number in reversed(numbers):
            self.give_back(number)

    def enter(self, phase: str) -> None:
        self.marks.append((len(self.events), phase))

    def finish(self) -> MemoryTrace:
        """Finish the trace. The first phase is the setup of the model and contains no training peak."""
        phases: dict[str, float] = {}
        current_bytes, most, peak_index, phase = 0, -1, 0, ""
        marks = iter([*self.marks, (len(self.events) + 1, "")])
        following = next(marks)
        for index, event in enumerate(self.events):
            while index >= following[0]:
                phase = following[1]
                phases[phase] = current_bytes
                following = next(marks)
            current_bytes += rounded(self.sizes[event]) if event >= 0 else -rounded(self.sizes[~event])
            phases[phase] = max(phases.get(phase, 0), current_bytes)
            if current_bytes > most and phase != "setup":
                most, peak_index, peak_phase = current_bytes, index, phase
        alive: set[int] = set()
        for event in self.events[: peak_index + 1]:
            if event >= 0:
                alive.add(event)
            else:
                alive.discard(~event)
        parts: dict[str, float] = {}
        for number in alive:
            parts[self.parts[number]] = parts.get(self.parts[number], 0) + rounded(self.sizes[number])
        peak = MemoryPeak(allocated=most, reserved=most, parts=parts, phase=peak_phase)
        return MemoryTrace(peak=peak, sizes=tuple(self.sizes), events=tuple(self.events), phases=phases)


ROUND_QUERIES = 128
CUBLAS_WORKSPACE = 32 * MIB
"""Workspace that PyTorch allocates per cuBLAS handle on Hopper; the forward and the backward thread have one
each.
"""
QUANTIZED_BLOCK, SCALES_BLOCK = 64, 256
"""NF4: weights that share a scale, and scales that share a second-level scale."""


class AttentionSizes(NamedTuple):
    """Sizes of one attention; `width` is bytes per number."""

    rows: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int


MULTIPROCESSORS = 132
"""Number of multiprocessors of a Hopper GPU. Smaller GPUs have fewer and split less."""


def flash_backward_sizes(sizes: AttentionSizes, *, deterministic: bool = False) -> list[int]:
    """Return the queries' gradients summed in float32, the row sums, and keys and values expanded over the
    heads. In deterministic mode, each of the blocks that share a head has its own sums.
    """
    rows, queries, keys, heads, kv_heads, head_dim, width = sizes
    padded = -(-queries // ROUND_QUERIES) * ROUND_QUERIES
    wide = -(-head_dim // 32) * 32 if head_dim <= 128 else -(-head_dim // 64) * 64
    splits = -(-MULTIPROCESSORS // (rows * heads)) if deterministic else 1
    sizes_in_order = [rows * heads * padded * 4, splits * rows * padded * heads * wide * 4]
    if kv_heads != heads:
        sizes_in_order += [rows * keys * heads * head_dim * width] * 2
    return sizes_in_order


def dequantized_sizes(weights: int, width: int) -> list[int]:
    """Return the weights in the type of the product, and the scales of their blocks in float32."""
    return [weights // QUANTIZED_BLOCK * 4, weights * width]


def tile_places(rows: int, width: int, vocabulary: int) -> int:
    """Return the number of positions, a power of two, whose logits take as much memory as the hidden
    states.
    """
    share = -(-rows // -(-vocabulary // width))
    return min(1 << (share - 1).bit_length(), rows)


FEWEST_IN_EIGHT = 4096
"""Smallest tensor, in weights, whose optimizer states the 8-bit optimizer keeps in 8 bits."""
STATES_BLOCK = 256
Weight = tuple[int, int]
"""Number of elements, and bytes per element."""


def keep_states(stream: AllocationStream, weights: Sequence[Weight], optimizer: Optimizer) -> None:
    """Allocations of the first step that later steps reuse."""
    if optimizer == "sgd":
        return
    for count, width in weights:
        if optimizer != "adamw_8bit":
            if optimizer == "adamw_fused":
                stream.take(4, "optimizer")  # its step, counted on the GPU
            stream.take(count * width, "optimizer")
            stream.take(count * width, "optimizer")
        elif count < FEWEST_IN_EIGHT:
            stream.take(count * 4, "optimizer")
            stream.take(count * 4, "optimizer")
        else:
            for _ in range(2):
                stream.take(count, "optimizer")
                stream.take(-(-count // STATES_BLOCK) * 4, "optimizer")


def take_step(stream: AllocationStream, weights: Sequence[Weight], optimizer: Optimizer) -> None:
    """Record the allocations and frees of a step."""
    if optimizer == "adamw_foreach":
        for width in {width for _, width in weights}:
            stream.use_together([count * width for count, kind in weights if kind == width])
    if optimizer == "adamw_loop":
        for count, width in weights:
            stream.use_together([count * width, count * width])
