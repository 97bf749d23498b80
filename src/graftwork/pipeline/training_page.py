"""The page of one run, in the run's own folder: something to look at after a plain `graft train`.

In: the folder of a run, its plan and its outcome. Out: `training.html`.
"""

from pathlib import Path

from pydantic import ValidationError

from graftwork.files.journal import Journal
from graftwork.files.whole import write_whole
from graftwork.process.vitals import VITALS_FILE
from graftwork.records.job import Vitals
from graftwork.records.plan import Plan
from graftwork.records.run import TrainOutcome
from graftwork.train.files import PAGE
from graftwork.train.log import read_journal


def write_training_page(folder: Path, plan: Plan, outcome: TrainOutcome) -> Path:
    # The template library is not needed to train; whoever only plans does not wait for it.
    from graftwork.report.training import make_training_page

    page = make_training_page(plan, outcome, read_journal(folder), read_vitals(folder))
    write_whole(folder / PAGE, page)
    return folder / PAGE


def read_vitals(folder: Path) -> tuple[Vitals, ...]:
    """What the machine felt like during the run; samples that another version wrote are passed over."""
    found = []
    for line in Journal(folder / VITALS_FILE).read():
        try:
            found.append(Vitals.model_validate(line))
        except ValidationError:
            continue
    return tuple(sorted(found, key=lambda one: one.at))
