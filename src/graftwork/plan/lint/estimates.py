"""What follows from a configuration: the peak of a card, the least time, floors of memory. Pure.

In: a configuration, the model, the card. Out: figures, or None where too little is stated.
"""

from typing import NamedTuple

from graftwork.costmodel.plain_memory import plain_peak
from graftwork.model.shape import linear_names
from graftwork.plan.catalog.models import CatalogModel
from graftwork.plan.fit.answer import fit
from graftwork.plan.fit.question import make_question
from graftwork.plan.lint.facts import Around, Configuration, Peaks, effective_batch
from graftwork.records.fit import FitOptions, PlainSetup, Precision
from graftwork.records.hardware import Gpu, Machine
from graftwork.records.units import ELEMENT_BYTES, GIB

CONTEXT_GIB = 0.4
"""Of the CUDA context, which no allocator counts."""
PLAIN = ("training", "axolotl", "llama-factory")
"""Kinds whose step is that of transformers and PEFT."""


def peaks_of(said: Configuration, model: CatalogModel, lengths: tuple[int, ...]) -> Peaks | None:
    """GiB of one card at the longest row that the limit lets through."""
    dtype = _dtype(said)
    sharded = said.zero_stage or said.offload_optimizer or said.offload_weights
    if said.kind not in PLAIN or sharded or said.method is None or dtype is None:
        return None
    if said.max_length is None or said.micro_batch is None or said.bits == 8:
        return None
    names = linear_names(model.shape)
    targets = tuple(name for name in said.targets or names if name in names) or names
    setup = PlainSetup(
        method=said.method,
        rank=said.rank or 16,
        targets=targets,
        adapted_layers=model.shape.layers,
        dtype=dtype,
        autocast=said.precision in ("bfloat16", "float16"),
        rows=said.micro_batch,
        tokens=min(said.max_length, max(lengths, default=said.max_length)),
        checkpointed=model.shape.layers if said.recompute else 0,
    )
    as_set = plain_peak(model.shape, setup, architecture=model.architecture)
    every = setup.model_copy(update={"checkpointed": model.shape.layers})
    recomputed = plain_peak(model.shape, every, architecture=model.architecture)
    return Peaks(
        as_set=as_set.allocated / GIB + CONTEXT_GIB,
        recomputed=recomputed.allocated / GIB + CONTEXT_GIB,
        tokens=setup.tokens,
    )


def least_minutes(
    said: Configuration, model: CatalogModel, gpu: Gpu, lengths: tuple[int, ...]
) -> float | None:
    """The lower end of what the run takes on these cards, with the best settings that there are for it."""
    if said.rows is None or said.method is None or not lengths:
        return None
    kept = [min(length, said.max_length or length) for length in lengths]
    asked = FitOptions(
        method=said.method,
        engine="graft" if said.kind == "graft" else "hf",
        seq=kept[0] if len(kept) == 1 else tuple(kept),
        rows=said.rows,
        epochs=said.epochs or 1.0,
        batch_rows=effective_batch(said) or 16,
        rank=said.rank or 16,
    )
    machine = Machine(gpu=gpu, gpus=said.cards or 1, ram_gib=said.ram_gib or 64.0)
    answer = fit(make_question(model, asked, machine=machine))
    return answer.run_minutes.low if answer.fits else None


def _dtype(said: Configuration) -> Precision | None:
    """The type of the weights: as they are loaded, else as the run multiplies."""
    return said.weights_dtype or said.precision


NF4 = 4.127 / 8
"""Bytes a weight in NF4 with double quantisation."""
HOST_OFFLOAD = 16.0
"""Bytes a parameter in host memory with the optimizer offloaded: fp32 weights, moments, gradients."""
HOST_OFFLOAD_PADDED = 1.5
"""What DeepSpeed's own estimate multiplies that by, for its buffers."""


class LoadedWeights(NamedTuple):
    gib: float
    form: str
    """Their format, for messages."""


def weights_of(said: Configuration, around: Around) -> LoadedWeights | None:
    """The weights alone, as the configuration loads them."""
    if around.parameters is None:
        return None
    if said.bits == 4 or said.method == "qlora":
        whole = 0
        if around.shape is not None:
            tables = 1 if around.shape.tied_embeddings else 2
            whole = around.shape.vocab_size * around.shape.hidden_size * tables
        gib = ((around.parameters - whole) * NF4 + whole * 2) / GIB
        return LoadedWeights(gib, "four bits")
    if said.bits == 8:
        return LoadedWeights(around.parameters / GIB, "eight bits")
    dtype = said.weights_dtype or said.precision
    if dtype is None:
        return None
    return LoadedWeights(around.parameters * ELEMENT_BYTES[dtype] / GIB, dtype)


class FullFloor(NamedTuple):
    card_gib: float
    explanation: str


def full_floor(said: Configuration, around: Around) -> FullFloor | None:
    """The least that a card holds where all weights are trained, without any activation."""
    if said.method != "full" or around.parameters is None:
        return None
    cards, stage = said.cards or 1, said.zero_stage or 0
    if said.precision == "float32":
        weights, gradients, optimizer = 4.0, 4.0, 8.0
    elif stage:
        # DeepSpeed keeps float32 weights and moments in addition to those of 16 bits.
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
