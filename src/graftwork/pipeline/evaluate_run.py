"""Subjects asked, one after the other, and put into one report.

In: cases, who is asked, who is compared with whom. Out: the report, and the folder of each subject's
answers. Each model is asked in a child process that may die and be started again; the log is only read.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from graftwork.evaluate.compare import compare
from graftwork.evaluate.confusion import confuse
from graftwork.evaluate.score import make_report, score, sessions_of
from graftwork.evaluate.slices import slice_report
from graftwork.evaluate.subjects.book import ANSWERS_FILE, forget_answers, read_answers
from graftwork.evaluate.subjects.engines import PRECISIONS, agree_on_engine, is_vllm
from graftwork.evaluate.subjects.log import answers_of_log, generation_of_log
from graftwork.evaluate.timing import group_of, is_timed
from graftwork.evaluate.wear import wear_of
from graftwork.evaluate.worker import GENERATION_FILE
from graftwork.files.disk import make_folder, write_atomic
from graftwork.pipeline.evaluate_context import Grading
from graftwork.pipeline.evaluate_subjects import Subject
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.supervise import run_job
from graftwork.records.base import Record
from graftwork.records.report import Case, Generation, Report, SubjectReport, TimingJob


class Evaluated(Record):
    """The report, and the folders in which the answers lie."""

    cases_file: str
    folders: dict[str, str]
    report: Report
    champion: str | None = None
    """The release that served when this was measured, where the candidate is another one."""
    adapter_hash: str = ""
    """The adapter that was measured; empty where none of this project's was."""
    page: str = ""
    """The page to read it on, where one was written."""


@dataclass(frozen=True)
class Lineup:
    """Who is compared. The candidate is measured against each of `references`, as against the baseline;
    `others` are candidates like it."""

    baseline: Subject
    candidate: Subject
    champion: Subject | None = None
    others: tuple[Subject, ...] = ()
    references: tuple[Subject, ...] = ()

    @property
    def all(self) -> tuple[Subject, ...]:
        champion = (self.champion,) if self.champion is not None else ()
        return (self.baseline, self.candidate, *champion, *self.others, *self.references)


def settle_engine(subjects: Sequence[Subject]) -> Callable[[Subject], Subject]:
    """Gives each subject back with the engine that all models among these are asked with.

    Answers of two engines differ a little with the same weights: a comparison of base and adapter would
    take that for what training did. What another engine answered is not taken up: it is asked anew.
    """
    engine = agree_on_engine([subject.job for subject in subjects if subject.job is not None])

    def settled(subject: Subject) -> Subject:
        if subject.job is None or subject.job.endpoint is not None:
            return subject
        return replace(subject, job=subject.job.model_copy(update={"engine": engine}))

    return settled


def with_one_engine(lineup: Lineup) -> Lineup:
    """The same subjects, all models among them asked with the same engine."""
    settled = settle_engine(lineup.all)
    return Lineup(
        baseline=settled(lineup.baseline),
        candidate=settled(lineup.candidate),
        champion=settled(lineup.champion) if lineup.champion is not None else None,
        others=tuple(settled(subject) for subject in lineup.others),
        references=tuple(settled(subject) for subject in lineup.references),
    )


def forget_subjects(lineup: Lineup, cases: Sequence[Case]) -> None:
    """Everything that these subjects answered to these cases: they are asked again."""
    for subject in with_one_engine(lineup).all:
        (subject.folder / GENERATION_FILE).unlink(missing_ok=True)
        if subject.job is not None:
            # On a card only the worker knows which one it will be.
            for precision in PRECISIONS:
                forget_answers(subject.job.model_copy(update={"precision": precision}), cases)


def ask_subject(work: OpenProject, subject: Subject, cases: Sequence[Case]) -> None:
    """Bring the subject's answers into its folder. What is there already is not asked again."""
    if subject.job is None:
        answers = [answer.model_dump(mode="json") for answer in answers_of_log(cases)]
        lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
        write_atomic(subject.folder / ANSWERS_FILE, "".join(lines))
        generation = generation_of_log(cases, latency_cases=work.settings.evaluate.latency_cases)
        write_atomic(subject.folder / GENERATION_FILE, generation.to_json())
        return
    run_job(
        name=f"the evaluation of {subject.name}",
        module="graftwork.evaluate.worker",
        job=subject.job,
        folder=subject.folder,
        reporter=work.reporter,
    )


def ask_everybody(work: OpenProject, lineup: Lineup, cases: Sequence[Case]) -> None:
    """Endpoints first: a wrong address or key shows at once, and not after the models have answered.

    Models of our own are timed at the end, in turn: load on the machine then falls on all alike.
    """
    subjects = sorted(with_one_engine(lineup).all, key=lambda one: not one.is_endpoint)
    together = timed_together(subjects)
    for subject in subjects:
        ask_subject(work, _timed_later(subject) if subject in together else subject, cases)
    if together:
        time_together(work, together, cases)


def timed_together(subjects: Sequence[Subject]) -> list[Subject]:
    """Those that one process can load beside each other; none where there is nobody to compare with."""
    found = [
        subject
        for subject in subjects
        if subject.job is not None
        and not subject.is_endpoint
        and subject.job.latency_cases
        and not is_vllm(subject.job)
    ]
    return found if len(found) > 1 else []


def _timed_later(subject: Subject) -> Subject:
    """Its own worker times nothing, but on a card one request, whose memory it notes."""
    assert subject.job is not None
    requests = 1 if subject.job.device.startswith("cuda") else 0
    return replace(subject, job=subject.job.model_copy(update={"latency_cases": requests}))


def time_together(work: OpenProject, subjects: Sequence[Subject], cases: Sequence[Case]) -> None:
    """Single requests of all subjects in turn, unless this very group was timed before."""
    jobs = tuple(subject.job for subject in subjects if subject.job is not None)
    requests = jobs[0].latency_cases
    group = group_of(jobs, cases=cases, requests=requests)
    if is_timed(jobs, group):
        return
    folder = work.project.evaluations / f"timing-{group}"
    make_folder(folder)
    run_job(
        name="timing the subjects in turn",
        module="graftwork.evaluate.timing",
        job=TimingJob(folder=str(folder), jobs=jobs, requests=requests, group=group),
        folder=folder,
        reporter=work.reporter,
    )


def measure_subjects(
    work: OpenProject, lineup: Lineup, *, cases: Sequence[Case], grading: Grading
) -> dict[str, SubjectReport]:
    """Ask everybody, then grade what they said: a judge that fails costs no answer."""
    ask_everybody(work, lineup, cases)
    scored = {}
    for subject in lineup.all:
        answers = read_answers(subject.folder)
        grading.prepare(cases, answers)
        generation = Generation.from_json((subject.folder / GENERATION_FILE).read_bytes())
        scored[subject.name] = score(
            cases,
            answers=answers,
            generation=generation,
            settings=work.settings.evaluate,
            context=grading.context(),
        )
    return scored


def report_on(
    work: OpenProject,
    lineup: Lineup,
    *,
    cases: Sequence[Case],
    scored: Mapping[str, SubjectReport],
    grading: Grading,
    looks: int,
    looked_at: str,
    remarks: Sequence[str] = (),
) -> Report:
    """Everybody compared on the same cases, in pairs; `remarks` are kept with it, and shown where it is.

    `looked_at` is the subject whose look was logged.
    """
    settings = work.settings.evaluate
    candidate = scored[lineup.candidate.name]
    report = make_report(
        cases,
        baseline=scored[lineup.baseline.name],
        candidate=candidate,
        settings=settings,
        looks=looks,
        champion=scored[lineup.champion.name] if lineup.champion is not None else None,
        others=[scored[subject.name] for subject in lineup.others],
    )
    # No candidates: they do not count among those that Holm's correction is for.
    references = [scored[subject.name] for subject in lineup.references]
    against = [
        comparison
        for reference in references
        for comparison in compare(
            reference, candidate=candidate, confidence=settings.confidence, sessions=sessions_of(cases)
        )
    ]
    answers = {subject.name: read_answers(subject.folder) for subject in (lineup.baseline, lineup.candidate)}
    report = grading.add_preference(report, cases, answers)
    sliced = slice_report(cases, report=report, by=settings.slices)
    return report.model_copy(
        update={
            "others": (*report.others, *references),
            "comparisons": (*report.comparisons, *against),
            "slices": sliced.figures,
            "cuts": sliced.cuts,
            "confusions": confuse(cases, answers, checks=settings.checks, confidence=settings.confidence),
            "remarks": tuple(remarks),
            "wear": wear_of(
                report,
                candidates=work.looks.candidates(report.cases_hash),
                look=work.looks.position(report.cases_hash, subject=looked_at),
            ),
        }
    )
