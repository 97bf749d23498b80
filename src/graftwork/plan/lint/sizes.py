"""Bytes that follow from a configuration and a number of parameters. Pure.

Only floors: what cannot be gone below whatever the activations are. `graft plan fit` reckons the rest.
"""

from typing import NamedTuple

from graftwork.plan.lint.facts import Around, Configuration
from graftwork.records.units import GIB

WIDTH = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
NF4 = 4.127 / 8
"""Bytes a weight in NF4 with double quantisation."""
HOST_OFFLOAD = 16.0
"""Bytes a parameter in host memory with the optimizer offloaded: fp32 weights, moments, gradients."""
HOST_OFFLOAD_PADDED = 1.5
"""What DeepSpeed's own estimate multiplies that by, for its buffers."""


class Weights(NamedTuple):
    gib: float
    form: str
    """How they are held, in words."""


def weights_of(said: Configuration, around: Around) -> Weights | None:
    """The weights alone, as the configuration loads them."""
    if around.parameters is None:
        return None
    if said.bits == 4 or said.method == "qlora":
        whole = 0
        if around.shape is not None:
            tables = 1 if around.shape.tied_embeddings else 2
            whole = around.shape.vocab_size * around.shape.hidden_size * tables
        gib = ((around.parameters - whole) * NF4 + whole * 2) / GIB
        return Weights(gib, "four bits")
    if said.bits == 8:
        return Weights(around.parameters / GIB, "eight bits")
    dtype = said.weights_dtype or said.precision
    if dtype is None:
        return None
    return Weights(around.parameters * WIDTH[dtype] / GIB, dtype)


class FullFloor(NamedTuple):
    card_gib: float
    words: str


def full_floor(said: Configuration, around: Around) -> FullFloor | None:
    """The least that a card holds where all weights are trained, without any activation."""
    if said.method != "full" or around.parameters is None:
        return None
    cards, stage = said.cards or 1, said.zero_stage or 0
    if said.precision == "float32":
        weights, gradients, optimizer = 4.0, 4.0, 8.0
    elif stage:
        # DeepSpeed keeps float32 weights and moments beside those of 16 bits.
        weights, gradients, optimizer = 2.0, 2.0, 12.0
    else:
        weights, gradients, optimizer = 2.0, 2.0, 4.0
    if said.offload_optimizer:
        optimizer = 0.0
        # Gradients travel as they are made; those of one layer at a time stay.
        gradients = 0.0 if stage >= 2 else gradients
    if said.offload_weights and stage == 3:
        weights = 0.0
    each = (
        weights / (cards if stage >= 3 else 1)
        + gradients / (cards if stage >= 2 else 1)
        + optimizer / (cards if stage >= 1 else 1)
    )
    kept = [
        f"{name} {bytes_ / (cards if stage >= least else 1):g}"
        for name, bytes_, least in (
            ("weights", weights, 3),
            ("gradients", gradients, 2),
            ("optimizer", optimizer, 1),
        )
        if bytes_
    ]
    return FullFloor(
        each * around.parameters / GIB, f"bytes a parameter and card: {' + '.join(kept) or 'none'}"
    )
