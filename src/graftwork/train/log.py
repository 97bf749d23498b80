"""The log of a run: one line a step."""

from pathlib import Path

from graftwork.files.journal import Journal
from graftwork.records.run import TrainStep
from graftwork.train.files import STEPS


def read_journal(folder: Path) -> list[TrainStep]:
    """Every step as it was done, those that a crash made necessary twice included."""
    return [TrainStep.model_validate(line) for line in Journal(folder / STEPS).read()]


def read_steps(folder: Path) -> list[TrainStep]:
    """The last word on each step, in order."""
    steps = {step.step: step for step in read_journal(folder)}
    return [steps[number] for number in sorted(steps)]
