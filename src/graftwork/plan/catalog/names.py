"""Finding one row by the name that a person types. Pure."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from graftwork.plan.catalog.table import normalise
from graftwork.records.errors import UserMistake

Thing = TypeVar("Thing")


def find_named(name: str, things: Mapping[str, tuple[Thing, Iterable[str]]], *, kind: str, fix: str) -> Thing:
    """The one called so, or by one of its other names; a mistake that offers the nearest ones otherwise."""
    known: dict[str, str] = {}
    for title, (_, aliases) in things.items():
        known[normalise(title)] = title
        for alias in aliases:
            known.setdefault(normalise(alias), title)
    found = known.get(normalise(name))
    if found is not None and normalise(name):
        return things[found][0]
    near = difflib.get_close_matches(normalise(name), known, n=4, cutoff=0.5)
    names = list(dict.fromkeys(known[key] for key in near)) or sorted(things)[:6]
    raise UserMistake(
        f"the catalog has no {kind} {name!r}",
        why="its figures are needed",
        fix=f"near it: {', '.join(names)}; {fix}",
        where=name,
    )
