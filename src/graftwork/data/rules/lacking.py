"""What could not be looked for, because the logs do not say what the rule needs to know."""

from collections.abc import Collection, Iterator

from graftwork.data.rules.facts import Facts
from graftwork.data.rules.foreign import NO_BASE, NO_MODEL
from graftwork.data.rules.leak import find_sides, say_missing_side
from graftwork.records.audit import NotLookedFor


def find_lacking(facts: Facts, *, found: Collection[str] = ()) -> Iterator[NotLookedFor]:
    """A code that was `found` was looked for: its finding says what part of it was not."""
    return (lacking for lacking in _find_lacking(facts) if lacking.code not in found)


def _find_lacking(facts: Facts) -> Iterator[NotLookedFor]:
    if not facts.corpus.rows:
        return
    if not _has(facts, "status"):
        yield NotLookedFor(code="failed_status", why="no row states a status")
    if not _has(facts, "group") and not _has(facts, "domain"):
        why = "no row names the role or the domain of its agent; only equal replies were counted"
        yield NotLookedFor(code="rare_group", why=why)
        yield NotLookedFor(code="imbalance", why=why)
    if not _has(facts, "model"):
        yield NotLookedFor(code="foreign_model", why=f"{NO_MODEL}; only reasoning in tags was seen")
    elif facts.sight.base is None:
        yield NotLookedFor(code="foreign_model", why=NO_BASE)
    sides = find_sides(facts)
    if sides.trained.any() != sides.held_out.any():
        yield NotLookedFor(code="split_leak", why=say_missing_side(sides))


def _has(facts: Facts, label: str) -> bool:
    return bool((facts.labels(label)[0] >= 0).any())
