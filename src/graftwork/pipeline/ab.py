"""`graft release ab --cases`: two releases on cases that both are asked.

In: an open workplace, two releases, a metric. Out: who won, if it is decided, with the evidence so far. What
is to be tested is written down before the first look, so that it shows how many metrics a pair was tried by.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from graftwork.evaluate.cases import hash_cases
from graftwork.evaluate.score import average
from graftwork.evaluate.subjects.book import read_answers
from graftwork.evaluate.subjects.case_file import read_case_file
from graftwork.evaluate.subjects.named import parse_subject
from graftwork.grading import LOWER_IS_BETTER, GradeContext, grade
from graftwork.pipeline.ab_evidence import Scores, run_replay, units_of
from graftwork.pipeline.ab_result import ABResult, choose_metric, find_pair, note_trial, tell
from graftwork.pipeline.evaluate_context import Grading, open_grading
from graftwork.pipeline.evaluate_run import ask_subject, settle_engine
from graftwork.pipeline.evaluate_subjects import Asking, Subject, resolve_subject
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.release_store import open_store
from graftwork.pipeline.steps.evaluate import log_look, put_cases
from graftwork.records.release import Release
from graftwork.records.report import Case


def compare_replayed(
    work: OpenProject, a: str, b: str, *, cases_file: Path, metric: str | None = None
) -> ABResult:
    """Ask both releases the cases of a file, in an order drawn by hash, until it is decided."""
    first, second = find_pair(work, a, b)
    name = choose_metric(work, metric)
    cases = read_case_file(cases_file, named=work.settings.evaluate.checks)
    grading = open_grading(work, cases)
    remarks = note_trial(work, first, second, metric=name, traffic=hash_cases(cases))
    log_look(work, cases, subject=second.adapter_hash)

    def grade_block(block: Sequence[Case]) -> tuple[Scores, Scores]:
        pair = _subjects(work, (first, second), block)
        of_a, of_b = (_ask(work, subject, block, metric=name, grading=grading) for subject in pair)
        return of_a, of_b

    confidence = work.settings.evaluate.confidence
    found = run_replay(
        units_of(cases), grade_block, alpha=1 - confidence, lower_is_better=name in LOWER_IS_BETTER
    )
    test = found.test
    return tell(
        (first, second),
        name,
        "cases",
        winner=test.winner,
        used=found.used,
        ungraded=found.ungraded,
        asked=found.asked,
        counts={"wins": test.wins, "losses": test.losses, "ties": test.ties},
        evidence=(test.e_value, test.p_value),
        interval=test.interval(confidence),
        confidence=confidence,
        remarks=remarks,
    )


def _subjects(work: OpenProject, pair: tuple[Release, Release], cases: Sequence[Case]) -> tuple[Subject, ...]:
    """Both releases, proven byte by byte, to be asked with the same engine. How fast is not the question."""
    asking = Asking(put_cases(work, tuple(cases)), timed=False)
    subjects = []
    for release in pair:
        open_store(work).verify(release.id)
        named = parse_subject(f"release:{release.id}")
        subjects.append(resolve_subject(work, named, asking=asking, outcome=None))
    return tuple(map(settle_engine(subjects), subjects))


def _ask(
    work: OpenProject, subject: Subject, cases: Sequence[Case], *, metric: str, grading: Grading
) -> dict[str, float | None]:
    """What the release answers, graded. Kept answers are not asked for again."""
    ask_subject(work, subject, cases)
    answers = read_answers(subject.folder)
    grading.prepare(cases, answers)
    context = grade_context(work, grading)
    by_id = {case.id: case for case in cases}
    grades: dict[str, list[float | None]] = {case.id: [] for case in cases}
    for answer in answers:
        if answer.case_id in by_id:
            said = grade(metric, by_id[answer.case_id], answer.text, context=context)
            grades[answer.case_id].append(said)
    return {case: average(values) if values else None for case, values in grades.items()}


def grade_context(work: OpenProject, grading: Grading) -> GradeContext:
    checks = {check.name: check for check in work.settings.evaluate.checks}
    return replace(grading.context(), checks=checks)
