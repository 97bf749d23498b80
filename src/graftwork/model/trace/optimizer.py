"""What an optimizer keeps and takes, by the sizes of what it trains: the `meta` device refuses some of them.

AdamW keeps two states in the weight's own type. Fused has no temporaries; `foreach` takes a root of the
second state of all weights of one type at once; the loop takes two of one weight. 8 bits: a byte each and a
float32 scale for 256, but float32 under 4,096 elements.
"""

from collections.abc import Sequence

from graftwork.model.trace.stream import AllocationStream
from graftwork.records.fit import Optimizer

SMALL = 4096
STATES_BLOCK = 256

Weight = tuple[int, int]
"""Elements, and bytes of one."""


def keep_states(stream: AllocationStream, weights: Sequence[Weight], optimizer: Optimizer) -> None:
    """What the first step makes and later ones find."""
    if optimizer == "sgd":
        return
    for count, width in weights:
        if optimizer != "adamw_8bit":
            if optimizer == "adamw_fused":
                stream.take(4, "optimizer")  # its step, counted on the card
            stream.take(count * width, "optimizer")
            stream.take(count * width, "optimizer")
        elif count < SMALL:
            stream.take(count * 4, "optimizer")
            stream.take(count * 4, "optimizer")
        else:
            for _ in range(2):
                stream.take(count, "optimizer")
                stream.take(-(-count // STATES_BLOCK) * 4, "optimizer")


def take_step(stream: AllocationStream, weights: Sequence[Weight], optimizer: Optimizer) -> None:
    """What a step takes and gives back."""
    if optimizer == "adamw_foreach":
        for width in {width for _, width in weights}:
            stream.use_together([count * width for count, kind in weights if kind == width])
    if optimizer == "adamw_loop":
        for count, width in weights:
            stream.use_together([count * width, count * width])
