"""The page: every record of a run as one self-contained HTML document.

In: a ReportPage. Out: HTML without scripts and without a single outside address; a content policy in
the page itself forbids both. Whatever came from logs or models is escaped by the template.
"""

from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from graftwork.records.report import Comparison, Metric
from graftwork.records.verdict import Decision
from graftwork.report import plots, row_plots, wording
from graftwork.report.differences import make_pretty, show_answer
from graftwork.report.inputs import ReportPage
from graftwork.report.templates import open_templates
from graftwork.report.training import BOTH, NARROW, WIDE, show_training

HEADLINES: dict[Decision, str] = {
    "deploy": "Deploy",
    "iterate": "Iterate",
    "abort": "Abort",
    "not_enough_evidence": "Not enough evidence",
}
SEVERITIES = {"blocker": 0, "warning": 1, "info": 2}


def render_report(page: ReportPage) -> str:
    """The same records give the same bytes."""
    environment = open_templates(**wording.FILTERS)
    template = environment.get_template("page.html.jinja")
    return template.render(
        page=page,
        headline=HEADLINES[page.verdict.decision],
        tiles=_tiles(page),
        stages=_stages(page),
        metrics=_metric_rows(page),
        answers=_answers(page),
        findings=sorted(page.audit.findings, key=lambda f: (SEVERITIES[f.severity], -f.count)),
        funnel=_funnel(page),
        lineage=_lineage(page),
        training=show_training(page.plan, page.outcome, page.steps, page.vitals),
        figure=_figures(page),
    )


def _figures(page: ReportPage) -> dict[str, Markup]:
    """Each plot twice, for a desk and for a phone; the style shows the one that fits."""
    metrics = page.report.candidate.metrics
    limits = {rule.metric: rule.limit for rule in page.verdict.rules if rule.limit and rule.limit <= 1}
    rates = [m for m in metrics.values() if m.kind == "rate" and m.name in page.report.baseline.metrics]
    before_after = [_before_after(page, metric, limits.get(metric.name)) for metric in rates if metric.n]
    lengths: dict[str, Sequence[int]] = {
        str(split): summary.spread_lengths() for split, summary in page.dataset.splits.items()
    }
    draws: dict[str, Callable[[float], Markup]] = {
        "lengths": lambda w: plots.draw_lengths(lengths, width=w),
        "metrics": lambda w: row_plots.draw_before_after(before_after, width=w),
    }
    return {name: BOTH.format(draw(WIDE), draw(NARROW)) for name, draw in draws.items()}


def _before_after(page: ReportPage, metric: Metric, limit: float | None) -> row_plots.BeforeAfter:
    base = page.report.baseline.metrics[metric.name]
    return row_plots.BeforeAfter(
        name=wording.name_of(metric.name),
        before=row_plots.Span(base.value, base.low, base.high),
        after=row_plots.Span(metric.value, metric.low, metric.high),
        limit=limit,
        note=f"{wording.percent(base.value)} → {wording.percent(metric.value)}",
    )


def _tiles(page: ReportPage) -> list[dict[str, Any]]:
    """One tile a ruled metric: before, after, the rule and whether it holds."""
    tiles: dict[str, dict[str, Any]] = {}
    for rule in page.verdict.rules:
        after = page.report.candidate.metrics.get(rule.metric)
        before = page.report.baseline.metrics.get(rule.metric)
        if after is None or before is None or not after.n:
            continue
        tile = tiles.setdefault(
            rule.metric,
            {
                "name": wording.name_of(rule.metric),
                "before": wording.value_of(before, before.value),
                "after": wording.value_of(after, after.value),
                "rules": [],
            },
        )
        tile["rules"].append(rule)
        outcomes = {seen.outcome for seen in tile["rules"]}
        tile["outcome"] = next(worst for worst in ("fail", "unknown", "pass") if worst in outcomes)
    return list(tiles.values())


def _interval(metric: Metric) -> str:
    if metric.low == metric.high or not metric.n:
        return ""
    return f"{wording.value_of(metric, metric.low)} to {wording.value_of(metric, metric.high)}"


def _metric_rows(page: ReportPage) -> list[dict[str, Any]]:
    """Every metric with both subjects and, where there is one, the paired comparison."""
    sides = (page.report.baseline.subject, page.report.candidate.subject)
    pairs: dict[str, Comparison] = {
        c.metric: c for c in page.report.comparisons if (c.baseline, c.candidate) == sides
    }
    rows = []
    for name, after in page.report.candidate.metrics.items():
        before = page.report.baseline.metrics.get(name)
        if before is None:
            continue
        pair = pairs.get(name)
        rate = after.kind == "rate"
        rows.append(
            {
                "name": wording.name_of(name),
                "before": wording.value_of(before, before.value) if before.n else "–",
                "before_interval": _interval(before),
                "before_counts": f"{before.successes} of {before.n}" if rate and before.n else "",
                "after": wording.value_of(after, after.value) if after.n else "–",
                "after_interval": _interval(after),
                "after_counts": f"{after.successes} of {after.n}" if rate and after.n else after.vacuous,
                "pair": pair,
                "difference": _difference(pair, after) if pair else "",
                "difference_interval": _difference_interval(pair, after) if pair else "",
                "better": bool(pair and pair.wins > pair.losses and pair.p_value < 1 - after.confidence),
                "worse": bool(pair and pair.losses > pair.wins and pair.p_value < 1 - after.confidence),
            }
        )
    return rows


def _difference(pair: Comparison, metric: Metric) -> str:
    return (
        f"{wording.points(pair.difference)} pts"
        if metric.kind == "rate"
        else _signed(pair.difference, metric)
    )


def _difference_interval(pair: Comparison, metric: Metric) -> str:
    if metric.kind == "rate":
        return f"{wording.points(pair.low)} to {wording.points(pair.high)}"
    return f"{_signed(pair.low, metric)} to {_signed(pair.high, metric)}"


def _signed(value: float, metric: Metric) -> str:
    sign = "+" if value > 0 else ""
    return sign + wording.number(value, metric.unit)


def _stages(page: ReportPage) -> list[dict[str, Any]]:
    """The way of the data, with the time that each step took and one fact about it."""
    longest = max([seconds for seconds in page.seconds.values() if seconds] or [1.0])
    notes = {
        "audit": f"{wording.plural(page.audit.rows, 'row')} read",
        "prepare": f"{wording.number(sum(s.rows for s in page.dataset.splits.values()))} rows kept",
        "plan": f"{wording.number(page.plan.minutes.value)} min foreseen",
        # All of it, loading, checks and restarts too; the section on training tells the time in steps.
        "train": f"{wording.plural(page.outcome.steps, 'step')}, "
        f"{wording.duration(page.outcome.seconds)} in them",
        "evaluate": wording.plural(page.report.cases, "case"),
        "gate": HEADLINES[page.verdict.decision].lower(),
        "release": wording.short(page.release.id) if page.release else "none made",
        "serve": f"{wording.plural(len(page.side_by_side), 'question')} asked",
    }
    names = {"eval": "evaluate"}
    return [
        {
            "name": name,
            "time": "unchanged" if seconds is None else wording.duration(seconds),
            "share": 0 if seconds is None else max(round(100 * seconds / longest), 1),
            "note": notes.get(names.get(name, name), ""),
        }
        for name, seconds in page.seconds.items()
    ]


def _answers(page: ReportPage) -> list[dict[str, Any]]:
    return [
        {
            "question": pair.question,
            "base": show_answer(pair.base_answer, reference=pair.reference),
            "adapter": show_answer(pair.adapter_answer, reference=pair.reference),
            "reference": make_pretty(pair.reference)[0],
            "release": pair.release,
        }
        for pair in page.side_by_side
    ]


def _funnel(page: ReportPage) -> list[dict[str, Any]]:
    """How many rows were left after each step of the preparation."""
    most = max([*page.dataset.kept_after.values(), 1])
    return [
        {"step": wording.name_of(step), "rows": rows, "share": round(100 * rows / most, 1)}
        for step, rows in page.dataset.kept_after.items()
    ]


def _lineage(page: ReportPage) -> list[tuple[str, str]]:
    outcome, release = page.outcome, page.release
    rows = [
        ("Release", release.id if release else "none"),
        ("Parent", (release.parent or "none: the first") if release else ""),
        ("Made", release.created_at if release else ""),
        ("Run", outcome.run_id),
        ("Base", page.plan.base),
        ("Base fingerprint", page.plan.base_fingerprint),
        ("Base weights after training", _base_proof(outcome.base_hash_before, outcome.base_hash_after)),
        ("Chat template", page.dataset.template_fingerprint),
        ("Tokenizer", page.dataset.tokenizer_fingerprint),
        ("Dataset", page.dataset.content_hash),
        ("Adapter", outcome.adapter_hash),
        ("Cases", page.report.cases_hash),
        ("Report", page.verdict.report_hash),
        ("Versions", ", ".join(f"{name} {version}" for name, version in sorted(outcome.versions.items()))),
    ]
    return [(name, value) for name, value in rows if value]


def _base_proof(before: str, after: str) -> str:
    return f"{after} (unchanged)" if before == after else f"{after} (CHANGED, was {before})"
