"""Push a release to MLflow at MLFLOW_TRACKING_URI with its files, tags and metrics.

A release that is there is not added twice, and an interrupted push continues in the run that it began.
Passwords appear in no message.
"""

import logging
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graftwork.files.disk import file_digest
from graftwork.records.errors import (
    Corrupted,
    EnvironmentFailure,
    GraftError,
    UserError,
    needs_extra,
)
from graftwork.records.release import Release
from graftwork.records.report import Report
from graftwork.registry.folder import MINISIGN, SIGSTORE
from graftwork.registry.store import ReleaseStore
from graftwork.text.redact import redact_variables

REPORT = "report.json"
RELEASE = "graftwork.release"
"""The tag by which a release is found again."""


def tracker_tags(release: Release) -> dict[str, str]:
    return {
        RELEASE: release.id,
        "graftwork.project": release.project,
        "graftwork.model": release.model,
        "graftwork.base": release.base,
        "graftwork.decision": release.decision,
        "graftwork.run": release.run_id,
        "graftwork.dataset": release.dataset_hash,
        "graftwork.parent": release.parent or "",
    }


def tracker_metrics(folder: Path) -> dict[str, float]:
    """What was measured of the candidate; nothing where the release was imported without a report."""
    path = folder / REPORT
    if not path.is_file():
        return {}
    report = Report.from_json(path.read_bytes())
    return {name: metric.value for name, metric in report.candidate.metrics.items() if metric.n}


ARTIFACTS = "release"
WHERE = "MLFLOW_TRACKING_URI"
MLFLOW_SECRETS = (WHERE, "MLFLOW_REGISTRY_URI", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # It would be printed to standard output with `--json`, login included.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # The default of seven retries takes four minutes to report that a server is down.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
_NOT_IN_ALIAS = re.compile(r"[^A-Za-z0-9_-]")
_RESERVED_ALIAS = re.compile(r"latest|v\d+", re.IGNORECASE)
_NOT_IN_FIGURE = re.compile(r"[^\w\-. :/]")


def push_to_mlflow(
    store: ReleaseStore, release_id: str, *, name: str, aliases: Collection[str] = ()
) -> tuple[str, bool]:
    """Log the files, then enter the version, then point the aliases at it.

    Returns the version, and whether it is a new one.
    """
    with _explaining_mlflow(name):
        client = _client()
    with store.shared_lock():
        release, folder = store.verify(release_id), store.folder(release_id)
        with _explaining_mlflow(name):
            _found_or_made(
                lambda: client.get_registered_model(name),
                lambda: client.create_registered_model(name, tags={"graftwork.project": release.project}),
            )
            version = _find_version(client, name, release)
            new = version is None
            if version is not None:
                _send_missing_signatures(client, version.run_id, folder)
            else:
                run = _send(client, folder, release)
                # Another process may have been faster. Last, so that every registered version has its files.
                version = _find_version(client, name, release) or client.create_model_version(
                    name,
                    source=f"{run.info.artifact_uri}/{ARTIFACTS}",
                    run_id=run.info.run_id,
                    tags=tracker_tags(release),
                )
            for alias in sorted(aliases):
                client.set_registered_model_alias(name, name_alias(alias), str(version.version))
    return str(version.version), new


def name_alias(alias: str) -> str:
    """As MLflow allows it: a slash, as in tagger/champion, would end its name; `latest`, `v2` are taken."""
    name = _NOT_IN_ALIAS.sub("-", alias)
    return f"alias-{name}" if _RESERVED_ALIAS.fullmatch(name) else name


def _find_version(client: Any, name: str, release: Release) -> Any | None:
    # By its tag: MLflow finds no name that has a quote or a backslash in it.
    versions = client.search_model_versions(f"tags.`{RELEASE}` = '{release.id}'")
    return next((version for version in versions if version.name == name), None)


def _send(client: Any, folder: Path, release: Release) -> Any:
    """The run that holds the files and the figures: a new one, or the one that an earlier push began."""
    if client.get_experiment_by_name(release.project) is None:
        _found_or_made(lambda: None, lambda: client.create_experiment(release.project))
    experiment = str(client.get_experiment_by_name(release.project).experiment_id)
    runs = client.search_runs([experiment], f"tags.`{RELEASE}` = '{release.id}'", max_results=1)
    run = (
        runs[0]
        if runs
        else client.create_run(experiment, tags=tracker_tags(release), run_name=f"release {release.id[:12]}")
    )
    run_id = run.info.run_id
    paths = sorted(folder.iterdir())
    uploaded = _read_back(client, run_id) if runs else {}
    if uploaded:
        for path in paths:
            if uploaded.get(path.name) != file_digest(path):
                client.log_artifact(run_id, str(path), ARTIFACTS)
    else:
        client.log_artifacts(run_id, str(folder), ARTIFACTS)
    uploaded = _read_back(client, run_id)
    for path in paths:
        if uploaded.get(path.name) != file_digest(path):
            raise _other_bytes(path.name, run_id)
    logged = run.data.metrics if runs else {}
    figures = {_NOT_IN_FIGURE.sub("_", figure): value for figure, value in tracker_metrics(folder).items()}
    for figure in figures.keys() - logged.keys():
        client.log_metric(run_id, figure, figures[figure])
    client.set_terminated(run_id)
    return run


def _send_missing_signatures(client: Any, run_id: str | None, folder: Path) -> None:
    """Send the missing signatures of a version. Nothing else of an existing version may be added later."""
    ours = [folder / name for name in (MINISIGN, SIGSTORE) if (folder / name).is_file()]
    if not ours or not run_id:
        return
    names = {str(artifact.path).rpartition("/")[2] for artifact in client.list_artifacts(run_id, ARTIFACTS)}
    for path in ours:
        if path.name in names:
            continue
        client.log_artifact(run_id, str(path), ARTIFACTS)
        with tempfile.TemporaryDirectory() as scratch:
            arrived = Path(client.download_artifacts(run_id, f"{ARTIFACTS}/{path.name}", scratch))
            if file_digest(arrived) != file_digest(path):
                raise _other_bytes(path.name, run_id)


def _other_bytes(name: str, run_id: str) -> Corrupted:
    return Corrupted(
        f"{name} has other bytes in MLflow",
        why="it did not arrive as it was sent",
        fix="push it again; if that does not help, check the server's artifact store",
        where=f"run {run_id}",
    )


def _read_back(client: Any, run_id: str) -> dict[str, str]:
    """The hashes of the artifacts. Downloaded outside the store, which may be read-only."""
    if not client.list_artifacts(run_id, ARTIFACTS):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        downloaded = Path(client.download_artifacts(run_id, ARTIFACTS, folder))
        return {path.name: file_digest(path) for path in downloaded.iterdir() if path.is_file()}


def _found_or_made(find: Callable[[], Any], make: Callable[[], Any]) -> None:
    """Return the existing one or create it. If two clients create it at once, the second finds it."""
    try:
        if find() is not None:
            return
    except Exception as error:
        if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
            raise
    try:
        make()
    except Exception as error:
        if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
            raise


def _client() -> Any:
    if not os.environ.get(WHERE):
        raise UserError(
            "the address of MLflow is not set",
            why=f"{WHERE} is not set, and a database in this folder would not be found again",
            fix=f"export {WHERE}=https://mlflow.example.org",
            where=WHERE,
        )
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with needs_extra("mlflow"):
        from mlflow import MlflowClient
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    return MlflowClient()


@contextmanager
def _explaining_mlflow(name: str) -> Iterator[None]:
    """Errors of the client become ours, without a password."""
    try:
        yield
    except GraftError:
        raise
    except Exception as error:
        message = redact_variables(
            str(error) or type(error).__name__, environment=os.environ, variables=MLFLOW_SECRETS
        )
        if getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE":
            raise UserError(
                f"MLflow does not accept this: {message}",
                why="a name has neither / nor :, and an address points to a server or a database",
                fix=f"choose another name, or correct {WHERE}",
                where=f"--mlflow {name}",
            ) from None
        raise EnvironmentFailure(
            f"MLflow failed: {message}",
            why="it is not responding, does not allow this, or broke off; no partial version was created",
            fix=f"check whether {WHERE} is correct and its login may write there, and push again: "
            "what has arrived is not sent again",
            where=f"--mlflow {name}",
        ) from None
