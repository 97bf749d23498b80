"""Audits of logs: with or without a project. Out: an `Audit`; nothing is kept but the project's own cache."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.settings import DataSettings
from graftwork.pipeline.reporter import NullReporter, Reporter, progress_listener
from graftwork.pipeline.steps.data import audit_context_here
from graftwork.process import worker
from graftwork.project.load import ProjectFolder
from graftwork.records.audit import Audit
from graftwork.records.errors import Busy


def audit_files(files: Sequence[str], *, reporter: Reporter | None = None) -> Audit:
    """Audit files, folders or globs with the default settings; no project is needed."""
    settings = DataSettings(logs=tuple(files))
    return _audit_in_scratch_folder(AuditContext(settings=settings), reporter or NullReporter())


def audit_with_settings(folder: ProjectFolder, files: Sequence[str], *, reporter: Reporter) -> Audit:
    """Audit other files than the project's logs, with the project's data settings."""
    context = audit_context_here(folder)
    settings = context.settings.model_copy(update={"logs": tuple(files)})
    return _audit_in_scratch_folder(replace(context, settings=settings), reporter)


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
