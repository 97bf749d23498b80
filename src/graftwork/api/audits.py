"""Audits of logs: with or without a project. Out: an `Audit`; nothing is kept but the project's own cache."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.project import audit_context_here, counter_here, template_here
from graftwork.data.settings import DataSettings
from graftwork.model.base import EMBEDDED
from graftwork.process import worker
from graftwork.project.load import ProjectFolder
from graftwork.project.reporter import NullReporter, Reporter, progress_listener
from graftwork.records.dataset import Audit
from graftwork.records.errors import Busy, UserMistake
from graftwork.text.wording import explain_error

if TYPE_CHECKING:
    from graftwork.data.audit.findings import CountTokens


def audit_files(
    files: Sequence[str], *, row_format: str | None = None, reporter: Reporter | None = None
) -> Audit:
    """Audit files, folders or globs with the default settings; no project is needed.

    Tokens are counted by the tokenizer of the embedded base if it is at hand.
    """
    settings = _force_format(DataSettings(logs=tuple(files)), row_format)
    count = counter_here(template_here(EMBEDDED, settings), settings)
    return _audit_in_scratch_folder(AuditContext(settings=settings), reporter or NullReporter(), count=count)


def audit_with_settings(
    folder: ProjectFolder, files: Sequence[str], *, reporter: Reporter, row_format: str | None = None
) -> Audit:
    """Audit other files than the project's logs, with the project's data settings."""
    template = template_here(folder.settings.base, folder.settings.data, root=folder.root)
    context = audit_context_here(folder, template=template)
    settings = _force_format(context.settings.model_copy(update={"logs": tuple(files)}), row_format)
    count = counter_here(template, settings)
    return _audit_in_scratch_folder(replace(context, settings=settings), reporter, count=count)


def _force_format(settings: DataSettings, row_format: str | None) -> DataSettings:
    if row_format is None:
        return settings
    try:
        return DataSettings.model_validate({**settings.model_dump(), "format": row_format, "mapping": None})
    except ValidationError as error:
        message = explain_error(error.errors()[-1])
        raise UserMistake(
            f"there is no format {row_format!r}", why=message, fix="name one of these", where="--format"
        ) from None


def audit_project(folder: ProjectFolder, *, reporter: Reporter) -> Audit:
    """Audit the project's logs."""
    from graftwork.data.prepare import audit_logs

    data = folder.settings.data
    template = template_here(folder.settings.base, data, root=folder.root)
    with ExitStack() as stack:
        try:
            stack.enter_context(worker.hold_lock(folder.state / "pipeline"))
            cache = folder.sifted
        except Busy:
            # A run holds the project, and its cache of row features.
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graft-audit-")))
        return audit_logs(
            audit_context_here(folder, template=template),
            folder=cache,
            root=folder.root,
            on_progress=progress_listener(reporter),
            count_tokens=counter_here(template, data),
        )


def _audit_in_scratch_folder(
    context: AuditContext, reporter: Reporter, *, count: "CountTokens | None"
) -> Audit:
    from graftwork.data.prepare import audit_logs

    with tempfile.TemporaryDirectory(prefix="graft-audit-") as folder:
        return audit_logs(
            context, folder=Path(folder), on_progress=progress_listener(reporter), count_tokens=count
        )
