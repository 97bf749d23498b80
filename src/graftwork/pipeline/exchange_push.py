"""Releases between this project and other places: a store at a URL, the Hub, a machine that serves, trackers.

In: an open project, a release, where to. Out: what was sent, or the release in store and index. Everything
is verified before it leaves and after it has arrived.
"""

from graftwork.pipeline.exchange import Imported, enter, require_own_project
from graftwork.pipeline.exchange_pace import tell_bytes
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.release_store import open_store, own_alias
from graftwork.records.errors import AnswerIsNo, UserMistake
from graftwork.registry.exchange.hub import Hub, OnHub
from graftwork.registry.exchange.mlflow import InMlflow, push_to_mlflow
from graftwork.registry.exchange.ssh import Delivered, parse_target, push_over_ssh
from graftwork.registry.exchange.trackio import InTrackio, push_to_trackio
from graftwork.registry.places.carry import Pushed, pull_release, push_release
from graftwork.registry.places.place import Place
from graftwork.registry.promote import find_release


def push_to_url(work: OpenProject, name: str, *, url: str | None) -> Pushed:
    release = find_release(work.releases, name)
    place = Place(_address(work, url))
    return push_release(open_store(work), place, release.id, tell=tell_bytes(work.reporter))


def pull_from_url(work: OpenProject, id_or_prefix: str, *, url: str | None) -> Imported:
    """The id is looked up there: this project's index need not know it."""
    place, store = Place(_address(work, url)), open_store(work)
    release_id = place.find(id_or_prefix)
    require_own_project(work, place.read(release_id), where=place.address)
    with store.adding():
        arrived = pull_release(store, place, release_id, tell=tell_bytes(work.reporter))
        return enter(work, arrived.release, new=arrived.new)


def push_to_hub(work: OpenProject, name: str, *, repository: str) -> OnHub:
    release = find_release(work.releases, name)
    return Hub(repository).push(open_store(work), release.id, tell=tell_bytes(work.reporter))


def pull_from_hub(work: OpenProject, repository: str) -> Imported:
    """`OWNER/NAME`, or `OWNER/NAME@REVISION`."""
    name, _, revision = repository.partition("@")
    store = open_store(work)
    with store.adding():
        arrived = Hub(name).pull(
            store,
            revision=revision or "main",
            allow=lambda release: require_own_project(work, release, where=repository),
            tell=tell_bytes(work.reporter),
        )
        return enter(work, arrived.release, new=arrived.new)


def push_to_machine(work: OpenProject, name: str, *, target: str, alias: str | None) -> Delivered:
    """The alias moves there only to what it points at here, where the verdict was asked, and logged."""
    release = find_release(work.releases, name)
    full = own_alias(work, alias, model=release.model) if alias is not None else None
    if full is not None and work.releases.aliases().get(full) != release.id:
        raise AnswerIsNo(
            f"{full} does not point at release {release.id[:12]} here",
            why="an alias is moved on the serving machine only where it was moved here first, by its verdict",
            fix=f"`graft release promote {release.id[:12]} --alias {full}`, then push it",
            where="--alias",
        )
    return push_over_ssh(
        open_store(work),
        release.id,
        target=parse_target(target),
        alias=full,
        tell=tell_bytes(work.reporter),
    )


def push_to_mlflow_registry(work: OpenProject, name: str, *, registered: str) -> InMlflow:
    """With the aliases that point at the release here."""
    release = find_release(work.releases, name)
    aliases = work.releases.entry(release.id).aliases
    return push_to_mlflow(open_store(work), release.id, name=registered, aliases=aliases)


def push_to_trackio_project(work: OpenProject, name: str, *, project: str) -> InTrackio:
    release = find_release(work.releases, name)
    return push_to_trackio(open_store(work), release.id, project=project)


def _address(work: OpenProject, url: str | None) -> str:
    found = url or getattr(work.settings.release, "store", None)
    if not found:
        raise UserMistake(
            "it is not said where the other store is",
            why="neither the command nor graft.yaml names one",
            fix="give --to or --from with a URL, or set release.store: s3://bucket/folder",
            where="release.store",
        )
    return str(found)
