"""Which label is taken for which: a confusion matrix and a table of classes for each field with few values.

In: cases, what subjects answered, the checks. Out: a Confusion for every check that compares labels and
every subject. Pure. A label is what a reference holds; what is none of them is counted by itself.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from graftwork.evaluate.statistics.intervals import clopper_pearson
from graftwork.grading.answers import MISSING, look_up, parse_object, words_of
from graftwork.grading.checks import Check
from graftwork.grading.rules import Exact, Normalised, plain_text
from graftwork.records.report import Answer, Case, ClassFigure, Confusion

MOST_LABELS = 20
OTHER = "another answer"
UNREADABLE = "not readable"
"""No JSON, or without the field."""


def confuse(
    cases: Sequence[Case],
    answers: Mapping[str, Sequence[Answer]],
    *,
    checks: Sequence[Check],
    confidence: float = 0.95,
) -> tuple[Confusion, ...]:
    """For each check of labels and each subject, in the order of the checks."""
    found = []
    for check in checks:
        expected = _labels_of(check, cases)
        labels = Counter(expected.values())
        if not 1 < len(labels) <= MOST_LABELS or 2 * len(labels) > len(expected):
            continue
        ordered = tuple(label for label, _ in labels.most_common())
        for subject, given in answers.items():
            # Several answers to a case are much alike: the first stands for them.
            first = {answer.case_id: answer.text for answer in reversed(given)}
            pairs = Counter(
                (label, _answered(check, first[case], ordered))
                for case, label in expected.items()
                if case in first
            )
            found.append(_make(check, subject, ordered, pairs, confidence=confidence))
    return tuple(found)


def _make(
    check: Check, subject: str, labels: Sequence[str], pairs: Counter[tuple[str, str]], *, confidence: float
) -> Confusion:
    columns = [*labels, *(name for name in (OTHER, UNREADABLE) if any(key[1] == name for key in pairs))]
    classes = []
    for label in labels:
        cases = sum(count for (wanted, _), count in pairs.items() if wanted == label)
        said = sum(count for (_, given), count in pairs.items() if given == label)
        right = pairs[label, label]
        low, high = clopper_pearson(right, n=cases, confidence=confidence)
        classes.append(
            ClassFigure(
                label=label, cases=cases, answered=said, right=right, recall_low=low, recall_high=high
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


def _labels_of(check: Check, cases: Sequence[Case]) -> dict[str, str]:
    """The label of each case that the check is about; empty where it compares no labels."""
    if check.metric not in ("exact", "normalised") or not check.against_reference:
        return {}
    told = ((case.id, _read(check, case.reference)) for case in cases if check.where.holds(case))
    return {case: label for case, label in told if label is not None}


def _answered(check: Check, text: str, labels: Sequence[str]) -> str:
    label = _read(check, text)
    if label is None:
        return UNREADABLE
    return label if label in labels else OTHER


def _read(check: Check, text: str) -> str | None:
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
