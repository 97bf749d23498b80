"""Every model of a project judged in one go, corrected for how many were tried.

In: an open workplace. Out: a verdict for each model. What is corrected is what later releases go by.
"""

from collections.abc import Collection
from dataclasses import replace

from graftwork.evaluate.gate import Judged, decide_all
from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.pipeline.reporter import ModelReporter
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.gate import finish, gather
from graftwork.pipeline.table import run_pipeline
from graftwork.records import errors
from graftwork.records.base import Record
from graftwork.records.verdict import Verdict

WORST_FIRST = (errors.EXIT_ABORT, errors.EXIT_ITERATE, errors.EXIT_NOT_ENOUGH_EVIDENCE)


class GatedAll(Record):
    """All models of a project, the main one first."""

    project: str
    verdicts: dict[str, Verdict]

    @property
    def exit_code(self) -> int:
        """That of the worst verdict: 0 only if all may be deployed."""
        codes = {verdict.exit_code for verdict in self.verdicts.values()}
        return next((code for code in WORST_FIRST if code in codes), errors.EXIT_DONE)


def gate_all(work: OpenProject, *, may_do: Collection[str] | None = None) -> GatedAll:
    """Bring every model up to date as far as its gate, by the steps that may be done; judge them together."""
    works: dict[str, OpenProject] = {}
    made: dict[str, StepOutputs] = {}
    judged: dict[str, Judged] = {}
    for name in work.project.settings.all_models:
        works[name] = replace(work, asked_model=name, reporter=ModelReporter(work.reporter, name))
        made[name] = run_pipeline(works[name], upto="gate", may_do=may_do)
        judged[name] = gather(works[name], made[name])
    verdicts = {
        name: finish(works[name], made[name], judged[name], verdict)
        for name, verdict in decide_all(judged).items()
    }
    for name, verdict in verdicts.items():
        _remember(works[name], verdict)
    return GatedAll(project=work.project.settings.project, verdicts=verdicts)


def _remember(work: OpenProject, verdict: Verdict) -> None:
    """In place of the verdict that did not know of the others: a release goes by this one."""
    entry = "gate" if work.model == work.settings.main_model else f"gate@{work.model}"
    last = work.ledger.get(entry)
    if last is None or last.output == verdict.model_dump(mode="json"):
        return
    work.ledger.put(
        entry,
        fingerprint=last.fingerprint,
        output=verdict.model_dump(mode="json"),
        finished_at=timestamp(),
        seconds=last.seconds,
    )
