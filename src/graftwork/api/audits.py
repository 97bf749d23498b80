"""Audits of logs: with or without a project. Out: an `Audit`; nothing is kept but the project's own cache."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.settings import DataSettings
from graftwork.pipeline.reporter import NullReporter, Reporter, progress_listener
from graftwork.pipeline.steps.data import audit_context_here
from graftwork.process import worker
from graftwork.project.load import ProjectFolder
from graftwork.records.audit import Audit
from graftwork.records.errors import Busy, UserMistake


def audit_files(
    files: Sequence[str], *, row_format: str | None = None, reporter: Reporter | None = None
) -> Audit:
    """Audit files, folders or globs with the default settings; no project is needed."""
    settings = _force_format(DataSettings(logs=tuple(files)), row_format)
    return _audit_in_scratch_folder(AuditContext(settings=settings), reporter or NullReporter())


def audit_with_settings(
    folder: ProjectFolder, files: Sequence[str], *, reporter: Reporter, row_format: str | None = None
) -> Audit:
    """Audit other files than the project's logs, with the project's data settings."""
    context = audit_context_here(folder)
    settings = _force_format(context.settings.model_copy(update={"logs": tuple(files)}), row_format)
    return _audit_in_scratch_folder(replace(context, settings=settings), reporter)


def _force_format(settings: DataSettings, row_format: str | None) -> DataSettings:
    if row_format is None:
        return settings
    try:
        return DataSettings.model_validate({**settings.model_dump(), "format": row_format, "mapping": None})
    except ValidationError as error:
        message = error.errors()[-1]["msg"].removeprefix("Value error, ")
        raise UserMistake(
            f"there is no format {row_format!r}", why=message, fix="name one of these", where="--format"
        ) from None


def audit_project(folder: ProjectFolder, *, reporter: Reporter) -> Audit:
    """Audit the project's logs."""
    from graftwork.data.prepare import audit_logs

    with _cache_folder(folder) as cache:
        return audit_logs(
            audit_context_here(folder),
            folder=cache,
            root=folder.root,
            on_progress=progress_listener(reporter),
        )


def _audit_in_scratch_folder(context: AuditContext, reporter: Reporter) -> Audit:
    from graftwork.data.prepare import audit_logs

    with tempfile.TemporaryDirectory(prefix="graft-audit-") as folder:
        return audit_logs(context, folder=Path(folder), on_progress=progress_listener(reporter))


@contextmanager
def _cache_folder(project: ProjectFolder) -> Iterator[Path]:
    """The project's cache of row features; a temporary folder while a run holds the project."""
    with ExitStack() as stack:
        try:
            stack.enter_context(worker.hold_lock(project.state / "pipeline"))
            folder = project.sifted
        except Busy:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graft-audit-")))
        yield folder
