"""What steps ask of the allocator, by what it is for, in the sizes that kernels allocate. Pure.

In: allocations and frees, in their order, by name. Out: an `AllocationStream`, which writes them down as a
`MemoryTrace`, and the sizes that attention, dequantizing, the loss and optimizers take.
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
    """Bytes of each tensor, in the order in which they came."""
    events: tuple[int, ...]
    """n: the nth tensor came; ~n: it went."""
    phases: dict[str, float]
    """The most that was held in each phase of the last step."""


class AllocationStream:
    """Writes it down. Parts can be named later: a gradient is known once it hangs on its weight."""

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
        """Sum it up. The first phase is where the model is set up: no peak of training is there."""
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
"""What PyTorch gives a cuBLAS handle on Hopper; the forward and the backward thread have one each."""
QUANTIZED_BLOCK, SCALES_BLOCK = 64, 256
"""NF4: weights that share a scale, and scales that share one of their own."""


class AttentionSizes(NamedTuple):
    """One attention; `width` is the bytes of a number."""

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
    """The queries' gradients summed in float32, a row of sums; keys and values spread over the heads.

    Where the order of sums is fixed, each of the blocks that share a head has sums of its own.
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
    """The weights in the type of the product, and the scales of their blocks in float32."""
    return [weights // QUANTIZED_BLOCK * 4, weights * width]


def tile_places(rows: int, width: int, vocabulary: int) -> int:
    """As many places that their logits take what the hidden states do, as a power of two."""
    share = -(-rows // -(-vocabulary // width))
    return min(1 << (share - 1).bit_length(), rows)


FEWEST_IN_EIGHT = 4096
"""Weights of a tensor whose states the 8-bit optimizer keeps in 8 bits."""
STATES_BLOCK = 256
Weight = tuple[int, int]
"""Elements, and bytes of one."""


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
    """Allocations and frees of a step."""
    if optimizer == "adamw_foreach":
        for width in {width for _, width in weights}:
            stream.use_together([count * width for count, kind in weights if kind == width])
    if optimizer == "adamw_loop":
        for count, width in weights:
            stream.use_together([count * width, count * width])
