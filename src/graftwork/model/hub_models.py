"""Base models of the Hub on this machine: fetch them, list them, remove them.

In: names, and the project whose pins they are. Out: records for the commands. A project keeps the commit
that it began with; only `pull --update` moves it.
"""

from pathlib import Path

from graftwork.model.base import EMBEDDED, hub_place, models_folder
from graftwork.model.hub import (
    HubName,
    HubPlace,
    fetch,
    find_pin,
    list_local,
    parse_hub_name,
    pin,
    remove_local,
    resolve,
)
from graftwork.records.base import Record
from graftwork.records.errors import UserMistake


class PulledModel(Record):
    """A model that was fetched. `moved_to` is the commit that its revision is now, if the project stays on
    another one.
    """

    name: str
    commit: str
    folder: str
    size_bytes: int
    files: int
    moved_to: str | None = None


class LocalModel(Record):
    """A base model on this machine. `pinned`: the project that asks uses this commit."""

    name: str
    commit: str | None
    size_bytes: int
    has_weights: bool
    pinned: bool = False
    folder: str


class LocalModels(Record):
    models: tuple[LocalModel, ...]


class RemovedModels(Record):
    removed: tuple[str, ...]
    freed_bytes: int


def pull_model(
    name: str, *, project_folder: Path, place: HubPlace, update: bool = False, weights: bool = True
) -> PulledModel:
    """Fetch a model at the commit that the project uses, or at the one that its revision is now."""
    hub_name = _require_hub_name(name)
    pinned = find_pin(hub_name, project_folder)
    moved_to = None
    if pinned is None or update:
        commit = resolve(hub_name, place)
    else:
        commit = pinned
        if hub_name.revision != commit:
            now = resolve(hub_name, place)
            moved_to = now if now != commit else None
    if pinned is None:
        # Before the download, so that the next command continues with the same commit.
        pin(hub_name, commit, project_folder)
    model = fetch(hub_name, commit, place, weights=weights)
    if update:
        pin(hub_name, commit, project_folder)
    return PulledModel(
        name=str(hub_name),
        commit=commit,
        folder=model.folder,
        size_bytes=model.size,
        files=len(model.files),
        moved_to=moved_to,
    )


def list_models(*, project_folder: Path, bases: tuple[str, ...] = ()) -> LocalModels:
    """List what is on this machine; `bases` are the names that the project uses."""
    names = [hub for name in bases if (hub := parse_hub_name(name)) is not None]
    pins = {(name.repository, find_pin(name, project_folder)) for name in names}
    found = [
        LocalModel(
            name=model.repository,
            commit=model.commit,
            size_bytes=sum(
                file.size for name, file in model.files.items() if (Path(model.folder) / name).exists()
            ),
            has_weights=model.has_weights,
            pinned=(model.repository, model.commit) in pins,
            folder=model.folder,
        )
        for model in list_local(hub_place())
    ]
    embedded = models_folder() / EMBEDDED
    if (embedded / "config.json").exists():
        found.insert(
            0,
            LocalModel(
                name=EMBEDDED,
                commit=None,
                size_bytes=sum(path.stat().st_size for path in embedded.iterdir() if path.is_file()),
                has_weights=True,
                pinned=EMBEDDED in bases,
                folder=str(embedded),
            ),
        )
    return LocalModels(models=tuple(found))


def remove_model(name: str) -> RemovedModels:
    """Remove a model: one commit if it is named, else all of them."""
    hub_name = _require_hub_name(name)
    chosen = [
        model
        for model in list_local(hub_place())
        if model.repository == hub_name.repository
        and (hub_name.revision is None or model.commit.startswith(hub_name.revision))
    ]
    if not chosen:
        raise UserMistake(
            f"{name} is not on this machine", fix="`graft model list` shows the models that are"
        )
    freed = sum(remove_local(model) for model in chosen)
    return RemovedModels(removed=tuple(model.name for model in chosen), freed_bytes=freed)


def _require_hub_name(name: str) -> HubName:
    hub_name = parse_hub_name(name)
    if hub_name is None:
        raise UserMistake(
            f"{name!r} is no name on the Hub", fix="write it like Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION"
        )
    return hub_name
