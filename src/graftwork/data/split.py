"""Which rows belong together, and which split each group goes to.

In: rows. Out: for each row its group, and for each group its split. A group is dealt by the hash of
its own content and the seed: it does not depend on the other groups, so rows that are logged later
move no group that they do not join. Groups are never divided.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from graftwork.data.question import Question, alike_questions, find_questions
from graftwork.data.settings import DataSettings
from graftwork.records.dataset import SPLITS, Row, Split
from graftwork.records.interaction import Interaction
from graftwork.text.compare import Clusters, cluster, content_key


class Dealt(NamedTuple):
    """The rows of a split, and of how many groups they are."""

    rows: list[Row]
    groups: int


def group_rows(rows: Sequence[Interaction], *, threshold: float) -> list[str]:
    """The key of each row's group: the smallest question key among its members."""
    questions = find_questions(rows)
    clusters = cluster(len(rows), alike_questions(questions, threshold=threshold))
    _join_equal_questions(clusters, questions)
    _join_conversations(clusters, rows)
    keys = [""] * len(rows)
    for members in clusters.members().values():
        key = min(content_key(rows[position].question) for position in members)
        for position in members:
            keys[position] = key
    return keys


def deal(group: str, settings: DataSettings) -> Split:
    """The split of a group, by a hash that falls evenly on 0 to 1."""
    digest = hashlib.sha256(f"{settings.seed}:{group}".encode()).digest()
    place = int.from_bytes(digest[:8]) / 2**64
    if place < settings.test:
        return "test"
    if place < settings.test + settings.validation:
        return "validation"
    return "train"


def deal_rows(rows: Sequence[Row], groups: Sequence[str], *, settings: DataSettings) -> dict[Split, Dealt]:
    """Every row in the split of its group, in the order of the logs."""
    dealt: dict[Split, list[tuple[Row, str]]] = {split: [] for split in SPLITS}
    for row, group in zip(rows, groups, strict=True):
        dealt[deal(group, settings)].append((row, group))
    return {
        split: Dealt([row for row, _ in members], len({group for _, group in members}))
        for split, members in dealt.items()
    }


def _join_equal_questions(clusters: Clusters, questions: Sequence[Question]) -> None:
    """Equal turns and equal asking lines, also where they are too short to have shingles."""
    first: dict[tuple[str, str], int] = {}
    for position, question in enumerate(questions):
        for kind, text in (("turn", question.turn), ("line", question.line)):
            clusters.join(first.setdefault((kind, content_key(text)), position), position)


def _join_conversations(clusters: Clusters, rows: Sequence[Interaction]) -> None:
    """Rows that continue one conversation repeat its earlier turns: they must not be parted."""
    first: dict[tuple[str, str], int] = {}
    for position, row in enumerate(rows):
        opening = next((message.content for message in row.messages if message.role == "user"), "")
        if row.session is not None:
            clusters.join(first.setdefault((row.session, content_key(opening)), position), position)
