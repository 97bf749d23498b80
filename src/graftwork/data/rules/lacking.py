"""What could not be looked for, because the logs do not say what the rule needs to know."""

from collections.abc import Iterator

from graftwork.data.rules.facts import Facts
from graftwork.data.rules.leak import find_sides
from graftwork.records.audit import NotLookedFor


def find_lacking(facts: Facts) -> Iterator[NotLookedFor]:
    if not facts.corpus.rows:
        return
    if not _has(facts, "status"):
        yield NotLookedFor(code="failed_status", why="no row states a status")
    if not _has(facts, "group") and not _has(facts, "domain"):
        why = "no row names the role or the domain of its agent; only equal replies were counted"
        yield NotLookedFor(code="rare_group", why=why)
        yield NotLookedFor(code="imbalance", why=why)
    if not _has(facts, "model"):
        yield NotLookedFor(
            code="foreign_model", why="no row names the model that answered; only reasoning in tags was seen"
        )
    elif facts.sight.base is None:
        yield NotLookedFor(
            code="foreign_model", why="no base is named to compare the models of the rows with"
        )
    sides = find_sides(facts)
    if sides.trained.any() != sides.held_out.any():
        here, there = ("training", "held-out") if sides.trained.any() else ("held-out", "training")
        yield NotLookedFor(
            code="split_leak",
            why=f"by their names these are the {here} rows of a split: give the {there} file too, and "
            "questions on both sides are found",
        )


def _has(facts: Facts, label: str) -> bool:
    return bool((facts.labels(label)[0] >= 0).any())
