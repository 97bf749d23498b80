"""Answers counted: rates with exact intervals, scores, and the report of all subjects.

In: cases, answers, how they were generated. Out: a SubjectReport each, and the Report that compares
them. Pure; does not know which figures are good enough.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graftwork.evaluate.cases import clusters_of, hash_cases
from graftwork.evaluate.compare import cluster_cases, compare, compare_candidates, differences_of
from graftwork.evaluate.measure import measure
from graftwork.evaluate.power import what_cases_show
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.evaluate.statistics import bounded_mean, clopper_pearson, make_units
from graftwork.evaluate.statistics.scores import score_mean
from graftwork.evaluate.subjects.log import LOG
from graftwork.evaluate.wording import plural
from graftwork.grading import (
    CHECKS_PASSED,
    JUDGE_SCORE,
    SCORED,
    TASK_SUCCESS,
    TRUNCATED,
    Check,
    FailedGrade,
    GradeContext,
    against_reference,
    explain_vacuous,
    grade,
)
from graftwork.records.errors import UserMistake
from graftwork.records.report import (
    Answer,
    Case,
    Comparison,
    Generation,
    Metric,
    Power,
    Report,
    SubjectReport,
)
from graftwork.text.redact import publishable

__all__ = ["compare", "compare_candidates", "make_metric", "make_rate", "make_report", "score", "sessions_of"]

Scores = dict[str, float | None]
NOT_BY_THE_CASE = (
    "None for one answer and a grade for another to the same case: whether it applies must depend on the "
    "case alone"
)


def score(
    cases: Sequence[Case],
    *,
    answers: Sequence[Answer],
    generation: Generation,
    settings: EvaluateSettings,
    context: GradeContext | None = None,
) -> SubjectReport:
    """Grade every answer by every metric and check of the settings.

    Several answers to a case are averaged: they make its grade steadier, and never count as cases.
    `context` holds what some graders need: a sandbox, a judge, the project's folder. The log's answers are
    the references: what would hold them against themselves is left out.
    """
    said = _answers_of_each(cases, answers, subject=generation.subject)
    context = replace(_complete(context, settings), is_reference=generation.subject == LOG)
    confidence, sessions = settings.confidence, sessions_of(cases)
    metrics: dict[str, Metric] = {}
    for name in settings.graded_on(cases):
        if context.is_reference and against_reference(name, context):
            # Perfect by construction. Left out, so that nobody is compared with it by this.
            continue
        scores = {case.id: _grade_case(name, case, said[case.id], context) for case in cases}
        # A case of which one repeat could not be graded has no grade: the others might be the lucky ones.
        scores |= dict.fromkeys({lost.case_id for lost in context.failed if lost.metric == name}, None)
        metric = make_metric(
            name, scores=scores, confidence=confidence, sessions=sessions, scored=_is_scored(name, context)
        )
        metric = _note_failures(metric, context.failed)
        if vacuous := explain_vacuous(name, cases, graded=metric.n + metric.failed, context=context):
            metric = metric.model_copy(update={"vacuous": vacuous})
        if metric.n or metric.failed or not context.is_reference:
            metrics[name] = metric
    cut = {case.id: average([float(a.finish_reason == "length") for a in said[case.id]]) for case in cases}
    metrics[TRUNCATED] = make_metric(TRUNCATED, scores=cut, confidence=confidence, sessions=sessions)
    metrics |= measure(said, generation=generation, confidence=confidence, sessions=sessions)
    return SubjectReport(subject=generation.subject, metrics=metrics, generation=generation)


def make_metric(
    name: str,
    *,
    scores: Scores,
    confidence: float = 0.95,
    sessions: Mapping[str, str] | None = None,
    scored: bool = False,
) -> Metric:
    """A rate where every grade is 0 or 1, a score where they lie between, a number where they do not.

    `scored` says that a mean is meant even if all grades happen to be 0 or 1.
    """
    graded = {case: value for case, value in scores.items() if value is not None}
    values = list(graded.values())
    if not values or (not scored and all(value in (0.0, 1.0) for value in values)):
        return make_rate(name, scores=scores, confidence=confidence, sessions=sessions)
    clusters = cluster_cases(list(graded), sessions=sessions or {})
    (low, high), method = score_mean(values, clusters=clusters, confidence=confidence)
    mean = sum(values) / len(values)
    return Metric(
        name=name,
        kind="score" if all(0 <= value <= 1 for value in values) else "number",
        value=mean,
        low=min(low, mean),
        high=max(high, mean),
        n=len(values),
        confidence=confidence,
        scores=scores,
        clusters=len(set(clusters or ())),
        method=_name_method(method, clusters),
    )


def make_rate(
    name: str, *, scores: Scores, confidence: float = 0.95, sessions: Mapping[str, str] | None = None
) -> Metric:
    """How many of the cases that the metric applies to were right. With none of them: 0 to 1."""
    graded = {case: float(value >= 1.0) for case, value in scores.items() if value is not None}
    successes = round(sum(graded.values()))
    clusters = cluster_cases(list(graded), sessions=sessions or {})
    if clusters is None:
        low, high = clopper_pearson(successes, n=len(graded), confidence=confidence)
    else:
        low, high = bounded_mean(list(graded.values()), clusters, confidence=confidence)
    return Metric(
        name=name,
        kind="rate",
        value=successes / len(graded) if graded else 0.0,
        low=low,
        high=high,
        n=len(graded),
        successes=successes,
        confidence=confidence,
        scores=scores,
        clusters=len(set(clusters or ())),
        method="exact (Clopper and Pearson)" if clusters is None else "bounded mean, by session",
    )


def make_report(
    cases: Sequence[Case],
    *,
    baseline: SubjectReport,
    candidate: SubjectReport,
    settings: EvaluateSettings,
    looks: int = 1,
    champion: SubjectReport | None = None,
    others: Sequence[SubjectReport] = (),
    margins: Mapping[str, float] | None = None,
) -> Report:
    """The candidate against the baseline first, then against the champion, then the others.

    `looks` counts how often these cases were looked at: every look makes them less of a test. `margins`
    holds for a metric how much worse a candidate may be, as it was set before the run.
    """
    sessions = sessions_of(cases)
    against_baseline = compare_candidates(
        baseline,
        candidates=(candidate, *others),
        confidence=settings.confidence,
        sessions=sessions,
        margins=margins,
    )
    against_champion: tuple[Comparison, ...] = ()
    if champion is not None:
        against_champion = compare(
            champion, candidate=candidate, confidence=settings.confidence, sessions=sessions, margins=margins
        )
    own = tuple(c for c in against_baseline if c.candidate == candidate.subject)
    rest = tuple(c for c in against_baseline if c.candidate != candidate.subject)
    return Report(
        cases_hash=hash_cases(cases),
        cases=len(cases),
        baseline=baseline,
        candidate=candidate,
        comparisons=(*own, *against_champion, *rest),
        looks=looks,
        settings=publishable(settings),
        groups={case.id: case.group for case in cases if case.group is not None},
        others=(champion, *others) if champion is not None else tuple(others),
        champion=champion.subject if champion is not None else None,
        sessions=sessions,
        power=_make_power(own, baseline=baseline, candidate=candidate, sessions=sessions, settings=settings),
    )


def sessions_of(cases: Sequence[Case]) -> dict[str, str]:
    """The session of each case; a question that is asked again belongs to the session that asked it first."""
    return clusters_of(cases)


def average(grades: Sequence[float | None]) -> float | None:
    """The mean of the grades that there are."""
    graded = [grade for grade in grades if grade is not None]
    return sum(graded) / len(graded) if graded else None


def _grade_case(name: str, case: Case, answers: Sequence[Answer], context: GradeContext) -> float | None:
    """The mean over the repeats, all of them or none: the others might be the lucky ones."""
    before = len(context.failed)
    grades = [grade(name, case, answer.text, context=context) for answer in answers]
    if None in grades and any(one is not None for one in grades) and len(context.failed) == before:
        context.failed.append(FailedGrade(name, case.id, NOT_BY_THE_CASE))
    return average(grades)


def _answers_of_each(
    cases: Sequence[Case], answers: Sequence[Answer], *, subject: str
) -> Mapping[str, Sequence[Answer]]:
    said: dict[str, list[Answer]] = {}
    for answer in answers:
        said.setdefault(answer.case_id, []).append(answer)
    missing = [case.id for case in cases if case.id not in said]
    if missing:
        have = "has" if len(missing) == 1 else "have"
        raise UserMistake(
            f"{len(missing)} of {plural(len(cases), 'case')} {have} no answer from {subject}",
            why="a rate over the answered cases alone would flatter it",
            fix="run `graft eval` again: it asks only what is missing",
            where=missing[0],
        )
    return said


def _make_power(
    comparisons: Sequence[Comparison],
    *,
    baseline: SubjectReport,
    candidate: SubjectReport,
    sessions: Mapping[str, str],
    settings: EvaluateSettings,
) -> Power | None:
    """What the cases can show on the metric named first, which is the one that matters most."""
    graded = (*settings.graded, TASK_SUCCESS)
    first = next((c for c in comparisons if c.metric in graded and c.n), None)
    if first is None:
        return None
    effective = None
    if first.clusters:
        changes = differences_of(baseline, candidate=candidate, metric=first.metric)
        clusters = cluster_cases(list(changes), sessions=sessions)
        # Whether a session fails as a whole shows only in sessions that do: it is taken to be one case.
        effective = len(changes) / make_units(list(changes.values()), clusters).added_size
    return what_cases_show(first.n, comparison=first, effective=effective, confidence=settings.confidence)


def _complete(context: GradeContext | None, settings: EvaluateSettings) -> GradeContext:
    """With the checks of the settings, and a list of failures of its own."""
    given = context or GradeContext(fields=settings.fields)
    checks = {check.name: check for check in settings.checks}
    return replace(given, checks={**checks, **given.checks}, failed=[])


def _is_scored(name: str, context: GradeContext) -> bool:
    check: Check | None = context.checks.get(name)
    return check.scored if check is not None else name in (*SCORED, CHECKS_PASSED, JUDGE_SCORE)


def _note_failures(metric: Metric, failed: Sequence[FailedGrade]) -> Metric:
    own = [failure for failure in failed if failure.metric == metric.name]
    if not own:
        return metric
    lost = dict.fromkeys(failure.case_id for failure in own if metric.scores.get(failure.case_id) is None)
    told = {"failed": len(lost), "why_failed": own[0].reason, "failed_cases": tuple(lost)}
    return metric.model_copy(update=told)


def _name_method(method: str, clusters: Sequence[str] | None) -> str:
    return method if clusters is None else f"{method}, by session"
