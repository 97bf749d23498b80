"""Questions on both sides of a split: of the one that the data has, and of one made at random."""

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from graftwork.data.rules.facts import PROMPT_PRINT, Facts
from graftwork.data.rules.finding import count_rows, find_placed
from graftwork.data.rules.together import say_like_another, say_together
from graftwork.records.audit import Finding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Side = Literal["trained", "held_out"]
_TRAINED = re.compile(r"(?:^|[^a-z])(?:train|training|sft)(?:[^a-z]|$)")
_HELD_OUT = re.compile(
    r"(?:^|[^a-z])(?:test|testing|valid|validation|val|dev|development|eval|evaluation|held-?_?out|holdout)"
    r"(?:[^a-z]|$)"
)


class Sides(NamedTuple):
    trained: "NDArray[np.bool_]"
    held_out: "NDArray[np.bool_]"


def find_split_leaks(facts: Facts) -> Iterator[Finding]:
    sides = find_sides(facts)
    if sides.trained.any() and sides.held_out.any():
        yield from _find_leaked(facts, sides)
    else:
        yield from _find_random_leak(facts)


def name_side(name: str) -> Side | None:
    """The side that a split, or a file or its folder, is called after."""
    path = PurePath(name.casefold())
    for part in (path.name, path.parent.name):
        if _HELD_OUT.search(part):
            return "held_out"
        if _TRAINED.search(part):
            return "trained"
    return None


def find_sides(facts: Facts) -> Sides:
    """Which rows are on which side: as the row says, else as its file is called."""
    import numpy as np

    side = np.zeros(facts.corpus.rows, dtype=np.int8)
    for label in ("file", "split"):
        numbers, names = facts.labels(label)
        worth = np.array(
            [{"trained": 1, "held_out": 2}.get(name_side(name) or "", 0) for name in names] + [0]
        )
        said = worth[numbers]
        side = np.where(said > 0, said, side)
    return Sides(side == 1, side == 2)


def say_missing_side(sides: Sides) -> str:
    """What to add where only one side of a split was given."""
    here, there = ("training", "held-out") if sides.trained.any() else ("held-out", "training")
    return (
        f"by their names these are the {here} rows of a split: give the {there} file too, and "
        "questions on both sides are found"
    )


def expect_leaks(sizes: "NDArray[Any]", *, held_out: float) -> float:
    """How many held-out rows have a twin outside the test, when each row is dealt by itself."""
    return float((sizes * held_out * (1 - held_out ** (sizes - 1.0))).sum())


def _find_leaked(facts: Facts, sides: Sides) -> Iterator[Finding]:
    import numpy as np

    twin = np.full(facts.corpus.rows, -1, dtype=np.int64)
    groups, prints = facts.dealing.group, facts.prints(PROMPT_PRINT)
    keys: tuple[tuple[NDArray[Any], NDArray[np.bool_]], ...] = ((groups, groups >= 0), (prints, prints != 0))
    for key, known in keys:
        trained = np.flatnonzero(sides.trained & known)
        values, first = np.unique(key[trained], return_index=True)
        if not len(values):
            continue
        at = np.minimum(np.searchsorted(values, key), len(values) - 1)
        hit = sides.held_out & known & (values[at] == key) & (twin < 0)
        twin[hit] = trained[first[at[hit]]]
    places = np.flatnonzero(twin >= 0)
    if len(places):
        held_out = int(sides.held_out.sum())
        split_by = facts.settings.split_by
        met = "asked" if split_by == "question" else "met"
        yield find_placed(
            facts,
            "split_leak",
            "blocker",
            places,
            show=lambda row, place: f"{met} in {facts.corpus.origin(int(twin[place]))} too: {row.question}",
            title=f"{len(places):,} of {held_out:,} held-out rows "
            + say_like_another(split_by, "a training row"),
            effect="the evaluation measures memory and calls it skill",
            fix="take these rows out of one of the sides; `graft data prepare` keeps rows together that "
            f"{say_together(split_by)} (data.split_by)",
        )


def _find_random_leak(facts: Facts) -> Iterator[Finding]:
    """Rows whose question stands in another row too: dealt one by one, they land on both sides."""
    import numpy as np

    settings = facts.settings
    groups = np.where(facts.passed, facts.dealing.group, -1)
    # A group goes by the place of its founder: sizes[place] counts its members.
    sizes = np.bincount(groups[groups >= 0], minlength=1)
    twins = np.flatnonzero((groups >= 0) & (sizes[groups] > 1))
    expected = expect_leaks(sizes[sizes > 1], held_out=settings.test)
    if not len(twins) or expected < 1:
        return
    places = twins[np.argsort(groups[twins], kind="stable")]
    sides = find_sides(facts)
    title = (
        count_rows(len(places), say_like_another(settings.split_by, "another row"))
        + f": a random split would put about {expected:,.0f} of them into the test beside a trained twin"
    )
    prints = facts.prints(PROMPT_PRINT)
    _, logged = np.unique(prints[prints != 0], return_counts=True)
    before = expect_leaks(logged[logged > 1], held_out=settings.test)
    if before > expected + 1:
        title += f" (about {before:,.0f} from the log as it is, before unfit rows are dropped)"
    if sides.trained.any() or sides.held_out.any():
        title += f"; not looked for: {say_missing_side(sides)}"
    yield find_placed(
        facts,
        "split_leak",
        "warning",
        places,
        show=lambda row, place: row.question,
        title=title,
        effect="the evaluation would measure memory and call it skill",
        fix="`graft data prepare` splits by group, never by row: rows that "
        f"{say_together(settings.split_by)} stay together (data.split_by); data.question_similarity sets "
        f"how alike ({settings.question_similarity})",
    )
