"""A project opened for work: its settings, its folders, its stores, and somebody who listens."""

import getpass
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property

from graftwork.files.private import make_folder
from graftwork.files.whole import explain_os_error
from graftwork.model.base import Base, find_base, is_ready, note_on_weights
from graftwork.pipeline.reporter import Reporter
from graftwork.project.folder import ProjectFolder
from graftwork.project.settings import ProjectSettings
from graftwork.records.errors import UserMistake
from graftwork.store.captures import CaptureStore
from graftwork.store.database import Database, open_database
from graftwork.store.looks import Looks
from graftwork.store.releases import Releases
from graftwork.store.residuals import Residuals
from graftwork.store.runs import RunStore
from graftwork.store.steps import StepLedger


@dataclass(frozen=True)
class Workplace:
    project: ProjectFolder
    database: Database
    reporter: Reporter
    asked_model: str | None = None

    @property
    def model(self) -> str:
        """Which of the project's models is worked on: the one that was asked for, or the main one."""
        known = self.project.settings
        if self.asked_model is None:
            return known.main_model
        if self.asked_model not in known.all_models:
            raise UserMistake(
                f"there is no model {self.asked_model!r} in this project",
                why=f"graft.yaml names: {', '.join(known.all_models)}",
                fix="name one of these, or add it under models:",
                where="--model",
            )
        return self.asked_model

    @cached_property
    def settings(self) -> ProjectSettings:
        """The project's settings as the model that is worked on has them."""
        return self.project.settings.of_model(self.model)

    @cached_property
    def base(self) -> Base:
        if not is_ready(self.settings.base):
            self.reporter.info(f"making {self.settings.base} ready: once a machine, about half a minute")
        return find_base(self.settings.base, project_folder=self.project.root)

    @property
    def ledger(self) -> StepLedger:
        return StepLedger(self.database, project=self.settings.project)

    @property
    def runs(self) -> RunStore:
        return RunStore(self.database, project=self.settings.project)

    @property
    def releases(self) -> Releases:
        return Releases(self.database, project=self.settings.project)

    @property
    def captures(self) -> CaptureStore:
        return CaptureStore(self.database, project=self.settings.project)

    @property
    def looks(self) -> Looks:
        return Looks(self.database, who=who())

    @property
    def residuals(self) -> Residuals:
        return Residuals(self.database)


@contextmanager
def open_workplace(
    project: ProjectFolder, reporter: Reporter, *, model: str | None = None
) -> Iterator[Workplace]:
    try:
        make_folder(project.state)
    except OSError as error:
        raise explain_os_error(error, project.state) from error
    database = open_database(project.database_url)
    try:
        yield Workplace(project=project, database=database, reporter=reporter, asked_model=model)
    finally:
        database.close()


def tell_note_on_base(work: Workplace) -> None:
    """Say once more, where it matters, that a base's weights are not what its name suggests."""
    note = note_on_weights(work.base.name)
    if note:
        work.reporter.info(note)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def who() -> str:
    """Who moves an alias or looks at a test set, for the log."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
