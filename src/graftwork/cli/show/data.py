"""Audits, datasets and repairs on the terminal."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.text import Text

from graftwork.data.export.sink import ExportRecord
from graftwork.data.inspect.diff import DatasetDiff, RowChanges
from graftwork.data.inspect.rows import ShownRow, TextPiece
from graftwork.data.inspect.trace import RowPlace, Trace, TracedDrop, TracedRow, TracedToken
from graftwork.records.correction import (
    AUGMENT,
    CUT_OFF,
    RepairOutcome,
    RepairPlan,
    RepairRow,
    TeacherSpending,
)
from graftwork.records.dataset import Audit, Finding, LabelNoise, SuspiciousLabel
from graftwork.views.document import quote, safe
from graftwork.views.terminal import PlainTable, print_line, table

if TYPE_CHECKING:
    from graftwork.data.split.model_subsets import UnmatchedValue
    from graftwork.records.dataset import Dataset, Drop, SubsetSummary

LOG_COLOURS = {"same": "green", "changed": "red", "gone": "yellow", "not_checked": "dim"}
TRAINED, CONTROL, BOUNDARY = "bold green", "dim", "bright_black"


def show_trace(console: Console, trace: Trace) -> None:
    for row in trace.rows:
        _show_traced_row(console, row)
    for drop in trace.drops:
        _show_traced_drop(console, drop)


def show_rows(
    console: Console, rows: tuple[ShownRow, ...], *, by_token: bool = False, plain: bool = False
) -> None:
    for row in rows:
        group = f" · {row.group}" if row.group else ""
        head = (
            f"{row.split}:{row.number}  {row.id}  {row.origin}{group} · "
            f"{row.tokens} tokens, {row.trained_tokens} trained"
        )
        _print(console, Text(safe(head), style="" if plain else "bold reverse"))
        _print(console, _mark(row.pieces, by_token) if plain else _colour(row.pieces, by_token))
        _print(console, Text(""))


def show_diff(console: Console, diff: DatasetDiff) -> None:
    print_line(console, f"{diff.before[:12]} → [bold]{diff.after[:12]}[/]")
    if diff.same:
        print_line(console, "the same dataset")
        return
    if diff.made_for or diff.settings:
        settings = table("setting", "before", "after")
        for change in (*diff.made_for, *diff.settings):
            settings.add_row(quote(change.key), _value(change.before), _value(change.after))
        console.print(settings)
    for kind, files in (
        ("added", diff.inputs.added),
        ("removed", diff.inputs.removed),
        ("changed", diff.inputs.changed),
    ):
        if files:
            named = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
            print_line(console, f"logs {kind}: {quote(named)}")
    _show_row_changes(console, diff.rows)
    _show_totals(console, diff)


def show_export(console: Console, export: ExportRecord, *, folder: Path) -> None:
    files = table("file", "rows", "sha256", right=("rows",))
    for file in export.files:
        files.add_row(quote(file.file), "" if file.rows is None else f"{file.rows:,}", file.sha256[:12])
    console.print(files)
    for left_out in export.left_out:
        first = ", ".join(str(origin) for origin in left_out.first[:3])
        text = f"{left_out.rows} rows left out: {left_out.why} ({first})"
        print_line(console, f"[yellow]! {quote(text)}[/]")
    for note in export.notes:
        print_line(console, f"[dim]{quote(note)}[/]")
    pairs = f", {export.preference_rows} of them preference pairs" if export.preference_rows else ""
    print_line(
        console,
        f"{export.rows:,} rows{pairs} of dataset [bold]{export.dataset[:12]}[/] written to {quote(folder)}",
    )


def _show_traced_row(console: Console, row: TracedRow) -> None:
    rows = table("row", quote(row.place.id))
    rows.add_row("from", _origin(row.place))
    rows.add_row(
        "log line", f"{row.input_hash or '?'}  [{LOG_COLOURS[row.log.state]}]{quote(row.log.words)}[/]"
    )
    rows.add_row("is in", f"[bold]{row.place.split}[/], row {row.place.number} counted from 0")
    for label, value in (("group", row.group), ("domain", row.domain), ("stage", row.stage)):
        if value is not None:
            rows.add_row(label, quote(value))
    if row.capture is not None:
        feedback = "no feedback" if row.capture.feedback is None else f"feedback {row.capture.feedback:g}"
        corrected = ", corrected by a person" if row.capture.corrected else ""
        served = f"{row.capture.id} by {row.capture.release[:12]} at {row.capture.at[:19]}"
        rows.add_row("captured", quote(f"{served}, {feedback}{corrected}"))
    if row.weight != 1:
        rows.add_row("weight", f"{row.weight:g}")
    trained = row.tokens - row.trained_from
    rows.add_row(
        "tokens", f"{row.tokens}, of which {trained} trained: {row.trained_from} to {row.tokens - 1}"
    )
    if row.token is not None:
        rows.add_row(f"token {row.token.place}", _token(row.token))
    console.print(rows)


def _token(token: TracedToken) -> str:
    text = "not decoded here" if token.text is None else quote(repr(token.text))
    trained = "[bold green]trained[/]" if token.trained else "[dim]not trained[/]"
    return f"{token.token}  {text}  {trained}"


def _show_traced_drop(console: Console, traced: TracedDrop) -> None:
    drop = traced.drop
    rows = table("left out", quote(drop.origin))
    rows.add_row(
        "log line",
        f"{drop.input_hash or '?'}  [{LOG_COLOURS[traced.log.state]}]{quote(traced.log.words)}[/]",
    )
    rows.add_row("by step", f"[bold]{quote(drop.step)}[/]")
    rows.add_row("because", quote(drop.reason))
    for place in traced.kept:
        rows.add_row("kept instead", f"{_origin(place)} in [bold]{place.split}[/], row {place.number}")
    console.print(rows)


def _origin(place: RowPlace) -> str:
    return quote(place.origin)


def _show_row_changes(console: Console, changes: RowChanges) -> None:
    print_line(
        console,
        f"rows: {changes.same:,} the same, {changes.added:,} added, {changes.removed:,} removed, "
        f"{changes.moved:,} moved to another split, {changes.changed:,} rendered differently",
    )
    for kind in ("moved", "changed", "added", "removed"):
        named = changes.named.get(kind, ())
        if not named:
            continue
        rows = table(kind, "from", "before", "after")
        for row in named:
            rows.add_row(quote(row.id), quote(row.origin), row.before or "", row.after or "")
        console.print(rows)


def _show_totals(console: Console, diff: DatasetDiff) -> None:
    totals = table("split", "rows", "tokens", "trained tokens", right=("rows", "tokens", "trained tokens"))
    for split, change in diff.splits.items():
        pairs = (
            (getattr(change.before, key), getattr(change.after, key))
            for key in ("rows", "tokens", "trained_tokens")
        )
        totals.add_row(split, *(_arrow(before, after) for before, after in pairs))
    console.print(totals)
    if diff.drops:
        drops = table("left out by", "rows", "new", "no longer", right=("rows", "new", "no longer"))
        for step, change_of_drops in diff.drops.items():
            counts = change_of_drops
            drops.add_row(
                quote(step), _arrow(counts.before, counts.after), str(counts.appeared), str(counts.vanished)
            )
        console.print(drops)


def _arrow(before: int, after: int) -> str:
    return f"{after:,}" if before == after else f"{before:,} → {after:,}"


def _value(value: Any) -> str:
    text = "" if value is None else str(value)
    return quote(text if len(text) <= 60 else f"{text[:57]}…")


def _colour(pieces: tuple[TextPiece, ...], by_token: bool) -> Text:
    text = Text()
    for piece in pieces:
        style = TRAINED if piece.trained else CONTROL if piece.control else ""
        text.append(safe(piece.text), style=style)
        if by_token:
            text.append("│", style=BOUNDARY)
    return text


def _mark(pieces: tuple[TextPiece, ...], by_token: bool) -> Text:
    """Trained text in brackets, without colours."""
    parts, trained = [], False
    for piece in pieces:
        if piece.trained != trained:
            parts.append("⟦" if piece.trained else "⟧")
            trained = piece.trained
        parts.append(safe(piece.text) + ("│" if by_token else ""))
    return Text("".join(parts) + ("⟧" if trained else ""))


def _print(console: Console, text: Text) -> None:
    console.print(text, highlight=False, soft_wrap=True)


FIGURES = ("own", "replay", "epoch", "RL", "valid", "test")


def show_portions(
    console: Console, portions: "Sequence[SubsetSummary]", *, unmatched: "Sequence[UnmatchedValue]" = ()
) -> None:
    stages = sorted({stage for portion in portions for stage in portion.stages})
    named = tuple(f"s{stage}" for stage in stages)
    rows = table("model", *FIGURES, *named, right=(*FIGURES, *named))
    rows.columns[0].no_wrap = True
    for portion in portions:
        rows.add_row(
            quote(portion.model),
            f"{portion.own:,}",
            f"{portion.replayed:,}",
            f"{portion.rows_an_epoch:,.0f}",
            f"{portion.rl:,}",
            f"{portion.validation:,}",
            f"{portion.test:,}",
            *(f"{portion.stages.get(stage, 0):,}" for stage in stages),
        )
    console.print(rows)
    print_line(
        console,
        "[dim]own and replay: distinct training rows; epoch: rows per epoch, by their weights; "
        "RL: prompts reserved for reinforcement learning; s1 …: training rows of a stage[/]",
    )
    for key, value in unmatched:
        print_line(console, f"[yellow]![/] {quote(key)}: no kept row has {quote(repr(value))}")


MOST_DROP_REASONS = 5
# The first rows are enough to find the most frequent reasons.
MOST_DROPS = 200_000

_KINDS = (
    (re.compile(r"^the same as "), "the same as another row"),
    (re.compile(r"^nearly the same as "), "nearly the same as another row"),
    (re.compile(r"^other reply to the same prompt in "), "other reply to the same prompt in another row"),
    (re.compile(r"^set aside: it asks what "), "set aside: asks what rows in different splits ask"),
    (re.compile(r"^overlong: |^\d+ tokens, more than max_tokens"), "longer than data.max_tokens"),
)
_FIGURE = re.compile(r"\d[\d,.]*")


class Reasons(NamedTuple):
    """The most frequent reasons, and how many rows were counted."""

    counts: list[tuple[str, int]]
    rows: int


def show_prepared(console: Console, prepared: Any) -> None:
    dataset: Dataset = prepared.dataset
    _show_splits(console, dataset)
    way = " → ".join(f"{step} {count}" for step, count in dataset.kept_after.items())
    print_line(console, f"rows kept: {way}")
    _show_reasons(console, Path(prepared.folder), dataset)
    if dataset.redactions:
        made = ", ".join(f"{kind} {count}" for kind, count in dataset.redactions.items())
        print_line(console, f"redacted: {quote(made)}")
    packing = dataset.packing
    if packing is not None and packing.sequences:
        print_line(
            console,
            f"packed: {packing.sequences:,} sequences of {packing.length:,} tokens, {packing.fill:.1%} full",
        )
    if len(prepared.portions) > 1:
        show_portions(console, prepared.portions)
        for name, folder in prepared.folders.items():
            _show_folder(console, folder, Path(folder).name, f" for {quote(name)}")
    else:
        _show_folder(console, prepared.folder, dataset.content_hash)
    print_line(
        console,
        "[dim]`graft data show` shows the rows, `graft data trace FILE:LINE` what became of a log line[/]",
    )


class UnreadFile(NamedTuple):
    """A log file with rows that could not be read: how many, and the first of them."""

    file: str
    rows: int
    first_line: int
    reason: str


def list_unread(folder: Path) -> tuple[UnreadFile, ...]:
    """The log files of a dataset with rows that could not be read."""
    from graftwork.files.dataset import iterate_drops

    files: dict[str, UnreadFile] = {}
    # Unreadable rows come first.
    for drop in takewhile(lambda drop: drop.step == "read", iterate_drops(folder)):
        file, line = drop.origin.file, drop.origin.line
        known = files.get(file) or UnreadFile(file, 0, line, drop.reason.partition(": ")[2])
        files[file] = known._replace(rows=known.rows + 1)
    return tuple(files.values())


def warn_of_unread(console: Console, folder: Path, dataset: "Dataset") -> None:
    """Say which rows of the logs could not be read, and why the first of each file."""
    from graftwork.files.dataset import DROPS

    rows = dataset.dropped.get("read", 0)
    if not rows:
        return
    whole = sum(log.rows for log in dataset.inputs)
    are = "row of the logs is" if rows == 1 else "rows of the logs are"
    print_line(console, f"[yellow]![/] {rows:,} {are} not learned from ({whole:,} in all): unreadable")
    # The dataset of an earlier result may have been removed.
    for unread in list_unread(folder) if (folder / DROPS).is_file() else ():
        reason = unread.reason.partition("; expected ")[0]
        print_line(
            console, f"  {quote(unread.file)}: {unread.rows:,}, line {unread.first_line}: {quote(reason)}"
        )
    print_line(
        console,
        "  name a format or a mapping under data.formats, or fix the lines; `graft data audit` lists them",
    )


def count_reasons(drops: "Iterable[Drop]", *, most: int = MOST_DROP_REASONS) -> Reasons:
    """Counts reasons that differ only in row names and numbers as one."""
    counts = Counter(_name_kind(drop.reason) for drop in islice(drops, MOST_DROPS))
    return Reasons(counts.most_common(most), sum(counts.values()))


def _name_kind(reason: str) -> str:
    for pattern, kind in _KINDS:
        if pattern.search(reason):
            return kind
    return _FIGURE.sub("…", reason.partition("; expected ")[0])


def _show_splits(console: Console, dataset: "Dataset") -> None:
    from graftwork.data.audit.corpus_findings import say_together

    split_by = str(dataset.settings.get("split_by", "question"))
    groups = "question groups" if split_by == "question" else "groups"
    figures = ("rows", groups, "tokens", "trained tokens", "longest row")
    rows = table("split", *figures, right=figures)
    for split, summary in dataset.splits.items():
        rows.add_row(
            split,
            str(summary.rows),
            str(summary.groups),
            f"{summary.tokens:,}",
            f"{summary.trained_tokens:,}",
            str(summary.longest),
        )
    console.print(rows)
    if split_by != "question":
        print_line(console, f"[dim]group: rows that {quote(say_together(split_by))} (data.split_by)[/]")


def _show_reasons(console: Console, folder: Path, dataset: "Dataset") -> None:
    from graftwork.files.dataset import DROPS, iterate_drops

    # The dataset of an earlier result may have been removed.
    if dataset.drops is None or not dataset.drops.rows or not (folder / DROPS).is_file():
        return
    reasons = count_reasons(iterate_drops(folder))
    among = f", among the first {reasons.rows:,}" if reasons.rows < dataset.drops.rows else ""
    print_line(console, f"left out: {dataset.drops.rows:,} rows; most often{among}")
    for reason, count in reasons.counts:
        print_line(console, f"  {count:,} × {quote(reason)}")


def _show_folder(console: Console, folder: str, content_hash: str, whose: str = "") -> None:
    # A wrapped path cannot be copied.
    print_line(console, f"dataset [bold]{content_hash[:12]}[/]{whose} in {quote(folder)}", soft_wrap=True)


MARKS = {"blocker": "✗", "warning": "!", "info": "·"}
COLOURS = {"blocker": "red", "warning": "yellow", "info": "dim"}
# These findings show the reasons; for the others the title is enough.
WITH_REASONS = ("parse_error", "schema")
MOST_REASONS = 3
MOST_SUSPICIOUS = 5


def show_audit(console: Console, audit: Audit) -> None:
    """One screen: findings and fixes. Everything else is in the HTML page and in --json."""
    print_line(
        console,
        f"[bold]{audit.rows:,}[/] {'row' if audit.rows == 1 else 'rows'} in "
        f"{quote(_name_files(audit.files))}: {audit.readable:,} readable, "
        f"[bold]{audit.usable:,} usable[/] without faulty and repeated rows{_say_too_long(audit)} "
        f"({audit.seconds:.1f} s)\n",
    )
    findings = PlainTable.grid(padding=(0, 2, 0, 0))
    findings.add_column(no_wrap=True)
    findings.add_column(overflow="fold")
    for finding in audit.findings:
        colour = COLOURS[finding.severity]
        findings.add_row(
            f"[{colour}]{MARKS[finding.severity]} {quote(finding.code)}[/]", _say(finding, audit)
        )
    console.print(findings)
    for why, codes in _group_reasons(audit).items():
        print_line(console, f"[dim]? {quote(codes)} not checked: {quote(why)}[/]")
    _show_noise(console, audit.label_noise)
    print_line(console, f"\n{_say_answer(audit)}")


def _say_answer(audit: Audit) -> str:
    if audit.fit_to_train:
        return "[green]fit to train on as it is[/]"
    if not audit.usable:
        return "[red]nothing to train on[/]: fix the log, or name another one"
    return "[red]must not be trained on as it is[/]: `graft data prepare` drops or repairs what it can"


def _show_noise(console: Console, noise: LabelNoise) -> None:
    """The estimate for each field, and the first rows to review. The HTML page and --json list all."""
    if noise.why_not:
        print_line(console, f"[dim]? label noise not estimated: {quote(noise.why_not)}[/]")
        return
    for field in noise.fields:
        named = quote(field.field or "the reply")
        print_line(
            console,
            f"label noise in [bold]{named}[/]: [bold]{100 * field.rate.value:.1f} %[/] "
            f"({100 * field.rate.low:.1f} to {100 * field.rate.high:.1f} %) of {field.rows:,} labels"
            + (f", {field.contradictions:,} near-duplicate pairs contradict" if field.contradictions else ""),
        )
    for name, why in noise.not_estimated.items():
        print_line(console, f"[dim]? label noise in {quote(name)} not estimated: {quote(why)}[/]")
    # A log without wrong labels also has a most suspicious row, which is not worth showing.
    if any(field.rate.low > 0 for field in noise.fields):
        for row in noise.suspicious[:MOST_SUSPICIOUS]:
            print_line(console, f"[dim]  review {quote(_say_suspicious(row))}[/]")


def _say_suspicious(row: SuspiciousLabel) -> str:
    of = f"{row.field}: " if row.field else ""
    near = f", like {row.near}" if row.near is not None else ""
    question = " ".join(row.question.split())[:60]
    return f"{row.origin}  {of}{row.label}, probably {row.suggested}{near}  «{question}»"


def _say_too_long(audit: Audit) -> str:
    from graftwork.data.audit.row_findings import BUT_FOR_LENGTH

    found = (finding.reasons.get(BUT_FOR_LENGTH, 0) for finding in audit.findings)
    rows = sum(found)
    if not rows:
        return ""
    size = f"{rows:,}" if audit.lengths_counted else f"about {rows:,}"
    return f", of which {size} {'is' if rows == 1 else 'are'} longer than data.max_tokens"


def _say(finding: Finding, audit: Audit) -> str:
    """Title and place; the fix unless it is only information; the effect of a blocker."""
    effect = f": {quote(finding.effect)}" if finding.severity == "blocker" else ""
    text = f"[bold]{quote(finding.title)}[/]{effect} [dim]· {quote(_where(finding, audit.files))}[/]"
    if finding.code in WITH_REASONS:
        text += "".join(f"\n{quote(line)}" for line in _name_reasons(finding, audit.files))
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
    rest = sum(reasons.values()) - sum(count for _, count in named)
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


def _name_files(files: tuple[str, ...]) -> str:
    return ", ".join(files[:3]) + (f" and {len(files) - 3:,} more files" if len(files) > 3 else "")


def _group_reasons(audit: Audit) -> dict[str, str]:
    """Rules that were skipped for the same reason share a line."""
    codes: dict[str, list[str]] = {}
    for lacking in audit.not_looked_for:
        codes.setdefault(lacking.why, []).append(lacking.code)
    return {why: ", ".join(named) for why, named in codes.items()}


MOST_ROWS = 12
_STATES = {
    "ask": "to be asked",
    "cached": "answered before",
    "shared": "same prompt as another row",
    "skipped": "not needed",
    "accepted": "accepted",
    "refused": "refused",
    "unanswered": "no answer; the next run asks again",
    "over_budget": "not asked: the budget is spent",
}


def show_plan(console: Console, plan: RepairPlan) -> None:
    listed = table(
        "row", "fault", "role", "state", "tokens in", "tokens out", "cost", right=("tokens in", "tokens out")
    )
    single = len({row.origin.file for row in plan.rows}) == 1
    # Rows that would be asked come first.
    for row in sorted(plan.rows, key=lambda row: row.state != "ask")[:MOST_ROWS]:
        cost = "" if row.cost is None else f"${row.cost:.4f}"
        listed.add_row(
            f"line {row.origin.line}" if single else quote(str(row.origin)),
            row.fault,
            quote(row.group or ""),
            _STATES[row.state],
            f"{row.tokens_in:,}" if row.tokens_in else "",
            f"{row.tokens_out:,}" if row.tokens_out else "",
            cost,
        )
    console.print(listed)
    if len(plan.rows) > MOST_ROWS:
        print_line(console, f"… and {len(plan.rows) - MOST_ROWS} more rows (--json lists all)")
    faults = ", ".join(f"{fault} {count:,}" for fault, count in plan.faults.items())
    print_line(console, f"[bold]{len(plan.rows):,} rows[/] to repair: {faults}; {plan.usable:,} usable now")
    _show_states(console, plan.rows)
    print_line(
        console,
        f"{plan.requests:,} requests for {plan.prompts:,} prompts, {plan.cached:,} answered before; about "
        f"{plan.tokens_in:,} tokens in and {plan.tokens_out:,} out (at most {plan.tokens_out_at_most:,})",
    )
    if plan.cost is not None and plan.cost_at_most is not None:
        print_line(
            console,
            f"estimated cost: [bold]{_say_dollars(plan.cost)}[/], at most {_say_dollars(plan.cost_at_most)}",
        )
        print_line(console, f"[dim]at {quote(plan.price)}[/]")
    else:
        print_line(
            console, "cost: not known; give --price-in and --price-out, or name a teacher with a price"
        )
    for limit in plan.limits:
        print_line(console, f"[yellow]budget too small:[/] {quote(limit)}")
    if plan.overlong:
        _warn_of_length(console, f"about {plan.overlong:,} of the answers will probably make rows that are")
    added = {row.group for row in plan.rows if row.fault == AUGMENT}
    for role, count in plan.small_groups.items():
        if role not in added:
            rows = "1 usable row" if count == 1 else f"{count} usable rows"
            print_line(
                console, f"small role: {quote(role)} has {rows}; --augment role={quote(role)} adds some"
            )


def show_outcome(console: Console, outcome: RepairOutcome) -> None:
    _show_states(console, outcome.rows)
    reasons = Counter(row.why.split(":")[0] for row in outcome.rows if row.state == "refused")
    for reason, count in reasons.most_common(8):
        print_line(console, f"  refused, {quote(reason)}: {count:,}")
    if any(CUT_OFF in reason for reason in reasons):
        print_line(console, "  a larger data.repair.teacher.max_tokens (--max-tokens) lets answers end")
    after = "" if outcome.usable_after is None else f"; usable rows {outcome.usable_before:,} → "
    after += "" if outcome.usable_after is None else f"{outcome.usable_after:,}"
    print_line(console, f"[bold]{outcome.written:,} rows[/] written to {quote(outcome.file)}{after}")
    if outcome.overlong:
        _warn_of_length(console, f"about {outcome.overlong:,} of these rows are")
    print_line(console, _say_spent(outcome.spent))
    if outcome.undecided:
        what = "row is" if outcome.undecided == 1 else "rows are"
        again = "run the same command again"
        if outcome.states.get("over_budget"):
            again = "raise the budget (--max-cost or --max-total-tokens) and " + again
        print_line(console, f"[yellow]{outcome.undecided:,} {what} not decided[/]: {again}")
    if outcome.written and not outcome.in_logs:
        print_line(console, f"add {quote(outcome.file)} to data.logs in graft.yaml to train on these rows")


def _warn_of_length(console: Console, which: str) -> None:
    print_line(
        console,
        f"[yellow]too long:[/] {which} longer than data.max_tokens, and `graft data prepare` drops such "
        "rows; raise data.max_tokens in graft.yaml",
    )


def _show_states(console: Console, rows: Sequence[RepairRow]) -> None:
    counts = Counter(row.state for row in rows)
    for state, words in _STATES.items():
        if counts[state]:  # type: ignore[index]
            why = _list_reasons(rows) if state == "skipped" else ""
            print_line(console, f"  {counts[state]:,} {words}{quote(why)}")  # type: ignore[index]


def _list_reasons(rows: Sequence[RepairRow]) -> str:
    """Why rows are not asked, the most frequent reason first."""
    reasons = Counter(row.why for row in rows if row.state == "skipped" and row.why)
    listed = (why if len(reasons) == 1 else f"{why} ({count:,})" for why, count in reasons.most_common())
    return f": {', '.join(listed)}" if reasons else ""


def _say_dollars(dollars: float) -> str:
    return f"${dollars:.2f}" if dollars >= 0.1 or not dollars else f"${dollars:.4f}"


def _say_spent(spent: TeacherSpending) -> str:
    cost = "" if spent.cost is None else f", {_say_dollars(spent.cost)}"
    lost = f"; {spent.lost} requests were lost by a kill and count in full" if spent.lost else ""
    return (
        f"spent so far: {spent.requests:,} requests, {spent.tokens_in:,} tokens in, {spent.tokens_out:,} out"
        f"{cost}{lost}"
    )
