"""Rows that could not be read: no JSON, no known shape. Those that are not UTF-8 stand in `language`."""

from collections.abc import Iterator

from graftwork.data.rules.facts import Facts
from graftwork.data.rules.finding import count_rows, make_finding
from graftwork.data.rules.gather import merge_faults
from graftwork.records.audit import Finding

# Why each row could not be read stands in the reasons: JSON that is broken is only one way.
_TITLES = {"parse_error": "are unreadable", "schema": "have a shape, a key or a type that does not fit"}
_UNKNOWN_SHAPE = ("no known shape", "no row of the format")
_DROPPED = "mend the lines in the log, or leave them: `graft data prepare` drops them by name"
_MAP = (
    "name the shape under data.format, or say under data.mapping where the question and the reply stand; "
    "`graft data prepare` drops the others by name"
)


def find_unreadable(facts: Facts) -> Iterator[Finding]:
    for code, title in _TITLES.items():
        merged = merge_faults(facts, code)
        if merged.count:
            yield make_finding(
                code,
                "warning",
                count=merged.count,
                rows=merged.rows,
                examples=merged.examples,
                reasons=merged.reasons,
                title=count_rows(merged.count, title),
                effect="these rows cannot be learned from; many of them mean that the logger is broken",
                fix=_MAP if any(why.startswith(_UNKNOWN_SHAPE) for why in merged.reasons) else _DROPPED,
            )
