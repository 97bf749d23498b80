"""All that the page is told."""

from graftwork.records.audit import Audit
from graftwork.records.base import Record
from graftwork.records.dataset import Dataset
from graftwork.records.job import Vitals
from graftwork.records.plan import Plan
from graftwork.records.release import Release
from graftwork.records.report import Report
from graftwork.records.run import TrainOutcome, TrainStep
from graftwork.records.verdict import Verdict


class SideBySide(Record):
    """One question, asked to base and adapter; `release` is the one that answered."""

    question: str
    base_answer: str
    adapter_answer: str
    reference: str = ""
    release: str = ""


class ReportPage(Record):
    """`steps` is the journal as it was written, replayed steps included: they show where a run was
    killed and went on. `seconds` maps a stage to its time, None where nothing had to be done again."""

    project: str
    audit: Audit
    dataset: Dataset
    plan: Plan
    steps: tuple[TrainStep, ...]
    outcome: TrainOutcome
    vitals: tuple[Vitals, ...] = ()
    report: Report
    verdict: Verdict
    release: Release | None = None
    side_by_side: tuple[SideBySide, ...] = ()
    seconds: dict[str, float | None] = {}
    evaluation_page: str = ""
    """The file beside this page on which every case can be read; none without it."""
