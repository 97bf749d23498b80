"""How a rule says what it found: an exact count, the first rows by name, a few with an excerpt."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from graftwork.data.rules.facts import Facts
from graftwork.data.rules.gather import MOST_EXAMPLES, MOST_ROWS
from graftwork.data.rules.note import show_start
from graftwork.records.audit import Example, Finding, Severity
from graftwork.records.interaction import Interaction, Origin

if TYPE_CHECKING:
    from numpy.typing import NDArray


def make_finding(
    code: str,
    severity: Severity,
    *,
    count: int,
    rows: Sequence[Origin],
    examples: Sequence[Example],
    title: str,
    effect: str,
    fix: str,
    reasons: dict[str, int] | None = None,
) -> Finding:
    """The excerpts of `examples` must come from redacted rows."""
    return Finding(
        code=code,
        severity=severity,
        count=count,
        title=title,
        effect=effect,
        fix=fix,
        rows=tuple(rows),
        examples=tuple(examples),
        reasons=reasons or {},
    )


def find_noted(
    facts: Facts,
    code: str,
    severity: Severity,
    *,
    title: str,
    effect: str,
    fix: str,
    noted: str | None = None,
    reasons: dict[str, int] | None = None,
) -> Finding:
    """A finding from the notes that the rows got under `noted`, or under its own code."""
    tallied = facts.tally[noted or code]
    return make_finding(
        code,
        severity,
        count=tallied.count,
        rows=facts.origins(tallied.places),
        examples=[Example(origin=facts.corpus.origin(place), excerpt=text) for place, text in tallied.shown],
        reasons=tallied.sort_reasons() if reasons is None else reasons,
        title=title,
        effect=effect,
        fix=fix,
    )


def find_placed(
    facts: Facts,
    code: str,
    severity: Severity,
    places: "NDArray[Any]",
    *,
    show: Callable[[Interaction, int], str],
    title: str,
    effect: str,
    fix: str,
    reasons: dict[str, int] | None = None,
) -> Finding:
    """A finding from places in the corpus; `show` says what of a row is quoted."""
    shown = [int(place) for place in places[:MOST_EXAMPLES]]
    rows = facts.read(shown)
    return make_finding(
        code,
        severity,
        count=len(places),
        rows=facts.origins(places[:MOST_ROWS]),
        examples=[
            Example(origin=facts.corpus.origin(place), excerpt=show_start(show(rows[place], place)))
            for place in shown
        ],
        reasons=reasons,
        title=title,
        effect=effect,
        fix=fix,
    )


def count_rows(count: int, what: str) -> str:
    """`1 row is cut off`, `2 rows are cut off`: `what` begins with the verb in the plural."""
    if count == 1:
        verb, _, rest = what.partition(" ")
        return f"1 row {({'are': 'is', 'have': 'has', 'do': 'does'}).get(verb, verb + 's')} {rest}"
    return f"{count:,} rows {what}"


def mend(setting: str, *, on: bool, done: str) -> str:
    """What the user has to do: nothing where the setting already mends it."""
    if on:
        return f"`graft data prepare` {done} (data.{setting})"
    return f"set data.{setting} to true: `graft data prepare` then {done}"
