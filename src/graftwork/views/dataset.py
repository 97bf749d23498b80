"""Datasets: what was prepared and left out, rows as the model sees them, traces, diffs, exports, repairs,
corrections, and captures that were exported or deleted.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.records.dataset import AUGMENT, CUT_OFF, RepairOutcome, RepairPlan, RepairRow
from graftwork.text.wording import plural, truncate
from graftwork.views.document import Cell, Document, Table, quote, safe

if TYPE_CHECKING:
    from graftwork.data.capture_export import ExportedCaptures, SelectedCaptures
    from graftwork.data.export.sink import ExportRecord
    from graftwork.data.inspect import (
        DatasetDiff,
        LogCheck,
        ShownRow,
        TextPiece,
        Trace,
        TracedDrop,
        TracedRow,
    )
    from graftwork.data.project import LogScoresAudit, PreparedData
    from graftwork.grading.reward_audit import ScoreAudit
    from graftwork.records.dataset import Corrections, Dataset, Drop, SubsetSummary
    from graftwork.serve.project import Forgotten


LOG_COLOURS = {"same": "green", "changed": "red", "gone": "yellow", "not_checked": "dim"}


def view_trace(trace: "Trace") -> Document:
    return Document("Trace", [*map(_trace_row, trace.rows), *map(_trace_drop, trace.drops)])


def _trace_row(row: "TracedRow") -> Table:
    rows = [
        ("from", quote(row.place.origin)),
        ("log line", _say_log(row.input_hash, row.log)),
        ("is in", f"[bold]{row.place.split}[/], row {row.place.number} counted from 0"),
    ]
    rows += [
        (label, quote(value))
        for label, value in (("group", row.group), ("domain", row.domain), ("stage", row.stage))
        if value is not None
    ]
    if row.capture is not None:
        feedback = "no feedback" if row.capture.feedback is None else f"feedback {row.capture.feedback:g}"
        corrected = ", corrected by a person" if row.capture.corrected else ""
        served = f"{row.capture.id} by {row.capture.release[:12]} at {row.capture.at[:19]}"
        rows.append(("captured", quote(f"{served}, {feedback}{corrected}")))
    if row.weight != 1:
        rows.append(("weight", f"{row.weight:g}"))
    trained = row.tokens - row.trained_from
    rows.append(
        ("tokens", f"{row.tokens}, of which {trained} trained: {row.trained_from} to {row.tokens - 1}")
    )
    if (token := row.token) is not None:
        text = "not decoded here" if token.text is None else quote(repr(token.text))
        is_trained = "[bold green]trained[/]" if token.trained else "[dim]not trained[/]"
        rows.append((f"token {token.place}", f"{token.token}  {text}  {is_trained}"))
    return Table(("row", quote(row.place.id)), rows)


def _say_log(input_hash: str | None, log: "LogCheck") -> str:
    return f"{input_hash or '?'}  [{LOG_COLOURS[log.state]}]{quote(log.words)}[/]"


def _trace_drop(traced: "TracedDrop") -> Table:
    drop = traced.drop
    rows = [
        ("log line", _say_log(drop.input_hash, traced.log)),
        ("by step", f"[bold]{quote(drop.step)}[/]"),
        ("because", quote(drop.reason)),
    ]
    rows += [
        ("kept instead", f"{quote(place.origin)} in [bold]{place.split}[/], row {place.number}")
        for place in traced.kept
    ]
    return Table(("left out", quote(drop.origin)), rows)


def view_rows(rows: "tuple[ShownRow, ...]", *, by_token: bool = False, plain: bool = False) -> Document:
    """Trained text in color; `plain`: in brackets."""
    viewed = Document("Rows")
    for row in rows:
        group = f" · {row.group}" if row.group else ""
        head = quote(
            f"{row.split}:{row.number}  {row.id}  {row.origin}{group} · "
            f"{row.tokens} tokens, {row.trained_tokens} trained"
        )
        pieces = _bracket(row.pieces, by_token) if plain else _color(row.pieces, by_token)
        viewed.line(head if plain else f"[bold reverse]{head}[/]", pieces, "", wrap=False)
    return viewed


def _color(pieces: "tuple[TextPiece, ...]", by_token: bool) -> str:
    text = ""
    for piece in pieces:
        style = "bold green" if piece.trained else "dim" if piece.control else ""
        text += f"[{style}]{quote(piece.text)}[/]" if style else quote(piece.text)
        text += "[bright_black]│[/]" if by_token else ""
    return text


def _bracket(pieces: "tuple[TextPiece, ...]", by_token: bool) -> str:
    parts, trained = [], False
    for piece in pieces:
        if piece.trained != trained:
            parts.append("⟦" if piece.trained else "⟧")
            trained = piece.trained
        parts.append(safe(piece.text) + ("│" if by_token else ""))
    return quote("".join(parts) + ("⟧" if trained else ""))


def view_diff(diff: "DatasetDiff") -> Document:
    viewed = Document("Differences")
    viewed.line(f"{diff.before[:12]} → [bold]{diff.after[:12]}[/]")
    if diff.same:
        viewed.line("the same dataset")
        return viewed
    viewed.table(
        ("setting", "before", "after"),
        [
            (quote(change.key), _value(change.before), _value(change.after))
            for change in (*diff.made_for, *diff.settings)
        ],
    )
    for kind in ("added", "removed", "changed"):
        if files := getattr(diff.inputs, kind):
            named = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
            viewed.line(f"logs {kind}: {quote(named)}")
    changes = diff.rows
    viewed.line(
        f"rows: {changes.same:,} the same, {changes.added:,} added, {changes.removed:,} removed, "
        f"{changes.moved:,} moved to another split, {changes.changed:,} rendered differently"
    )
    for kind in ("moved", "changed", "added", "removed"):
        viewed.table(
            (kind, "from", "before", "after"),
            [
                (quote(row.id), quote(row.origin), row.before, row.after)
                for row in changes.named.get(kind, ())
            ],
        )
    figures = ("rows", "tokens", "trained_tokens")
    viewed.table(
        ("split", "rows", "tokens", "trained tokens"),
        [
            (split, *(_arrow(getattr(change.before, key), getattr(change.after, key)) for key in figures))
            for split, change in diff.splits.items()
        ],
        right=("rows", "tokens", "trained tokens"),
    )
    viewed.table(
        ("left out by", "rows", "new", "no longer"),
        [
            (quote(step), _arrow(drops.before, drops.after), str(drops.appeared), str(drops.vanished))
            for step, drops in diff.drops.items()
        ],
        right=("rows", "new", "no longer"),
    )
    return viewed


def _arrow(before: int, after: int) -> str:
    return f"{before:,}" if before == after else f"{before:,} → {after:,}"


def _value(value: Any) -> str:
    return "" if value is None else quote(truncate(str(value), 60))


def view_export(export: "ExportRecord", *, folder: Path) -> Document:
    viewed = Document("Export")
    rows = [(quote(file.file), file.rows, file.sha256[:12]) for file in export.files]
    viewed.table(("file", "rows", "sha256"), rows, right=("rows",))
    for left_out in export.left_out:
        first = ", ".join(str(origin) for origin in left_out.first[:3])
        text = f"{left_out.rows} rows left out: {left_out.why} ({first})"
        viewed.line(f"[yellow]! {quote(text)}[/]")
    viewed.line(*(f"[dim]{quote(note)}[/]" for note in export.notes))
    pairs = f", {export.preference_rows} of them preference pairs" if export.preference_rows else ""
    viewed.line(
        f"{export.rows:,} rows{pairs} of dataset [bold]{export.dataset[:12]}[/] written to {quote(folder)}"
    )
    return viewed


FIGURES = ("own", "replay", "epoch", "RL", "valid", "test")


def view_portions(
    portions: "Sequence[SubsetSummary]", *, unmatched: "Sequence[tuple[str, str]]" = ()
) -> Document:
    """The rows of each model of a family."""
    viewed = Document("Rows of each model")
    stages = sorted({stage for portion in portions for stage in portion.stages})
    named = tuple(f"s{stage}" for stage in stages)
    rows: list[Sequence[Cell]] = [
        (
            quote(portion.model),
            portion.own,
            portion.replayed,
            f"{portion.rows_per_epoch:,.0f}",
            portion.rl,
            portion.validation,
            portion.test,
            *(portion.stages.get(stage, 0) for stage in stages),
        )
        for portion in portions
    ]
    viewed.add(Table(("model", *FIGURES, *named), rows, right=(*FIGURES, *named), no_wrap=(0,)))
    viewed.line(
        "[dim]own and replay: distinct training rows; epoch: rows per epoch, by their weights; "
        "RL: prompts reserved for reinforcement learning; s1 …: training rows of a stage[/]",
        *(f"[yellow]![/] {quote(key)}: no kept row has {quote(repr(value))}" for key, value in unmatched),
    )
    return viewed


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


def view_prepared(prepared: "PreparedData") -> Document:
    from graftwork.files.dataset import DROPS, iterate_drops

    dataset: Dataset = prepared.dataset
    viewed = Document("Dataset")
    _add_splits(viewed, dataset)
    way = " → ".join(f"{step} {count}" for step, count in dataset.kept_after.items())
    viewed.line(f"rows kept: {way}")
    folder = Path(prepared.folder)
    # The dataset of an earlier result may have been removed.
    if dataset.drops is not None and dataset.drops.rows and (folder / DROPS).is_file():
        counts = count_reasons(iterate_drops(folder))
        among = f", among the first {counts.total():,}" if counts.total() < dataset.drops.rows else ""
        viewed.line(
            f"left out: {dataset.drops.rows:,} rows; most often{among}",
            *(f"  {count:,} × {quote(reason)}" for reason, count in counts.most_common(MOST_DROP_REASONS)),
        )
    if dataset.redactions:
        kinds = ", ".join(f"{kind} {count}" for kind, count in dataset.redactions.items())
        viewed.line(f"redacted: {quote(kinds)}")
    packing = dataset.packing
    if packing is not None and packing.sequences:
        viewed.line(
            f"packed: {packing.sequences:,} sequences of {packing.length:,} tokens, {packing.fill:.1%} full"
        )
    folders: Mapping[str, str] = {"": prepared.folder}
    if len(prepared.portions) > 1:
        viewed.add(view_portions(prepared.portions))
        folders = prepared.folders
    for name, path in folders.items():
        whose, content_hash = (f" for {quote(name)}", Path(path).name) if name else ("", dataset.content_hash)
        viewed.line(f"dataset [bold]{content_hash[:12]}[/]{whose} in {quote(path)}", wrap=False)
    viewed.line(
        "[dim]`graft data show` shows the rows, `graft data trace FILE:LINE` what became of a log line[/]"
    )
    return viewed


def _add_splits(viewed: Document, dataset: "Dataset") -> None:
    from graftwork.data.audit.corpus_findings import say_together

    split_by = str(dataset.settings.get("split_by", "question"))
    groups = "question groups" if split_by == "question" else "groups"
    figures = ("rows", groups, "tokens", "trained tokens", "longest row")
    viewed.table(
        ("split", *figures),
        [
            (
                split,
                str(summary.rows),
                str(summary.groups),
                summary.tokens,
                summary.trained_tokens,
                str(summary.longest),
            )
            for split, summary in dataset.splits.items()
        ],
        right=figures,
    )
    if split_by != "question":
        viewed.line(f"[dim]group: rows that {quote(say_together(split_by))} (data.split_by)[/]")


def count_reasons(drops: "Iterable[Drop]") -> Counter[str]:
    """Counts reasons that differ only in row names and numbers as one."""
    return Counter(_name_kind(drop.reason) for drop in islice(drops, MOST_DROPS))


def _name_kind(reason: str) -> str:
    for pattern, kind in _KINDS:
        if pattern.search(reason):
            return kind
    return _FIGURE.sub("…", reason.partition("; expected ")[0])


def list_unread(folder: Path) -> tuple["tuple[Drop, int]", ...]:
    """For each log file of a dataset with rows that could not be read, the first of them and how many."""
    from graftwork.files.dataset import iterate_drops

    first: dict[str, Drop] = {}
    rows: Counter[str] = Counter()
    # Unreadable rows come first.
    for drop in takewhile(lambda drop: drop.step == "read", iterate_drops(folder)):
        first.setdefault(drop.origin.file, drop)
        rows[drop.origin.file] += 1
    return tuple((drop, rows[file]) for file, drop in first.items())


def view_unread(folder: Path, dataset: "Dataset") -> Document:
    """Which rows of the logs could not be read, and why the first of each file; empty if all could."""
    from graftwork.files.dataset import DROPS

    viewed, rows = Document("Unreadable rows"), dataset.dropped.get("read", 0)
    if not rows:
        return viewed
    whole = sum(log.rows for log in dataset.inputs)
    are = "row of the logs is" if rows == 1 else "rows of the logs are"
    viewed.line(f"[yellow]![/] {rows:,} {are} not learned from ({whole:,} in all): unreadable")
    # The dataset of an earlier result may have been removed.
    for drop, count in list_unread(folder) if (folder / DROPS).is_file() else ():
        reason = drop.reason.partition(": ")[2].partition("; expected ")[0]
        viewed.line(f"  {quote(drop.origin.file)}: {count:,}, line {drop.origin.line}: {quote(reason)}")
    viewed.line(
        "  name a format or a mapping under data.formats, or fix the lines; `graft data audit` lists them"
    )
    return viewed


MOST_REPAIRS = 12
REPAIR_STATES = {
    "ask": "to be asked",
    "cached": "answered before",
    "shared": "same prompt as another row",
    "skipped": "not needed",
    "accepted": "accepted",
    "refused": "refused",
    "unanswered": "no answer; the next run asks again",
    "over_budget": "not asked: the budget is spent",
}


def view_repair_plan(plan: RepairPlan) -> Document:
    viewed = Document("Repair")
    single = len({row.origin.file for row in plan.rows}) == 1
    viewed.table(
        ("row", "fault", "role", "state", "tokens in", "tokens out", "cost"),
        [
            (
                f"line {row.origin.line}" if single else quote(row.origin),
                row.fault,
                quote(row.group or ""),
                REPAIR_STATES[row.state],
                row.tokens_in or "",
                row.tokens_out or "",
                "" if row.cost is None else f"${row.cost:.4f}",
            )
            # Rows that would be asked come first.
            for row in sorted(plan.rows, key=lambda row: row.state != "ask")[:MOST_REPAIRS]
        ],
        right=("tokens in", "tokens out"),
    )
    if len(plan.rows) > MOST_REPAIRS:
        viewed.line(f"… and {len(plan.rows) - MOST_REPAIRS} more rows (--json lists all)")
    faults = ", ".join(f"{fault} {count:,}" for fault, count in plan.faults.items())
    viewed.line(
        f"[bold]{len(plan.rows):,} rows[/] to repair: {faults}; {plan.usable:,} usable now",
        *_count_states(plan.rows),
        f"{plan.requests:,} requests for {plan.prompts:,} prompts, {plan.cached:,} answered before; about "
        f"{plan.tokens_in:,} tokens in and {plan.tokens_out:,} out (at most {plan.tokens_out_at_most:,})",
    )
    if plan.cost is not None and plan.cost_at_most is not None:
        viewed.line(
            f"estimated cost: [bold]{_say_dollars(plan.cost)}[/], at most {_say_dollars(plan.cost_at_most)}",
            f"[dim]at {quote(plan.price)}[/]",
        )
    else:
        viewed.line("cost: not known; give --price-in and --price-out, or specify a teacher with a price")
    viewed.line(*(f"[yellow]budget too small:[/] {quote(limit)}" for limit in plan.limits))
    if plan.overlong:
        viewed.line(
            _warn_of_length(f"about {plan.overlong:,} of the answers will probably make rows that are")
        )
    added = {row.group for row in plan.rows if row.fault == AUGMENT}
    for role, count in plan.small_groups.items():
        if role not in added:
            rows = "1 usable row" if count == 1 else f"{count} usable rows"
            viewed.line(f"small role: {quote(role)} has {rows}; --augment role={quote(role)} adds some")
    return viewed


def view_repair(outcome: RepairOutcome) -> Document:
    viewed = Document("Repair")
    reasons = Counter(row.why.split(":")[0] for row in outcome.rows if row.state == "refused")
    viewed.line(
        *_count_states(outcome.rows),
        *(f"  refused, {quote(reason)}: {count:,}" for reason, count in reasons.most_common(8)),
    )
    if any(CUT_OFF in reason for reason in reasons):
        viewed.line("  a larger data.repair.teacher.max_tokens (--max-tokens) lets answers end")
    after = outcome.usable_after
    usable = "" if after is None else f"; usable rows {outcome.usable_before:,} → {after:,}"
    viewed.line(f"[bold]{outcome.written:,} rows[/] written to {quote(outcome.file)}{usable}")
    if outcome.overlong:
        viewed.line(_warn_of_length(f"about {outcome.overlong:,} of these rows are"))
    spent = outcome.spent
    cost = "" if spent.cost is None else f", {_say_dollars(spent.cost)}"
    lost = f"; {spent.lost} requests were lost by a kill and count in full" if spent.lost else ""
    viewed.line(
        f"spent so far: {spent.requests:,} requests, {spent.tokens_in:,} tokens in, {spent.tokens_out:,} out"
        f"{cost}{lost}"
    )
    if outcome.undecided:
        what = "row is" if outcome.undecided == 1 else "rows are"
        resume_hint = "run the same command again"
        if outcome.states.get("over_budget"):
            resume_hint = "raise the budget (--max-cost or --max-total-tokens) and " + resume_hint
        viewed.line(f"[yellow]{outcome.undecided:,} {what} not decided[/]: {resume_hint}")
    if outcome.written and not outcome.in_logs:
        viewed.line(f"add {quote(outcome.file)} to data.logs in graft.yaml to train on these rows")
    return viewed


def _warn_of_length(which: str) -> str:
    return (
        f"[yellow]too long:[/] {which} longer than data.max_tokens, and `graft data prepare` drops such "
        "rows; raise data.max_tokens in graft.yaml"
    )


def _count_states(rows: Sequence[RepairRow]) -> list[str]:
    counts = Counter[str](row.state for row in rows)
    # Why rows are not asked, the most frequent reason first.
    skipped = Counter(row.why for row in rows if row.state == "skipped" and row.why)
    listed = (why if len(skipped) == 1 else f"{why} ({count:,})" for why, count in skipped.most_common())
    why = {"skipped": f": {', '.join(listed)}"} if skipped else {}
    return [
        f"  {counts[state]:,} {words}{quote(why.get(state, ''))}"
        for state, words in REPAIR_STATES.items()
        if counts[state]
    ]


def _say_dollars(dollars: float) -> str:
    return f"${dollars:.2f}" if dollars >= 0.1 or not dollars else f"${dollars:.4f}"


def view_score_audit(found: "LogScoresAudit") -> Document:
    viewed = Document("Quality scores")
    rows: list[Sequence[Cell]] = [
        (quote(log.file), log.rows, *(_score_cells(log.audit) if log.audit else (0, "", "", "no scores")))
        for log in found.files
    ]
    if found.whole is not None and len(found.files) > 1:
        rows.append(("[bold]all[/]", sum(log.rows for log in found.files), *_score_cells(found.whole)))
    columns = ("log", "rows", "scores", "range", "values", "findings")
    viewed.add(Table(columns, rows, right=("rows", "scores", "values")))
    if found.whole is None:
        viewed.line("[yellow]no row has a score: there is nothing to use as a reward[/]")
    else:
        usable = "[green]the scores can be used[/]"
        viewed.line(usable if found.usable else "[red]the scores cannot serve as rewards[/]")
    return viewed


def _score_cells(audit: "ScoreAudit") -> tuple[Cell, ...]:
    findings = "; ".join(f"{finding.kind}: {finding.says}" for finding in audit.findings)
    spread = f"{audit.least:g} … {audit.most:g}"
    return audit.scores, spread, audit.distinct, quote(findings) or "[green]none[/]"


def view_corrections(found: "Corrections") -> Document:
    viewed = Document("Corrections")
    for correction in found.corrections:
        reviewer = quote(correction.reviewer or "unknown")
        served, corrected = _one_line(correction.served), _one_line(correction.corrected)
        viewed.line(f"{correction.at[:19]}  {reviewer}  {correction.capture[:12]}  {served} → {corrected}")
    corrections, conflicts = len(found.corrections), len(found.conflicts)
    viewed.line(f"{plural(corrections, 'correction')}, {plural(conflicts, 'conflict')}")
    for conflict in found.conflicts:
        viewed.line(f"[yellow]conflict[/]: {_one_line(conflict.question)}")
        for correction in conflict.corrections:
            reviewer = quote(correction.reviewer or "unknown")
            viewed.line(f"  {reviewer}, {correction.at[:19]}: {_one_line(correction.corrected)}")
    return viewed


def _one_line(text: str, longest: int = 60) -> str:
    return quote(truncate(" ".join(text.split()), longest))


def view_exported_captures(exported: "ExportedCaptures") -> Document:
    viewed = Document("Captures")
    viewed.line(f"{exported.captures} captures written to {quote(exported.file)}", wrap=False)
    for reason, count in sorted(exported.left_out.items(), key=lambda item: -item[1]):
        viewed.line(f"  {count} left out: {quote(reason)}", wrap=False)
    return viewed


def view_selected_captures(selected: "SelectedCaptures") -> Document:
    viewed = Document("Captures")
    rows = [
        (
            capture.at[:16].replace("T", " "),
            quote(capture.model),
            quote(capture.release[:8]),
            "" if capture.score is None else f"{capture.score:g}",
            _one_line(capture.question, 40),
            _one_line(capture.reply, 40),
            quote(capture.left_out),
        )
        for capture in selected.captures
    ]
    columns = ("at", "model", "release", "score", "question", "answer", "not exported because")
    shown = columns if any(capture.left_out for capture in selected.captures) else columns[:-1]
    viewed.table(shown, [row[: len(shown)] for row in rows], right=("score",))
    viewed.line(f"{plural(selected.count, 'capture')}; `--out FILE` writes those that are allowed")
    return viewed


def view_forgotten(found: "Forgotten") -> Document:
    viewed = Document("Forgotten captures")
    counts = f"{plural(found.captures, 'capture')}, {plural(found.feedback, 'item')} of feedback"
    viewed.line(f"deleted: {counts}" if found.deleted else f"to delete: {counts}; add --yes to do it")
    for file in found.files:
        viewed.line(f"  {quote(file.file)} holds {plural(file.lines, 'line')} of them", wrap=False)
    for dataset in found.datasets:
        trained = ", ".join(release[:12] for release in dataset.releases) or "no release"
        rows = plural(dataset.rows, "row")
        viewed.line(f"  {quote(dataset.folder)} holds {rows} of them; trained on it: {trained}", wrap=False)
    for path in found.unread:
        viewed.line(f"  {quote(path)} cannot be read: look for copies there yourself", wrap=False)
    if found.files or found.datasets:
        viewed.line("copies are not changed: remove the lines, then `graft run` makes data without them")
    return viewed
