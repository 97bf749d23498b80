"""What follows from a configuration: the peak of a card, the least time, floors of memory. Pure.

In: a configuration, the model, the card. Out: figures, or None where too little is stated.
"""

from typing import NamedTuple

from graftwork.costmodel.plain_memory import plain_peak
from graftwork.model.shape import linear_names
from graftwork.plan.catalog.models import CatalogModel
from graftwork.plan.fit.answer import fit
from graftwork.plan.fit.question import CONTEXT_GIB, make_question
from graftwork.plan.lint.facts import Configuration, LintContext, Peaks, effective_batch
from graftwork.records.hardware import Gpu, Machine
from graftwork.records.plan import FitOptions, PlainSetup, Precision
from graftwork.records.units import ELEMENT_BYTES, GIB

PLAIN = ("training", "axolotl", "llama-factory")
"""Kinds whose step is that of transformers and PEFT."""


def peaks_of(config: Configuration, model: CatalogModel, lengths: tuple[int, ...]) -> Peaks | None:
    """GiB of one card at the longest row that the limit lets through."""
    dtype = _dtype(config)
    sharded = config.zero_stage or config.offload_optimizer or config.offload_weights
    if config.kind not in PLAIN or sharded or config.method is None or dtype is None:
        return None
    if config.max_length is None or config.micro_batch is None or config.bits == 8:
        return None
    names = linear_names(model.shape)
    targets = tuple(name for name in config.targets or names if name in names) or names
    setup = PlainSetup(
        method=config.method,
        rank=config.rank or 16,
        targets=targets,
        adapted_layers=model.shape.layers,
        dtype=dtype,
        autocast=config.precision in ("bfloat16", "float16"),
        rows=config.micro_batch,
        tokens=min(config.max_length, max(lengths, default=config.max_length)),
        checkpointed=model.shape.layers if config.recompute else 0,
    )
    as_set = plain_peak(model.shape, setup, architecture=model.architecture)
    every = setup.model_copy(update={"checkpointed": model.shape.layers})
    recomputed = plain_peak(model.shape, every, architecture=model.architecture)
    # No allocator counts what CUDA itself takes.
    _, context, _ = CONTEXT_GIB
    return Peaks(
        as_set=as_set.allocated / GIB + context,
        recomputed=recomputed.allocated / GIB + context,
        tokens=setup.tokens,
    )


def least_minutes(
    config: Configuration, model: CatalogModel, gpu: Gpu, lengths: tuple[int, ...]
) -> float | None:
    """The lower end of what the run takes on these cards, with the best settings that there are for it."""
    if config.rows is None or config.method is None or not lengths:
        return None
    kept = [min(length, config.max_length or length) for length in lengths]
    asked = FitOptions(
        method=config.method,
        engine="graft" if config.kind == "graft" else "hf",
        seq=kept[0] if len(kept) == 1 else tuple(kept),
        rows=config.rows,
        epochs=config.epochs or 1.0,
        batch_rows=effective_batch(config) or 16,
        rank=config.rank or 16,
    )
    machine = Machine(gpu=gpu, gpus=config.cards or 1, ram_gib=config.ram_gib or 64.0)
    answer = fit(make_question(model, asked, machine=machine))
    return answer.run_minutes.low if answer.fits else None


def _dtype(config: Configuration) -> Precision | None:
    """The type of the weights: as they are loaded, else as the run multiplies."""
    return config.weights_dtype or config.precision


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


def weights_of(config: Configuration, context: LintContext) -> LoadedWeights | None:
    """The weights alone, as the configuration loads them."""
    if context.parameters is None:
        return None
    if config.bits == 4 or config.method == "qlora":
        whole = 0
        if context.shape is not None:
            tables = 1 if context.shape.tied_embeddings else 2
            whole = context.shape.vocab_size * context.shape.hidden_size * tables
        gib = ((context.parameters - whole) * NF4 + whole * 2) / GIB
        return LoadedWeights(gib, "four bits")
    if config.bits == 8:
        return LoadedWeights(context.parameters / GIB, "eight bits")
    dtype = config.weights_dtype or config.precision
    if dtype is None:
        return None
    return LoadedWeights(context.parameters * ELEMENT_BYTES[dtype] / GIB, dtype)


class FullFloor(NamedTuple):
    card_gib: float
    explanation: str


def full_floor(config: Configuration, context: LintContext) -> FullFloor | None:
    """The least that a card holds where all weights are trained, without any activation."""
    if config.method != "full" or context.parameters is None:
        return None
    cards, stage = config.cards or 1, config.zero_stage or 0
    if config.precision == "float32":
        weights, gradients, optimizer = 4.0, 4.0, 8.0
    elif stage:
        # DeepSpeed keeps float32 weights and moments in addition to those of 16 bits.
        weights, gradients, optimizer = 2.0, 2.0, 12.0
    else:
        weights, gradients, optimizer = 2.0, 2.0, 4.0
    if config.offload_optimizer:
        optimizer = 0.0
        # Gradients travel as they are made; those of one layer at a time stay.
        gradients = 0.0 if stage >= 2 else gradients
    if config.offload_weights and stage == 3:
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
        each * context.parameters / GIB, f"bytes a parameter and card: {' + '.join(kept) or 'none'}"
    )
