"""Rows that could not be read: no JSON, no known shape. Those that are not UTF-8 stand in `language`."""

from collections.abc import Iterator

from graftwork.data.rules.facts import Facts
from graftwork.data.rules.finding import count_rows, make_finding
from graftwork.data.rules.gather import merge_faults
from graftwork.records.audit import Finding

_TITLES = {"parse_error": "are not JSON", "schema": "have a shape or a type that is not known"}
_FIXES = {
    "parse_error": "mend the lines in the log, or leave them: `graft data prepare` drops them by name",
    "schema": "name the shape under data.format, or say under data.mapping where the question and the reply "
    "stand; `graft data prepare` drops the others by name",
}


def find(facts: Facts) -> Iterator[Finding]:
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
                fix=_FIXES[code],
            )
