"""The page: every record of a run as one self-contained HTML document.

Input: a ReportPage. Output: HTML without scripts and without a single outside address; a content policy in
the page itself forbids both. Whatever came from logs or models is escaped by the template.
"""

import json
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from markupsafe import Markup

from graftwork.records.base import Record
from graftwork.records.dataset import Audit, Dataset
from graftwork.records.fleet import Vitals
from graftwork.records.interaction import Savings
from graftwork.records.live import EscalationForecast, PromptDrift
from graftwork.records.plan import Plan
from graftwork.records.release import Release, Tried
from graftwork.records.report import Decision, Report, SubjectReport, Verdict
from graftwork.records.run import TrainOutcome, TrainStep
from graftwork.text.wording import duration, number, p_value, percent, plural, short
from graftwork.views import charts, html
from graftwork.views.document import Name, Table, quote
from graftwork.views.endpoint import view_forecast
from graftwork.views.evaluation_page import page_figure, say_difference
from graftwork.views.training import show_training
from graftwork.views.turns import show_call, split_answer


class ReportPage(Record):
    """`steps` is the journal as written, including replayed steps: they show where a run was killed and
    continued. `seconds` maps a stage to its time, None if nothing had to be repeated.
    """

    project: str
    audit: Audit
    dataset: Dataset
    plan: Plan
    steps: tuple[TrainStep, ...]
    outcome: TrainOutcome
    vitals: tuple[Vitals, ...] = ()
    report: Report
    verdict: Verdict
    release: Release | None = None
    side_by_side: tuple[Tried, ...] = ()
    seconds: dict[str, float | None] = {}
    savings: Savings | None = None
    """What the model saves a month; None if unknown."""
    evaluation_page: str = ""
    """The file next to this page with every case; None if there is none."""
    without_repaired: str = ""
    """The subject that was trained without rows that a teacher answered; empty if there is none."""
    drift: PromptDrift | None = None
    escalation: EscalationForecast | None = None
    """The last forecast of escalation; None if there is none."""


_TOKENS = re.compile(r"\w+|\s+|[^\w\s]")
MOST_TOKENS = 2000
"""Longer texts are shown unmarked: comparing them takes longer than it helps."""


class DiffPiece(NamedTuple):
    text: str
    differs: bool


class ComparedAnswer(NamedTuple):
    """An answer as shown on the page."""

    pieces: tuple[DiffPiece, ...]
    is_json: bool
    same: bool
    calls: tuple[str, ...] = ()


def show_answer(text: str, *, reference: str) -> ComparedAnswer:
    (said, calls), (expected_text, expected_calls) = split_answer(text), split_answer(reference)
    pretty, is_json = make_pretty(said)
    expected, _ = make_pretty(expected_text)
    pieces = mark_differences(pretty, reference=expected) if reference else (DiffPiece(pretty, False),)
    return ComparedAnswer(
        pieces=pieces if pretty else (),
        is_json=is_json,
        same=bool(reference) and (pretty, calls) == (expected, expected_calls),
        calls=tuple(map(show_call, calls)),
    )


def make_pretty(text: str) -> tuple[str, bool]:
    """JSON objects and lists indented, short ones on one line; anything else as it is."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip(), False
    if not isinstance(document, dict):
        return text.strip(), False
    lines = [
        f"  {json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in document.items()
    ]
    return ("{\n" + ",\n".join(lines) + "\n}" if lines else "{}"), True


def mark_differences(text: str, *, reference: str) -> tuple[DiffPiece, ...]:
    """The text in pieces; those that differ from the reference are marked."""
    ours, theirs = _TOKENS.findall(text), _TOKENS.findall(reference)
    if len(ours) > MOST_TOKENS or len(theirs) > MOST_TOKENS:
        return (DiffPiece(text, False),)
    pieces: list[DiffPiece] = []
    for kind, start, end, _, _ in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        part = "".join(ours[start:end])
        if part:
            # Differences only in white space are not marked.
            pieces.append(DiffPiece(part, kind != "equal" and not part.isspace()))
    return tuple(pieces)


HEADLINES: dict[Decision, str] = {
    "deploy": "Deploy",
    "iterate": "Iterate",
    "abort": "Abort",
    "not_enough_evidence": "Not enough evidence",
}
SEVERITIES = {"blocker": 0, "warning": 1, "info": 2}


def render_report(page: ReportPage) -> str:
    """The same records give the same bytes."""
    return html.render(
        "page.html.jinja",
        page=page,
        headline=HEADLINES[page.verdict.decision],
        tiles=_tiles(page),
        stages=_stages(page),
        metrics=_compare(page, page.report.baseline, names=("Base", "Adapter")),
        # The candidate against the adapter that was trained without repaired rows.
        repaired=next(
            (
                _compare(page, subject, names=("Without", "With"))
                for subject in page.report.others
                if subject.subject == page.without_repaired
            ),
            None,
        ),
        answers=[
            {
                "question": pair.question,
                "base": show_answer(pair.base_answer, reference=pair.reference),
                "adapter": show_answer(pair.release_answer, reference=pair.reference),
                "reference": make_pretty(pair.reference)[0],
                "release": pair.answered_by,
            }
            for pair in page.side_by_side
        ],
        findings=sorted(page.audit.findings, key=lambda f: (SEVERITIES[f.severity], -f.count)),
        lineage=_lineage(page),
        training=show_training(page.plan, page.outcome, page.steps, page.vitals),
        figure=_figures(page),
        forecast=None if page.escalation is None else view_forecast(page.escalation),
    )


def _figures(page: ReportPage) -> dict[str, Markup]:
    metrics, before = page.report.candidate.metrics, page.report.baseline.metrics
    limits = {rule.metric: rule.limit for rule in page.verdict.rules if rule.limit and rule.limit <= 1}
    before_after = [
        charts.BeforeAfter(
            name=html.name_of(name),
            before=charts.PlotInterval(base.value, base.low, base.high),
            after=charts.PlotInterval(metric.value, metric.low, metric.high),
            limit=limits.get(name),
            note=f"{percent(base.value)} → {percent(metric.value)}",
        )
        for name, metric in metrics.items()
        if metric.kind == "rate" and metric.n and (base := before.get(name)) is not None
    ]
    lengths: dict[str, Sequence[int]] = {
        str(split): summary.spread_lengths() for split, summary in page.dataset.splits.items()
    }
    return {
        "lengths": charts.draw_both(lambda width: charts.draw_lengths(lengths, width=width)),
        "metrics": charts.draw_both(lambda width: charts.draw_before_after(before_after, width=width)),
    }


def _tiles(page: ReportPage) -> list[dict[str, Any]]:
    """One tile per metric with a rule: before, after, the rule and whether it passes."""
    tiles: dict[str, dict[str, Any]] = {}
    for rule in page.verdict.rules:
        after = page.report.candidate.metrics.get(rule.metric)
        before = page.report.baseline.metrics.get(rule.metric)
        if after is None or before is None or not after.n:
            continue
        tile = tiles.setdefault(
            rule.metric,
            {
                "name": html.name_of(rule.metric),
                "before": html.value_of(before, before.value),
                "after": html.value_of(after, after.value),
                "rules": [],
            },
        )
        tile["rules"].append(rule)
        outcomes = {seen.outcome for seen in tile["rules"]}
        tile["outcome"] = next(worst for worst in ("fail", "unknown", "pass") if worst in outcomes)
    return list(tiles.values())


def _compare(page: ReportPage, baseline: SubjectReport, *, names: tuple[str, str]) -> Table:
    """Every metric with both subjects and, if there is one, the paired comparison."""
    candidate = page.report.candidate
    pairs = {
        pair.metric: pair
        for pair in page.report.comparisons
        if (pair.baseline, pair.candidate) == (baseline.subject, candidate.subject)
    }
    rows = []
    for name, after in candidate.metrics.items():
        if name not in baseline.metrics:
            continue
        cells = [quote(html.name_of(name)), page_figure(baseline.metrics[name]), page_figure(after)]
        if (pair := pairs.get(name)) is None:
            rows.append([*cells, *["[dim]–[/]"] * 3])
            continue
        is_sure = pair.p_value < 1 - after.confidence and pair.wins != pair.losses
        tone = "" if not is_sure else " green" if pair.wins > pair.losses else " red"
        low, high = (say_difference(after, value).removesuffix(" pts") for value in (pair.low, pair.high))
        rows.append(
            [
                *cells,
                f"[bold{tone}]{say_difference(after, pair.difference)}[/]\n[dim]{low} to {high}[/]",
                f"{pair.wins} / {pair.losses}",
                p_value(pair.p_value),
            ]
        )
    columns = ("Metric", *names, "Difference", "Won / lost", Name("p"))
    return Table(columns, rows, right=columns[1:])


def _stages(page: ReportPage) -> list[dict[str, Any]]:
    """The path of the data, with the time of each step and one fact about it."""
    longest = max([seconds for seconds in page.seconds.values() if seconds] or [1.0])
    notes = {
        "audit": f"{plural(page.audit.rows, 'row')} read",
        "prepare": f"{number(sum(s.rows for s in page.dataset.splits.values()))} rows kept",
        "plan": f"{number(page.plan.minutes.value)} min planned",
        # The section on training shows the time in steps; that of the stage has loading and restarts in it.
        "train": plural(page.outcome.steps, "step"),
        "evaluate": plural(page.report.cases, "case"),
        "gate": HEADLINES[page.verdict.decision].lower(),
        "release": short(page.release.id) if page.release else "none made",
        "try": f"{plural(len(page.side_by_side), 'question')} asked",
    }
    return [
        {
            "name": name,
            "time": "unchanged" if seconds is None else duration(seconds),
            "share": 0 if seconds is None else max(round(100 * seconds / longest), 1),
            "note": notes.get(name, ""),
        }
        for name, seconds in page.seconds.items()
    ]


def _lineage(page: ReportPage) -> list[tuple[str, str]]:
    outcome, release = page.outcome, page.release
    before, after = outcome.base_hash_before, outcome.base_hash_after
    proof = f"{after} (unchanged)" if before == after else f"{after} (CHANGED, was {before})"
    rows = [
        ("Release", release.id if release else "none"),
        ("Parent", (release.parent or "none: the first") if release else ""),
        ("Made", release.created_at if release else ""),
        ("Run", outcome.run_id),
        ("Base", page.plan.base),
        ("Base fingerprint", page.plan.base_fingerprint),
        ("Base weights after training", proof),
        ("Chat template", page.dataset.template_fingerprint),
        ("Tokenizer", page.dataset.tokenizer_fingerprint),
        ("Dataset", page.dataset.content_hash),
        ("Adapter", outcome.adapter_hash),
        ("Cases", page.report.cases_hash),
        ("Report", page.verdict.report_hash),
        ("Versions", ", ".join(f"{name} {version}" for name, version in sorted(outcome.versions.items()))),
    ]
    return [(name, value) for name, value in rows if value]
