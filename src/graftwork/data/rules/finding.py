"""How a rule says what it found: all rows by name, a few of them with an excerpt."""

from collections.abc import Sequence

from graftwork.records.audit import Example, Finding, Severity
from graftwork.records.interaction import Interaction, Origin

EXCERPT = 140
EXAMPLES = 3
# A report of a million rows would be no report; the count stays exact.
MOST_ROWS = 1000

Hit = tuple[Origin, str]


def make_finding(
    code: str, severity: Severity, hits: Sequence[Hit], *, title: str, effect: str, fix: str
) -> Finding:
    """`hits` are origins with excerpts that must come from redacted rows."""
    return Finding(
        code=code,
        severity=severity,
        count=len(hits),
        title=title,
        effect=effect,
        fix=fix,
        rows=tuple(origin for origin, _ in hits[:MOST_ROWS]),
        examples=tuple(Example(origin=origin, excerpt=excerpt) for origin, excerpt in hits[:EXAMPLES]),
    )


def show_start(text: str) -> str:
    folded = " ".join(text.split())
    return folded if len(folded) <= EXCERPT else f"{folded[: EXCERPT - 1]}…"


def show_end(text: str) -> str:
    folded = " ".join(text.split())
    return folded if len(folded) <= EXCERPT else f"…{folded[-EXCERPT + 1 :]}"


def show_around(text: str, mark: str) -> str:
    folded = " ".join(text.split())
    place = max(0, folded.find(mark) - EXCERPT // 3)
    return ("…" if place else "") + show_start(folded[place:])


def show_question(row: Interaction) -> str:
    """The end of the question: the beginning is often the sources."""
    return show_end(row.question)


def count_rows(count: int, what: str) -> str:
    """`1 row is cut off`, `2 rows are cut off`: `what` begins with the verb in the plural."""
    if count == 1:
        verb, _, rest = what.partition(" ")
        return f"1 row {({'are': 'is', 'have': 'has', 'do': 'does'}).get(verb, verb + 's')} {rest}"
    return f"{count} rows {what}"


def mend(setting: str, *, on: bool, done: str) -> str:
    """What the user has to do: nothing where the setting already mends it."""
    if on:
        return f"`graft data prepare` {done} (data.{setting})"
    return f"set data.{setting} to true: `graft data prepare` then {done}"
