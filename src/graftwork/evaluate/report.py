"""The report of an evaluation: comparisons, parts of the cases, confusion matrices.

In: cases and the scored subjects. Out: a Report; every graded metric on every part of the cases, with exact
intervals; which label is taken for which. Pure; does not know which part matters.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from graftwork.evaluate.cases import hash_cases
from graftwork.evaluate.comparison import cluster_cases, compare, compare_candidates, differences_of
from graftwork.evaluate.power import what_cases_show
from graftwork.evaluate.score import make_metric, sessions_of
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.evaluate.statistics.bounded import make_units
from graftwork.evaluate.statistics.intervals import clopper_pearson
from graftwork.evaluate.statistics.significance import holm, mcnemar
from graftwork.grading.answers import MISSING, look_up, parse_object, words_of
from graftwork.grading.checks import GradeCheck
from graftwork.grading.metrics import (
    LOWER_IS_BETTER,
    TASK_SUCCESS,
)
from graftwork.grading.rules import Exact, Normalised, plain_text
from graftwork.records.report import (
    Answer,
    Case,
    ClassFigure,
    Comparison,
    Confusion,
    Metric,
    Power,
    Report,
    SliceFigure,
    SubjectReport,
)
from graftwork.text.redact import publishable

MOST_PARTS = 12
"""More parts than this are not read: the smaller ones are put together."""
REST = "the others"
LENGTH_PARTS = 3
FEWEST_FOR_LENGTH = 6
"""Fewer cases than this are not cut by length."""


def slice_report(report: Report, cases: Sequence[Case], *, by: Sequence[str]) -> Report:
    """With every graded metric of baseline and candidate on every part. What has one part only is no cut."""
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
    """By what, then case by case, the part that it is in."""
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
    found = []
    ordered = [part for part, _ in Counter(parts.values()).most_common()]
    if cut == "length":
        ordered.sort(key=lambda part: (not part.startswith("under"), part.endswith("more")))
    for part in ordered:
        members = [case for case, its in parts.items() if its == part]
        figure = _measure_part(report, members, cut=cut, part=part, metric=metric)
        if figure.n:
            found.append(figure)
    tested = {figure.part: figure.p_value for figure in found if figure.p_value is not None}
    adjusted = holm(tested)
    return [figure.model_copy(update={"adjusted_p": adjusted.get(figure.part)}) for figure in found]


def _measure_part(report: Report, members: Sequence[str], *, cut: str, part: str, metric: str) -> SliceFigure:
    inside = set(members)
    before = _restrict(report.baseline.metrics[metric], inside, report.sessions)
    after = _restrict(report.candidate.metrics[metric], inside, report.sessions)
    changes = differences_of(report.baseline, candidate=report.candidate, metric=metric)
    sign = -1 if metric in LOWER_IS_BETTER else 1
    own = {case: sign * change for case, change in changes.items() if case in inside}
    wins, losses = sum(c > 0 for c in own.values()), sum(c < 0 for c in own.values())
    alone = cluster_cases(list(own), sessions=report.sessions) is None
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
        p_value=mcnemar(wins, losses=losses) if alone and own else None,
    )


def _restrict(metric: Metric, inside: set[str], sessions: Mapping[str, str]) -> Metric:
    return make_metric(
        metric.name,
        scores={case: score for case, score in metric.scores.items() if case in inside},
        confidence=metric.confidence,
        sessions=sessions,
        scored=metric.kind == "score",
    )


MOST_LABELS = 20
OTHER = "another answer"
UNREADABLE = "not readable"
"""No JSON, or without the field."""


def confuse(
    cases: Sequence[Case],
    answers: Mapping[str, Sequence[Answer]],
    *,
    checks: Sequence[GradeCheck],
    confidence: float = 0.95,
) -> tuple[Confusion, ...]:
    """For each check of labels and each subject, in the order of the checks."""
    found = []
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
        for subject, given in answers.items():
            # Several answers to a case are much alike: the first represents them.
            first = {answer.case_id: answer.text for answer in reversed(given)}
            pairs: Counter[tuple[str, str]] = Counter()
            for case, label in expected.items():
                if case in first:
                    answered = _read(check, first[case])
                    column = UNREADABLE if answered is None else answered if answered in labels else OTHER
                    pairs[label, column] += 1
            found.append(_count_classes(check, subject, ordered, pairs, confidence=confidence))
    return tuple(found)


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
        cases = sum(count for (wanted, _), count in pairs.items() if wanted == label)
        answered = sum(count for (_, given), count in pairs.items() if given == label)
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
    """The label that a reply holds, in the form that the check compares."""
    value: Any = text
    if check.field is not None:
        document = parse_object(text)
        value = MISSING if document is None else look_up(document, check.field)
        if value is MISSING:
            return None
    if not isinstance(value, str):
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    rule = check.rule
    if isinstance(rule, Normalised):
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
    own = tuple(c for c in against_baseline if c.candidate == candidate.subject)
    rest = tuple(c for c in against_baseline if c.candidate != candidate.subject)
    # What the cases can show on the metric named first, which is the one that matters most.
    graded = (*settings.graded, TASK_SUCCESS)
    power: Power | None = None
    first = next((c for c in own if c.metric in graded and c.n), None)
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
        comparisons=(*own, *against_champion, *rest),
        looks=looks,
        settings=publishable(settings),
        groups={case.id: case.group for case in cases if case.group is not None},
        others=(champion, *others) if champion is not None else tuple(others),
        champion=champion.subject if champion is not None else None,
        sessions=sessions,
        power=power,
    )
