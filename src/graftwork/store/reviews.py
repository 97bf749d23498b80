"""Decisions of reviewers, in the order in which they were made.

Decisions are only added. An item is decided by its last decision, unless that one was undone. Does not know
what a decision does to the data.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, select, update

from graftwork.records.dataset import ReviewDecision
from graftwork.records.interaction import Feedback
from graftwork.store.captures import insert_feedback
from graftwork.store.database import ProjectTable
from graftwork.store.schema import reviews


class ReviewEntry(NamedTuple):
    """`applied` says whether the decision has become feedback on a capture."""

    place: int
    review: ReviewDecision
    applied: bool


class ReviewStore(ProjectTable):
    def add(self, review: ReviewDecision) -> bool:
        """Keep a decision; False if another reviewer decided about the item in the meantime."""
        with self._database.write() as connection:
            if any(entry.review.item.keys & review.item.keys for entry in self._standing(connection)):
                return False
            self._insert(connection, review)
            return True

    def undo(self, who: str, *, at: str) -> ReviewDecision | None:
        """Take back this reviewer's last decision that can be: one that is not applied yet."""
        with self._database.write() as connection:
            standing = [entry for entry in self._standing(connection) if entry.review.who == who]
            if not standing or standing[-1].applied:
                return None
            last = standing[-1].review
            self._insert(connection, last.model_copy(update={"action": "undo", "at": at, "reply": None}))
            return last

    def decided(self) -> set[str]:
        """The keys of the items that need no further look."""
        with self._database.read() as connection:
            return {key for entry in self._standing(connection) for key in entry.review.item.keys}

    def standing(self) -> tuple[ReviewEntry, ...]:
        """The decisions that hold, the oldest first."""
        with self._database.read() as connection:
            return tuple(self._standing(connection))

    def apply(self, entry: ReviewEntry, given: Sequence[Feedback]) -> int:
        """Keep the feedback that a decision comes to; how many captures got it.

        None do if the decision was undone, or applied by another process, since the entry was read.
        """
        with self._database.write() as connection:
            standing = {known.place: known for known in self._standing(connection)}
            if entry.place not in standing or standing[entry.place].applied:
                return 0
            connection.execute(update(reviews).where(reviews.c.seq == entry.place).values(applied=True))
            return sum(insert_feedback(connection, self._project, new) for new in given)

    def _standing(self, connection: Connection) -> list[ReviewEntry]:
        query = select(reviews.c.seq, reviews.c.item, reviews.c.applied, reviews.c.body).where(
            reviews.c.project == self._project
        )
        held: dict[str, ReviewEntry] = {}
        for row in connection.execute(query.order_by(reviews.c.seq)):
            review = ReviewDecision.model_validate(row.body)
            if review.action == "undo":
                held.pop(row.item, None)
            else:
                held[row.item] = ReviewEntry(row.seq, review, bool(row.applied))
        return sorted(held.values(), key=lambda entry: entry.place)

    def _insert(self, connection: Connection, review: ReviewDecision) -> None:
        row = {
            "project": self._project,
            "item": review.item.key,
            "who": review.who,
            "reviewed_at": review.at,
            "action": review.action,
            "applied": False,
            "body": review.model_dump(mode="json"),
        }
        connection.execute(reviews.insert(), [row])
