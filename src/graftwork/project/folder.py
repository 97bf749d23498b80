"""The folder of a project: where graft.yaml is found, and what lies below it.

Input: a path, or the current folder. Output: a `ProjectFolder` with its settings and paths.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from graftwork.files.disk import STATE_FOLDER, close_to_others, is_private
from graftwork.project.load import PROJECT_FILE, load_settings, log
from graftwork.project.settings import ProjectSettings


@dataclass(frozen=True)
class ProjectFolder:
    """A project's settings and its locations on disk."""

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
        """Row features and rendered rows, which are cached here."""
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

    def page_of(self, kind: str, model: str) -> Path:
        """A page about one model, such as its report; that of the main model has the short name."""
        return self.root / (f"{kind}.html" if model == self.settings.main_model else f"{kind}-{model}.html")

    def report_of(self, model: str) -> Path:
        return self.page_of("report", model)

    @property
    def reports(self) -> dict[str, Path]:
        """The reports that were written, by model, the main one first."""
        pages = {model: self.report_of(model) for model in self.settings.all_models}
        return {model: page for model, page in pages.items() if page.is_file()}

    @property
    def audit_page(self) -> Path:
        return self.root / "audit.html"

    @property
    def database_url(self) -> str:
        """The team's PostgreSQL if one is named, else a file of the project."""
        return os.environ.get("GRAFT_DATABASE_URL") or f"sqlite:///{self.state / 'state.db'}"


def find_project() -> Path | None:
    """The folder that holds the project's file: the working folder, or the nearest one above it."""
    current = Path().absolute()
    return next((folder for folder in (current, *current.parents) if (folder / PROJECT_FILE).is_file()), None)


def open_project(root: Path | None = None) -> ProjectFolder:
    """Open the project in `root`, or the one that contains the working folder. State that others may read, as
    in a copied project, is made private to its owner.
    """
    folder = (root or find_project() or Path()).absolute()
    if root is None and folder != Path().absolute():
        log.info("project: %s", folder / PROJECT_FILE)
    project = ProjectFolder(root=folder, settings=load_settings(folder / PROJECT_FILE))
    # The state folder itself is closed last: once it is private, all below it is.
    if project.state.is_dir() and not is_private(project.state):
        close_to_others(project.state)
    return project
