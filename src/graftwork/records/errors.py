"""The hierarchy of expected errors, the exit codes of the command line, and the error of a missing package.

An expected error says what is wrong, why that matters and how to fix it; the CLI and the server print it
without a traceback. Anything else that is raised is a bug and propagates. `needs_extra` turns a failed import
into an error that names the extra to install.

To add one: subclass the class whose exit code fits, and pass `what`, `why` and `fix`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

EXIT_DONE = 0
EXIT_NEGATIVE_RESULT = 1
EXIT_USER_ERROR = 2
EXIT_ENVIRONMENT = 3
EXIT_ITERATE = 10
EXIT_ABORT = 11
EXIT_NOT_ENOUGH_EVIDENCE = 12
EXIT_RESUME = 75
EXIT_INTERRUPTED = 130


class GraftError(Exception):
    """An expected failure: what happened, why it matters, how to fix it, and where."""

    exit_code: ClassVar[int] = EXIT_USER_ERROR

    def __init__(self, what: str, *, why: str = "", fix: str = "", where: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.where = where

    def as_json(self) -> dict[str, object]:
        return {
            "error": type(self).__name__,
            "what": self.what,
            "why": self.why,
            "fix": self.fix,
            "where": self.where,
            "exit_code": self.exit_code,
        }


class UserError(GraftError):
    """The input is wrong: a file, a key, a value, an argument."""


class NegativeResult(GraftError):
    """The work was done and the answer is no: a gate refused, it does not fit, the audit blocks."""

    exit_code = EXIT_NEGATIVE_RESULT


class EnvironmentFailure(GraftError):
    """Something outside is missing: a package, a model, disk space, a permission."""

    exit_code = EXIT_ENVIRONMENT


class Busy(EnvironmentFailure):
    """Another worker holds the lock of this run."""


class Corrupted(EnvironmentFailure):
    """A file does not have the bytes that its manifest promises."""


class Stale(EnvironmentFailure):
    """A required result is missing, or was made from other settings or logs."""


class WorkerFailed(EnvironmentFailure):
    """A child process ended without a result."""


class OutOfMemory(EnvironmentFailure):
    """The device or the machine ran out of memory. `figures` are measured, in GiB."""

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        fix: str = "",
        where: str = "",
        figures: dict[str, float] | None = None,
    ) -> None:
        super().__init__(what, why=why, fix=fix, where=where)
        self.figures = figures or {}

    def as_json(self) -> dict[str, object]:
        return {**super().as_json(), "figures": self.figures}


class GracefulStop(GraftError):
    """The work was stopped at a safe point and can be resumed."""

    exit_code = EXIT_RESUME


class Interrupted(GraftError):
    """The user pressed Ctrl-C."""

    exit_code = EXIT_INTERRUPTED


@contextmanager
def needs_extra(extra: str, *, why: str = "") -> Iterator[None]:
    """Wraps the import of a library from an optional extra: the error names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise EnvironmentFailure(
            f"the package {error.name} is not installed", why=why, fix=pip_install(extra)
        ) from error


def pip_install(extra: str) -> str:
    """The command that installs an optional extra, from the origin of this installation: it is on no
    index.
    """
    import json
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    try:
        direct_url = metadata.distribution("graftwork").read_text("direct_url.json")
        url = urlsplit(json.loads(direct_url)["url"]) if direct_url else None
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        url = None
    extras = f"[{extra}]" if extra else ""
    if url is not None and url.scheme == "file":
        return f'pip install "{unquote(url.path)}{extras}"'
    return f'pip install ".{extras}" in a checkout of graftwork'
