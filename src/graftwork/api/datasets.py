"""Datasets to look at: the audit, the list, rows as the model sees them, drops, comparisons, traces; reviews.

A dataset is named by its hash or its first characters; without one it is the latest. The queue of rows to
review keeps nothing between two requests: reviewers who share a front end see different rows, and of two who
decide about the same row, the first counts. Decisions become data when they are applied.
"""

import json
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import get_args

from graftwork.api.project import PAGE_SIZE, Page, Project, cut_page
from graftwork.data.ingest.fields import take_object
from graftwork.data.ingest.read import read_row as read_log_row
from graftwork.data.ingest.read import settings_of_file
from graftwork.data.inspect import (
    DatasetDiff,
    ShownRow,
    Trace,
    diff_datasets,
    find_row_id,
    names_token,
    read_log_line,
    show_row,
    trace,
)
from graftwork.data.project import (
    find_dataset_by_hash,
    find_latest_dataset,
    open_decoder,
    open_decoder_if_there,
)
from graftwork.data.review import apply_reviews, decide_item
from graftwork.files.dataset import MANIFEST, fetch_rows, read_manifest, scan_columns, scan_drops
from graftwork.project.open_project import current_user, timestamp
from graftwork.records.base import Record
from graftwork.records.dataset import (
    Audit,
    Dataset,
    Drop,
    ReviewAction,
    ReviewDecision,
    ReviewItem,
    Row,
    Split,
)
from graftwork.records.errors import GraftError, UserError
from graftwork.records.interaction import Interaction, Message, Origin
from graftwork.store.captures import ReviewStore
from graftwork.text.redact import redact

MOST_DATASETS = 100
MOST_LOG_LINES, LONGEST_LOG_LINE = 20, 20_000
SPLITS: tuple[Split, ...] = get_args(Split)


class DatasetLine(Record):
    """A dataset as the list shows it."""

    hash: str
    model: str
    base: str
    prepared_at: float
    rows: dict[Split, int]
    tokens: int
    latest: bool = False


class RowView(Record):
    """A row with its text as the model sees it. `shown` is None if the tokenizer is missing."""

    row: Row
    split: Split
    number: int
    shown: ShownRow | None
    why_not: str = ""


def read_audit(project: Project) -> Audit | None:
    """The last audit of the project's logs; None if there was none yet."""
    with project.open() as work:
        entry = work.ledger.get("audit")
    try:
        return Audit.model_validate(entry.output) if entry is not None else None
    except ValueError:
        return None


def list_datasets(project: Project) -> tuple[DatasetLine, ...]:
    """Newest first; datasets whose manifest cannot be read are left out."""
    latest = None
    with suppress(UserError):
        latest = _find(project, "")
    folders = [path for path in project.folder.datasets.glob("*") if (path / MANIFEST).is_file()]
    folders.sort(key=lambda path: (path / MANIFEST).stat().st_mtime, reverse=True)
    found = []
    for folder in folders[:MOST_DATASETS]:
        try:
            dataset = read_manifest(folder)
        except GraftError:
            continue
        found.append(
            DatasetLine(
                hash=dataset.content_hash,
                model=dataset.model,
                base=dataset.base,
                prepared_at=(folder / MANIFEST).stat().st_mtime,
                rows={split: summary.rows for split, summary in dataset.splits.items()},
                tokens=sum(summary.tokens for summary in dataset.splits.values()),
                latest=folder == latest,
            )
        )
    return tuple(found)


def read_dataset(project: Project, name: str = "") -> Dataset:
    return read_manifest(_find(project, name))


def list_rows(
    project: Project, name: str = "", *, split: str = "train", group: str = "", page: int = 1
) -> Page[Row]:
    """A page of rows; of one role with `group`."""
    folder = _find(project, name)
    dataset, chosen = read_manifest(folder), to_split(split)
    numbers = list(range(dataset.splits[chosen].rows if chosen in dataset.splits else 0))
    if group:
        numbers = []
        for _, first, batch in scan_columns(folder, dataset, columns=("group",), splits=(chosen,)):
            values = batch.column(0).to_pylist()
            numbers += [first + place for place, value in enumerate(values) if value == group]
    shown = cut_page(numbers, page)
    rows = fetch_rows(folder, dataset, places={chosen: list(shown.items)})
    return Page[Row](
        items=tuple(rows[chosen, number] for number in shown.items if (chosen, number) in rows),
        total=shown.total,
        page=shown.page,
        pages=shown.pages,
    )


def count_groups(project: Project, name: str = "") -> dict[str, dict[Split, int]]:
    """How many rows of each role are in each split."""
    folder = _find(project, name)
    found: dict[str, Counter[Split]] = {}
    for split, _, batch in scan_columns(folder, read_manifest(folder), columns=("group",)):
        for group in batch.column(0).to_pylist():
            found.setdefault(group or "", Counter())[split] += 1
    return {group: dict(counts) for group, counts in sorted(found.items())}


def read_row(project: Project, name: str, row_id: str, *, by_token: bool = False) -> RowView:
    """A row by its id or by its first characters."""
    folder = _find(project, name)
    dataset = read_manifest(folder)
    found = fetch_rows(folder, dataset, places=find_row_id(folder, dataset, row_id))
    if not found:
        raise UserError(
            f"no row has the id {row_id!r}",
            why=f"the dataset {dataset.content_hash[:12]} has no such row",
            fix="choose a row from the list",
        )
    (split, number), row = next(iter(found.items()))
    shown, why_not = None, ""
    try:
        decoder = open_decoder(folder, project.root)
        shown = show_row(row, split=split, number=number, decoder=decoder, by_token=by_token)
    except GraftError as error:
        why_not = error.what
    return RowView(row=row, split=split, number=number, shown=shown, why_not=why_not)


def list_drops(
    project: Project, name: str = "", *, step: str = "", reason: str = "", page: int = 1
) -> tuple[Page[Drop], dict[str, int], dict[str, int]]:
    """List a page of the rows that were left out: by one step, or for one kind of reason. Also their number
    by step and by kind of reason.
    """
    folder = _find(project, name)
    dataset = read_manifest(folder)
    by_step: Counter[str] = Counter()
    by_reason: Counter[str] = Counter()
    start = (max(page, 1) - 1) * PAGE_SIZE
    shown: list[Drop] = []
    total = 0
    for batch in scan_drops(folder, dataset, columns=("file", "line", "input_hash", "step", "reason")):
        for value in batch.to_pylist():
            # The rule in the text of a reason: what is before the colon.
            kind = value["reason"].partition(":")[0].strip()
            by_step[value["step"]] += 1
            if step and value["step"] != step:
                continue
            by_reason[kind] += 1
            if reason and kind != reason:
                continue
            if start <= total < start + PAGE_SIZE:
                origin = Origin(file=value.pop("file"), line=value.pop("line"))
                shown.append(Drop(origin=origin, **value))
            total += 1
    drops = Page[Drop](
        items=tuple(shown), total=total, page=max(page, 1), pages=max(-(-total // PAGE_SIZE), 1)
    )
    return drops, dict(by_step.most_common()), dict(by_reason.most_common())


def compare_datasets(project: Project, a: str, b: str) -> DatasetDiff:
    return diff_datasets(_find(project, a), _find(project, b))


def trace_line(project: Project, what: str, name: str = "") -> Trace:
    """What became of a line of the log (FILE:LINE), or where a row came from."""
    folder = _find(project, name)
    decoder = open_decoder_if_there(folder, project.root) if names_token(what) else None
    return trace(folder, what, root=project.root, decoder=decoder)


class ShownLine(Record):
    """A line of a log, redacted and formatted for reading, and its conversation if it is one."""

    text: str
    messages: tuple[Message, ...] = ()


def show_log_lines(project: Project, found: Trace) -> dict[str, ShownLine]:
    """The log lines that a trace leads to, by their origin."""
    origins = [row.place.origin for row in found.rows] + [drop.drop.origin for drop in found.drops]
    shown = {}
    for origin in origins[:MOST_LOG_LINES]:
        line = read_log_line(origin, root=project.root)
        if line:
            text = redact(_lay_out(line)).text
            shown[str(origin)] = ShownLine(text=text, messages=_read_conversation(project, origin, text))
    return shown


def _read_conversation(project: Project, origin: Origin, line: str) -> tuple[Message, ...]:
    """The first exchange of a line, its reply last; empty if the line is of no known form."""
    try:
        settings = settings_of_file(project.settings.data, origin.file)
        results = read_log_row(take_object(json.loads(line), "the row"), origin, settings=settings)
    except (ValueError, RecursionError):
        return ()
    exchange = next((result for result in results if isinstance(result, Interaction)), None)
    if exchange is None:
        return ()
    return (*exchange.messages, Message(role="assistant", content=exchange.reply))


def _lay_out(line: str) -> str:
    """Format JSON with one value per line; other text, and very long lines, stay unchanged."""
    if len(line) <= LONGEST_LOG_LINE:
        with suppress(ValueError):
            return json.dumps(json.loads(line), indent=2, ensure_ascii=False)
    return line if len(line) <= LONGEST_LOG_LINE else f"{line[:LONGEST_LOG_LINE]} …"


def to_split(name: str) -> Split:
    found = next((known for known in SPLITS if known == name), None)
    if found is None:
        raise UserError(f"there is no split {name!r}", fix=f"use one of {', '.join(SPLITS)}")
    return found


def _find(project: Project, name: str) -> Path:
    if name:
        return find_dataset_by_hash(project.folder.datasets, name)
    with project.open() as work:
        return find_latest_dataset(work)


KEEP_SECONDS = 60.0
"""Listing reads all captures and rows: the order of the queue is kept for this long."""

HOLD_SECONDS = 600.0
"""A row that one reviewer looks at is not shown to others for this long."""


class ReviewTurn(Record):
    """What a reviewer sees: the next row, and how many wait."""

    item: ReviewItem | None
    waiting: int
    decided: int
    """Decisions that are in effect, of all reviewers."""
    mine: int
    last: ReviewDecision | None
    """This reviewer's last decision that can still be taken back."""
    reasons: dict[str, int]
    """How many rows wait for each reason."""


_listed: dict[str, tuple[float, tuple[ReviewItem, ...]]] = {}
"""By project: the queue, and when it was listed."""
_held: dict[tuple[str, str], tuple[str, float]] = {}
"""By project and row: the reviewer who looks at it, and since when."""
_lock = threading.Lock()


def next_review(project: Project, *, who: str = "", key: str = "", hold: bool = False) -> ReviewTurn:
    """The next row for this reviewer, or the row `key`. With `hold`, others get another row meanwhile."""
    reviewer = who or current_user()
    items = _list(project)
    with project.open() as work:
        reviews = ReviewStore(work.database, project=work.settings.project).standing()
    decided = {key for entry in reviews for key in entry.review.item.keys}
    waiting = [item for item in items if item.keys.isdisjoint(decided)]
    mine = [entry for entry in reviews if entry.review.who == reviewer]
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
        decided=len(reviews),
        mine=len(mine),
        last=mine[-1].review if mine and not mine[-1].applied else None,
        reasons=dict(sorted(reasons.items(), key=lambda pair: -pair[1])),
    )


def decide_review(
    project: Project, key: str, action: ReviewAction, *, who: str = "", reply: str | None = None
) -> bool:
    """Store a decision; False if another reviewer was faster."""
    item = next((item for item in _list(project) if item.key == key), None)
    if item is None:
        item = next((item for item in _list(project, fresh=True) if item.key == key), None)
    if item is None:
        return False
    with project.open() as work:
        return decide_item(work, item, action, who=who or current_user(), reply=reply)


def undo_review(project: Project, *, who: str = "") -> ReviewDecision | None:
    """Take back the reviewer's last decision that is not applied yet."""
    with project.open() as work:
        store = ReviewStore(work.database, project=work.settings.project)
        undone = store.undo(who or current_user(), at=timestamp())
    with _lock:
        _listed.pop(str(project.root), None)
    return undone


def apply_decisions(project: Project) -> tuple[int, int, Path | None]:
    """Turn decisions into feedback on captures and into the log of reviewed rows; how many became which,
    and the log."""
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
