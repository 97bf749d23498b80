"""The report of an evaluation: answers graded and counted, comparisons, parts of the cases, confusions.

Input: cases, answers, how they were generated. Output: a SubjectReport (rates, scores, latency, memory,
perplexity); a Report; every graded metric on every part of the cases, with exact intervals; which label is
taken for which. What cannot be measured is left out, never taken for 0. Pure; does not know which figures are
good enough.
"""

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from graftwork.evaluate.cases import clusters_of, hash_cases
from graftwork.evaluate.comparison import (
    cluster_cases,
    compare,
    compare_candidates,
    differences_of,
    what_cases_show,
)
from graftwork.evaluate.costs import (
    AnswerPrice,
    costs_of_answers,
    costs_of_log,
    measure_cost,
    measure_slowest,
    measure_tokens,
    tokens_of_answers,
    tokens_of_log,
)
from graftwork.evaluate.settings import EvaluateSettings, choose_success
from graftwork.evaluate.statistics.intervals import clopper_pearson, fewest_for_quantile, quantile_interval
from graftwork.evaluate.statistics.means import bootstrap_mean, bounded_mean, make_units, score_mean
from graftwork.evaluate.statistics.significance import holm, mcnemar
from graftwork.evaluate.subjects import LOG
from graftwork.grading.answers import MISSING, look_up, parse_object, words_of
from graftwork.grading.checks import GradeCheck, against_reference, explain_vacuous, grade
from graftwork.grading.interface import FailedGrade, GradeContext
from graftwork.grading.metrics import (
    FIRST_TOKEN,
    LATENCY,
    LOWER_IS_BETTER,
    MEMORY,
    PERPLEXITY,
    TASK_SUCCESS,
    TOKENS_PER_SECOND,
    TRUNCATED,
    is_scored,
)
from graftwork.grading.rules import Exact, Normalized, plain_text
from graftwork.records.errors import UserError
from graftwork.records.report import (
    Answer,
    Case,
    ClassFigure,
    Comparison,
    Confusion,
    Generation,
    Metric,
    Power,
    Report,
    SliceFigure,
    SubjectReport,
)
from graftwork.text.redact import publishable
from graftwork.text.wording import plural

LARGEST_LOSS = 700.0
"""exp of more than this overflows."""

Scores = dict[str, float | None]
NOT_BY_THE_CASE = (
    "None for one answer and a grade for another to the same case: whether it applies must depend on the "
    "case alone"
)

MOST_PARTS = 12
"""More parts than this are not readable: the smaller ones are merged."""
REST = "the others"
LENGTH_PARTS = 3
FEWEST_FOR_LENGTH = 6
"""Fewer cases than this are not cut by length."""

MOST_LABELS = 20
OTHER = "another answer"
UNREADABLE = "not readable"
"""No JSON, or without the field."""


def measure(
    by_case: Mapping[str, Sequence[Answer]],
    *,
    generation: Generation,
    confidence: float = 0.95,
    sessions: Mapping[str, str] | None = None,
) -> dict[str, Metric]:
    """By name; `by_case` holds the answers to each case."""
    losses = {
        case: next((a.reference_loss for a in answers if a.reference_loss is not None), None)
        for case, answers in by_case.items()
    }
    metrics = [
        _make_seconds(LATENCY, generation.single_latency_seconds, confidence),
        _make_seconds(FIRST_TOKEN, generation.first_token_seconds, confidence),
        _make_figure(TOKENS_PER_SECOND, generation.tokens_per_second, "tokens/s", confidence),
        _make_figure(MEMORY, generation.peak_memory_gib, "GiB", confidence),
        make_perplexity(losses, confidence=confidence, sessions=sessions or {}),
    ]
    return {metric.name: metric for metric in metrics if metric is not None}


def _make_seconds(name: str, seconds: Sequence[float], confidence: float) -> Metric | None:
    if not seconds:
        return None
    low, high = quantile_interval(seconds, quantile=0.5, confidence=confidence)
    count, method = len(seconds), "exact (order statistics)"
    if count < fewest_for_quantile(0.5, confidence=confidence):
        # So few requests cannot bound their median at this confidence, and the report says so.
        method = f"range of {count}: holds the median in {1 - 2 * 0.5**count:.0%}"
    return Metric(
        name=name,
        kind="number",
        value=median(seconds),
        # Where no bound holds at this confidence, the range is shown, and how often it holds the median.
        low=low if math.isfinite(low) else min(seconds),
        high=high if math.isfinite(high) else max(seconds),
        n=count,
        unit="s",
        confidence=confidence,
        method=method,
    )


def _make_figure(name: str, value: float, unit: str, confidence: float) -> Metric | None:
    """Measured once: the interval is the figure itself."""
    if not value > 0:
        return None
    return Metric(
        name=name, kind="number", value=value, low=value, high=value, n=1, unit=unit, confidence=confidence
    )


def make_perplexity(
    losses: Mapping[str, float | None], *, confidence: float, sessions: Mapping[str, str]
) -> Metric | None:
    """exp of the mean of the cases' losses, bounded by how much their sessions differ. The repeats of a case
    weigh the same reply. A loss that is not a number counts as failed.
    """
    measured = {case: loss for case, loss in losses.items() if loss is not None}
    sound = {case: loss for case, loss in measured.items() if abs(loss) <= LARGEST_LOSS}
    if not sound:
        return None
    clusters = cluster_cases(list(sound), sessions=sessions)
    low, high = bootstrap_mean(list(sound.values()), clusters=clusters, confidence=confidence)
    mean = math.fsum(sound.values()) / len(sound)
    failed = len(measured) - len(sound)
    return Metric(
        name=PERPLEXITY,
        kind="number",
        value=math.exp(mean),
        low=math.exp(min(low, mean)),
        high=math.exp(max(high, mean)),
        n=len(sound),
        confidence=confidence,
        scores={case: math.exp(sound[case]) if case in sound else None for case in losses},
        clusters=len(set(clusters or ())),
        method=f"bootstrap of the mean loss{', by session' if clusters else ''}",
        failed=failed,
        why_failed="the loss of the recorded reply is not a number" if failed else "",
        failed_cases=tuple(case for case in measured if case not in sound),
    )


def score(
    cases: Sequence[Case],
    *,
    answers: Sequence[Answer],
    generation: Generation,
    settings: EvaluateSettings,
    context: GradeContext | None = None,
    price: AnswerPrice | None = None,
) -> SubjectReport:
    """Grade every answer by every metric and check of the settings.

    Several answers to a case are averaged: they make its grade steadier, and never count as cases.
    `context` holds what some graders need: a sandbox, a judge, the project's folder. The log's answers are
    the references: what would hold them against themselves is left out.
    """
    by_case: dict[str, list[Answer]] = {}
    for answer in answers:
        by_case.setdefault(answer.case_id, []).append(answer)
    missing = [case.id for case in cases if case.id not in by_case]
    if missing:
        have = "has" if len(missing) == 1 else "have"
        raise UserError(
            f"{len(missing)} of {plural(len(cases), 'case')} {have} no answer from {generation.subject}",
            why="a rate over only the answered cases would be too optimistic",
            fix="run `graft eval` again: it only requests the missing answers",
            where=missing[0],
        )
    context = context or GradeContext(fields=settings.fields)
    checks = {check.name: check for check in settings.checks} | dict(context.checks)
    context = replace(context, checks=checks, failed=[], is_reference=generation.subject == LOG)
    confidence, sessions = settings.confidence, sessions_of(cases)
    metrics: dict[str, Metric] = {}
    for name in settings.graded_on(cases):
        if context.is_reference and against_reference(name, context):
            # Perfect by construction. Left out, so that no subject is compared with it by this metric.
            continue
        scores = {case.id: _grade_case(name, case, by_case[case.id], context) for case in cases}
        # A case of which one repeat could not be graded has no grade: the others might be the lucky ones.
        failed = [failure for failure in context.failed if failure.metric == name]
        lost = dict.fromkeys(failure.case_id for failure in failed)
        scored = checks[name].scored if name in checks else is_scored(name)
        metric = make_metric(
            name, scores=scores | lost, confidence=confidence, sessions=sessions, scored=scored
        )
        if failed:
            changed = {"failed": len(lost), "why_failed": failed[0].reason, "failed_cases": tuple(lost)}
            metric = metric.model_copy(update=changed)
        if vacuous := explain_vacuous(name, cases, graded=metric.n + metric.failed, context=context):
            metric = metric.model_copy(update={"vacuous": vacuous})
        if metric.n or metric.failed or not context.is_reference:
            metrics[name] = metric
    cut = {case.id: average([float(a.finish_reason == "length") for a in by_case[case.id]]) for case in cases}
    metrics[TRUNCATED] = make_metric(TRUNCATED, scores=cut, confidence=confidence, sessions=sessions)
    metrics |= measure(by_case, generation=generation, confidence=confidence, sessions=sessions)
    costed = _measure_costs(
        cases, by_case, generation=generation, price=price, settings=settings, graded=metrics
    )
    metrics |= {metric.name: metric for metric in costed if metric is not None}
    return SubjectReport(subject=generation.subject, metrics=metrics, generation=generation)


def _measure_costs(
    cases: Sequence[Case],
    by_case: Mapping[str, Sequence[Answer]],
    *,
    generation: Generation,
    price: AnswerPrice | None,
    settings: EvaluateSettings,
    graded: Mapping[str, Metric],
) -> list[Metric | None]:
    """Measure the costs that the log states. Its answers count as successes if they are the references."""
    is_log = generation.subject == LOG
    confidence, sessions = settings.confidence, sessions_of(cases)
    seconds = list(generation.single_latency_seconds)
    if is_log:
        seconds = [case.duration_ms / 1000 for case in cases if case.duration_ms is not None]
    success = graded.get(choose_success(settings))
    successes: Mapping[str, float | None] = success.scores if success is not None else {}
    if is_log and success is None:
        successes = dict.fromkeys((case.id for case in cases), 1.0)
    costs = costs_of_log(cases) if is_log else costs_of_answers(by_case, generation=generation, price=price)
    return [
        measure_slowest(seconds, confidence=confidence),
        measure_tokens(
            tokens_of_log(cases) if is_log else tokens_of_answers(by_case),
            confidence=confidence,
            sessions=sessions,
        ),
        measure_cost(costs, successes=successes, confidence=confidence, sessions=sessions),
    ]


def make_metric(
    name: str,
    *,
    scores: Scores,
    confidence: float = 0.95,
    sessions: Mapping[str, str] | None = None,
    scored: bool = False,
) -> Metric:
    """A rate if every grade is 0 or 1, a score if they are between, a number otherwise. `scored` makes it a
    mean even if all grades happen to be 0 or 1.
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
        method=method if clusters is None else f"{method}, by session",
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


def sessions_of(cases: Sequence[Case]) -> dict[str, str]:
    """Return the session of each case; a repeated question belongs to the session that asked it first."""
    return clusters_of(cases)


def average(grades: Sequence[float | None]) -> float | None:
    """Return the mean of the available grades."""
    graded = [grade for grade in grades if grade is not None]
    return sum(graded) / len(graded) if graded else None


def _grade_case(name: str, case: Case, answers: Sequence[Answer], context: GradeContext) -> float | None:
    """Mean over the repeats, all of them or none: the others might be the lucky ones."""
    before = len(context.failed)
    grades = [grade(name, case, answer.text, context=context) for answer in answers]
    if None in grades and any(mark is not None for mark in grades) and len(context.failed) == before:
        context.failed.append(FailedGrade(name, case.id, NOT_BY_THE_CASE))
    return average(grades)


def slice_report(report: Report, cases: Sequence[Case], *, by: Sequence[str]) -> Report:
    """With every graded metric of baseline and candidate on every part. A single part is not a cut."""
    cuts = cut_cases(cases, by=by)
    before = report.baseline.metrics
    graded = [
        name
        for name, metric in report.candidate.metrics.items()
        if metric.kind in ("rate", "score") and metric.scores and name in before
    ]
    figures = [
        figure
        for cut, parts in cuts.items()
        for metric in graded
        for figure in _measure_parts(report, cut, parts, metric)
    ]
    return report.model_copy(update={"slices": tuple(figures), "cuts": cuts})


def cut_cases(cases: Sequence[Case], *, by: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return, by cut and by case, the part that it is in."""
    cuts = {}
    for cut in dict.fromkeys("group" if name == "role" else name for name in by):
        if cut == "length":
            parts = _cut_by_length(cases)
        else:
            parts = {case.id: str(value) for case in cases if (value := getattr(case, cut)) is not None}
            if len(set(parts.values())) > MOST_PARTS:
                largest = {part for part, _ in Counter(parts.values()).most_common(MOST_PARTS - 1)}
                parts = {case: part if part in largest else REST for case, part in parts.items()}
        if len(set(parts.values())) > 1:
            cuts[cut] = parts
    return cuts


def _cut_by_length(cases: Sequence[Case]) -> dict[str, str]:
    """Thirds of about as many cases, by the characters of what is asked."""
    if len(cases) < FEWEST_FOR_LENGTH:
        return {}
    lengths = {case.id: sum(len(message.content) for message in case.messages) for case in cases}
    ordered = sorted(lengths.values())
    edges = sorted({ordered[len(ordered) * i // LENGTH_PARTS] for i in range(1, LENGTH_PARTS)})
    # All of one length: an edge at the smallest would leave nothing below it.
    edges = [edge for edge in edges if edge > ordered[0]]
    if not edges:
        return {}
    names = {0: f"under {edges[0]} characters", len(edges): f"{edges[-1]} characters and more"}
    between = f"{edges[0]} to {edges[-1] - 1} characters"
    return {case: names.get(bisect_right(edges, length), between) for case, length in lengths.items()}


def _measure_parts(report: Report, cut: str, parts: Mapping[str, str], metric: str) -> list[SliceFigure]:
    """The largest part first, lengths from short to long. Parts without a graded case are left out."""
    figures = []
    ordered = [part for part, _ in Counter(parts.values()).most_common()]
    if cut == "length":
        ordered.sort(key=lambda part: (not part.startswith("under"), part.endswith("more")))
    for part in ordered:
        members = [case for case, its in parts.items() if its == part]
        figure = _measure_part(report, members, cut=cut, part=part, metric=metric)
        if figure.n:
            figures.append(figure)
    tested = {figure.part: figure.p_value for figure in figures if figure.p_value is not None}
    adjusted = holm(tested)
    return [figure.model_copy(update={"adjusted_p": adjusted.get(figure.part)}) for figure in figures]


def _measure_part(report: Report, members: Sequence[str], *, cut: str, part: str, metric: str) -> SliceFigure:
    inside = set(members)
    before = _restrict(report.baseline.metrics[metric], inside, report.sessions)
    after = _restrict(report.candidate.metrics[metric], inside, report.sessions)
    changes = differences_of(report.baseline, candidate=report.candidate, metric=metric)
    sign = -1 if metric in LOWER_IS_BETTER else 1
    inside_changes = {case: sign * change for case, change in changes.items() if case in inside}
    wins, losses = sum(c > 0 for c in inside_changes.values()), sum(c < 0 for c in inside_changes.values())
    is_single = cluster_cases(list(inside_changes), sessions=report.sessions) is None
    return SliceFigure(
        by=cut,
        part=part,
        metric=metric,
        n=after.n,
        before=before.value,
        before_low=before.low,
        before_high=before.high,
        after=after.value,
        after_low=after.low,
        after_high=after.high,
        wins=wins,
        losses=losses,
        p_value=mcnemar(wins, losses=losses) if is_single and inside_changes else None,
    )


def _restrict(metric: Metric, inside: set[str], sessions: Mapping[str, str]) -> Metric:
    return make_metric(
        metric.name,
        scores={case: score for case, score in metric.scores.items() if case in inside},
        confidence=metric.confidence,
        sessions=sessions,
        scored=metric.kind == "score",
    )


def confuse(
    cases: Sequence[Case],
    answers: Mapping[str, Sequence[Answer]],
    *,
    checks: Sequence[GradeCheck],
    confidence: float = 0.95,
) -> tuple[Confusion, ...]:
    """Confusions of each check of labels and each subject, in the order of the checks."""
    matrices = []
    for check in checks:
        expected = {}
        if check.metric in ("exact", "normalised") and check.against_reference:
            labels_of_cases = {
                case.id: _read(check, case.reference) for case in cases if check.where.holds(case)
            }
            expected = {case: label for case, label in labels_of_cases.items() if label is not None}
        labels = Counter(expected.values())
        if not 1 < len(labels) <= MOST_LABELS or 2 * len(labels) > len(expected):
            continue
        ordered = tuple(label for label, _ in labels.most_common())
        for subject, subject_answers in answers.items():
            # Several answers to a case are much alike: the first represents them.
            first = {answer.case_id: answer.text for answer in reversed(subject_answers)}
            pairs: Counter[tuple[str, str]] = Counter()
            for case, label in expected.items():
                if case in first:
                    answered = _read(check, first[case])
                    column = UNREADABLE if answered is None else answered if answered in labels else OTHER
                    pairs[label, column] += 1
            matrices.append(_count_classes(check, subject, ordered, pairs, confidence=confidence))
    return tuple(matrices)


def _count_classes(
    check: GradeCheck,
    subject: str,
    labels: Sequence[str],
    pairs: Counter[tuple[str, str]],
    *,
    confidence: float,
) -> Confusion:
    columns = [*labels, *(name for name in (OTHER, UNREADABLE) if any(key[1] == name for key in pairs))]
    classes = []
    for label in labels:
        cases = sum(count for (expected, _), count in pairs.items() if expected == label)
        answered = sum(count for (_, predicted), count in pairs.items() if predicted == label)
        right = pairs[label, label]
        low, high = clopper_pearson(right, n=cases, confidence=confidence)
        classes.append(
            ClassFigure(
                label=label, cases=cases, answered=answered, right=right, recall_low=low, recall_high=high
            )
        )
    return Confusion(
        metric=check.name,
        field=check.field or "",
        subject=subject,
        columns=tuple(columns),
        counts=tuple(tuple(pairs[label, column] for column in columns) for label in labels),
        classes=tuple(classes),
    )


def _read(check: GradeCheck, text: str) -> str | None:
    """Return the label in a reply, in the form that the check compares."""
    value: Any = text
    if check.field is not None:
        document = parse_object(text)
        value = MISSING if document is None else look_up(document, check.field)
        if value is MISSING:
            return None
    if not isinstance(value, str):
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    rule = check.rule
    if isinstance(rule, Normalized):
        return " ".join(words_of(value))
    return plain_text(value, rule) if isinstance(rule, Exact) else value.strip()


def make_report(
    cases: Sequence[Case],
    *,
    baseline: SubjectReport,
    candidate: SubjectReport,
    settings: EvaluateSettings,
    looks: int = 1,
    champion: SubjectReport | None = None,
    others: Sequence[SubjectReport] = (),
) -> Report:
    """The candidate against the baseline first, then against the champion, then the others.

    `looks` counts how often these cases were used: every use makes them less of a test.
    """
    sessions = sessions_of(cases)
    against_baseline = compare_candidates(
        baseline,
        candidates=(candidate, *others),
        confidence=settings.confidence,
        sessions=sessions,
    )
    against_champion: tuple[Comparison, ...] = ()
    if champion is not None:
        against_champion = compare(
            champion, candidate=candidate, confidence=settings.confidence, sessions=sessions
        )
    candidate_pairs = tuple(c for c in against_baseline if c.candidate == candidate.subject)
    other_pairs = tuple(c for c in against_baseline if c.candidate != candidate.subject)
    # What the cases can show on the metric named first, which is the one that matters most.
    graded = (*settings.graded, TASK_SUCCESS)
    power: Power | None = None
    first = next((c for c in candidate_pairs if c.metric in graded and c.n), None)
    if first is not None:
        effective = None
        if first.clusters:
            changes = differences_of(baseline, candidate=candidate, metric=first.metric)
            clusters = cluster_cases(list(changes), sessions=sessions)
            # Whether a session fails as a whole shows only in sessions that do: it is taken to be one case.
            effective = len(changes) / make_units(list(changes.values()), clusters).added_size
        power = what_cases_show(
            first.n, comparison=first, effective=effective, confidence=settings.confidence
        )
    return Report(
        cases_hash=hash_cases(cases),
        cases=len(cases),
        baseline=baseline,
        candidate=candidate,
        comparisons=(*candidate_pairs, *against_champion, *other_pairs),
        looks=looks,
        settings=publishable(settings),
        groups={case.id: case.group for case in cases if case.group is not None},
        others=(champion, *others) if champion is not None else tuple(others),
        champion=champion.subject if champion is not None else None,
        sessions=sessions,
        power=power,
    )
