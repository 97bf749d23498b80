"""An audit: its findings with their effects and fixes, on the terminal and as a page with rows to read.

The page is one self-contained HTML document without scripts and without a single outside address; a content
policy in the page itself forbids both. The same audit gives the same bytes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Literal

from markupsafe import Markup

from graftwork.data.audit.row_findings import BUT_FOR_LENGTH
from graftwork.records.dataset import Audit, Finding, LabelNoise, LengthHistogram, SuspiciousLabel
from graftwork.records.interaction import Origin
from graftwork.text.wording import number, percent
from graftwork.views import html
from graftwork.views.charts import draw_both, draw_nothing, draw_stacks
from graftwork.views.document import Document, Table, quote

MARKS = {"blocker": ("✗", "red"), "warning": ("!", "yellow"), "info": ("·", "dim")}
# These findings show the reasons; for the others the title is enough.
WITH_REASONS = ("parse_error", "schema")
MOST_REASONS = 3
MOST_SUSPICIOUS = 5


def view_audit(audit: Audit) -> Document:
    """One screen: findings and fixes. Everything else is in the HTML page and in --json."""
    viewed, files = Document("Audit"), audit.files
    named = ", ".join(files[:3]) + (f" and {len(files) - 3:,} more files" if len(files) > 3 else "")
    too_long = sum(finding.reasons.get(BUT_FOR_LENGTH, 0) for finding in audit.findings)
    size = f"{too_long:,}" if audit.lengths_counted else f"about {too_long:,}"
    are = f"{'is' if too_long == 1 else 'are'} longer than data.max_tokens"
    viewed.line(
        f"[bold]{audit.rows:,}[/] {'row' if audit.rows == 1 else 'rows'} in {quote(named)}: "
        f"{audit.readable:,} readable, [bold]{audit.usable:,} usable[/] without faulty and repeated rows"
        f"{f', of which {size} {are}' if too_long else ''} ({audit.seconds:.1f} s)\n"
    )
    rows = []
    for finding in audit.findings:
        mark, colour = MARKS[finding.severity]
        rows.append((f"[{colour}]{mark} {quote(finding.code)}[/]", _say(finding, files)))
    viewed.add(Table((), rows, no_wrap=(0,)))
    # Rules that were skipped for the same reason share a line.
    codes: dict[str, list[str]] = {}
    for lacking in audit.not_looked_for:
        codes.setdefault(lacking.why, []).append(lacking.code)
    viewed.line(
        *(f"[dim]? {quote(', '.join(named))} not checked: {quote(why)}[/]" for why, named in codes.items()),
        *_say_noise(audit.label_noise),
    )
    if audit.fit_to_train:
        answer = "[green]fit to train on as it is[/]"
    elif not audit.usable:
        answer = "[red]nothing to train on[/]: fix the log, or use another one"
    else:
        answer = "[red]must not be trained on as it is[/]: `graft data prepare` drops or repairs what it can"
    viewed.line(f"\n{answer}")
    return viewed


def _say_noise(noise: LabelNoise) -> list[str]:
    """Show the estimate for each field, and the first rows to review. The HTML page and --json list all."""
    if noise.why_not:
        return [f"[dim]? label noise not estimated: {quote(noise.why_not)}[/]"]
    lines = [
        f"label noise in [bold]{quote(field.field or 'the reply')}[/]: "
        f"[bold]{100 * field.rate.value:.1f} %[/] "
        f"({100 * field.rate.low:.1f} to {100 * field.rate.high:.1f} %) of {field.rows:,} labels"
        + (f", {field.contradictions:,} near-duplicate pairs contradict" if field.contradictions else "")
        for field in noise.fields
    ]
    lines += [
        f"[dim]? label noise in {quote(name)} not estimated: {quote(why)}[/]"
        for name, why in noise.not_estimated.items()
    ]
    # A log without wrong labels also has a most suspicious row, which is not worth showing.
    if any(field.rate.low > 0 for field in noise.fields):
        lines += [
            f"[dim]  review {quote(_say_suspicious(row))}[/]" for row in noise.suspicious[:MOST_SUSPICIOUS]
        ]
    return lines


def _say_suspicious(row: SuspiciousLabel) -> str:
    field_prefix = f"{row.field}: " if row.field else ""
    near = f", like {row.near}" if row.near is not None else ""
    question = " ".join(row.question.split())[:60]
    return f"{row.origin}  {field_prefix}{row.label}, probably {row.suggested}{near}  «{question}»"


def _say(finding: Finding, files: tuple[str, ...]) -> str:
    """Title and location; the fix unless it is only information; the effect of a blocker."""
    effect = f": {quote(finding.effect)}" if finding.severity == "blocker" else ""
    text = f"[bold]{quote(finding.title)}[/]{effect} [dim]· {quote(_where(finding, files))}[/]"
    if finding.code in WITH_REASONS:
        text += "".join(f"\n{quote(line)}" for line in _name_reasons(finding, files))
    return text if finding.severity == "info" else f"{text}\n[dim]{quote(finding.fix)}[/]"


def _name_reasons(finding: Finding, files: tuple[str, ...]) -> list[str]:
    """The most frequent reasons with their counts and first places; the page and --json list all."""
    reasons: Counter[str] = Counter()
    for reason, count in finding.reasons.items():
        reasons[reason.partition("; expected ")[0]] += count
    named = reasons.most_common(MOST_REASONS)
    places: dict[str, str] = {}
    for example in finding.examples:
        place = str(example.origin) if len(files) > 1 else f"line {example.origin.line}"
        places.setdefault(example.excerpt.partition("; expected ")[0], f" · {place}")
    lines = [f"{count:,} × {reason}{places.get(reason, '')}" for reason, count in named]
    rest = reasons.total() - sum(count for _, count in named)
    return [*lines, f"{rest:,} × other reasons"] if rest else lines


def _where(finding: Finding, files: tuple[str, ...]) -> str:
    """The first rows; with the file name if there are several files."""
    if not finding.rows:
        return ""
    if len(files) == 1:
        # All records of a JSON array may be on one line.
        numbers = list(dict.fromkeys(row.line for row in finding.rows))
        lines = ", ".join(str(number) for number in numbers[:4])
        several = f" ({len(finding.rows):,} rows there)" if len(numbers) < min(len(finding.rows), 4) else ""
        return f"line {lines}{' …' if len(numbers) > 4 else ''}{several}"
    return f"{finding.rows[0]}{' …' if len(finding.rows) > 1 else ''}"


def draw_buckets(
    edges: Sequence[int], counts: Mapping[str, Sequence[int]], *, title: str, unit: str, width: float = 760
) -> Markup:
    """Buckets side by side, the named counts stacked; empty buckets at both ends are left out."""
    totals = [sum(values) for values in zip(*counts.values(), strict=True)]
    filled = [i for i, total in enumerate(totals) if total]
    if not filled:
        return draw_nothing(title, width)
    first, last = max(filled[0] - 1, 0), min(filled[-1] + 2, len(edges))
    every = max(1, round((last - first) / (10 if width > 500 else 5)))
    longest = number(edges[filled[-1] + 1]) if filled[-1] + 1 < len(edges) else "more"
    return draw_stacks(
        {name: values[first:last] for name, values in counts.items()},
        {i - first: number(edges[i]) for i in range(first, last, every)},
        title=title,
        unit=unit,
        description=f"{number(sum(totals))} rows between {number(edges[filled[0]])} and {longest} {unit}",
        width=width,
    )


MOST_LINES = 200
MOST_BARS = 12
KINDS = {
    "conflicting_answers": "One prompt, different answers",
    "near_duplicate": "Nearly the same",
    "duplicate": "The same",
}


def make_audit_page(audit: Audit) -> str:
    groups = [shape.group for shape in audit.length_histograms if shape.of == "reply" and shape.group]
    return html.render(
        "audit_page.html.jinja",
        audit=audit,
        lines=_name_lines,
        tiles=_tiles(audit),
        kinds=KINDS,
        most_bars=MOST_BARS,
        lengths=[
            ("Prompts", audit.prompt_length, _draw(audit, "prompt")),
            ("Replies", audit.reply_length, _draw(audit, "reply")),
        ],
        # The names of the stacked parts: the largest groups, and all others together.
        drawn_groups=[*groups, "others"] if groups else [],
        # Who the rows are of: bars of what was logged, and in them of what is usable.
        shares=(
            ("Roles", audit.groups, audit.usable_groups),
            ("Domains", audit.domains, {}),
            ("Models that answered", audit.models, {}),
        ),
    )


def _tiles(audit: Audit) -> list[tuple[str, str, str, str]]:
    """Name, value, note and tone of each."""
    count = Counter(finding.severity for finding in audit.findings)
    unread = audit.rows - audit.readable
    unreadable = f"{number(unread)} could not be read" if unread else "all of them readable"
    usable = percent(audit.usable / audit.rows) if audit.rows else "0 %"
    blockers, warnings = count["blocker"], count["warning"]
    return [
        ("Rows", number(audit.rows), unreadable, "plain"),
        ("Usable", number(audit.usable), f"{usable} after cleaning", "plain"),
        ("Blockers", str(blockers), "kinds of fault that forbid training", "fail" if blockers else "pass"),
        ("Warnings", str(warnings), "kinds of fault that harm it", "unknown" if warnings else "pass"),
    ]


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
