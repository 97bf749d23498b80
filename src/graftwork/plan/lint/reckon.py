"""What follows from a configuration by the planner's own models: the peak of a card, the time of the run.

In: a configuration, the model, the card. Out: figures, or None where too little is said. Pure; computed,
not measured.
"""

from graftwork.model.shape import linear_names
from graftwork.plan.catalog.models import CatalogModel
from graftwork.plan.fit.answer import fit
from graftwork.plan.fit.ask import make_question
from graftwork.plan.lint.counts import effective_batch
from graftwork.plan.lint.facts import Configuration, Peaks, Precision
from graftwork.plan.memory_plain import plain_peak
from graftwork.records.fit import PlainSetup
from graftwork.records.hardware import Gpu, Machine
from graftwork.records.units import GIB

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
    question = make_question(
        model,
        machine=Machine(gpu=gpu, gpus=said.cards or 1, ram_gib=said.ram_gib or 64.0),
        method=said.method,
        engine="graft" if said.kind == "graft" else "hf",
        seq=kept[0] if len(kept) == 1 else kept,
        rows=said.rows,
        epochs=said.epochs or 1.0,
        batch_rows=effective_batch(said) or 16,
        rank=said.rank or 16,
    )
    answer = fit(question)
    return answer.run_minutes.low if answer.fits else None


def _dtype(said: Configuration) -> Precision | None:
    """What the weights stand in: as they are loaded, else as the run multiplies."""
    return said.weights_dtype or said.precision
