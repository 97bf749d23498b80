"""An evaluation as somebody asks for it now: other subjects, other cases, more processes, asked again.

In: what was asked for. Out: the report, as the step of the pipeline makes one. An evaluation of other
subjects or cases than the project's own stands beside the pipeline: the gate does not see it. Everything
that is answered is kept for both.
"""

from dataclasses import dataclass
from pathlib import Path

from graftwork.evaluate.cases import draw_cases, hash_cases
from graftwork.evaluate.subjects.case_file import read_case_file
from graftwork.evaluate.subjects.named import CHAMPION, NamedSubject, parse_subjects
from graftwork.files.disk import write_atomic
from graftwork.pipeline.evaluate_context import open_grading
from graftwork.pipeline.evaluate_log import remark_on_log
from graftwork.pipeline.evaluate_run import (
    Evaluated,
    Lineup,
    ask_everybody,
    forget_subjects,
    measure_subjects,
    report_on,
)
from graftwork.pipeline.evaluate_subjects import Asking, resolve_subject
from graftwork.pipeline.evaluation_page import put_page
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.data import PreparedData
from graftwork.pipeline.steps.evaluate import (
    ADAPTER,
    LOG,
    REFERENCES,
    STEP,
    held_out,
    line_up,
    log_look,
    put_cases,
    worked_example,
)
from graftwork.pipeline.table import run_pipeline
from graftwork.records.base import fingerprint
from graftwork.records.errors import UserMistake
from graftwork.records.report import Case
from graftwork.records.run import TrainOutcome


@dataclass(frozen=True)
class Asked:
    """What was asked for; with nothing of it, the evaluation is the pipeline's own."""

    subjects: tuple[str, ...] = ()
    cases: Path | None = None
    limit: int | None = None
    shards: int = 1
    again: bool = False

    @property
    def stands_beside(self) -> bool:
        """Whether it is another evaluation than the one that the gate decides on."""
        return bool(self.subjects) or self.cases is not None or self.limit is not None


def evaluate_asked(work: OpenProject, asked: Asked) -> Evaluated:
    if not asked.stands_beside:
        if asked.shards > 1 or asked.again:
            _ask_beforehand(work, asked)
        return put_page(work, run_pipeline(work, upto=STEP.name).get(STEP.name, Evaluated))
    named = parse_subjects(asked.subjects)
    # Read first: a mistake in the file shall not cost a training.
    checks = work.settings.evaluate.checks
    given = read_case_file(asked.cases, named=checks) if asked.cases is not None else None
    trained = not named or any(subject.name == ADAPTER for subject in named)
    made = run_pipeline(work, upto="train" if trained else "prepare")
    prepared = made.get("prepare", PreparedData)
    cases = draw_cases(given or held_out(work, prepared), most=asked.limit)
    asking = _asking(work, prepared, cases, asked)
    outcome = made.get("train", TrainOutcome) if trained else None
    lineup = _line_up(work, named, asking=asking, outcome=outcome)
    if asked.again:
        forget_subjects(lineup, cases)
    grading = open_grading(work, cases)
    scored = measure_subjects(work, lineup, cases=cases, grading=grading)
    looks = log_look(work, cases, subject=lineup.candidate.identity)
    # The answers of a user's own file are nobody's log.
    remarks = remark_on_log(scored, prepared=prepared if given is None else None)
    evaluated = Evaluated(
        cases_file=str(asking.cases_file),
        folders={subject.name: str(subject.folder) for subject in lineup.all},
        report=report_on(
            work,
            lineup,
            cases=cases,
            scored=scored,
            grading=grading,
            looks=looks,
            looked_at=lineup.candidate.identity,
            remarks=remarks,
        ),
    )
    name = fingerprint([hash_cases(cases), [subject.name for subject in lineup.all]])[:12]
    write_atomic(work.project.evaluations / f"asked-{name}.json", evaluated.to_json())
    return put_page(work, evaluated, beside=True)


def _ask_beforehand(work: OpenProject, asked: Asked) -> None:
    """Answer what the pipeline's evaluation will ask for, in several processes or anew."""
    made: StepOutputs = run_pipeline(work, upto="train")
    prepared = made.get("prepare", PreparedData)
    cases = held_out(work, prepared)
    lineup = line_up(
        work, asking=_asking(work, prepared, cases, asked), outcome=made.get("train", TrainOutcome)
    )
    if asked.again:
        work.ledger.forget(
            STEP.name if work.model == work.settings.main_model else f"{STEP.name}@{work.model}"
        )
        forget_subjects(lineup, cases)
    ask_everybody(work, lineup, cases)


def _asking(work: OpenProject, prepared: PreparedData, cases: tuple[Case, ...], asked: Asked) -> Asking:
    return Asking(put_cases(work, cases), example=worked_example(work, prepared), shards=asked.shards)


def _line_up(
    work: OpenProject, named: tuple[NamedSubject, ...], *, asking: Asking, outcome: TrainOutcome | None
) -> Lineup:
    """The first is the baseline, the second the candidate; one alone is measured against the log."""
    if not named:
        assert outcome is not None
        return line_up(work, asking=asking, outcome=outcome)
    if len(named) == 1:
        if named[0].name == LOG:
            raise UserMistake(
                "the log alone cannot be compared",
                why="its answers are what the others are measured against",
                fix="name another subject too: --subject log --subject base",
                where="--subject",
            )
        named = (*parse_subjects([LOG]), *named)
    subjects = [resolve_subject(work, subject, asking=asking, outcome=outcome) for subject in named]
    rest = list(zip(named[2:], subjects[2:], strict=True))
    return Lineup(
        baseline=subjects[0],
        candidate=subjects[1],
        champion=next((subject for name, subject in rest if name.name == CHAMPION), None),
        others=tuple(s for n, s in rest if n.kind not in REFERENCES and n.name != CHAMPION),
        references=tuple(s for n, s in rest if n.kind in REFERENCES),
    )
