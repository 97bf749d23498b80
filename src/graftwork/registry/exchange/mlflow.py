"""A release into an MLflow model registry.

In: a store, a release, the name of a registered model. Out: a model version with the release's files, facts
and figures, and its aliases. A release that is there is not entered twice. MLFLOW_TRACKING_URI says where.
Contract-tested on a stand-in that records the calls, not live-validated.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from graftwork.records.errors import EnvironmentLacks
from graftwork.registry.exchange.figures import facts_of, figures_of
from graftwork.registry.store import ReleaseStore

ARTIFACTS = "release"


class InMlflow(NamedTuple):
    name: str
    version: str
    new: bool


def push_to_mlflow(
    store: ReleaseStore, release_id: str, *, name: str, aliases: Collection[str] = ()
) -> InMlflow:
    """Log the files, then enter the version, then point the aliases at it."""
    client = _client()
    with store.adding():
        release, folder = store.verify(release_id), store.folder(release_id)
        facts = facts_of(release)
        if not client.search_registered_models(filter_string=f"name = '{_quote(name)}'"):
            client.create_registered_model(name, tags={"graftwork.project": release.project})
        known = [
            one
            for one in client.search_model_versions(f"name = '{_quote(name)}'")
            if one.tags.get("graftwork.release") == release.id
        ]
        if known:
            version, new = str(known[0].version), False
        else:
            run = client.create_run(
                _experiment(client, release.project), tags=facts, run_name=f"release {release.id[:12]}"
            )
            client.log_artifacts(run.info.run_id, str(folder), ARTIFACTS)
            for figure, value in figures_of(folder).items():
                client.log_metric(run.info.run_id, figure, value)
            client.set_terminated(run.info.run_id)
            # Last: what is in the registry has its files.
            entered = client.create_model_version(
                name, source=f"{run.info.artifact_uri}/{ARTIFACTS}", run_id=run.info.run_id, tags=facts
            )
            version, new = str(entered.version), True
    for alias in sorted(aliases):
        # A slash, as in tagger/champion, would end MLflow's name.
        client.set_registered_model_alias(name, alias.replace("/", "-"), version)
    return InMlflow(name, version, new)


def _experiment(client: Any, name: str) -> str:
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found is not None else client.create_experiment(name))


def _quote(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


def _client() -> Any:
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise EnvironmentLacks(
            "the package mlflow is not installed", fix='pip install "graftwork[mlflow]"'
        ) from error
    return MlflowClient()
