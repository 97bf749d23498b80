"""How the plain step goes through the rows of a step so that it fits: how many at a time, with which blocks
computed again. Pure.

In: a decoder's shape, the work, who shares it, the memory of a card or of the host. Out: a PlainStep that the
trainer takes; None on a processor where all rows of a step fit at once. Does not know our own step on a card.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from graftwork.model.shape import adapter_parameters, total_parameters
from graftwork.plan.fit.candidate import RESERVED_SPREAD
from graftwork.plan.fit.late import expected_longest
from graftwork.plan.fit.plain_steps import peak_of_each
from graftwork.plan.fit.sharding import WIDTH, Shared
from graftwork.plan.memory import training_memory
from graftwork.plan.timing.plain import plain_step
from graftwork.plan.timing.rates import Rates
from graftwork.plan.tuning import default_rates
from graftwork.records.fit import MemoryPeak, Offload, PlainSetup, Precision, Sharding
from graftwork.records.plan import ModelShape, PlainStep, Workload
from graftwork.records.units import GIB

SHARDINGS: dict[str, Sharding] = {
    "single": "none",
    "ddp": "ddp",
    "fsdp": "fsdp2",
    "zero2": "zero2",
    "zero3": "zero3",
}
UNEVEN_REPLIES = 2.0
"""How much more than its share of a step's replies some rows of it may hold (guessed)."""
HOST_SPREAD = 1.2


class Crew(NamedTuple):
    """Who shares a run, as the trainer's settings name it."""

    strategy: str = "single"
    processes: int = 1
    offload: bool = False

    @property
    def shared(self) -> Shared:
        sharding = SHARDINGS[self.strategy]
        moved: Offload = "none"
        if self.offload and sharding in ("zero2", "zero3", "fsdp2"):
            moved = "optimizer" if sharding == "zero2" else "weights"
        return Shared(sharding, moved, self.processes if self.strategy != "single" else 1)


class Found(NamedTuple):
    """A way with its figures."""

    setup: PlainSetup
    peak: MemoryPeak
    seconds_a_token: float


def choose_passes(
    shape: ModelShape,
    work: Workload,
    *,
    crew: Crew,
    dtype: Precision,
    architecture: str,
    limit_gib: float,
    checkpointing: Literal["auto", "on", "off"] = "auto",
    rates: Rates | None = None,
) -> PlainStep:
    """On cards: the fastest way within the limit; where none is, the one that needs the least."""
    known = rates or default_rates()
    room = limit_gib * GIB / (1 + RESERVED_SPREAD["computed"])
    ways = list(_setups(shape, work, crew, dtype, checkpointing))

    def reckon(setup: PlainSetup, *, exact: bool) -> Found:
        peak = _peak(shape, work, setup, crew, architecture=architecture, exact=exact)
        return Found(setup, peak, _seconds_a_token(shape, work, setup, crew, rates=known, dtype=dtype))

    found = [reckon(setup, exact=False) for setup in ways]
    roomy = sorted((one for one in found if one.peak.reserved <= room), key=_preference)
    for one in roomy:
        # The search goes by straight lines; what is taken is reckoned to the tensor.
        exact = reckon(one.setup, exact=True)
        if exact.peak.reserved <= room:
            return _step(exact)
    return _step(reckon(min(found, key=lambda one: one.peak.reserved).setup, exact=True))


def needs_more(step: PlainStep, *, limit_gib: float) -> bool:
    """Whether even this way may pass the limit."""
    return step.peak_gib * (1 + RESERVED_SPREAD["computed"]) > limit_gib


def choose_host_passes(
    shape: ModelShape, work: Workload, *, limit_gib: float, width: int, checkpointed: bool = False
) -> PlainStep | None:
    """On a processor: as many rows as memory has room for; None where that is all of them."""
    rows = work.batch_rows
    while True:
        parts = training_memory(
            shape,
            with_rows(work, rows),
            parameters=total_parameters(shape),
            trainable=_trainable(shape, work),
            width=width,
            checkpointed=checkpointed,
        )
        if rows == 1 or parts.total * HOST_SPREAD <= limit_gib * GIB:
            break
        rows //= 2
    if rows == work.batch_rows and not checkpointed:
        return None
    return PlainStep(micro_rows=rows, checkpointed=checkpointed, peak_gib=parts.total / GIB)


def with_rows(work: Workload, rows: int) -> Workload:
    """The work as the memory of one pass sees it."""
    share = min(1.0, UNEVEN_REPLIES * rows / work.batch_rows)
    return work.model_copy(update={"batch_rows": rows, "most_replies": round(work.most_replies * share)})


def _setups(
    shape: ModelShape,
    work: Workload,
    crew: Crew,
    dtype: Precision,
    checkpointing: Literal["auto", "on", "off"],
) -> Iterator[PlainSetup]:
    full, cards = work.method == "full", crew.shared.cards
    depths = {"auto": (0, shape.layers), "on": (shape.layers,), "off": (0,)}[checkpointing]
    for checkpointed in depths:
        rows = -(-min(work.batch_rows, len(work.lengths)) // cards)
        while rows:
            yield PlainSetup(
                method=work.method,
                rank=max([work.rank, *work.ranks.values()]),
                targets=work.targets,
                adapted_layers=work.adapted_layers,
                # Learned weights stand in float32; products are mixed only where one process works alone.
                dtype="float32" if full else dtype,
                autocast=dtype != "float32" and not (full and crew.strategy != "single"),
                rows=rows,
                tokens=_tokens(work, crew, rows=rows, checkpointed=bool(checkpointed)),
                checkpointed=checkpointed,
                kbit_upcast=False,
            )
            rows //= 2


def _tokens(work: Workload, crew: Crew, *, rows: int, checkpointed: bool) -> int:
    """Of a row, with its padding and its part of the beginning that all rows share."""
    longest = max(work.lengths)
    if checkpointed or crew.shared.sharding in ("fsdp2", "zero3"):
        return longest
    return longest - work.shared_tokens + -(-work.shared_tokens // rows)


def _peak(
    shape: ModelShape, work: Workload, setup: PlainSetup, crew: Crew, *, architecture: str, exact: bool
) -> MemoryPeak:
    shared, longest = crew.shared, max(work.lengths)
    of_step = min(1.0, UNEVEN_REPLIES * setup.rows * shared.cards / work.batch_rows)
    replies = (work.most_replies or work.batch_rows * longest) * of_step
    peak = peak_of_each(
        shape,
        setup,
        shared,
        architecture=architecture,
        trainable=_trainable(shape, work),
        predicted=min(1.0, replies / (setup.rows * setup.tokens)),
        exact=exact,
    )
    # Every row lays the beginning's keys and values before its own.
    copied = setup.rows * (longest - setup.tokens) * 2 * shape.kv_heads * shape.head_dim
    size = float(copied * WIDTH[setup.dtype] * setup.adapted_layers)
    parts = {**peak.parts, "activations": peak.parts.get("activations", 0.0) + size}
    return peak.model_copy(
        update={"parts": parts, "allocated": peak.allocated + size, "reserved": peak.reserved + size}
    )


def _seconds_a_token(
    shape: ModelShape, work: Workload, setup: PlainSetup, crew: Crew, *, rates: Rates, dtype: Precision
) -> float:
    """Passes of usual rows and the update, over all processes."""
    usual = max(1, round(expected_longest(work.lengths, setup.rows) * setup.tokens / max(work.lengths)))
    # With autocast, products go in 16 bits whatever the weights are kept in.
    worked = setup.model_copy(update={"tokens": usual, "dtype": dtype if setup.autocast else setup.dtype})
    a_pass = sum(plain_step(shape, worked, rates=rates).parts.values())
    cards = crew.shared.cards
    passes = math.ceil(work.batch_rows / (setup.rows * cards))
    update = sum(plain_step(shape, setup, rates=rates).once_a_step.values())
    tokens = sum(work.lengths) / len(work.lengths) * work.batch_rows
    return (a_pass * passes + update) / tokens


def _trainable(shape: ModelShape, work: Workload) -> int:
    return adapter_parameters(
        shape,
        rank=work.rank,
        targets=work.targets,
        layers=work.adapted_layers,
        ranks=work.ranks,
        method=work.method,
    )


def _preference(found: Found) -> tuple[float, int]:
    """The fastest; of equals the one that computes nothing again."""
    return found.seconds_a_token, found.setup.checkpointed


def _step(found: Found) -> PlainStep:
    return PlainStep(
        micro_rows=found.setup.rows,
        checkpointed=found.setup.checkpointed > 0,
        peak_gib=found.peak.reserved / GIB,
        parts_gib={name: size / GIB for name, size in found.peak.parts.items() if size > 0},
        seconds_a_token=found.seconds_a_token,
    )
