"""The page of an audit: findings, their effects and fixes, and rows to read.

In: an Audit. Out: one self-contained HTML document without scripts and without a single outside
address; a content policy in the page itself forbids both. Whatever came from logs is escaped by the
template. The same audit gives the same bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from markupsafe import Markup

from graftwork.records.dataset import Audit, Cluster, Finding, LengthHistogram
from graftwork.records.interaction import Origin
from graftwork.text.wording import number, percent
from graftwork.views import html
from graftwork.views.svg import Scale, draw_both, draw_nothing, drawing, element, label, line, round_ticks

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 200.0, 44.0, 14.0, 12.0, 38.0


def draw_buckets(
    edges: Sequence[int], counts: Mapping[str, Sequence[int]], *, title: str, unit: str, width: float = 760
) -> Markup:
    """Buckets side by side, the named counts stacked; empty buckets at both ends are left out."""
    totals = [sum(values) for values in zip(*counts.values(), strict=True)]
    filled = [i for i, total in enumerate(totals) if total]
    if not filled:
        return draw_nothing(title, width)
    first, last = max(filled[0] - 1, 0), min(filled[-1] + 2, len(edges))
    marks = [mark for mark in round_ticks(0, max(totals), count=4) if mark == int(mark)]
    x = Scale(first, last, LEFT, width - RIGHT)
    y = Scale(0, max(*marks, *totals), HEIGHT - BOTTOM, TOP)
    parts: list[Markup] = []
    for mark in marks:
        parts.append(line(LEFT, y(mark), width - RIGHT, y(mark), class_="grid" if mark else "axis"))
        parts.append(label(number(mark), x=LEFT - 8, y=y(mark) + 4, class_="tick", anchor="end"))
    every = max(1, round((last - first) / (10 if width > 500 else 5)))
    for i in range(first, last, every):
        parts.append(label(number(edges[i]), x=x(i), y=HEIGHT - BOTTOM + 18, class_="tick", anchor="middle"))
    for i in range(first, last):
        parts += _draw_bar(i, counts, x=x, y=y)
    parts.append(label(unit, x=width - RIGHT, y=HEIGHT - 4, class_="tick", anchor="end"))
    return drawing(
        *parts,
        width=width,
        height=HEIGHT,
        title=title,
        description=f"{number(sum(totals))} rows between {number(edges[filled[0]])} and "
        f"{number(edges[filled[-1] + 1]) if filled[-1] + 1 < len(edges) else 'more'} {unit}",
    )


def _draw_bar(i: int, counts: Mapping[str, Sequence[int]], *, x: Scale, y: Scale) -> list[Markup]:
    floor, parts = 0, []
    left, right = x(i) + 0.6, x(i + 1) - 0.6
    for place, values in enumerate(counts.values()):
        if values[i]:
            roof, base = y(floor + values[i]), y(floor)
            parts.append(
                element("rect", x=left, y=roof, width=right - left, height=base - roof, class_=f"s{place}")
            )
            floor += values[i]
    return parts


FIRST_EXAMPLES = 3
MOST_LINES = 200
MOST_BARS = 12
KINDS = {
    "conflicting_answers": "One prompt, different answers",
    "near_duplicate": "Nearly the same",
    "duplicate": "The same",
}


def make_audit_page(audit: Audit) -> str:
    return html.render(
        "audit_page.html.jinja",
        audit=audit,
        lines=_name_lines,
        blockers=[finding for finding in audit.findings if finding.severity == "blocker"],
        tiles=_tiles(audit),
        findings=[_show_finding(finding) for finding in audit.findings],
        lacking=[{"code": skipped.code, "why": skipped.why} for skipped in audit.not_looked_for],
        lengths=[
            {"of": "prompt", "summary": audit.prompt_length, "figure": _draw(audit, "prompt")},
            {"of": "reply", "summary": audit.reply_length, "figure": _draw(audit, "reply")},
        ],
        drawn_groups=_drawn_groups(audit),
        shares=_shares(audit),
        clusters=[
            {"kind": kind, "name": KINDS[kind], "members": [_show_cluster(member) for member in members]}
            for kind, members in groupby(audit.clusters, key=lambda cluster: cluster.kind)
        ],
    )


def _tiles(audit: Audit) -> list[dict[str, str]]:
    count = {
        severity: sum(1 for finding in audit.findings if finding.severity == severity)
        for severity in ("blocker", "warning")
    }
    unread = audit.rows - audit.readable
    return [
        {
            "name": "Rows",
            "value": number(audit.rows),
            "note": f"{number(unread)} could not be read" if unread else "all of them readable",
            "tone": "plain",
        },
        {
            "name": "Usable",
            "value": number(audit.usable),
            "note": f"{percent(audit.usable / audit.rows) if audit.rows else '0 %'} after cleaning",
            "tone": "plain",
        },
        {
            "name": "Blockers",
            "value": str(count["blocker"]),
            "note": "kinds of fault that forbid training",
            "tone": "fail" if count["blocker"] else "pass",
        },
        {
            "name": "Warnings",
            "value": str(count["warning"]),
            "note": "kinds of fault that harm it",
            "tone": "unknown" if count["warning"] else "pass",
        },
    ]


def _show_finding(finding: Finding) -> dict[str, Any]:
    most = max([*finding.reasons.values(), 1])
    return {
        "finding": finding,
        "first": finding.examples[:FIRST_EXAMPLES],
        "more": finding.examples[FIRST_EXAMPLES:],
        "reasons": [
            {"name": name, "count": count, "share": round(100 * count / most, 1)}
            for name, count in list(finding.reasons.items())[:MOST_BARS]
        ]
        # One reason that holds for all says no more than the title.
        if len(finding.reasons) > 1
        else [],
    }


def _show_cluster(cluster: Cluster) -> dict[str, Any]:
    first = cluster.shown[0] if cluster.shown else None
    asked = " ".join(first.question.split()) if first else ""
    return {
        "cluster": cluster,
        "asked": f"…{asked[-110:]}" if len(asked) > 110 else asked,
        "question": first.question if first else "",
        # Rows that differ in the question show it each; those that contradict each other share it.
        "own_questions": cluster.kind == "near_duplicate",
    }


def _shares(audit: Audit) -> list[dict[str, Any]]:
    """Who the rows are of: bars of what was logged, and in them of what is usable."""
    found = []
    for title, logged, usable in (
        ("Roles", audit.groups, audit.usable_groups),
        ("Domains", audit.domains, {}),
        ("Models that answered", audit.models, {}),
    ):
        most = max([*logged.values(), 1])
        bars = [
            {
                "name": name,
                "rows": count,
                "share": round(100 * count / most, 1),
                "usable": usable.get(name, 0) if usable else None,
                "usable_share": round(100 * usable.get(name, 0) / most, 1) if usable else 0,
            }
            for name, count in list(logged.items())[:MOST_BARS]
        ]
        if bars:
            found.append({"title": title, "bars": bars, "more": max(len(logged) - MOST_BARS, 0)})
    return found


def _drawn_groups(audit: Audit) -> list[str]:
    """The names of the stacked parts: the largest groups, and all others together."""
    named = [
        shape.group for shape in audit.length_histograms if shape.of == "reply" and shape.group is not None
    ]
    return [*named, "others"] if named else []


def _draw(audit: Audit, of: Literal["prompt", "reply"]) -> Markup:
    shapes: list[LengthHistogram] = [shape for shape in audit.length_histograms if shape.of == of]
    whole = next((shape.counts for shape in shapes if shape.group is None), ())
    stacked = {f"group {shape.group}": shape.counts for shape in shapes if shape.group is not None}
    rest = tuple(total - sum(parts) for total, *parts in zip(whole, *stacked.values(), strict=True))
    counts = {**stacked, "others": rest}

    def draw(width: float) -> Markup:
        title = f"Length of the {'prompts' if of == 'prompt' else 'replies'}"
        return draw_buckets(audit.length_edges, counts, title=title, unit="characters", width=width)

    return draw_both(draw)


def _name_lines(rows: Iterable[Origin]) -> list[dict[str, str]]:
    """Rows by their files: `log.jsonl: 2, 3, 4`."""
    found = []
    for file, members in groupby(rows, key=lambda row: row.file):
        # The records of an array may all be on one line.
        lines = list(dict.fromkeys(str(row.line) for row in members))
        more = f" and {len(lines) - MOST_LINES:,} more" if len(lines) > MOST_LINES else ""
        found.append({"file": file, "lines": ", ".join(lines[:MOST_LINES]) + more})
    return found[:50]
