"""The cases of an evaluation as the browser of the page reads them.

In: cases, the report, what each subject said. Out: plain data, and that data as text that may stand in
a page whatever the models wrote. Does not know how a case is drawn: `case_browser.js` does, one screen
at a time, so that a page of many cases opens at once.
"""

import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from graftwork.records.report import Answer, Case, Metric, Report, SubjectReport
from graftwork.report.wording import name_of

LESS_IS_BETTER = ("truncated",)
"""Grades of which the smaller is the better one."""
MOST_CHARACTERS = 20_000
"""Longer texts are shown by their beginning and their end."""


def list_cases(
    cases: Sequence[Case], *, report: Report, answers: Mapping[str, Sequence[Answer]]
) -> dict[str, Any]:
    """Everything the browser shows. Subjects without answers, as in imported results, are left out."""
    subjects = [subject for subject in subjects_of(report) if answers.get(subject.subject)]
    said = {subject.subject: _first_answers(answers[subject.subject]) for subject in subjects}
    metrics = _graded(subjects)
    return {
        "subjects": [subject.subject for subject in subjects],
        "left": report.baseline.subject,
        "right": report.candidate.subject,
        "metrics": [
            {
                "name": name,
                "label": name_of(name),
                "rate": metric.kind == "rate",
                "less": name in LESS_IS_BETTER,
            }
            for name, metric in metrics.items()
        ],
        "cuts": {cut: sorted(set(parts.values())) for cut, parts in report.cuts.items()},
        "cases": [
            {
                "id": case.id,
                "from": str(case.origin),
                "turns": [[message.role, shorten(message.content)] for message in case.messages],
                "reference": shorten(case.reference),
                "parts": {cut: parts[case.id] for cut, parts in report.cuts.items() if case.id in parts},
                "answers": [_show(said[subject.subject].get(case.id)) for subject in subjects],
                "scores": [[_score_of(subject, name, case.id) for subject in subjects] for name in metrics],
            }
            for case in cases
        ],
    }


def subjects_of(report: Report) -> list[SubjectReport]:
    """Baseline, candidate, then the others; one that was measured alone is not named twice."""
    named = {one.subject: one for one in (report.baseline, report.candidate, *report.others)}
    return list(named.values())


def embed(data: Mapping[str, Any]) -> Markup:
    """JSON that cannot end the element it stands in, nor begin another one."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def read_part(name: str) -> str:
    """A file that stands beside this one."""
    return files("graftwork.report").joinpath(name).read_text(encoding="utf-8")


def shorten(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n… {left_out} characters left out …\n{text[-half:]}"


def _graded(subjects: Sequence[SubjectReport]) -> dict[str, Metric]:
    """Metrics that grade each answer; those of the candidate come in the order of the report."""
    return {
        name: metric
        for subject in subjects
        for name, metric in subject.metrics.items()
        if metric.kind in ("rate", "score") and metric.scores
    }


def _first_answers(answers: Sequence[Answer]) -> dict[str, tuple[Answer, int]]:
    """The first answer to each case, and how many there are."""
    found: dict[str, tuple[Answer, int]] = {}
    for answer in sorted(answers, key=lambda answer: answer.repeat):
        first, count = found.get(answer.case_id, (answer, 0))
        found[answer.case_id] = (first, count + 1)
    return found


def _show(said: tuple[Answer, int] | None) -> dict[str, Any] | None:
    if said is None:
        return None
    answer, count = said
    shown: dict[str, Any] = {"text": shorten(answer.text)}
    if answer.finish_reason == "length":
        shown["cut"] = True
    if count > 1:
        shown["of"] = count
    return shown


def _score_of(subject: SubjectReport, metric: str, case: str) -> float | None:
    found = subject.metrics.get(metric)
    score = found.scores.get(case) if found is not None else None
    return score if score is not None and math.isfinite(score) else None
