"""A release into trackio, as an artifact of a run.

In: a store, a release, a trackio project. Out: a run with the release's facts and figures and its files as an
artifact of the type "model". It stays on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says
otherwise. Pushed twice, it is there once. Of the machine nothing is told.
"""

import contextlib
import io
import os
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from graftwork.files.digest import file_digest
from graftwork.process.http_client import HttpClient
from graftwork.records.errors import Damaged, EnvironmentLacks, GraftError, UserMistake, pip_install
from graftwork.registry.exchange.figures import facts_of, figures_of
from graftwork.registry.folder import files_of
from graftwork.registry.store import ReleaseStore
from graftwork.text.messages import redact_variables

SERVER, SPACE, TOKEN = "TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID", "TRACKIO_WRITE_TOKEN"
SECRETS = (SERVER, TOKEN, "HF_TOKEN")
ANSWER_SECONDS = 10


class InTrackio(NamedTuple):
    project: str
    run: str
    artifact: str


def push_to_trackio(store: ReleaseStore, release_id: str, *, project: str) -> InTrackio:
    trackio = _library()
    with store.adding():
        release, folder = store.verify(release_id), store.folder(release_id)
        run, artifact = f"release-{release.id[:12]}", f"{release.project}-{release.model}"
        with _answering(project):
            _require_server()
            opened = trackio.init(
                project=project,
                name=run,
                config=facts_of(release),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            try:
                logged = trackio.log_artifact(str(folder), name=artifact, type="model")
                _require_hashes(logged, folder, where=f"{artifact} in {project}")
                figures = figures_of(folder)
                # A run that was there has its figures; told again, they would stand there twice.
                if figures and not getattr(opened, "_next_step", 0):
                    trackio.log(figures)
            finally:
                trackio.finish()
    return InTrackio(project, run, artifact)


def _require_hashes(logged: Any, folder: Path, *, where: str) -> None:
    """trackio names every file by its sha256, and its server refuses what has another."""
    there = {entry["path"]: entry["digest"].rpartition(":")[2] for entry in logged.manifest or ()}
    for path in files_of(folder):
        if there.get(path.name) != file_digest(path):
            raise Damaged(
                f"{path.name} has another hash in trackio",
                why="it did not arrive as it was sent",
                fix="push it again; if it stays so, see to trackio's folder or server",
                where=where,
            )


def _require_server() -> None:
    """Asked first: trackio itself would wait for a minute."""
    address = os.environ.get(SERVER)
    if not address or os.environ.get(SPACE):
        return
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserMistake(
            f"{SERVER} is no http(s) address", fix="write it whole: http://host:7860", where=SERVER
        )
    bare = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    # Whatever it answers: what it allows is seen in a moment.
    with HttpClient().send(urllib.request.Request(bare), seconds=ANSWER_SECONDS):
        pass


def _library() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import trackio
    except ImportError as error:
        raise EnvironmentLacks("the package trackio is not installed", fix=pip_install("trackio")) from error
    if not hasattr(trackio, "log_artifact"):
        raise EnvironmentLacks("this trackio knows no artifacts", fix=pip_install("trackio"))
    return trackio


@contextlib.contextmanager
def _answering(project: str) -> Iterator[None]:
    """Whatever trackio raises becomes what, why and fix. What it prints would stand amid our own words."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except GraftError:
        raise
    except Exception as error:
        said = redact_variables(str(error) or type(error).__name__, environment=os.environ, variables=SECRETS)
        if isinstance(error, ValueError):
            raise UserMistake(
                f"trackio does not take it: {said}",
                why="a name or a setting is not as trackio wants it",
                fix=f"choose another name, or set {SERVER} and {TOKEN} as its server says",
                where=f"--trackio {project}",
            ) from None
        raise EnvironmentLacks(
            f"trackio did not do it: {said}",
            why="it does not answer, does not allow it, or broke off; there is no half artifact",
            fix=f"see whether {SERVER} and {TOKEN} are right, and push again: "
            "what has arrived is not sent again",
            where=f"--trackio {project}",
        ) from None
