"""Rows that say the same again, and rows that contradict each other.

In: rows that passed the judgement. Out: for each row that should go, the row that stays in its
place. Compared are the turns and the reply; the system prompt takes part only where prompts must
be the same to the letter. Does not know why a row was logged twice.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from graftwork.data.question import find_questions
from graftwork.records.interaction import Interaction
from graftwork.text.compare import alike_pairs, cluster, content_key, likeness, shingles, weigh


class Repeat(NamedTuple):
    """The row at `position` goes, because of the one at `kept`."""

    position: int
    kept: int


def find_duplicates(rows: Sequence[Interaction]) -> list[Repeat]:
    """Rows whose prompt and reply differ in case, spacing and punctuation at most. The first stays."""
    first: dict[str, int] = {}
    repeats = []
    for position, row in enumerate(rows):
        kept = first.setdefault(content_key(prompt_text(row), row.reply), position)
        if kept != position:
            repeats.append(Repeat(position, kept))
    return repeats


def find_near_duplicates(rows: Sequence[Interaction], *, threshold: float) -> list[Repeat]:
    """Rows that are alike as a whole, in the line that asks and in the reply. The first stays.

    All three must be: long sources that two questions share would make the whole alike, and a
    refusal is the same reply to everything. A question in other words is worth keeping; it is
    grouped later, so that it cannot stand in two splits.
    """
    whole = [shingles(f"{turns_text(row)}\n{row.reply}") for row in rows]
    lines = [shingles(question.line, sizes=(1, 2)) for question in find_questions(rows)]
    replies = [shingles(row.reply) for row in rows]
    line_weights, reply_weights = weigh(lines), weigh(replies)
    alike = [
        pair
        for pair in alike_pairs(whole, threshold=threshold)
        if likeness(lines[pair.first], lines[pair.second], weights=line_weights) >= threshold
        and likeness(replies[pair.first], replies[pair.second], weights=reply_weights) >= threshold
    ]
    clusters = cluster(len(rows), alike)
    return [
        Repeat(position, kept)
        for kept, members in clusters.members().items()
        for position in members
        if position != kept
    ]


def find_conflicts(rows: Sequence[Interaction], *, keep: Literal["keep_last", "drop_all"]) -> list[Repeat]:
    """The same prompt with different replies: only the reply that was logged last stays, or none."""
    bearers: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        bearers.setdefault(content_key(prompt_text(row)), []).append(position)
    repeats = []
    for members in bearers.values():
        replies = {position: content_key(rows[position].reply) for position in members}
        if len(set(replies.values())) > 1:
            last = members[-1]
            gone = [p for p in members if keep == "drop_all" or replies[p] != replies[last]]
            repeats += [Repeat(position, last) for position in gone]
    return sorted(repeats)


def prompt_text(row: Interaction) -> str:
    """All that stood before the reply."""
    return "\n".join(f"{message.role}: {message.content}" for message in row.messages)


def turns_text(row: Interaction) -> str:
    """All that stood before the reply but the system prompt."""
    return "\n".join(message.content for message in row.messages if message.role != "system")
