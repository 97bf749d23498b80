"""What a database says, as what, why and fix.

In: an error of a driver (sqlite3 or psycopg). Out: an expected error of ours, or None where it is a
bug of ours and must propagate. Goes by the codes of the drivers, not by their English.
"""

from collections.abc import Collection
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from graftwork.records.errors import Busy, Damaged, EnvironmentLacks, GraftError
from graftwork.text.messages import hide

# The first word behind SQLITE_; extended codes such as SQLITE_READONLY_DIRECTORY share it.
_SQLITE_BUSY = {"BUSY", "LOCKED"}
_SQLITE_DAMAGED = {"NOTADB", "CORRUPT"}
_SQLITE_CLOSED = {"CANTOPEN", "READONLY", "PERM", "AUTH"}
_SQLITE_DISK = {"FULL", "IOERR"}

_POSTGRES_BUSY = {"55P03", "40P01", "57014", "25P03"}
_POSTGRES_FULL = {"53100"}


def explain_driver_error(error: BaseException | None, *, where: str) -> GraftError | None:
    """The expected error that this is, if it is one."""
    if error is None:
        return None
    if hasattr(error, "sqlite_errorname"):
        return _explain_sqlite(_sqlite_code(error), detail=str(error), where=where)
    if hasattr(error, "sqlstate"):
        detail = next(iter(str(error).strip().splitlines()), "it gave no reason")
        return _explain_postgres(error.sqlstate, detail=detail, lost=_is_lost(error), where=where)
    return None


def leave_values_unsaid(error: DBAPIError, secrets: Collection[str] = ()) -> None:
    """Cut what the driver said to its first line, without these secrets: further lines may quote whole rows.

    The error itself is changed, for it is logged with the one that it caused.
    """
    said = error.orig
    if said is None or not said.args or not isinstance(said.args[0], str):
        return
    first = hide(next(iter(said.args[0].strip().splitlines()), ""), secrets)
    said.args = (first, *said.args[1:])
    error.args = (f"({type(said).__module__}.{type(said).__name__}) {first}",)


def is_busy(error: BaseException) -> bool:
    """Whether SQLite says that somebody else has the file."""
    return _sqlite_code(error) in _SQLITE_BUSY


def _sqlite_code(error: BaseException) -> str:
    return str(getattr(error, "sqlite_errorname", "")).removeprefix("SQLITE_").split("_")[0]


def _explain_sqlite(code: str, *, detail: str, where: str) -> GraftError | None:
    if code in _SQLITE_BUSY:
        return _busy(where)
    if code in _SQLITE_DAMAGED:
        return Damaged(
            "the state database cannot be read",
            why=f"SQLite says: {detail}",
            fix="restore the file from a backup, or move it away to start with an empty one "
            "(release folders are whole without it)",
            where=where,
        )
    if code == "CANTOPEN" and not Path(where).exists():
        return EnvironmentLacks(
            "the state database is gone",
            why="the file was removed or moved away; it is not made anew, for that would be an empty one",
            fix="put it back (mount its disk, restore a backup); what is running goes on then",
            where=where,
        )
    if code in _SQLITE_CLOSED:
        return EnvironmentLacks(
            "the state database cannot be opened for writing",
            why=f"SQLite says: {detail}",
            fix="change the owner or mode of the file and its folder, or work in another folder",
            where=where,
        )
    if code in _SQLITE_DISK:
        return _disk_full(detail, where)
    return None


def _explain_postgres(state: str | None, *, detail: str, lost: bool, where: str) -> GraftError | None:
    if state in _POSTGRES_BUSY:
        return _busy(where)
    if state in _POSTGRES_FULL:
        return _disk_full(detail, where)
    if lost:
        return EnvironmentLacks(
            "PostgreSQL cannot be reached",
            why=detail,
            fix="check that the server runs and that GRAFT_DATABASE_URL names its host, database, user "
            "and password",
            where=where,
        )
    if state == "42501":
        return EnvironmentLacks(
            "this database user may not do that",
            why=f"PostgreSQL says: {detail}",
            fix="grant it CREATE and USAGE on the schema, or name a user that has them",
            where=where,
        )
    return None


def _is_lost(error: BaseException) -> bool:
    """Without a state the server never answered; the classes: connection, password, database, shutdown."""
    state = getattr(error, "sqlstate", None)
    if state is None:
        return any(kind.__name__ == "OperationalError" for kind in type(error).__mro__)
    return str(state)[:2] in {"08", "28", "3D", "57"}


def _busy(where: str) -> Busy:
    return Busy(
        "another process keeps the state database busy",
        why="it held the write lock for longer than this one was ready to wait",
        fix="run the same command again; `graft status` shows what is at work",
        where=where,
    )


def _disk_full(detail: str, where: str) -> EnvironmentLacks:
    return EnvironmentLacks(
        "the state could not be written to disk",
        why=f"the database says: {detail}; the change was undone as a whole",
        fix="free some space and run the same command again",
        where=where,
    )
