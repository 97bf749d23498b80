"""Audits as one screen."""

from collections import Counter

from rich.console import Console

from graftwork.cli.show.prepared import show_prepared
from graftwork.cli.show.tables import PlainTable, print_line, quote
from graftwork.records.audit import Audit, Finding, LabelNoise, SuspiciousLabel

MARKS = {"blocker": "✗", "warning": "!", "info": "·"}
COLOURS = {"blocker": "red", "warning": "yellow", "info": "dim"}
# Why a row could not be read is the finding; of the others the title says enough.
WITH_REASONS = ("parse_error", "schema")
MOST_REASONS = 3
MOST_SUSPICIOUS = 5


def show_audit(console: Console, audit: Audit) -> None:
    """One screen: what was found and what mends it. All the rest is in the page and in --json."""
    print_line(
        console,
        f"[bold]{audit.rows:,}[/] rows in {quote(_name_files(audit.files))}: {audit.readable:,} readable, "
        f"[bold]{audit.usable:,} usable[/] after cleaning{_say_too_long(audit)} ({audit.seconds:.1f} s)\n",
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
        print_line(console, f"[dim]? {quote(codes)} not looked for: {quote(why)}[/]")
    _show_noise(console, audit.label_noise)
    answer = (
        "[green]fit to train on as it is[/]"
        if audit.fit_to_train
        else "[red]must not be trained on as it is[/]: `graft data prepare` drops and mends what it can"
    )
    print_line(console, f"\n{answer}")


def _show_noise(console: Console, noise: LabelNoise) -> None:
    """The estimate of each field, and the first rows to review. The page and --json list all of them."""
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
    # A log without wrong labels has most suspicious rows too; nobody needs to see them here.
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
    return f", of which about {rows:,} are longer than data.max_tokens" if rows else ""


def _say(finding: Finding, audit: Audit) -> str:
    """The title and where; of what matters also what mends it, and of a blocker what it does."""
    effect = f": {quote(finding.effect)}" if finding.severity == "blocker" else ""
    said = f"[bold]{quote(finding.title)}[/]{effect} [dim]· {quote(_where(finding, audit.files))}[/]"
    if finding.code in WITH_REASONS:
        said += "".join(f"\n{quote(line)}" for line in _name_reasons(finding))
    return said if finding.severity == "info" else f"{said}\n[dim]{quote(finding.fix)}[/]"


def _name_reasons(finding: Finding) -> list[str]:
    """The most frequent, each with its count. What would have been read instead the page and --json say."""
    reasons: Counter[str] = Counter()
    for reason, count in finding.reasons.items():
        reasons[reason.partition("; expected ")[0]] += count
    named = reasons.most_common(MOST_REASONS)
    lines = [f"{count:,} × {reason}" for reason, count in named]
    rest = sum(reasons.values()) - sum(count for _, count in named)
    return [*lines, f"{rest:,} × other reasons"] if rest else lines


def _where(finding: Finding, files: tuple[str, ...]) -> str:
    """The first rows; the file only where there are several."""
    if not finding.rows:
        return ""
    if len(files) == 1:
        # The records of an array may all stand on one line.
        numbers = list(dict.fromkeys(row.line for row in finding.rows))
        lines = ", ".join(str(number) for number in numbers[:4])
        several = f" ({len(finding.rows):,} rows there)" if len(numbers) < min(len(finding.rows), 4) else ""
        return f"line {lines}{' …' if len(numbers) > 4 else ''}{several}"
    return f"{finding.rows[0]}{' …' if len(finding.rows) > 1 else ''}"


def _name_files(files: tuple[str, ...]) -> str:
    return ", ".join(files[:3]) + (f" and {len(files) - 3:,} more files" if len(files) > 3 else "")


def _group_reasons(audit: Audit) -> dict[str, str]:
    """Rules that could not look for the same reason share a line."""
    codes: dict[str, list[str]] = {}
    for lacking in audit.not_looked_for:
        codes.setdefault(lacking.why, []).append(lacking.code)
    return {why: ", ".join(named) for why, named in codes.items()}


PRINTERS = {"Audit": show_audit, "Prepared": show_prepared}
