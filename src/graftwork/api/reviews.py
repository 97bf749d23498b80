"""The queue of rows to review, one row at a time, for front ends that keep nothing between two requests.

In: a project, who reviews, a decision. Out: the next row. A row that was decided is not shown again.
Reviewers who share a front end see different rows; of two who decide about the same row, the first counts.
Decisions become data when they are applied.
"""

import threading
import time

from graftwork.api.project import Project
from graftwork.data.review import AppliedReviews, apply_reviews
from graftwork.project.open_project import current_user, timestamp
from graftwork.records.base import Record
from graftwork.records.dataset import ReviewAction, ReviewDecision, ReviewItem
from graftwork.records.errors import UserMistake
from graftwork.store.captures import ReviewStore

KEEP_SECONDS = 60.0
"""Listing reads all captures and rows: the order of the queue is kept for so long."""

HOLD_SECONDS = 600.0
"""A row that one reviewer looks at is not shown to others for so long."""


class ReviewTurn(Record):
    """What a reviewer sees: the next row, and how many wait."""

    item: ReviewItem | None
    waiting: int
    decided: int
    """Decisions that hold, of all reviewers."""
    mine: int
    last: ReviewDecision | None
    """This reviewer's last decision that can still be taken back."""
    reasons: dict[str, int]
    """How many rows wait for each reason."""


_listed: dict[str, tuple[float, tuple[ReviewItem, ...]]] = {}
"""By project: the queue, and when it was listed."""
_held: dict[tuple[str, str], tuple[str, float]] = {}
"""By project and row: who looks at it, and since when."""
_lock = threading.Lock()


def next_review(project: Project, *, who: str = "", key: str = "", hold: bool = False) -> ReviewTurn:
    """The next row for this reviewer, or the row `key`. With `hold`, others get another row meanwhile."""
    reviewer = who or current_user()
    items = _list(project)
    with project.open() as work:
        standing = ReviewStore(work.database, project=work.settings.project).standing()
    decided = {key for entry in standing for key in entry.review.item.keys}
    waiting = [item for item in items if item.keys.isdisjoint(decided)]
    mine = [entry for entry in standing if entry.review.who == reviewer]
    reasons: dict[str, int] = {}
    for item in waiting:
        for reason in item.reasons:
            reasons[reason] = reasons.get(reason, 0) + 1
    now, name = time.monotonic(), str(project.root)
    with _lock:
        for row, (who_holds, since) in list(_held.items()):
            # A reviewer looks at one row at a time.
            if now - since >= HOLD_SECONDS or (hold and row[0] == name and who_holds == reviewer):
                del _held[row]
        taken = {row for root, row in _held if hold and root == name}
        free = [item for item in waiting if item.key not in taken] or waiting
        chosen = next((item for item in waiting if item.key == key), free[0] if free else None)
        if hold and chosen is not None:
            _held.setdefault((name, chosen.key), (reviewer, now))
    return ReviewTurn(
        item=chosen,
        waiting=len(waiting),
        decided=len(standing),
        mine=len(mine),
        last=mine[-1].review if mine and not mine[-1].applied else None,
        reasons=dict(sorted(reasons.items(), key=lambda pair: -pair[1])),
    )


def decide_review(
    project: Project, key: str, action: ReviewAction, *, who: str = "", reply: str | None = None
) -> bool:
    """Keep a decision; False if another reviewer was faster."""
    item = next((item for item in _list(project) if item.key == key), None)
    if item is None:
        item = next((item for item in _list(project, fresh=True) if item.key == key), None)
    if item is None:
        return False
    if action == "edit" and (reply is None or not reply.strip() or reply.strip() == item.reply.strip()):
        raise UserMistake(
            "the answer was not changed",
            why="an edit must differ",
            fix="accept the answer as it is, or edit it",
        )
    with project.open() as work:
        store = ReviewStore(work.database, project=work.settings.project)
        decision = ReviewDecision(
            item=item, action=action, who=who or current_user(), at=timestamp(), reply=reply
        )
        return store.add(decision)


def undo_review(project: Project, *, who: str = "") -> ReviewDecision | None:
    """Take back the reviewer's last decision that is not applied yet."""
    with project.open() as work:
        store = ReviewStore(work.database, project=work.settings.project)
        undone = store.undo(who or current_user(), at=timestamp())
    with _lock:
        _listed.pop(str(project.root), None)
    return undone


def apply_decisions(project: Project) -> AppliedReviews:
    """Turn decisions into feedback on captures and into the log of reviewed rows."""
    with project.open() as work:
        return apply_reviews(work)


def _list(project: Project, *, fresh: bool = False) -> tuple[ReviewItem, ...]:
    name = str(project.root)
    with _lock:
        known = _listed.get(name)
    if known is not None and not fresh and time.monotonic() - known[0] < KEEP_SECONDS:
        return known[1]
    items = project.review_items()
    with _lock:
        _listed.clear()
        _listed[name] = time.monotonic(), items
    return items
