"""The epoch order of a dataset's rows: which rows are trained in which step, and the learning rate of a step.

Input: rows with their lengths, weights and stages, and the settings. Output: the rows of each step. A batch
takes its rows from all lengths, so that no kind of row (short refusals, long reports) fills batches of its
own; within a batch, rows are sorted by length, so that micro-batches pad little. Where rows have stages,
lower stages come first in every epoch, no batch spans two stages, and rows without a stage join the last one.
Pure: depends only on the rows and the seed, so a resumed run gets the same batches.
"""

import hashlib
import math
import random
from collections.abc import Sequence
from typing import Any

from graftwork.records.dataset import Row
from graftwork.records.errors import UserError
from graftwork.train.settings import TrainSettings

WORTH_SHARING = 8
"""A shorter common prefix costs more in bookkeeping than it saves."""


class PlannedOrder:
    """A batch source whose steps are known from the start, as numbers of the rows or pairs that it orders."""

    def __init__(self, steps: Sequence[Sequence[int]], *, rows_each: int = 1) -> None:
        self._steps, self._rows_each = steps, rows_each

    @property
    def steps(self) -> int:
        return len(self._steps)

    def measures(self, step: int) -> dict[str, float]:
        return {}

    def rows_before(self, step: int) -> int:
        return sum(self._rows_each * len(batch) for batch in self._steps[:step])

    def mark(self, number: int) -> object:
        """Identifies the order: a different order makes a different run."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for batch in self._steps:
            digest.update(repr([self.mark(number) for number in batch]).encode())
        return {"steps": self.steps, "order": digest.hexdigest()[:16]}


class EpochOrder(PlannedOrder):
    """The batch source of supervised fine-tuning."""

    def __init__(self, rows: Sequence[Row], *, settings: TrainSettings) -> None:
        super().__init__(plan_steps(rows, settings=settings))
        self._rows = rows

    def batch(self, step: int) -> list[Row]:
        return [self._rows[index] for index in self._steps[step - 1]]

    def peek(self, step: int) -> list[Row]:
        return self.batch(step)

    def mark(self, number: int) -> object:
        return self._rows[number].id, len(self._rows[number].tokens)


def plan_steps(rows: Sequence[Row], *, settings: TrainSettings) -> tuple[tuple[int, ...], ...]:
    """The row numbers of each step. The planner calls it too, so what is planned is what is trained."""
    steps = plan_batches(
        tuple(len(row.tokens) for row in rows),
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        seed=settings.seed,
        stages=[row.stage for row in rows],
        weights=[row.weight for row in rows],
    )
    if not steps:
        raise UserError(
            "no row is in any epoch",
            why=f"the weights of the {len(rows)} training rows leave nothing in {settings.epochs} epochs",
            fix="raise the `weights` of this model under `models:`, or `train.epochs`",
        )
    return steps


def plan_batches(
    lengths: tuple[int, ...],
    *,
    batch_size: int,
    epochs: int,
    seed: int,
    stages: Sequence[int | None] | None = None,
    weights: Sequence[float] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """The row numbers of each step, over all epochs. A row occurs in an epoch as often as its weight says:
    once by default.
    """
    steps: list[tuple[int, ...]] = []
    ranks = [0] * len(lengths)
    if stages is not None:
        # Rows without a stage get the last rank.
        by_rank = {stage: rank for rank, stage in enumerate(sorted({s for s in stages if s is not None}))}
        last = max(len(by_rank) - 1, 0)
        ranks = [last if stage is None else by_rank[stage] for stage in stages]
    # Only fractional weights have a phase: in steps of 2⁻³², so that adding an epoch's share loses nothing.
    phases = [
        int.from_bytes(hashlib.sha256(f"{seed}/{row}".encode()).digest()[:4]) / 2**32 if weight % 1 else 0.0
        for row, weight in enumerate(weights or ())
    ]
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
            batches = -(-len(rows) // batch_size)
            mixed: list[list[int]] = [[] for _ in range(batches)]
            # Each batch gets one row of each band of similar lengths.
            for first in range(0, len(rows), batches or 1):
                band = rows[first : first + batches]
                for batch, row in zip(chance.sample(range(batches), len(band)), band, strict=True):
                    mixed[batch].append(row)
            steps.extend(map(tuple, mixed))
    return tuple(steps)


def count_visits(weight: float, *, epoch: int, phase: float) -> int:
    """How often a row of this weight is in an epoch: 2.0 twice in each, 0.5 in every second one.

    Over the first n epochs it is n × weight, rounded up or down. `phase`, uniform between 0 and 1, decides
    which, so that the expected count is exact in every epoch.
    """
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"a weight is a number of visits, at least 0, not {weight}")
    whole = math.floor(weight)
    part = weight - whole
    return whole + math.floor((epoch + 1) * part + phase) - math.floor(epoch * part + phase)


def choose_training_rows(rows: Sequence[Row], *, settings: TrainSettings) -> list[Row]:
    """The rows of positive weight, at most `train.max_rows` of them."""
    weighted = [row for row in rows if row.weight > 0]
    indices = choose_rows(len(weighted), most=settings.max_rows, seed=settings.seed)
    return [weighted[index] for index in indices]


def choose_rows(count: int, *, most: int | None, seed: int) -> tuple[int, ...]:
    """All row numbers, or a sample of `most` of them in order."""
    if most is None or count <= most:
        return tuple(range(count))
    return tuple(sorted(random.Random(f"{seed}/rows").sample(range(count), most)))


def shared_tokens(rows: Sequence[Row]) -> int:
    """The length of the common prefix of all rows, up to the first token that predicts a reply."""
    limit = min(row.trained_from for row in rows) - 1
    first = rows[0].tokens
    count = next(
        (
            position
            for position in range(limit)
            if any(row.tokens[position] != first[position] for row in rows)
        ),
        max(limit, 0),
    )
    return count if count >= WORTH_SHARING and len(rows) > 1 else 0


def learning_rate(step: int, *, steps: int, highest: float, warmup_ratio: float) -> float:
    """Linear warmup, then cosine decay; step 1 … `steps`. Never zero, so that no step is wasted."""
    warmup = round(steps * warmup_ratio)
    if step <= warmup:
        return highest * step / (warmup + 1)
    gone = (step - warmup - 1) / max(steps - warmup, 1)
    return highest * 0.5 * (1 + math.cos(math.pi * gone))
