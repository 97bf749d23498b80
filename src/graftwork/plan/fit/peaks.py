"""The peak of one card alone: to the tensor, or quickly from small ones for a search over many ways. Pure.

In: a question and a setup. Out: a MemoryPeak. The quick way reckons one and two layers at two numbers of
tokens and goes on in a straight line: memory is linear in both but where another moment becomes the
highest. What is chosen in the end is reckoned to the tensor.
"""

from functools import lru_cache

from graftwork.plan.fit.sharding import ADAM_BYTES, HELD, STATES_BYTES, WIDTH
from graftwork.plan.memory_plain import plain_peak
from graftwork.records.fit import MemoryPeak, PlainSetup
from graftwork.records.plan import ModelShape

FEW, MORE = 1, 2
"""Layers that are reckoned to the tensor."""
FIRST_ANCHOR, ANCHOR_STEP = 256, 4
"""Tokens that are reckoned: 256, 1,024, 4,096 …"""
MOST_BEYOND = 0.2
"""Of what is allocated, the most that the allocator was seen to add to a large model."""
FOREACH_TEMPORARIES = 1.0
"""Of the optimizer's states, what the foreach kernels hold for a moment."""


def exact_peak(shape: ModelShape, setup: PlainSetup, *, architecture: str) -> MemoryPeak:
    """Tensor by tensor: a third of a second for a large model."""
    return plain_peak(shape, setup, architecture=architecture)


def quick_peak(shape: ModelShape, setup: PlainSetup, *, architecture: str, trainable: int) -> MemoryPeak:
    """By straight lines through small cases."""
    # Where all weights are learned, the optimizer's own moment hides the passes: it is added apart.
    apart = setup.method == "full" and setup.optimizer != "sgd"
    asked = setup.model_copy(update={"optimizer": "sgd"}) if apart else setup
    tokens = asked.rows * asked.tokens
    low = FIRST_ANCHOR
    while low * ANCHOR_STEP < tokens:
        low *= ANCHOR_STEP
    high = low * ANCHOR_STEP
    below, above = (_all_layers(shape, asked, at, architecture) for at in (low, high))
    found = _line(below, above, share=(tokens - low) / (high - low))
    return _with_optimizer(found, setup, trainable=trainable) if apart else found


def _all_layers(shape: ModelShape, setup: PlainSetup, tokens: int, architecture: str) -> MemoryPeak:
    """All adapted layers from a few of them, and the frozen ones below, which keep only their weights."""
    few, more = (_anchor(shape, setup, tokens, layers, architecture) for layers in (FEW, MORE))
    share = (setup.adapted_layers - FEW) / (MORE - FEW)
    found = _line(few, more, share=share)
    reserved = found.reserved
    if setup.checkpointed:
        # What the allocator adds then grows with what passes, not with what stays.
        beyond = (more.reserved - more.allocated) / max(_passing(more), 1.0)
        grown = min(beyond * _passing(found), MOST_BEYOND * found.allocated)
        reserved = max(reserved, found.allocated + grown)
    below = shape.layers - setup.adapted_layers
    a_layer = (more.parts.get("weights", 0.0) - few.parts.get("weights", 0.0)) / (MORE - FEW)
    frozen = below * a_layer
    return MemoryPeak(
        allocated=found.allocated + frozen,
        reserved=reserved + frozen,
        parts={**found.parts, "weights": found.parts.get("weights", 0.0) + frozen},
        phase=found.phase,
    )


def _passing(peak: MemoryPeak) -> float:
    return sum(size for name, size in peak.parts.items() if name not in HELD)


def _anchor(shape: ModelShape, setup: PlainSetup, tokens: int, layers: int, architecture: str) -> MemoryPeak:
    deep = setup.checkpointed >= setup.adapted_layers
    small = setup.model_copy(
        update={
            "rows": 1,
            "tokens": tokens,
            "adapted_layers": layers,
            "checkpointed": layers if deep else round(layers * setup.checkpointed / setup.adapted_layers),
        }
    )
    cut = shape.model_copy(update={"layers": layers, "parameters": None})
    return _reckoned(cut.model_dump_json(), small.model_dump_json(), architecture)


@lru_cache(maxsize=4096)
def _reckoned(shape: str, setup: str, architecture: str) -> MemoryPeak:
    return plain_peak(
        ModelShape.model_validate_json(shape),
        PlainSetup.model_validate_json(setup),
        architecture=architecture,
    )


def _line(first: MemoryPeak, second: MemoryPeak, *, share: float) -> MemoryPeak:
    """On the straight line through two peaks, never below nothing."""

    def between(a: float, b: float) -> float:
        return max(a + share * max(b - a, 0.0), 0.0)

    names = dict.fromkeys([*first.parts, *second.parts])
    parts = {name: between(first.parts.get(name, 0.0), second.parts.get(name, 0.0)) for name in names}
    return MemoryPeak(
        allocated=between(first.allocated, second.allocated),
        reserved=between(first.reserved, second.reserved),
        parts=parts,
        phase=second.phase,
    )


def _with_optimizer(peak: MemoryPeak, setup: PlainSetup, *, trainable: int) -> MemoryPeak:
    """The states beside the passes, or the optimizer's own moment where that is higher."""
    states = trainable * STATES_BYTES.get(setup.optimizer, ADAM_BYTES * WIDTH[setup.dtype] / 4)
    passing = peak.allocated + states
    gradients = float(trainable * WIDTH[setup.dtype])
    weights = peak.parts.get("weights", 0.0)
    moment = states * FOREACH_TEMPORARIES if setup.optimizer == "adamw_foreach" else 0.0
    stepping = weights + gradients + states + moment
    beyond = peak.reserved - peak.allocated
    if stepping <= passing:
        parts = {**peak.parts, "optimizer": states}
        return MemoryPeak(allocated=passing, reserved=passing + beyond, parts=parts, phase=peak.phase)
    parts = {"weights": weights, "gradients": gradients, "optimizer": states, "workspace": moment}
    # Of what the passes took, the allocator gives nothing back.
    reserved = max(stepping, passing) + beyond
    return MemoryPeak(allocated=stepping, reserved=reserved, parts=parts, phase="optimizer")
