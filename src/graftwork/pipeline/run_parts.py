"""Where a finished run's minutes and memory went, read from what it left in its folder.

In: the folder of a run, its outcome, the minutes that were waited. Out: RunParts. Measures nothing itself:
the journal of steps, the looks and the vitals were written while it ran.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from graftwork.pipeline.training_page import read_vitals
from graftwork.plan.residuals import COMPUTE, WAITING, split_memory
from graftwork.records.job import Vitals
from graftwork.records.plan import RunParts
from graftwork.records.run import TrainOutcome, TrainStep
from graftwork.train.log import read_journal


def read_parts(folder: Path, outcome: TrainOutcome, *, minutes: float) -> RunParts:
    return divide(outcome, read_journal(folder), read_vitals(folder), minutes=minutes)


def divide(
    outcome: TrainOutcome, steps: Sequence[TrainStep], vitals: Sequence[Vitals], *, minutes: float
) -> RunParts:
    """Loading, computing, waiting for data, looks, checkpoints, and the rest: validation at the end and
    saving; with restarts what was lost by them. The loss before the first step belongs to loading."""
    waiting = outcome.seconds * _data_share(vitals)
    looks = sum(look.seconds for look in outcome.looks)
    checkpoints = max(0.0, between_steps(steps) - looks)
    rest = minutes * 60 - outcome.load_seconds - outcome.seconds - looks - checkpoints
    return RunParts(
        seconds={
            "load": outcome.load_seconds,
            COMPUTE: outcome.seconds - waiting,
            WAITING: waiting,
            "looks": looks,
            "checkpoints": checkpoints,
            "restarts" if outcome.restarts else "validation": max(0.0, rest),
        },
        memory_gib=dict(split_memory(loaded=_loaded_gib(steps, vitals), peak=outcome.peak_memory_gib)),
    )


def between_steps(steps: Sequence[TrainStep]) -> float:
    """Seconds that passed between the end of a step and the beginning of the next; not over a restart."""
    gaps = [
        _apart(earlier, later) - later.seconds
        for earlier, later in pairwise(steps)
        if later.step == earlier.step + 1 and earlier.at and later.at
    ]
    return sum(gap for gap in gaps if gap > 0)


def _apart(earlier: TrainStep, later: TrainStep) -> float:
    """By the steady clock; journals of earlier versions have the other one alone."""
    if earlier.steady and later.steady:
        return later.steady - earlier.steady
    return later.at - earlier.at


def _data_share(vitals: Sequence[Vitals]) -> float:
    shares = [one.data_share for one in vitals if one.data_share is not None]
    return min(max(sum(shares) / len(shares), 0.0), 1.0) if shares else 0.0


def _loaded_gib(steps: Sequence[TrainStep], vitals: Sequence[Vitals]) -> float | None:
    """The last sample of memory before the first step. A card's is its driver's, with others' use in it:
    there, nobody can tell."""
    if not steps or not steps[0].at or any(one.devices for one in vitals):
        return None
    begun = steps[0].at - steps[0].seconds
    before = [one.memory_gib for one in vitals if one.at < begun]
    return before[-1] if before else None
