"""The page of an evaluation: what is known, on which parts it holds, and every case to read.

Input: an EvaluationPage. Output: one self-contained HTML document without a single outside address. The only
script is the case browser's own; a content policy in the page names its hash, so that nothing that a model
wrote could ever run. The same evaluation gives the same bytes.
"""

import base64
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from graftwork.records.base import Record
from graftwork.records.report import Answer, Case, Metric, Report, SliceFigure, SubjectReport
from graftwork.text.wording import number, p_value, percent, plural, points
from graftwork.views import html
from graftwork.views.charts import Scale, draw_both, draw_nothing, drawing, element, label, line
from graftwork.views.document import Cell, Document, Name, Table, quote

LINE = 17.0
"""Distance between the intervals of one metric."""
HEAD = 26.0
FOOT = 24.0
TITLE = "Metrics with their intervals"


def draw_intervals(
    rows: Sequence[tuple[str, Sequence[tuple[str, str, Metric]]]], *, width: float = 760
) -> Markup:
    """The name of each metric above its intervals, one a subject: the class that colors it, and its name."""
    if not rows:
        return draw_nothing(TITLE, width)
    floor = 4 + sum(HEAD + LINE * len(intervals) + 8 for _, intervals in rows)
    x = Scale(0, 1, 6, width - 92)
    parts = []
    for mark in (0, 0.25, 0.5, 0.75, 1):
        parts.append(line(x(mark), 4, x(mark), floor, class_="axis" if mark in (0, 1) else "grid"))
        parts.append(
            label(f"{100 * mark:.0f} %", x=x(mark), y=floor + FOOT - 6, class_="tick", anchor="middle")
        )
    top = 4.0
    for name, intervals in rows:
        parts.append(label(name, x=x(0) + 6, y=top + HEAD - 10, class_="name"))
        for place, (kind, _, metric) in enumerate(intervals):
            parts += _draw_span(x, metric, kind, y=top + HEAD + LINE * (place + 0.5), width=width)
        top += HEAD + LINE * len(intervals) + 8
    described = (
        f"{name}: " + ", ".join(f"{subject} {percent(metric.value)}" for _, subject, metric in intervals)
        for name, intervals in rows
    )
    return drawing(*parts, width=width, height=floor + FOOT, title=TITLE, description="; ".join(described))


def _draw_span(x: Scale, span: Metric, kind: str, *, y: float, width: float) -> list[Markup]:
    return [
        line(x(span.low), y, x(span.high), y, class_=f"whisker {kind}"),
        line(x(span.low), y - 4, x(span.low), y + 4, class_=f"whisker {kind}"),
        line(x(span.high), y - 4, x(span.high), y + 4, class_=f"whisker {kind}"),
        element("circle", cx=x(span.value), cy=y, r=5, class_=f"dot {kind}"),
        label(percent(span.value), x=width, y=y + 4.5, class_="note", anchor="end"),
    ]


LESS_IS_BETTER = ("truncated",)
"""Metrics for which smaller grades are better."""
MOST_CHARACTERS = 20_000
"""Longer texts are shortened to their beginning and end."""


def list_cases(
    cases: Sequence[Case], *, report: Report, answers: Mapping[str, Sequence[Answer]]
) -> dict[str, Any]:
    """Everything the browser shows. Subjects without answers, as in imported results, are left out."""
    subjects = [subject for subject in subjects_of(report) if answers.get(subject.subject)]
    first = {subject.subject: _first_answers(answers[subject.subject]) for subject in subjects}
    metrics = _graded(subjects)
    return {
        "subjects": [subject.subject for subject in subjects],
        "left": report.baseline.subject,
        "right": report.candidate.subject,
        "metrics": [
            {
                "name": name,
                "label": html.name_of(name),
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
                "answers": [_show_answer(first[subject.subject].get(case.id)) for subject in subjects],
                "scores": [[_score_of(subject, name, case.id) for subject in subjects] for name in metrics],
            }
            for case in cases
        ],
    }


def subjects_of(report: Report) -> list[SubjectReport]:
    """Baseline, champion, candidate, then the others: each once."""
    champion = [other for other in report.others if other.subject == report.champion]
    ordered = (report.baseline, *champion, report.candidate, *report.others)
    return list({subject.subject: subject for subject in ordered}.values())


def embed(data: Mapping[str, Any]) -> Markup:
    """JSON that cannot end the element that contains it, nor start another one."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def read_part(name: str) -> str:
    """A file next to this module."""
    return files("graftwork.views").joinpath(name).read_text(encoding="utf-8")


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


def _show_answer(found: tuple[Answer, int] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    answer, count = found
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


CUTS = {
    "group": "By role",
    "domain": "By domain",
    "length": "By length of the prompt",
    "session": "By session",
}


class EvaluationPage(Record):
    """`answers` maps a subject to its answers; imported results may have none."""

    project: str
    report: Report
    cases: tuple[Case, ...] = ()
    answers: dict[str, tuple[Answer, ...]] = {}
    notes: tuple[str, ...] = ()
    """Notes to read first, one sentence each."""


def render_evaluation(page: EvaluationPage) -> str:
    report = page.report
    script = read_part("case_browser.js")
    browsed = bool(page.cases and page.answers)
    return html.render(
        "evaluation_page.html.jinja",
        page=page.model_copy(update={"notes": (*page.notes, *report.remarks)}),
        report=report,
        subjects=[{"name": shown.subject, "kind": kind_of(report, shown)} for shown in subjects_of(report)],
        figure=draw_metrics(report),
        metrics=compare_subjects(report),
        pairs=compare_pairs(report),
        failed=_failed(report),
        cuts=view_cuts(report.slices),
        confusions=view_confusions(report),
        confidence=next((metric.confidence for metric in report.candidate.metrics.values()), 0.95),
        facts=_facts(report),
        script=Markup(script) if browsed else "",
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=embed(list_cases(page.cases, report=report, answers=page.answers)) if browsed else "",
    )


def kind_of(report: Report, subject: SubjectReport) -> str:
    """The class that colors a subject."""
    if subject.subject == report.candidate.subject:
        return "after"
    if subject.subject == report.baseline.subject:
        return "before"
    return "champion" if subject.subject == report.champion else "other"


def draw_metrics(report: Report) -> Markup:
    rows = []
    for name in _names(report):
        shown = [
            (kind_of(report, subject), subject.subject, metric)
            for subject in subjects_of(report)
            if (metric := subject.metrics.get(name)) and metric.n and metric.kind in ("rate", "score")
        ]
        if shown:
            rows.append((html.name_of(name), shown))
    return draw_both(lambda width: draw_intervals(rows, width=width))


def _names(report: Report) -> list[str]:
    """The candidate's metrics first, in order; then those that only others have."""
    candidate, *others = report.candidate, report.baseline, *report.others
    return list(dict.fromkeys(name for subject in (candidate, *others) for name in subject.metrics))


def compare_subjects(report: Report, link: Callable[[str], str] | None = None) -> Table:
    """Every metric of every subject, with its counts and its interval; `link` leads to a metric's cases."""
    subjects = subjects_of(report)
    names = [Name(quote(subject.subject)) for subject in subjects]
    rows = [
        (quote(html.name_of(name)), *(page_figure(subject.metrics.get(name)) for subject in subjects))
        for name in _names(report)
    ]
    links = [link(name) for name in _names(report)] if link else ()
    return Table(("Metric", *names), rows, right=names, links=links)


def page_figure(metric: Metric | None) -> str:
    if metric is None or not metric.n:
        return f"[dim]–[/]\n[dim]{quote(metric.vacuous)}[/]" if metric and metric.vacuous else "[dim]–[/]"
    counts = f" [dim]{metric.successes} of {metric.n}[/]" if metric.successes is not None else ""
    low, high = html.value_of(metric, metric.low), html.value_of(metric, metric.high)
    interval = "" if metric.low == metric.high else f"\n[dim]{low} to {high}[/]"
    return f"[bold]{html.value_of(metric, metric.value)}[/]{counts}{interval}"


def compare_pairs(report: Report) -> Table:
    """Every comparison; colored where the difference is significant."""
    subjects = {subject.subject: subject for subject in subjects_of(report)}
    rows = []
    for pair in report.comparisons:
        metric = subjects[pair.candidate].metrics.get(pair.metric) if pair.candidate in subjects else None
        decided = pair.adjusted_p if pair.adjusted_p is not None else pair.p_value
        is_sure = decided < 1 - (metric.confidence if metric else 0.95)
        tone = "" if pair.wins == pair.losses else " green" if pair.wins > pair.losses else " red"
        low, high = say_difference(metric, pair.low), say_difference(metric, pair.high)
        test = f"{pair.test}, {plural(pair.clusters, 'session')}" if pair.clusters else pair.test
        if pair.non_inferior is not None:
            within = "worse by less than the margin"
            test += f"; {within if pair.non_inferior else 'not proven to be within the margin'}"
        rows.append(
            (
                quote(html.name_of(pair.metric)),
                f"{quote(pair.candidate)} [dim]against {quote(pair.baseline)}, {plural(pair.n, 'pair')}[/]",
                f"[bold{tone if is_sure else ''}]{say_difference(metric, pair.difference)}[/]\n"
                f"[dim]{low} to {high}[/]",
                f"{pair.wins} / {pair.losses}" if pair.wins or pair.losses else "[dim]–[/]",
                p_value(pair.p_value),
                p_value(pair.adjusted_p) if pair.adjusted_p is not None else "[dim]–[/]",
                f"[dim]{test}[/]",
            )
        )
    columns = ("Metric", "Compared", "Difference", "Won / lost", Name("p"), Name("p, corrected"), "Test")
    return Table(columns, rows, right=columns[2:-1])


def say_difference(metric: Metric | None, value: float) -> str:
    if metric is None or metric.kind in ("rate", "score"):
        return f"{points(value)} pts"
    return f"{'+' if value > 0 else ''}{number(value, metric.unit)}"


def _failed(report: Report) -> list[str]:
    """Graders that failed themselves, one sentence each."""
    return [
        f"{html.name_of(name)} of {subject.subject}: the grader failed on "
        f"{plural(metric.failed, 'case')}, which are not counted ({metric.why_failed})."
        for subject in subjects_of(report)
        for name, metric in subject.metrics.items()
        if metric.failed
    ]


def view_cuts(figures: Sequence[SliceFigure]) -> Document:
    """One table a cut: a row a part, a column a metric."""
    viewed = Document("Slices")
    for by in dict.fromkeys(figure.by for figure in figures):
        own = [figure for figure in figures if figure.by == by]
        metrics = list(dict.fromkeys(figure.metric for figure in own))
        cells = {(figure.part, figure.metric): _slice(figure) for figure in own}
        sizes: dict[str, int] = {}
        for figure in own:
            sizes[figure.part] = max(figure.n, sizes.get(figure.part, 0))
        names = [Name(quote(html.name_of(metric))) for metric in metrics]
        viewed.heading(quote(CUTS.get(by, f"By {by}")))
        viewed.table(
            ("Slice", "Cases", *names),
            [
                (quote(part), n, *(cells.get((part, metric), "[dim]–[/]") for metric in metrics))
                for part, n in sizes.items()
            ],
            right=("Cases", *names),
        )
    return viewed


def _slice(figure: SliceFigure) -> str:
    less = figure.metric in LESS_IS_BETTER
    better = "green" if (figure.after > figure.before) is not less else "red"
    is_sure = figure.adjusted_p is not None and figure.adjusted_p < 0.05
    change = f"{percent(figure.before)} → [bold]{percent(figure.after)}[/]"
    spread = f"{percent(figure.after_low)} to {percent(figure.after_high)}"
    counts = f"{figure.wins} / {figure.losses}"
    return (f"[{better}]{change}[/]" if is_sure else change) + f"\n[dim]{spread}; {counts}[/]"


def view_confusions(report: Report) -> Document:
    """The candidate's matrix, and the recall of each class next to the baseline's."""
    viewed = Document("Classes")
    before = {found.metric: found for found in report.confusions if found.subject == report.baseline.subject}
    recall = f"Recall ({quote(report.baseline.subject)} → {quote(report.candidate.subject)})"
    for found in report.confusions:
        if found.subject != report.candidate.subject:
            continue
        base = before.get(found.metric)
        known = {shown.label: shown for shown in base.classes} if base is not None else {}
        name = html.name_of(found.metric)
        field = f" [dim]field {quote(found.field)}[/]" if found.field and found.field != name else ""
        viewed.heading(f"{quote(name)}{field}")
        columns = [Name(quote(column)) for column in found.columns]
        rows: list[Sequence[Cell]] = []
        for shown, counts in zip(found.classes, found.counts, strict=True):
            baseline_recall = f"{percent(known[shown.label].recall)} → " if shown.label in known else ""
            spread = f"{percent(shown.recall_low)} to {percent(shown.recall_high)}"
            tones = [
                "dim" if not n else "green" if c == shown.label else "bold"
                for c, n in zip(found.columns, counts, strict=True)
            ]
            rows.append(
                (
                    quote(shown.label),
                    shown.cases,
                    f"{baseline_recall}[bold]{percent(shown.recall)}[/]\n[dim]{spread}[/]",
                    "[dim]–[/]" if shown.precision is None else percent(shown.precision),
                    *(f"[{tone}]{count}[/]" for tone, count in zip(tones, counts, strict=True)),
                )
            )
        viewed.table(
            ("Label", "Cases", recall, "Precision", *columns),
            rows,
            right=("Cases", recall, "Precision", *columns),
        )
    return viewed


def _facts(report: Report) -> list[tuple[str, str]]:
    """How the answers were generated, to reproduce them."""
    rows = [
        ("Cases", f"{report.cases}, {report.cases_hash}"),
        ("Evaluations of these cases", str(report.looks)),
    ]
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
        return " ".join(str(item) for item in value) or "none"
    return str(value)
