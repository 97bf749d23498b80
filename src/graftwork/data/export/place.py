"""The folder that an export is put into: made whole, and nothing of the user's lost by it.

In: a folder that is full already and where it should stand. Out: it stands there. What stood there
before goes only if it was an export of ours and nothing else; forced, our files take their places
among the others. Does not know what the files are.
"""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from graftwork.data.export.record import EXPORT_FILE, Export
from graftwork.files.disk import atomic_folder, explain_os_error, sync_folder
from graftwork.records.errors import UserMistake


def require_place(out: Path, *, force: bool) -> None:
    """Refuse a folder that holds what an export would destroy."""
    if not out.exists() or force:
        if out.exists() and not out.is_dir():
            raise UserMistake("this is a file, not a folder", fix="name a folder for --out", where=str(out))
        return
    if not out.is_dir():
        raise UserMistake("this is a file, not a folder", fix="name a folder for --out", where=str(out))
    foreign = sorted(_files(out) - _own_files(out))
    if foreign:
        raise UserMistake(
            f"the folder holds other files: {', '.join(foreign[:3])}{' …' if len(foreign) > 3 else ''}",
            why="an export replaces what it finds, and these are not of an export",
            fix="name an empty folder, or add --force to write among them",
            where=str(out),
        )


@contextmanager
def put_in_place(out: Path) -> Iterator[Path]:
    """Give a folder to fill; it stands at `out` when the block succeeds."""
    staged = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with atomic_folder(staged) as folder:
            yield folder
        if not out.exists() or not any(out.iterdir()):
            staged.replace(out)
        elif _files(out) <= _own_files(out):
            _swap(staged, out)
        else:
            _mingle(staged, out)
        sync_folder(out.parent)
    except OSError as error:
        raise explain_os_error(error, out) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _swap(staged: Path, out: Path) -> None:
    aside = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.old")
    out.replace(aside)
    try:
        staged.replace(out)
    except OSError:
        aside.replace(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _mingle(staged: Path, out: Path) -> None:
    """File by file, the one that says what all of them are last."""
    stale = _own_files(out) - _files(staged)
    for name in sorted(_files(staged), key=lambda name: (name == EXPORT_FILE, name)):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).replace(out / name)
    for name in stale:
        (out / name).unlink(missing_ok=True)


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def _own_files(folder: Path) -> set[str]:
    """The files that an export of ours says it wrote; none where there is no such export."""
    try:
        export = Export.from_json((folder / EXPORT_FILE).read_bytes())
    except (OSError, ValidationError):
        return set()
    return {EXPORT_FILE, *(file.file for file in export.files)}
