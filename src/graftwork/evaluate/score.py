"""Answers counted: rates with exact intervals, latency, memory, and the two subjects in pairs.

In: cases, answers, how they were generated. Out: a SubjectReport each, their comparisons, the
Report. Pure; does not know which figures are good enough.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from graftwork.evaluate.cases import hash_cases
from graftwork.evaluate.metrics import LATENCY, LOWER_IS_BETTER, MEMORY, METRICS, TRUNCATED
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.evaluate.statistics import bootstrap_median, clopper_pearson, mcnemar, paired_difference
from graftwork.records.errors import UserMistake
from graftwork.records.report import (
    Answer,
    Case,
    Comparison,
    Generation,
    Metric,
    Report,
    SubjectReport,
)

Scores = dict[str, float | None]


def score(
    cases: Sequence[Case],
    *,
    answers: Sequence[Answer],
    generation: Generation,
    settings: EvaluateSettings,
) -> SubjectReport:
    """Grade every answer by every metric of the settings."""
    said = _one_answer_each(cases, answers, subject=generation.subject)
    metrics = {
        name: make_rate(
            name,
            scores={case.id: METRICS[name](case, said[case.id].text, settings.fields) for case in cases},
            confidence=settings.confidence,
        )
        for name in settings.metrics
    }
    metrics[TRUNCATED] = make_rate(
        TRUNCATED,
        scores={case.id: float(said[case.id].finish_reason == "length") for case in cases},
        confidence=settings.confidence,
    )
    if generation.single_latency_seconds:
        metrics[LATENCY] = _make_latency(generation, confidence=settings.confidence)
    metrics[MEMORY] = _make_memory(generation, confidence=settings.confidence)
    return SubjectReport(subject=generation.subject, metrics=metrics, generation=generation)


def make_rate(name: str, *, scores: Scores, confidence: float = 0.95) -> Metric:
    """How many of the cases that the metric applies to were right. With none of them: 0 to 1."""
    graded = [value for value in scores.values() if value is not None]
    successes = sum(value >= 1.0 for value in graded)
    low, high = clopper_pearson(successes, n=len(graded), confidence=confidence)
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
    )


def compare(
    baseline: SubjectReport, *, candidate: SubjectReport, confidence: float = 0.95
) -> tuple[Comparison, ...]:
    """Every metric that both have, case by case. A win is a case where only the candidate did well.

    The difference is candidate less baseline; its interval is Tango's and p is McNemar's exact one.
    """
    shared = [name for name in candidate.metrics if name in baseline.metrics]
    comparisons = [
        _compare_rates(baseline, candidate, name, confidence)
        for name in shared
        if candidate.metrics[name].kind == "rate"
    ]
    before = baseline.generation.single_latency_seconds
    after = candidate.generation.single_latency_seconds
    if before and len(before) == len(after):
        comparisons.append(_compare_latency(baseline, candidate, confidence))
    return tuple(comparisons)


def make_report(
    cases: Sequence[Case],
    *,
    baseline: SubjectReport,
    candidate: SubjectReport,
    settings: EvaluateSettings,
    looks: int = 1,
) -> Report:
    """`looks` counts how often these cases were looked at: every look makes them less of a test."""
    return Report(
        cases_hash=hash_cases(cases),
        cases=len(cases),
        baseline=baseline,
        candidate=candidate,
        comparisons=compare(baseline, candidate=candidate, confidence=settings.confidence),
        looks=looks,
        settings=settings.model_dump(mode="json"),
        groups={case.id: case.group for case in cases if case.group is not None},
    )


def _one_answer_each(
    cases: Sequence[Case], answers: Sequence[Answer], *, subject: str
) -> Mapping[str, Answer]:
    said = {answer.case_id: answer for answer in answers}
    missing = [case.id for case in cases if case.id not in said]
    if missing:
        raise UserMistake(
            f"{len(missing)} of {len(cases)} cases have no answer from {subject}",
            why="a rate over the answered cases alone would flatter it",
            fix="run `graft eval` again: it asks only what is missing",
            where=missing[0],
        )
    return said


def _make_latency(generation: Generation, *, confidence: float) -> Metric:
    seconds = generation.single_latency_seconds
    middle = median(seconds)
    low, high = bootstrap_median(seconds, confidence=confidence)
    return Metric(
        name=LATENCY,
        kind="number",
        value=middle,
        low=min(low, middle),
        high=max(high, middle),
        n=len(seconds),
        unit="s",
        confidence=confidence,
    )


def _make_memory(generation: Generation, *, confidence: float) -> Metric:
    peak = generation.peak_memory_gib
    return Metric(
        name=MEMORY,
        kind="number",
        value=peak,
        low=peak,
        high=peak,
        n=1,
        unit="GiB",
        confidence=confidence,
    )


def _compare_rates(
    baseline: SubjectReport, candidate: SubjectReport, name: str, confidence: float
) -> Comparison:
    before, after = baseline.metrics[name].scores, candidate.metrics[name].scores
    pairs = [
        (old, new) for case, new in after.items() if new is not None and (old := before.get(case)) is not None
    ]
    gained = sum(new >= 1 > old for old, new in pairs)
    lost = sum(old >= 1 > new for old, new in pairs)
    low, high = paired_difference(gained, losses=lost, n=len(pairs), confidence=confidence)
    lower_is_better = name in LOWER_IS_BETTER
    return Comparison(
        metric=name,
        baseline=baseline.subject,
        candidate=candidate.subject,
        n=len(pairs),
        wins=lost if lower_is_better else gained,
        losses=gained if lower_is_better else lost,
        difference=(gained - lost) / len(pairs) if pairs else 0.0,
        low=low,
        high=high,
        p_value=mcnemar(gained, losses=lost),
    )


def _compare_latency(baseline: SubjectReport, candidate: SubjectReport, confidence: float) -> Comparison:
    """The same requests, one at a time: the median of the differences, and a sign test."""
    differences = [
        new - old
        for old, new in zip(
            baseline.generation.single_latency_seconds,
            candidate.generation.single_latency_seconds,
            strict=True,
        )
    ]
    faster, slower = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    middle = median(differences)
    low, high = bootstrap_median(differences, confidence=confidence)
    return Comparison(
        metric=LATENCY,
        baseline=baseline.subject,
        candidate=candidate.subject,
        n=len(differences),
        wins=faster,
        losses=slower,
        difference=middle,
        low=min(low, middle),
        high=max(high, middle),
        p_value=mcnemar(faster, losses=slower),
    )
