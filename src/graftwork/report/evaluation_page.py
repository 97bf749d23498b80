"""The page of an evaluation: what is known, on which parts it holds, and every case to read.

In: an EvaluationPage. Out: one self-contained HTML document without a single outside address. The only
script is the case browser's own; a content policy in the page names its hash, so that nothing that a
model wrote could ever run. The same evaluation gives the same bytes.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from graftwork.records.base import Record
from graftwork.records.report import Answer, Case, Comparison, Metric, Report, SliceFigure, SubjectReport
from graftwork.report import wording
from graftwork.report.case_browser import LESS_IS_BETTER, embed, list_cases, read_part, subjects_of
from graftwork.report.evaluation_plots import MetricRow, Shown, draw_intervals
from graftwork.report.row_plots import Span
from graftwork.report.templates import open_templates
from graftwork.report.training import BOTH, NARROW, WIDE

CUTS = {
    "group": "By role",
    "domain": "By domain",
    "length": "By length of the prompt",
    "session": "By session",
}


class EvaluationPage(Record):
    """`answers` maps a subject to what it said; imported results may have none."""

    project: str
    report: Report
    cases: tuple[Case, ...] = ()
    answers: dict[str, tuple[Answer, ...]] = {}
    notes: tuple[str, ...] = ()
    """What one should know before reading, one sentence each."""


def render_evaluation(page: EvaluationPage) -> str:
    report = page.report
    script = read_part("case_browser.js")
    browsed = bool(page.cases and page.answers)
    return (
        open_templates(**wording.FILTERS)
        .get_template("evaluation_page.html.jinja")
        .render(
            page=page.model_copy(update={"notes": (*page.notes, *report.remarks)}),
            report=report,
            subjects=[{"name": one.subject, "kind": kind_of(report, one)} for one in subjects_of(report)],
            figure=_draw(report),
            metrics=_metric_rows(report),
            pairs=_pair_rows(report),
            failed=_failed(report),
            cuts=_cut_tables(report.slices),
            confusions=_confusion_tables(report),
            confidence=_confidence(report),
            told=_told(report),
            script=Markup(script) if browsed else "",
            script_hash=_policy_hash(script),
            data=embed(list_cases(page.cases, report=report, answers=page.answers)) if browsed else "",
        )
    )


def kind_of(report: Report, subject: SubjectReport) -> str:
    """The class that colours a subject."""
    if subject.subject == report.candidate.subject:
        return "after"
    if subject.subject == report.baseline.subject:
        return "before"
    return "champion" if subject.subject == report.champion else "other"


def _policy_hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _draw(report: Report) -> Markup:
    rows = []
    for name in _names(report):
        shown = [
            Shown(
                kind_of(report, subject),
                subject.subject,
                Span(metric.value, metric.low, metric.high),
                wording.percent(metric.value),
            )
            for subject in subjects_of(report)
            if (metric := subject.metrics.get(name)) and metric.n and metric.kind in ("rate", "score")
        ]
        if shown:
            rows.append(MetricRow(wording.name_of(name), shown))
    return BOTH.format(draw_intervals(rows, width=WIDE), draw_intervals(rows, width=NARROW))


def _names(report: Report) -> list[str]:
    """The candidate's metrics first, in their order; then what only others have."""
    candidate, *others = report.candidate, report.baseline, *report.others
    return list(dict.fromkeys(name for one in (candidate, *others) for name in one.metrics))


def _confidence(report: Report) -> float:
    return next((metric.confidence for metric in report.candidate.metrics.values()), 0.95)


def _metric_rows(report: Report) -> list[dict[str, Any]]:
    return [
        {
            "name": wording.name_of(name),
            "cells": [_cell(subject.metrics.get(name)) for subject in subjects_of(report)],
        }
        for name in _names(report)
    ]


def _cell(metric: Metric | None) -> dict[str, str] | None:
    if metric is None or not metric.n:
        return None
    interval = (
        "" if metric.low == metric.high else f"{_show(metric, metric.low)} to {_show(metric, metric.high)}"
    )
    return {
        "value": _show(metric, metric.value),
        "counts": f"{metric.successes} of {metric.n}" if metric.successes is not None else "",
        "interval": interval,
        "method": metric.method,
    }


def _show(metric: Metric, value: float) -> str:
    return wording.value_of(metric, value)


def _pair_rows(report: Report) -> list[dict[str, Any]]:
    """Every comparison; the direction that is better depends on the metric."""
    found = {one.subject: one for one in subjects_of(report)}
    rows = []
    for pair in report.comparisons:
        metric = found[pair.candidate].metrics.get(pair.metric) if pair.candidate in found else None
        decided = pair.adjusted_p if pair.adjusted_p is not None else pair.p_value
        sure = decided < 1 - (metric.confidence if metric else 0.95)
        rows.append(
            {
                "pair": pair,
                "name": wording.name_of(pair.metric),
                "difference": _difference(metric, pair.difference),
                "interval": f"{_difference(metric, pair.low)} to {_difference(metric, pair.high)}",
                "tone": _tone(pair) if sure else "",
                "counted": bool(pair.wins or pair.losses),
            }
        )
    return rows


def _tone(pair: Comparison) -> str:
    return "" if pair.wins == pair.losses else "good" if pair.wins > pair.losses else "bad"


def _difference(metric: Metric | None, value: float) -> str:
    if metric is None or metric.kind in ("rate", "score"):
        return f"{wording.points(value)} pts"
    return f"{'+' if value > 0 else ''}{wording.number(value, metric.unit)}"


def _failed(report: Report) -> list[str]:
    """Graders that failed themselves, one sentence each."""
    return [
        f"{wording.name_of(name)} of {subject.subject}: the grader failed on "
        f"{wording.plural(metric.failed, 'case')}, which are not counted ({metric.why_failed})."
        for subject in subjects_of(report)
        for name, metric in subject.metrics.items()
        if metric.failed
    ]


def _cut_tables(figures: Sequence[SliceFigure]) -> list[dict[str, Any]]:
    """One table a cut: a row a part, a column a metric."""
    tables = []
    for by in dict.fromkeys(figure.by for figure in figures):
        own = [figure for figure in figures if figure.by == by]
        metrics = list(dict.fromkeys(figure.metric for figure in own))
        cells = {(figure.part, figure.metric): _slice_cell(figure) for figure in own}
        sizes: dict[str, int] = {}
        for figure in own:
            sizes[figure.part] = max(figure.n, sizes.get(figure.part, 0))
        tables.append(
            {
                "name": CUTS.get(by, f"By {by}"),
                "metrics": [wording.name_of(metric) for metric in metrics],
                "rows": [
                    {"part": part, "n": n, "cells": [cells.get((part, metric)) for metric in metrics]}
                    for part, n in sizes.items()
                ],
            }
        )
    return tables


def _confusion_tables(report: Report) -> list[dict[str, Any]]:
    """The candidate's matrix, and each class beside the baseline's."""
    before = {one.metric: one for one in report.confusions if one.subject == report.baseline.subject}
    tables = []
    for found in report.confusions:
        if found.subject != report.candidate.subject:
            continue
        base = before.get(found.metric)
        known = {shown.label: shown for shown in base.classes} if base is not None else {}
        tables.append(
            {
                "name": wording.name_of(found.metric),
                "field": found.field,
                "columns": found.columns,
                "rows": [
                    {
                        "figure": shown,
                        "before": known.get(shown.label),
                        "cells": [
                            {"count": count, "right": column == shown.label}
                            for column, count in zip(found.columns, counts, strict=True)
                        ],
                    }
                    for shown, counts in zip(found.classes, found.counts, strict=True)
                ],
            }
        )
    return tables


def _slice_cell(figure: SliceFigure) -> dict[str, Any]:
    sure = figure.adjusted_p is not None and figure.adjusted_p < 0.05
    less = figure.metric in LESS_IS_BETTER
    return {
        "before": wording.percent(figure.before),
        "after": wording.percent(figure.after),
        "interval": f"{wording.percent(figure.after_low)} to {wording.percent(figure.after_high)}",
        "won": figure.wins,
        "lost": figure.losses,
        "n": figure.n,
        "tone": "" if not sure else "good" if (figure.after > figure.before) is not less else "bad",
    }


def _told(report: Report) -> list[tuple[str, str]]:
    """How the answers were made, for whoever wants to make them again."""
    rows = [("Cases", f"{report.cases}, {report.cases_hash}"), ("Looks", str(report.looks))]
    if report.source:
        rows.append(("Measured by", report.source))
    for subject in subjects_of(report):
        rows.append(
            (f"How {subject.subject} was asked", _write(subject.generation.settings) or "not recorded")
        )
    asked = ("sampling", "repeats", "max_new_tokens", "confidence", "metrics", "slices", "worked_example")
    settings = {name: report.settings[name] for name in asked if name in report.settings}
    return [*rows, ("Settings", _write(settings))] if settings else rows


def _write(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_write_value(value)}" for name, value in settings.items())


def _write_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_write(value)})"
    if isinstance(value, list | tuple):
        return " ".join(str(one) for one in value) or "none"
    return str(value)
