"""No step is faster than its products at the card's peak, nor than its bytes at the memory's. Pure.

In: what a step computes and moves at the very least, and how long somebody says that it takes. Out: the
claim against the roof. Ours and others' claims are held to the same.
"""

from graftwork.costmodel.rates import StepRates
from graftwork.model.shape import layer_parameters
from graftwork.records.base import Record
from graftwork.records.plan import ModelShape


class Roof(Record):
    """The least seconds that a step can take, and why."""

    compute: float
    memory: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory)


def least_seconds(
    shape: ModelShape,
    *,
    tokens: int,
    adapted: int,
    rates: StepRates,
    full: bool = False,
    eight: bool = False,
    head_share: float = 1.0,
    bytes_per_weight: float = 0.5,
) -> Roof:
    """Products without attention, elementwise work or anything computed again, at the peak that the maker
    states; and every frozen weight read once forward and once backward in its smallest form."""
    peak = rates.peak_eight if eight and rates.peak_eight else rates.peak_half
    weights = layer_parameters(shape)
    backward = 2 if full else 1
    flops = 2.0 * weights * tokens * (shape.layers + backward * adapted)
    table = shape.vocab_size * shape.hidden_size
    flops += 2.0 * table * tokens * head_share * (1 + backward)
    read = bytes_per_weight * (weights * (shape.layers + adapted) + table)
    return Roof(compute=flops / peak, memory=read / rates.peak_bandwidth)


def is_possible(claimed_seconds: float, roof: Roof) -> bool:
    """A claim above the roofline is wrong."""
    return claimed_seconds >= roof.seconds
