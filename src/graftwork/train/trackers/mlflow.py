"""MLflow: a store in the run's folder, or where MLFLOW_TRACKING_URI points.

MLflow assigns its own run ids; ours is the run's name and a tag, by which a resumed run finds it.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from graftwork.train.trackers import PROJECT

PACKAGE = "mlflow"
TAG = "graftwork.run"
LONGEST_VALUE = 500
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # The address of the run, with whatever login is in it.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Seven by default: a step would wait four minutes for a dead server.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}


class MlflowRun:
    def __init__(self, client: Any, run: str) -> None:
        self._client = client
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def open_run(run_id: str, settings: Mapping[str, Any], folder: Path) -> MlflowRun:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    where = os.environ.get("MLFLOW_TRACKING_URI")
    if not where:
        folder.mkdir(parents=True, exist_ok=True)
        where = folder.absolute().as_uri()
        # A folder needs no database library; MLflow asks for this confirmation.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=where)
    experiment = _find_experiment(client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
    # By name too: a pushed release of this run has the same tag.
    wanted = f"tags.`{TAG}` = '{run_id}' and attributes.run_name = '{run_id}'"
    found = client.search_runs([experiment], filter_string=wanted, max_results=1)
    if found:
        run = str(found[0].info.run_id)
        client.update_run(run, status="RUNNING")
        return MlflowRun(client, run)
    run = str(client.create_run(experiment, run_name=run_id, tags={TAG: run_id}).info.run_id)
    for name, value in _flatten(settings):
        client.log_param(run, name, str(value)[:LONGEST_VALUE])
    return MlflowRun(client, run)


def _find_experiment(client: Any, name: str) -> str:
    known = client.get_experiment_by_name(name)
    return str(known.experiment_id if known else client.create_experiment(name))


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
