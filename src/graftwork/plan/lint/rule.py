"""The shape of a rule: what it looks at, how grave it is, who says so."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from graftwork.plan.lint.facts import Around, Configuration, Severity


class RuleResult(NamedTuple):
    """What a rule found: in words, and the fields that it concerns, the one to point at first."""

    what: str
    why: str
    fix: str
    fields: tuple[str, ...]


Check = Callable[[Configuration, Around], Iterator[RuleResult]]


class LintRule(NamedTuple):
    id: str
    severity: Severity
    finds: str
    """What it looks for, in one line."""
    check: Check
    source: str = ""
