"""Captured exchanges, feedback on them and reviewers' decisions: what flows back from serving to data.

Captures and feedback are already redacted. Feedback is append-only: a user who changes their mind is stored
twice. Deleting a capture deletes its feedback and the decisions of reviewers about it. Does not know how
captures become training data.

Reviewers' decisions are only added, in order. An item is decided by its last decision, unless it was undone.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    LargeBinary,
    Select,
    Text,
    and_,
    cast,
    delete,
    func,
    or_,
    select,
    type_coerce,
    update,
)

from graftwork.records.dataset import ReviewDecision
from graftwork.records.interaction import CORRECTED_FIELDS, Capture, Feedback
from graftwork.store.database import Database, ProjectTable
from graftwork.store.schema import captures, feedback, json_text, reviews

_PAGE = 500


class DeletedCaptures(NamedTuple):
    captures: int
    feedback: int
    reviews: int


class CaptureStore(ProjectTable):
    def add(self, new: Iterable[Capture]) -> int:
        """Store all of them or none, each id once. Returns how many were new."""
        by_id = {capture.id: capture for capture in new}
        added = 0
        with self._database.write() as connection:
            ids = tuple(by_id)
            # Databases limit how many values one statement may name.
            for start in range(0, len(ids), _PAGE):
                page = ids[start : start + _PAGE]
                stored = set(
                    connection.scalars(
                        select(captures.c.id).where(
                            captures.c.project == self._project, captures.c.id.in_(page)
                        )
                    )
                )
                rows = [self._row(by_id[id_]) for id_ in page if id_ not in stored]
                if rows:
                    connection.execute(captures.insert(), rows)
                added += len(rows)
        return added

    def get(self, capture_id: str) -> Capture | None:
        matches = self._fetch(self._all().where(captures.c.id == capture_id))
        return matches[0] if matches else None

    def page(
        self, *, limit: int = 20, offset: int = 0, text: str = "", release: str = ""
    ) -> tuple[Capture, ...]:
        """A page of captures, the newest first; `text` selects those with this id or that hold it, letter for
        letter, `release` those of releases that begin with it.
        """
        query = self._all().where(*self._selected(text, release))
        return self._fetch(query.order_by(captures.c.seq.desc()).limit(limit).offset(offset))

    def count(self, *, text: str = "", release: str = "") -> int:
        """How many captures `page` goes through."""
        query = select(func.count()).select_from(captures).where(captures.c.project == self._project)
        return int(self._database.scalar(query.where(*self._selected(text, release))) or 0)

    def _selected(self, text: str, release: str) -> list[ColumnElement[bool]]:
        conditions: list[ColumnElement[bool]] = []
        if text:
            conditions.append(or_(captures.c.id == text, _holds(self._database, json_text(text)[1:-1])))
        if release:
            conditions.append(captures.c.release.startswith(release, autoescape=True))
        return conditions

    def count_by_release(self) -> dict[str, int]:
        query = select(captures.c.release, func.count()).where(captures.c.project == self._project)
        return {row[0]: int(row[1]) for row in self._database.rows(query.group_by(captures.c.release))}

    def holding(self, values: Collection[str]) -> Iterator[Capture]:
        """Those that hold one of these as a whole JSON string, in the order they came in."""
        for _, page in self._pages(or_(*(_holds(self._database, json_text(value)) for value in values))):
            yield from page

    def delete(self, ids: Iterable[str]) -> DeletedCaptures:
        """Delete captures with their feedback and reviews, page by page, so that writers do not wait long."""
        unique = tuple(dict.fromkeys(ids))
        done = DeletedCaptures(0, 0, 0)
        for start in range(0, len(unique), _PAGE):
            with self._database.write() as connection:
                page = self._delete_page(connection, unique[start : start + _PAGE])
            done = DeletedCaptures(*(a + b for a, b in zip(done, page, strict=True)))
        if done.captures:
            self._database.forget_log()
        return done

    def _delete_page(self, connection: Connection, ids: Sequence[str]) -> DeletedCaptures:
        if self._database.is_sqlite:
            # Deleted text is overwritten; otherwise it would stay in free pages of the file.
            connection.exec_driver_sql("PRAGMA secure_delete = ON")
        query = select(reviews.c.seq, reviews.c.body).where(reviews.c.project == self._project)
        feedback_ids = [
            row.seq for row in connection.execute(query) if row.body["item"].get("capture") in ids
        ]
        reviewed = (
            connection.execute(delete(reviews).where(reviews.c.seq.in_(feedback_ids))).rowcount
            if feedback_ids
            else 0
        )
        deleted_feedback = connection.execute(
            delete(feedback).where(feedback.c.project == self._project, feedback.c.capture_id.in_(ids))
        )
        gone = connection.execute(
            delete(captures).where(captures.c.project == self._project, captures.c.id.in_(ids))
        )
        return DeletedCaptures(gone.rowcount, deleted_feedback.rowcount, reviewed)

    def prune(self, *, before: str | None = None, most_bytes: int | None = None) -> DeletedCaptures:
        """Delete what was captured before a time, and the oldest until all take at most `most_bytes`."""
        mine = captures.c.project == self._project
        ids: list[str] = []
        with self._database.read() as connection:
            if before is not None:
                old = select(captures.c.id).where(mine, captures.c.captured_at < before)
                ids += connection.scalars(old.order_by(captures.c.seq))
            if most_bytes is not None:
                text = type_coerce(captures.c.body, Text)
                is_sqlite = self._database.is_sqlite
                size = func.length(cast(text, LargeBinary)) if is_sqlite else func.octet_length(text)
                newer = func.sum(size).over(order_by=captures.c.seq.desc()).label("newer")
                sizes = select(captures.c.id, captures.c.seq, newer).where(mine).subquery()
                ids += connection.scalars(
                    select(sizes.c.id).where(sizes.c.newer > most_bytes).order_by(sizes.c.seq)
                )
        return self.delete(ids)

    def export(self, *, release: str | None = None) -> Iterator[Capture]:
        """All in the order they came in, each with the last score and the last correction of it."""
        conditions = [captures.c.release == release] if release is not None else []
        for _, page in self._pages(*conditions):
            ids = [capture.id for capture in page]
            query = select(feedback.c.capture_id, feedback.c.body).where(
                feedback.c.project == self._project, feedback.c.capture_id.in_(ids)
            )
            latest: dict[str, dict[str, object]] = {}
            for row in self._database.rows(query.order_by(feedback.c.seq)):
                last = latest.setdefault(row.capture_id, {})
                last["feedback"] = row.body["score"]
                # A correction stays the better answer, whatever feedback follows.
                if row.body.get("correction") is not None:
                    last["correction"] = row.body["correction"]
                    last["corrected_by"], last["corrected_at"] = row.body.get("who"), row.body["at"]
            for capture in page:
                last = latest.get(capture.id, {})
                yield capture.model_copy(update=last) if last else capture

    def read_on(
        self,
        *,
        after: int = 0,
        releases: Sequence[str],
        experiment: str | None = None,
        copies_only: bool = False,
    ) -> Iterator[tuple[int, Capture]]:
        """Requests that these releases were asked, after position `after`, in order, each with its position.

        `experiment` selects the captures of one; None selects all. `copies_only` selects answers to
        copies of live requests (shadow traffic).
        """
        if copies_only:
            # The database leaves out most of the others; parsing each of them would take far longer.
            # Copies are never escalated.
            conditions = [captures.c.release.in_(releases), _holds(self._database, '"shadow_of":"')]
        else:
            conditions = [_was_asked(self._database, releases, experiment)]
        for positions, page in self._pages(*conditions, after=after):
            for position, capture in zip(positions, page, strict=True):
                if capture.asked_release in releases and (not copies_only or capture.shadow_of is not None):
                    yield position, capture

    def experiments(self) -> tuple[str, ...]:
        """Ids of the experiments that captures belong to, the one with the newest capture last."""
        query = (
            select(captures.c.dealt)
            .where(captures.c.project == self._project, captures.c.dealt.is_not(None))
            .group_by(captures.c.dealt)
            .order_by(func.max(captures.c.seq))
        )
        return tuple(self._database.scalars(query))

    def _pages(
        self, *which: ColumnElement[bool], after: int = 0
    ) -> Iterator[tuple[list[int], list[Capture]]]:
        """Page by page, so that no transaction stays open."""
        while True:
            query = (
                select(captures.c.seq, captures.c.body)
                .where(captures.c.project == self._project, captures.c.seq > after, *which)
                .order_by(captures.c.seq)
                .limit(_PAGE)
            )
            rows = self._database.rows(query)
            if not rows:
                return
            yield [row.seq for row in rows], [Capture.model_validate(row.body) for row in rows]
            after = rows[-1].seq

    def _all(self) -> Select[tuple[dict[str, object]]]:
        return select(captures.c.body).where(captures.c.project == self._project)

    def _fetch(self, query: Select[tuple[dict[str, object]]]) -> tuple[Capture, ...]:
        return tuple(Capture.model_validate(body) for body in self._database.scalars(query))

    def _row(self, capture: Capture) -> dict[str, object]:
        return {
            "project": self._project,
            "id": capture.id,
            "captured_at": capture.at,
            "release": capture.release,
            # Feedback has a table of its own, where it can still come in.
            "body": capture.model_dump(mode="json", exclude={"feedback", "correction", *CORRECTED_FIELDS}),
            "dealt": capture.dealt,
        }


def _was_asked(database: Database, releases: Sequence[str], experiment: str | None) -> ColumnElement[bool]:
    """Captures of an experiment; without one, those of the releases and those answered in their place."""
    if experiment is not None:
        return captures.c.dealt == experiment
    replaced = (_holds(database, f'"escalated_from":{json_text(release)}') for release in releases)
    return or_(captures.c.release.in_(releases), *replaced)


def _holds(database: Database, text: str) -> ColumnElement[bool]:
    # SQLite's LIKE takes A for a and PostgreSQL's does not; a position is the same on both.
    position = func.instr if database.is_sqlite else func.strpos
    condition: ColumnElement[bool] = position(type_coerce(captures.c.body, Text), text) > 0
    return condition


def insert_feedback(connection: Connection, project: str, new: Feedback) -> bool:
    """Keep feedback in a transaction that writes; False if there is no such capture."""
    matching = select(captures.c.id).where(captures.c.project == project, captures.c.id == new.capture)
    if connection.scalar(matching) is None:
        return False
    row = {"project": project, "capture_id": new.capture, "given_at": new.at}
    connection.execute(feedback.insert(), [{**row, "body": new.model_dump(mode="json")}])
    return True


class FeedbackStore(ProjectTable):
    def add(self, new: Feedback) -> bool:
        """Keep it; False if there is no such capture."""
        about = select(captures.c.id).where(captures.c.project == self._project, captures.c.id == new.capture)
        # Looked up first, so that nonsense does not hold up the writers; again below, as it may be deleted.
        if self._database.scalar(about) is None:
            return False
        with self._database.write() as connection:
            return insert_feedback(connection, self._project, new)

    def by(self, names: Collection[str]) -> dict[int, Feedback]:
        """The feedback that these people gave, by its position."""
        return {position: entry for position, entry, _ in self._read_on(after=0) if entry.who in names}

    def delete(self, positions: Collection[int]) -> int:
        with self._database.write() as connection:
            gone = connection.execute(
                delete(feedback).where(feedback.c.project == self._project, feedback.c.seq.in_(positions))
            )
            return gone.rowcount

    def of_capture(self, capture_id: str) -> tuple[Feedback, ...]:
        """The oldest first."""
        query = (
            select(feedback.c.body)
            .where(feedback.c.project == self._project, feedback.c.capture_id == capture_id)
            .order_by(feedback.c.seq)
        )
        return tuple(Feedback.model_validate(body) for body in self._database.scalars(query))

    def count(self) -> int:
        query = select(func.count()).select_from(feedback).where(feedback.c.project == self._project)
        return int(self._database.scalar(query) or 0)

    def all(self) -> Iterator[tuple[Feedback, Capture]]:
        """All feedback with its captures, the oldest first."""
        return ((entry, capture) for _, entry, capture in self._read_on(after=0))

    def read_on(
        self, *, after: int = 0, releases: Sequence[str], experiment: str | None = None
    ) -> Iterator[tuple[int, Feedback, Capture]]:
        """Feedback after position `after` on requests that these releases were asked, in order.

        `experiment` selects the captures of one; None selects all.
        """
        conditions = _was_asked(self._database, releases, experiment)
        for position, entry, capture in self._read_on(conditions, after=after):
            if capture.asked_release in releases:
                yield position, entry, capture

    def _read_on(self, *which: ColumnElement[bool], after: int) -> Iterator[tuple[int, Feedback, Capture]]:
        same = and_(captures.c.project == feedback.c.project, captures.c.id == feedback.c.capture_id)
        while True:
            query = (
                select(feedback.c.seq, feedback.c.body, captures.c.body.label("about"))
                .select_from(feedback.join(captures, same))
                .where(feedback.c.project == self._project, feedback.c.seq > after, *which)
                .order_by(feedback.c.seq)
                .limit(_PAGE)
            )
            rows = self._database.rows(query)
            if not rows:
                return
            for row in rows:
                yield row.seq, Feedback.model_validate(row.body), Capture.model_validate(row.about)
            after = rows[-1].seq


class ReviewEntry(NamedTuple):
    """`applied`: whether the decision has become feedback on a capture."""

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
            own_entries = [entry for entry in self._standing(connection) if entry.review.who == who]
            if not own_entries or own_entries[-1].applied:
                return None
            last = own_entries[-1].review
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

    def apply(self, entry: ReviewEntry, feedback_rows: Sequence[Feedback]) -> int:
        """Keep the feedback that a decision comes to; how many captures got it.

        None do if the decision was undone, or applied by another process, since the entry was read.
        """
        with self._database.write() as connection:
            current_entries = {current.place: current for current in self._standing(connection)}
            if entry.place not in current_entries or current_entries[entry.place].applied:
                return 0
            connection.execute(update(reviews).where(reviews.c.seq == entry.place).values(applied=True))
            return sum(insert_feedback(connection, self._project, new) for new in feedback_rows)

    def _standing(self, connection: Connection) -> list[ReviewEntry]:
        query = select(reviews.c.seq, reviews.c.item, reviews.c.applied, reviews.c.body).where(
            reviews.c.project == self._project
        )
        by_item: dict[str, ReviewEntry] = {}
        for row in connection.execute(query.order_by(reviews.c.seq)):
            review = ReviewDecision.model_validate(row.body)
            if review.action == "undo":
                by_item.pop(row.item, None)
            else:
                by_item[row.item] = ReviewEntry(row.seq, review, bool(row.applied))
        return sorted(by_item.values(), key=lambda entry: entry.place)

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
