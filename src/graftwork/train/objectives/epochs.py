"""Which rows are trained on in which step: decided by the rows and the seed alone, before the run.

In: lengths, and where the dataset has them weights and stages. Out: the row numbers of every step.
Rows of like length share a batch, so that little is padded; the batches of an epoch are shuffled.
Where rows have stages, lower stages come first in every epoch, no batch spans two of them, and rows
without one come among the last: of what is not known to be easy, nothing is put before what is.
Pure: no clock, no state. A resumed run asks again and gets the same answer.
"""

import hashlib
import math
import random
from collections.abc import Sequence

from graftwork.records.dataset import Row
from graftwork.records.errors import UserMistake
from graftwork.train.settings import TrainSettings

WORTH_SHARING = 8
"""A shorter common beginning costs more in bookkeeping than it saves."""


def plan_steps(rows: Sequence[Row], *, settings: TrainSettings) -> tuple[tuple[int, ...], ...]:
    """The row numbers of each step of a run on `rows`: what is planned is what is trained."""
    steps = plan_batches(
        tuple(len(row.tokens) for row in rows),
        batch_rows=settings.batch_rows,
        epochs=settings.epochs,
        seed=settings.seed,
        stages=[row.stage for row in rows],
        weights=[row.weight for row in rows],
    )
    if not steps:
        raise UserMistake(
            "no row stands in any epoch",
            why=f"the weights of the {len(rows)} training rows leave nothing in {settings.epochs} epochs",
            fix="raise the `weights` of this model under `models:`, or `train.epochs`",
        )
    return steps


def plan_batches(
    lengths: tuple[int, ...],
    *,
    batch_rows: int,
    epochs: int,
    seed: int,
    stages: Sequence[int | None] | None = None,
    weights: Sequence[float] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """The row numbers of each step, over all epochs.

    A row stands in an epoch as often as its weight says: once where no weights are given.
    """
    steps: list[tuple[int, ...]] = []
    ranks = _rank_stages(stages) if stages is not None else [0] * len(lengths)
    phases = _draw_phases(weights, seed=seed) if weights is not None else []
    for epoch in range(epochs):
        chance = random.Random(f"{seed}/{epoch}")
        by_stage: list[list[int]] = [[] for _ in range(max(ranks, default=-1) + 1)]
        for row, rank in enumerate(ranks):
            visits = 1 if weights is None else count_visits(weights[row], epoch=epoch, phase=phases[row])
            by_stage[rank].extend([row] * visits)
        for rows in by_stage:
            chance.shuffle(rows)
            # Sorting is stable: rows of the same length stay shuffled among themselves.
            rows.sort(key=lambda row: lengths[row])
            batches = [tuple(rows[at : at + batch_rows]) for at in range(0, len(rows), batch_rows)]
            chance.shuffle(batches)
            steps.extend(batches)
    return tuple(steps)


def count_visits(weight: float, *, epoch: int, phase: float) -> int:
    """How often a row of this weight stands in an epoch: 2.0 twice in each, 0.5 in every second one.

    Over the first n epochs it is always n × weight, rounded up or down; `phase`, which falls evenly
    on 0 to 1, says which, so that in expectation it is exact in every single epoch.
    """
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"a weight is a number of visits, at least 0, not {weight}")
    whole = math.floor(weight)
    part = weight - whole
    return whole + math.floor((epoch + 1) * part + phase) - math.floor(epoch * part + phase)


def choose_training_rows(rows: Sequence[Row], *, settings: TrainSettings) -> list[Row]:
    """The rows that a run is about: those that weigh anything, as many as the budget allows."""
    weighty = [row for row in rows if row.weight > 0]
    chosen = choose_rows(len(weighty), most=settings.max_rows, seed=settings.seed)
    return [weighty[at] for at in chosen]


def choose_rows(count: int, *, most: int | None, seed: int) -> tuple[int, ...]:
    """All rows, or as many of them as the budget allows, in their order."""
    if most is None or count <= most:
        return tuple(range(count))
    return tuple(sorted(random.Random(f"{seed}/rows").sample(range(count), most)))


def shared_tokens(rows: Sequence[Row]) -> int:
    """How many first tokens all rows have in common, short of the first that predicts a reply."""
    limit = min(row.trained_from for row in rows) - 1
    first = rows[0].tokens
    count = next(
        (at for at in range(limit) if any(row.tokens[at] != first[at] for row in rows)), max(limit, 0)
    )
    return count if count >= WORTH_SHARING and len(rows) > 1 else 0


def _rank_stages(stages: Sequence[int | None]) -> list[int]:
    """The place of each row's stage among those that occur; rows without one share the last."""
    ranks = {stage: rank for rank, stage in enumerate(sorted({s for s in stages if s is not None}))}
    last = max(len(ranks) - 1, 0)
    return [last if stage is None else ranks[stage] for stage in stages]


def _draw_phases(weights: Sequence[float], *, seed: int) -> list[float]:
    """Where in its rhythm each row begins. Only a weight with a fraction has one."""
    return [0.0 if weight % 1 == 0 else _fall_evenly(f"{seed}/{row}") for row, weight in enumerate(weights)]


def _fall_evenly(text: str) -> float:
    """0 to 1, in steps so wide that adding an epoch's share to it loses nothing that matters."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) / 2**32


def learning_rate(step: int, *, steps: int, highest: float, warmup_share: float) -> float:
    """The rate of step 1 … `steps`. Never zero, so that no step is wasted."""
    warmup = round(steps * warmup_share)
    if step <= warmup:
        return highest * step / (warmup + 1)
    gone = (step - warmup - 1) / max(steps - warmup, 1)
    return highest * 0.5 * (1 + math.cos(math.pi * gone))
