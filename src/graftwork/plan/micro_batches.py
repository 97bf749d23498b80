"""How the plain step goes through the rows of a step so that it fits: how many at a time, with which blocks
computed again. Pure.

In: a decoder's shape, the work, who shares it, the memory of a card or of the host. Out: a PlainStep that the
trainer takes; None on a processor where all rows of a step fit at once. Does not know our own step on a card.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

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


class TrainStrategy(NamedTuple):
    """Who shares a run, as the trainer's settings name it."""

    strategy: str = "single"
    processes: int = 1
    offload: bool = False

    @property
    def shared(self) -> Distribution:
        sharding = SHARDINGS[self.strategy]
        moved: Offload = "none"
        if self.offload and sharding in ("zero2", "zero3", "fsdp2"):
            moved = "optimizer" if sharding == "zero2" else "weights"
        return Distribution(sharding, moved, self.processes if self.strategy != "single" else 1)


class MicroBatchOption(NamedTuple):
    """A way with its figures."""

    setup: PlainSetup
    peak: MemoryPeak
    seconds_a_token: float


def choose_micro_batches(
    run: PlainRun,
    work: Workload,
    strategy: TrainStrategy,
    *,
    limit_gib: float,
    checkpointing: Literal["auto", "on", "off"] = "auto",
) -> PlainStep:
    """The fastest option within the limit; where there is none, the one that needs the least."""
    room = limit_gib * GIB / (1 + RESERVED_SPREAD[memory_level(run.architecture, run.correction)])

    def estimate(setup: PlainSetup, *, exact: bool) -> MicroBatchOption:
        peak = _peak(run, work, setup, strategy, exact=exact)
        return MicroBatchOption(setup, peak, _seconds_a_token(run, work, setup, strategy))

    options = [
        estimate(setup, exact=False) for setup in _setups(run, work, strategy, checkpointing=checkpointing)
    ]
    roomy = sorted((option for option in options if option.peak.reserved <= room), key=_preference)
    for option in roomy:
        # The search follows straight lines; what is chosen is computed tensor by tensor.
        exact = estimate(option.setup, exact=True)
        if exact.peak.reserved <= room:
            return _step(exact)
    leanest = min(options, key=lambda option: option.peak.reserved)
    return _step(estimate(leanest.setup, exact=True))


def needs_more(step: PlainStep, *, limit_gib: float, level: Level = "computed") -> bool:
    """Whether even this option may exceed the limit."""
    return step.peak_gib * (1 + RESERVED_SPREAD[level]) > limit_gib


def _setups(
    run: PlainRun, work: Workload, strategy: TrainStrategy, *, checkpointing: Literal["auto", "on", "off"]
) -> Iterator[PlainSetup]:
    full, layers = work.method == "full", run.shape.layers
    depths = {"auto": (0, layers), "on": (layers,), "off": (0,)}[checkpointing]
    for checkpointed in depths:
        rows = -(-min(work.batch_rows, len(work.lengths)) // strategy.shared.cards)
        while rows:
            yield PlainSetup(
                method=work.method,
                rank=max([work.rank, *work.ranks.values()]),
                targets=work.targets,
                adapted_layers=work.adapted_layers,
                # Trained weights are in float32; precisions are mixed only where one process works alone.
                dtype="float32" if full else run.half,
                autocast=run.half != "float32" and not (full and strategy.strategy != "single"),
                rows=rows,
                tokens=_tokens(work, strategy, rows=rows, checkpointed=bool(checkpointed)),
                checkpointed=checkpointed,
                kbit_upcast=False,
                fused_nf4=True,
            )
            rows //= 2


def _tokens(work: Workload, strategy: TrainStrategy, *, rows: int, checkpointed: bool) -> int:
    """Of a row, with its padding and its part of the beginning that all rows share."""
    longest = max(work.lengths)
    if checkpointed or strategy.shared.sharding in ("fsdp2", "zero3"):
        return longest
    return longest - work.shared_tokens + -(-work.shared_tokens // rows)


def _peak(
    run: PlainRun, work: Workload, setup: PlainSetup, strategy: TrainStrategy, *, exact: bool
) -> MemoryPeak:
    shared, longest = strategy.shared, max(work.lengths)
    of_step = min(1.0, UNEVEN_REPLIES * setup.rows * shared.cards / work.batch_rows)
    replies = (work.most_replies or work.batch_rows * longest) * of_step
    predicted = min(1.0, replies / (setup.rows * setup.tokens))
    peak = peak_of_each(run._replace(predicted=predicted), setup, shared, exact=exact)
    # Every row has the keys and values of the shared prefix in front of its own.
    copied = setup.rows * (longest - setup.tokens) * 2 * run.shape.kv_heads * run.shape.head_dim
    size = float(copied * ELEMENT_BYTES[setup.dtype] * setup.adapted_layers)
    parts = {**peak.parts, "activations": peak.parts.get("activations", 0.0) + size}
    return peak.model_copy(
        update={"parts": parts, "allocated": peak.allocated + size, "reserved": peak.reserved + size}
    )


def _seconds_a_token(run: PlainRun, work: Workload, setup: PlainSetup, strategy: TrainStrategy) -> float:
    """Of an optimizer step of usual rows, over all processes."""
    usual = max(1, round(expected_longest(work.lengths, setup.rows) * setup.tokens / max(work.lengths)))
    passes = math.ceil(work.batch_rows / (setup.rows * strategy.shared.cards))
    step = setup.model_copy(update={"tokens": usual})
    seconds = sum(plain_step_parts(run, step, strategy.shared, passes=passes).values())
    return seconds / (sum(work.lengths) / len(work.lengths) * work.batch_rows)


def _preference(found: MicroBatchOption) -> tuple[float, int]:
    """The fastest; of equals the one that computes nothing again."""
    return found.seconds_a_token, found.setup.checkpointed


def _step(found: MicroBatchOption) -> PlainStep:
    return PlainStep(
        micro_rows=found.setup.rows,
        checkpointed=found.setup.checkpointed > 0,
        peak_gib=found.peak.reserved / GIB,
        parts_gib={name: size / GIB for name, size in found.peak.parts.items() if size > 0},
        seconds_a_token=found.seconds_a_token,
    )
