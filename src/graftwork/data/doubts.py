"""Settings that name something no row has: a slip of the pen, most likely.

In: the settings, and what the rows have. Out: words for whoever asked, or an error where obeying
would be harmful: a key that is to keep rows together and that no row has would keep none together.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np

from graftwork.data.corpus import Corpus
from graftwork.data.portions import Facts, find_unmatched
from graftwork.data.prints import SPLIT_FIELDS
from graftwork.data.settings import DataSettings, ModelSettings
from graftwork.records.errors import UserMistake

LOOKED_AT = 200


def require_split_key(corpus: Corpus, passed: "np.ndarray[Any, Any]", *, settings: DataSettings) -> list[str]:
    """Refuse a key that no row has; say how many rows lack it."""
    if settings.split_by == "question" or not passed.any():
        return []
    lacking = int((passed & (corpus.column("together") == 0)).sum())
    if lacking == int(passed.sum()):
        raise UserMistake(
            f"no row has {settings.split_by!r}, which data.split_by names",
            why="rows that belong together would be parted, and nobody would notice",
            fix=f"name one of: {', '.join(_name_keys(corpus, passed))}; or `question`",
            where="data.split_by",
        )
    if not lacking:
        return []
    return [f"data.split_by: {lacking:,} rows have no {settings.split_by!r}; they are split by question"]


def find_doubts(facts: Facts, *, settings: DataSettings, models: Mapping[str, ModelSettings]) -> list[str]:
    """What is named and not there, one sentence each."""
    doubts = [f"{key}: no kept row has {value!r}" for key, value in find_unmatched(facts, dict(models))]
    roles = {facts.role_names[place] for place in np.unique(facts.role).tolist() if place >= 0}
    doubts += [
        f"data.system_prompts: no kept row has the role {role!r}"
        for role in settings.system_prompts
        if role not in roles
    ]
    if not (facts.stage >= 0).any():
        doubts += [
            f"models.{name}.curriculum: no kept row has a stage"
            for name, model in models.items()
            if model.curriculum
        ]
    return doubts


def _name_keys(corpus: Corpus, passed: "np.ndarray[Any, Any]") -> list[str]:
    """The keys that the first rows have."""
    places = np.flatnonzero(passed)[:LOOKED_AT].tolist()
    rows = [row for _, row in islice(corpus.rows_at(places), LOOKED_AT)]
    fields = [name for name, field in SPLIT_FIELDS.items() if any(getattr(row, field) for row in rows)]
    return sorted({*fields, *(key for row in rows for key in row.extra)} - {"id"})[:20]
