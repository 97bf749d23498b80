"""How the plain step goes through the rows of a step so that it fits: how many at a time, with which blocks
computed again. Pure.

In: a decoder's shape, the work, who shares it, the memory of a card or of the host. Out: a PlainStep that the
trainer takes; None on a processor where all rows of a step fit at once. Does not know our own step on a card.
"""

import math
from collections.abc import Iterator
from typing import Literal

from graftwork.costmodel.cpu_step import UNEVEN_REPLIES
from graftwork.costmodel.distributed import Distribution, PlainRun, plain_step_parts
from graftwork.costmodel.plain_memory import peak_of_each
from graftwork.costmodel.plain_time import expected_longest
from graftwork.plan.fit.candidate import RESERVED_SPREAD, memory_level
from graftwork.records.plan import Level, MemoryPeak, Offload, PlainSetup, PlainStep, Sharding, Workload
from graftwork.records.units import ELEMENT_BYTES, GIB

SHARDINGS: dict[str, Sharding] = {
    "single": "none",
    "ddp": "ddp",
    "fsdp": "fsdp2",
    "zero2": "zero2",
    "zero3": "zero3",
}


def distribution_of(strategy: str, processes: int = 1, *, offload: bool = False) -> Distribution:
    """Who shares a run, from how the trainer's settings name it."""
    sharding = SHARDINGS[strategy]
    moved: Offload = "none"
    if offload and sharding in ("zero2", "zero3", "fsdp2"):
        moved = "optimizer" if sharding == "zero2" else "weights"
    return Distribution(sharding, moved, processes if sharding != "none" else 1)


def choose_micro_batches(
    run: PlainRun,
    work: Workload,
    shared: Distribution,
    *,
    limit_gib: float,
    checkpointing: Literal["auto", "on", "off"] = "auto",
) -> PlainStep:
    """The fastest option within the limit; where there is none, the one that needs the least."""
    room = limit_gib * GIB / (1 + RESERVED_SPREAD[memory_level(run.architecture, run.correction)])

    def seconds_a_token(setup: PlainSetup) -> float:
        return _seconds_a_token(run, work, setup, shared)

    def step(setup: PlainSetup, peak: MemoryPeak) -> PlainStep:
        return PlainStep(
            micro_rows=setup.rows,
            checkpointed=setup.checkpointed > 0,
            peak_gib=peak.reserved / GIB,
            parts_gib={name: size / GIB for name, size in peak.parts.items() if size > 0},
            seconds_a_token=seconds_a_token(setup),
        )

    options = [
        (_peak(run, work, setup, shared, exact=False).reserved, setup)
        for setup in _setups(run, work, shared, checkpointing=checkpointing)
    ]
    roomy = [setup for reserved, setup in options if reserved <= room]
    # Of equals the one that computes nothing again.
    for setup in sorted(roomy, key=lambda setup: (seconds_a_token(setup), setup.checkpointed)):
        # The search follows straight lines; what is chosen is computed tensor by tensor.
        peak = _peak(run, work, setup, shared, exact=True)
        if peak.reserved <= room:
            return step(setup, peak)
    _, leanest = min(options, key=lambda option: option[0])
    return step(leanest, _peak(run, work, leanest, shared, exact=True))


def needs_more(step: PlainStep, *, limit_gib: float, level: Level = "computed") -> bool:
    """Whether even this option may exceed the limit."""
    return step.peak_gib * (1 + RESERVED_SPREAD[level]) > limit_gib


def _setups(
    run: PlainRun, work: Workload, shared: Distribution, *, checkpointing: Literal["auto", "on", "off"]
) -> Iterator[PlainSetup]:
    full, layers = work.method == "full", run.shape.layers
    depths = {"auto": (0, layers), "on": (layers,), "off": (0,)}[checkpointing]
    longest, common = max(work.lengths), work.shared_tokens
    for checkpointed in depths:
        # Else a row has its part of the beginning that all rows share.
        whole = checkpointed or shared.sharding in ("fsdp2", "zero3")
        rows = -(-min(work.batch_rows, len(work.lengths)) // shared.cards)
        while rows:
            yield PlainSetup(
                method=work.method,
                rank=max([work.rank, *work.ranks.values()]),
                targets=work.targets,
                adapted_layers=work.adapted_layers,
                # Trained weights are in float32; precisions are mixed only where one process works alone.
                dtype="float32" if full else run.half,
                autocast=run.half != "float32" and not (full and shared.sharding != "none"),
                rows=rows,
                tokens=longest if whole else longest - common + -(-common // rows),
                checkpointed=checkpointed,
                kbit_upcast=False,
                fused_nf4=True,
            )
            rows //= 2


def _peak(
    run: PlainRun, work: Workload, setup: PlainSetup, shared: Distribution, *, exact: bool
) -> MemoryPeak:
    longest = max(work.lengths)
    of_step = min(1.0, UNEVEN_REPLIES * setup.rows * shared.cards / work.batch_rows)
    replies = (work.most_replies or work.batch_rows * longest) * of_step
    predicted = min(1.0, replies / (setup.rows * setup.tokens))
    peak = peak_of_each(run._replace(predicted=predicted), setup, shared, exact=exact)
    # Every row has the keys and values of the shared prefix in front of its own.
    copied = setup.rows * (longest - setup.tokens) * 2 * run.shape.kv_heads * run.shape.head_dim
    size = float(copied * ELEMENT_BYTES[setup.dtype] * setup.adapted_layers)
    return peak.plus({"activations": size})


def _seconds_a_token(run: PlainRun, work: Workload, setup: PlainSetup, shared: Distribution) -> float:
    """Of an optimizer step of usual rows, over all processes."""
    usual = max(1, round(expected_longest(work.lengths, setup.rows) * setup.tokens / max(work.lengths)))
    passes = math.ceil(work.batch_rows / (setup.rows * shared.cards))
    step = setup.model_copy(update={"tokens": usual})
    seconds = sum(plain_step_parts(run, step, shared, passes=passes).values())
    return seconds / (sum(work.lengths) / len(work.lengths) * work.batch_rows)
