"""Notes and faults to counts: exact numbers, the first rows by name, a few with an excerpt.

In: (place, note) in the order of the corpus. Out: one tally a code. Memory does not grow with the
rows: beyond the first of each code only numbers are kept.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from graftwork.data.rules.note import Note
from graftwork.records.audit import Example
from graftwork.records.interaction import Origin

if TYPE_CHECKING:
    from graftwork.data.rules.facts import Facts

# A report of a million rows would be no report; the count stays exact.
MOST_ROWS = 1000
MOST_EXAMPLES = 20
# Reasons with figures in them are as many as the rows: no count of them says anything.
MOST_REASONS = 40
OTHER_REASONS = "other reasons"


class Shown(NamedTuple):
    place: int
    text: str


@dataclass
class Tallied:
    """What was noted under one code. A row counts once, whatever is noted about it."""

    count: int = 0
    places: list[int] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    last: int = -1

    def add(self, place: int, note: Note) -> None:
        if note.reason in self.reasons or len(self.reasons) < MOST_REASONS:
            self.reasons[note.reason] += 1
        if place == self.last:
            return
        self.last = place
        self.count += 1
        if len(self.places) < MOST_ROWS:
            self.places.append(place)
        if len(self.shown) < MOST_EXAMPLES:
            self.shown.append(Shown(place, quote(note.reason, note.excerpt)))

    def sort_reasons(self) -> dict[str, int]:
        """The most frequent first; nothing where every row has a reason of its own."""
        if len(self.reasons) >= MOST_REASONS:
            return {}
        return dict(sorted(self.reasons.items(), key=lambda item: (-item[1], item[0])))

    def say_reasons(self, most: int = MOST_REASONS) -> str:
        reasons = list(self.sort_reasons().items())
        named = ", ".join(f"{reason} {count:,}" for reason, count in reasons[:most])
        return f"{named} …" if len(reasons) > most else named


class Tally:
    """What was noted, by code."""

    def __init__(self, notes: Iterable[tuple[int, Note]] = ()) -> None:
        self._by_code: dict[str, Tallied] = {}
        for place, note in notes:
            tallied = self._by_code.get(note.code)
            if tallied is None:
                tallied = self._by_code[note.code] = Tallied()
            tallied.add(place, note)

    def __getitem__(self, code: str) -> Tallied:
        return self._by_code.get(code, Tallied())


@dataclass(frozen=True)
class Merged:
    """Faults and notes of one kind together."""

    count: int
    rows: tuple[Origin, ...]
    examples: tuple[Example, ...]
    reasons: dict[str, int]


def merge_faults(facts: "Facts", code: str, *, noted: str | None = None) -> Merged:
    """The unreadable rows of a code, and behind them the readable ones with such a note."""
    count = 0
    rows: list[Origin] = []
    examples: list[Example] = []
    reasons: Counter[str] = Counter()
    others = 0
    for _, fault in facts.corpus.faults():
        if fault.code == code:
            count += 1
            if fault.message in reasons or len(reasons) < MOST_REASONS:
                reasons[fault.message] += 1
            else:
                others += 1
            if len(rows) < MOST_ROWS:
                rows.append(fault.origin)
            if len(examples) < MOST_EXAMPLES:
                examples.append(Example(origin=fault.origin, excerpt=fault.message))
    if noted is not None:
        tallied = facts.tally[noted]
        count += tallied.count
        rows += facts.origins(tallied.places[: MOST_ROWS - len(rows)])
        examples += [
            Example(origin=facts.corpus.origin(place), excerpt=text)
            for place, text in tallied.shown[: MOST_EXAMPLES - len(examples)]
        ]
        reasons.update(tallied.sort_reasons())
    ordered = dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))
    if others:
        ordered[OTHER_REASONS] = others
    return Merged(count, tuple(rows), tuple(examples), ordered)


def quote(reason: str, excerpt: str) -> str:
    return f"{reason}: {excerpt}" if excerpt else reason
