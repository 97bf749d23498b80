"""How far plans were off over past runs: read from the store, with the bias of each kind of figure.

In: an open project. Out: the runs, newest first, and the biases.
"""

from graftwork.pipeline.open_project import OpenProject
from graftwork.plan.residuals import find_biases
from graftwork.records.base import Record
from graftwork.records.plan import Bias
from graftwork.store.runs import PastRun


class PastResiduals(Record):
    runs: tuple[PastRun, ...]
    biases: tuple[Bias, ...]


def past_residuals(work: OpenProject, *, runs: int) -> PastResiduals:
    found = work.residuals.past(runs=runs)
    return PastResiduals(runs=found, biases=find_biases(run.residuals for run in found))
