"""Rows that repeat each other, and rows that contradict each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from graftwork.data.rules.facts import DUPLICATE, NEAR_DUPLICATE, PROMPT_PRINT, REPLY_PRINT, Facts
from graftwork.data.rules.finding import count_rows, find_placed
from graftwork.records.audit import Finding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CONFLICTS_DONE = {
    "keep_last": "keeps the reply that was logged last",
    "drop_all": "drops all of them",
    "keep_all": "keeps all of them",
}


def find_repeated(facts: Facts) -> Iterator[Finding]:
    kept = f"`graft data prepare` keeps the {facts.settings.keep_duplicate} of each (data.keep_duplicate)"
    same = _places_of(facts, DUPLICATE)
    if len(same):
        yield find_placed(
            facts,
            "duplicate",
            "warning",
            same,
            show=lambda row, place: f"the same as {_kept(facts, place)}: {row.question}",
            title=count_rows(len(same), "repeat an earlier row"),
            effect="repeated rows are learned by heart, and one that is held out is no test",
            fix=kept,
        )
    near = _places_of(facts, NEAR_DUPLICATE)
    if len(near):
        yield find_placed(
            facts,
            "near_duplicate",
            "warning",
            near,
            show=lambda row, place: f"nearly the same as {_kept(facts, place)}: {row.question}",
            title=count_rows(len(near), "nearly repeat an earlier row"),
            effect="they weigh in training as if they were different rows",
            fix=f"{kept}; data.near_duplicate sets how alike ({facts.settings.near_duplicate})",
        )
    yield from _find_conflicts(facts)


def find_conflicting(facts: Facts, among: "NDArray[np.bool_]") -> "NDArray[Any]":
    """The places of all rows whose prompt stands before different replies, rows of one prompt together.

    Prompts follow each other by their first row.
    """
    import numpy as np

    prompts = facts.prints(PROMPT_PRINT)
    # Most prompts stand once: what follows is only about the others.
    ordered = np.sort(prompts[among])
    several = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(several):
        return np.zeros(0, dtype=np.int64)
    at = np.minimum(np.searchsorted(several, prompts), len(several) - 1)
    places = np.flatnonzero(among & (several[at] == prompts))
    prompts, replies = prompts[places], facts.prints(REPLY_PRINT)[places]
    _, first, number = np.unique(prompts, return_index=True, return_inverse=True)
    order = np.lexsort((replies, number))
    new = (number[order][1:] == number[order][:-1]) & (replies[order][1:] != replies[order][:-1])
    torn = np.zeros(len(first), dtype=bool)
    torn[number[order][1:][new]] = True
    inside = np.flatnonzero(torn[number])
    return places[inside[np.lexsort((inside, first[number[inside]]))]]


def _find_conflicts(facts: Facts) -> Iterator[Finding]:
    places = find_conflicting(facts, facts.passed)
    logged = find_conflicting(facts, facts.prints(PROMPT_PRINT) != 0)
    if not len(logged):
        return
    title = count_rows(len(places), "share a prompt with a row that has another reply")
    if len(logged) > len(places):
        title += f" ({len(logged):,} in the log as it is, before unfit rows are dropped)"
    yield find_placed(
        facts,
        "conflicting_answers",
        "warning" if len(places) else "info",
        places if len(places) else logged,
        show=lambda row, place: row.reply,
        title=title,
        effect="the model is pulled both ways and learns neither",
        fix=f"`graft data prepare` {_CONFLICTS_DONE[facts.settings.conflicts]} "
        f"(data.conflicts: {facts.settings.conflicts})",
    )


def _places_of(facts: Facts, step: int) -> "NDArray[Any]":
    import numpy as np

    return np.flatnonzero(facts.repeats.step == step)


def _kept(facts: Facts, place: int) -> str:
    instead = int(facts.repeats.instead[place])
    return "another row" if instead < 0 else str(facts.corpus.origin(instead))
