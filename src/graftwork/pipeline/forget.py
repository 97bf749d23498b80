"""Deletes what was captured of a session or a user, and finds where copies of it are.

In: the id of a session or a user. Out: what is, or was, deleted in the store, and the log files, datasets and
releases that hold copies. Copies are not changed: a dataset is what its releases were trained on.
"""

from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path

from graftwork.data.ingest.files import find_sources
from graftwork.files.dataset import iterate_rows, read_manifest
from graftwork.pipeline.open_project import OpenProject
from graftwork.records.base import Record
from graftwork.records.errors import GraftError
from graftwork.records.interaction import Capture
from graftwork.records.units import MIB
from graftwork.serve.captures import redact_name
from graftwork.serve.settings import ServeSettings
from graftwork.store.captures import FeedbackStore
from graftwork.text.redact import Redactor


class FileCopies(Record):
    """A log file with lines of deleted captures."""

    file: str
    lines: int


class DatasetCopies(Record):
    """A dataset with rows of deleted captures, and the releases that were trained on it."""

    folder: str
    rows: int
    releases: tuple[str, ...] = ()


class Forgotten(Record):
    """`deleted` is False for a dry run: nothing was changed."""

    deleted: bool
    captures: int
    feedback: int
    """Feedback on these captures; for a user, also what they gave on others."""
    files: tuple[FileCopies, ...] = ()
    datasets: tuple[DatasetCopies, ...] = ()


def forget_captures(
    work: OpenProject, *, session: str | None = None, user: str | None = None, dry_run: bool = True
) -> Forgotten:
    """Delete the captures of a session or a user with their feedback and reviews, or count them."""
    asked = session if session is not None else user
    assert asked is not None
    names = _stored_forms(asked)
    is_theirs = _of_session(names) if session is not None else _of_user(names)
    ids = tuple(capture.id for capture in work.captures.holding(names) if is_theirs(capture))
    book = FeedbackStore(work.database, project=work.settings.project)
    given = () if user is None else tuple(e for e in book.by(names) if e.feedback.capture not in set(ids))
    on_them = sum(len(book.of_capture(id_)) for id_ in ids)
    found = Forgotten(
        deleted=not dry_run,
        captures=len(ids),
        feedback=on_them + len(given),
        files=_find_in_files(work, ids),
        datasets=_find_in_datasets(work, ids),
    )
    if not dry_run:
        work.captures.delete(ids)
        if given:
            book.delete([entry.place for entry in given])
            work.database.forget_log()
    return found


def prune_captures(work: OpenProject, settings: ServeSettings) -> Callable[[], object] | None:
    """What deletes captures beyond the limits of the settings; None where there are none."""
    days, mib = settings.capture_keep_days, settings.capture_keep_mib
    if days is None and mib is None:
        return None

    def prune() -> object:
        before = None
        if days is not None:
            before = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="milliseconds")
        return work.captures.prune(before=before, most_bytes=None if mib is None else int(mib * MIB))

    return prune


def _stored_forms(name: str) -> tuple[str, ...]:
    """How the store may have an id: as it is, as a pseudonym, or as a header came in."""
    forms = [name, name.encode(errors="replace").decode("latin-1")]
    for kind in ("session", "user"):
        forms += [redact_name(form, Redactor(), kind=kind) or form for form in forms[:2]]
    return tuple(dict.fromkeys(forms))


def _of_session(names: Collection[str]) -> Callable[[Capture], bool]:
    return lambda capture: capture.session in names


def _of_user(names: Collection[str]) -> Callable[[Capture], bool]:
    def is_theirs(capture: Capture) -> bool:
        if capture.user in names or capture.request.get("user") in names:
            return True
        # A request without a session is in the session of its user; older captures name no other user.
        return capture.user is None and capture.session in names

    return is_theirs


def _find_in_files(work: OpenProject, ids: Collection[str]) -> tuple[FileCopies, ...]:
    """The log files of the project with lines that name one of the captures."""
    wanted = {id_.encode() for id_ in ids}
    found = []
    for path in _log_files(work) if wanted else ():
        try:
            with path.open("rb") as lines:
                count = sum(any(part in wanted for part in line.split(b'"')) for line in lines)
        except OSError:
            continue
        if count:
            found.append(FileCopies(file=str(path), lines=count))
    return tuple(found)


def _log_files(work: OpenProject) -> list[Path]:
    found: list[Path] = []
    for pattern in work.settings.data.logs:
        try:
            found += [work.project.root / name for name in find_sources([pattern], root=work.project.root)]
        except GraftError:
            continue  # a log that is not there holds nothing
    return found


def _find_in_datasets(work: OpenProject, ids: Collection[str]) -> tuple[DatasetCopies, ...]:
    wanted, found = set(ids), []
    folders = sorted(work.project.datasets.iterdir()) if wanted and work.project.datasets.is_dir() else []
    releases = work.releases.list() if folders else ()
    for folder in folders:
        try:
            splits = read_manifest(folder).splits
            rows = sum(
                row.capture is not None and row.capture.id in wanted
                for split in splits
                for row in iterate_rows(folder, split)
            )
        except (GraftError, OSError):
            continue  # damaged or half removed: it cannot be read to look for anything
        if rows:
            trained = tuple(r.id for r in releases if r.dataset_hash == folder.name)
            found.append(DatasetCopies(folder=str(folder), rows=rows, releases=trained))
    return tuple(found)
