"""A project opened for work: its settings, folders and stores, and a reporter.

Stores are imported when they are used: SQLAlchemy takes longer to import than some commands take to run.
"""

import getpass
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.files.disk import explain_os_error, make_folder
from graftwork.model.base import EMBEDDED, BaseFolder, find_base, hub_store, is_ready, note_on_weights
from graftwork.model.hub import HubStore
from graftwork.process.local_workers import LocalWorkers, WorkerHost
from graftwork.project.folder import ProjectFolder
from graftwork.project.reporter import Reporter
from graftwork.project.settings import ProjectSettings
from graftwork.records.errors import UserError

if TYPE_CHECKING:
    from graftwork.model.chat.template import ChatTemplate
    from graftwork.store.api_keys import ApiKeyStore
    from graftwork.store.captures import CaptureStore
    from graftwork.store.cycles import CycleTable
    from graftwork.store.database import Database
    from graftwork.store.fleet import FleetLedger
    from graftwork.store.releases import ReleaseTable
    from graftwork.store.runs import EvaluationLog, ResidualStore, RunStore, StepLedger


@dataclass(frozen=True)
class OpenProject:
    project: ProjectFolder
    database: "Database"
    reporter: Reporter
    asked_model: str | None = None
    place: WorkerHost = field(default_factory=LocalWorkers)
    """Where workers run."""
    publish_to: str | None = None
    """The alias that a new release gets first; None: the one that is live."""
    quick: bool = False
    """A trial over a part of the rows: its evaluation says so, and no rule of the gate has to be provable."""
    base_on_trial: str | None = None
    """A base that is only tried: its steps have a ledger of their own, and the project's stay up to date."""

    @property
    def model(self) -> str:
        """The model of the project that is worked on: the requested one, or the main one."""
        project = self.project.settings
        if self.asked_model is None:
            return project.main_model
        if self.asked_model not in project.all_models:
            raise UserError(
                f"there is no model {self.asked_model!r} in this project",
                why=f"graft.yaml names: {', '.join(project.all_models)}",
                fix="use one of these, or add it under models:",
                where="--model",
            )
        return self.asked_model

    @cached_property
    def settings(self) -> ProjectSettings:
        """The project's settings for the model that is worked on."""
        return self.project.settings.of_model(self.model)

    @cached_property
    def base(self) -> BaseFolder:
        """The base without its weights, if they are not on this machine yet."""
        return self._find_base(weights=False)

    @cached_property
    def weights(self) -> BaseFolder:
        """The base with its weights, which are fetched if the base is a model of the Hub."""
        return self._find_base(weights=True)

    def _find_base(self, *, weights: bool) -> BaseFolder:
        name, root = self.settings.base, self.project.root
        if name == EMBEDDED and not is_ready(name):
            self.reporter.info(f"preparing {name}: once per machine, about half a minute")
        return find_base(name, project_folder=root, weights=weights, store=report_downloads(self.reporter))

    @property
    def ledger(self) -> "StepLedger":
        from graftwork.store.runs import StepLedger

        # No project has a name with a slash.
        trial = "" if self.base_on_trial is None else f"/{self.base_on_trial}"
        return StepLedger(self.database, project=f"{self.settings.project}{trial}")

    @property
    def runs(self) -> "RunStore":
        from graftwork.store.runs import RunStore

        return RunStore(self.database, project=self.settings.project)

    @property
    def releases(self) -> "ReleaseTable":
        from graftwork.store.releases import ReleaseTable

        return ReleaseTable(self.database, project=self.settings.project)

    @property
    def captures(self) -> "CaptureStore":
        from graftwork.store.captures import CaptureStore

        return CaptureStore(self.database, project=self.settings.project)

    @cached_property
    def api_keys(self) -> "ApiKeyStore":
        from graftwork.store.api_keys import ApiKeyStore

        return ApiKeyStore(self.database, project=self.settings.project)

    @property
    def looks(self) -> "EvaluationLog":
        from graftwork.store.runs import EvaluationLog

        return EvaluationLog(self.database, who=current_user())

    @property
    def jobs(self) -> "FleetLedger":
        """Jobs at other places."""
        from graftwork.store.fleet import FleetLedger

        return FleetLedger(self.database, project=self.settings.project)

    @property
    def cycles(self) -> "CycleTable":
        from graftwork.store.cycles import CycleTable

        return CycleTable(self.database, project=self.settings.project)

    @property
    def residuals(self) -> "ResidualStore":
        from graftwork.store.runs import ResidualStore

        return ResidualStore(self.database)


@contextmanager
def use_project(
    project: ProjectFolder, reporter: Reporter, *, model: str | None = None
) -> Iterator[OpenProject]:
    from graftwork.store.database import open_database

    try:
        make_folder(project.state)
    except OSError as error:
        raise explain_os_error(error, project.state) from error
    database = open_database(project.database_url)
    try:
        yield OpenProject(project=project, database=database, reporter=reporter, asked_model=model)
    finally:
        database.close()


def report_downloads(reporter: Reporter) -> HubStore:
    """Where models of the Hub are stored; downloads are reported with the remaining time."""
    began = time.monotonic()

    def progress(phase: str, done: int, total: int) -> None:
        seconds = time.monotonic() - began
        seconds_left = seconds * (total - done) / done if done else None
        reporter.progress(phase, done / 1e6, total / 1e6, seconds_left=seconds_left, detail={})

    return hub_store()._replace(announce=reporter.info, progress=progress)


def report_base_note(work: OpenProject) -> None:
    """Report that the weights of a base are not what its name suggests, as in its plan."""
    note = note_on_weights(work.base.name)
    if note:
        work.reporter.info(note)


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def current_user() -> str:
    """Who moves an alias or looks at a test set, for the log."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def load_template(work: OpenProject) -> "ChatTemplate":
    """The base's template as this project uses it: for rows, evaluation and serving."""
    from graftwork.model.chat.template import ChatTemplate

    return ChatTemplate.from_folder(Path(work.base.folder), reasoning=work.settings.data.reasoning == "keep")


def name_entry(work: OpenProject, step: str, *, model: str | None = None) -> str:
    """The ledger's name for a step. Each model of a project has its own; the main one's are plain."""
    model = model or work.model
    return step if model == work.settings.main_model else f"{step}@{model}"
