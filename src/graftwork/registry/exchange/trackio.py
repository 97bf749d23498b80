"""A release into trackio, as an artifact of a run.

In: a store, a release, a trackio project. Out: a run with the release's facts and figures and its files as an
artifact of the type "model". It stays on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says
otherwise. Contract-tested on a stand-in that records the calls, not live-validated.
"""

from typing import NamedTuple

from graftwork.records.errors import EnvironmentLacks
from graftwork.registry.exchange.figures import facts_of, figures_of
from graftwork.registry.store import ReleaseStore


class InTrackio(NamedTuple):
    project: str
    run: str
    artifact: str


def push_to_trackio(store: ReleaseStore, release_id: str, *, project: str) -> InTrackio:
    try:
        import trackio
    except ImportError as error:
        raise EnvironmentLacks(
            "the package trackio is not installed", fix='pip install "graftwork[trackio]"'
        ) from error
    if not hasattr(trackio, "log_artifact"):
        raise EnvironmentLacks(
            "this trackio knows no artifacts", fix='pip install --upgrade "graftwork[trackio]"'
        )
    with store.adding():
        release, folder = store.verify(release_id), store.folder(release_id)
        run, artifact = f"release-{release.id[:12]}", f"{release.project}-{release.model}"
        trackio.init(project=project, name=run, config=facts_of(release), resume="allow", embed=False)
        try:
            figures = figures_of(folder)
            if figures:
                trackio.log(figures)
            trackio.log_artifact(str(folder), name=artifact, type="model")
        finally:
            trackio.finish()
    return InTrackio(project, run, artifact)
