"""The project's folder: where graft.yaml stands and where `.graft/` keeps what was made."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from graftwork.files.private import STATE_FOLDER, close_to_others, is_private
from graftwork.project.load import PROJECT_FILE, load_settings
from graftwork.project.settings import ProjectSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProjectFolder:
    """A project's settings and its places on disk."""

    root: Path
    settings: ProjectSettings

    @property
    def file(self) -> Path:
        return self.root / PROJECT_FILE

    @property
    def state(self) -> Path:
        return self.root / STATE_FOLDER

    @property
    def data(self) -> Path:
        """What was sifted and rendered, so that it is not done again."""
        return self.state / "data"

    @property
    def sifted(self) -> Path:
        return self.data / "sifted"

    @property
    def datasets(self) -> Path:
        return self.state / "datasets"

    @property
    def runs(self) -> Path:
        return self.state / "runs"

    @property
    def evaluations(self) -> Path:
        return self.state / "evaluations"

    @property
    def releases(self) -> Path:
        return self.state / "releases"

    @property
    def serving(self) -> Path:
        return self.state / "serving"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def audit_page(self) -> Path:
        return self.root / "audit.html"

    @property
    def database_url(self) -> str:
        """The team's PostgreSQL where one is named, else a file of the project's own."""
        return os.environ.get("GRAFT_DATABASE_URL") or f"sqlite:///{self.state / 'state.db'}"


def find_project() -> Path | None:
    """The folder that holds the project's file: the working folder, or the nearest one above it."""
    here = Path().absolute()
    return next((folder for folder in (here, *here.parents) if (folder / PROJECT_FILE).is_file()), None)


def open_project(root: Path | None = None) -> ProjectFolder:
    """The project in `root`, or the one that the working folder belongs to.

    The state of one that an earlier version made for everybody to read is closed to all but its owner.
    """
    folder = (root or find_project() or Path()).absolute()
    if root is None and folder != Path().absolute():
        log.info("project: %s", folder / PROJECT_FILE)
    project = ProjectFolder(root=folder, settings=load_settings(folder / PROJECT_FILE))
    # The state folder itself is closed last: once it is private, all below it is.
    if project.state.is_dir() and not is_private(project.state):
        close_to_others(project.state)
    return project
