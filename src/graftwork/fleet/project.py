"""The places that a project can use, by name, what each offers now, and the engine that maps work over Ray.

Input: an open project with its `fleet` settings. Output: places; which of them answer, with GPUs and prices;
the `MapEngine` that `engine:` of graft.yaml names. A place's name is `local`, `ssh` or `ssh:HOST`, `manual`,
`slurm`, `ray`, a provider such as `runpod`, or a place of an installed package.
"""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

from graftwork.evaluate.ask.shards import ENGINE_VARIABLE
from graftwork.fleet.control import Controller, Safety
from graftwork.fleet.place import Place
from graftwork.fleet.places import CLOUDS
from graftwork.fleet.places.hosts import local_place, ssh_place
from graftwork.fleet.places.manual import ManualPlace
from graftwork.fleet.places.ray import RayPlace, RaySettings
from graftwork.fleet.places.slurm import SlurmPlace, SlurmSettings
from graftwork.fleet.settings import FleetSettings
from graftwork.plan.catalog.prices import list_offers
from graftwork.process.extensions import extension_names, load_extension
from graftwork.process.pieces import MapEngine
from graftwork.process.ray_cluster import RayTasks, ray_environment
from graftwork.project.open_project import OpenProject
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, UserError
from graftwork.records.hardware import Offer

REQUIRED = ("name", "paid", "offer", "submit", "poll", "log", "fetch", "stop", "list")
BUILT_IN = ("local", "ssh", "manual", "slurm", "ray", *CLOUDS)


class PlaceFacts(Record):
    """A place as it is now."""

    name: str
    reachable: bool
    paid: bool = False
    offers: tuple[Offer, ...] = ()
    open_jobs: int = 0
    note: str = ""
    """Why it does not answer."""
    fix: str = ""


class FleetPlaces(Record):
    places: tuple[PlaceFacts, ...]
    unconfigured: tuple[str, ...] = ()
    """Places that graft.yaml does not name."""


def open_place(work: OpenProject, name: str) -> Place:
    """Return the place of this name, as the project configures it."""
    kind, _, detail = name.partition(":")
    folder, settings = work.project.state / "fleet", work.settings.fleet
    if kind == "local":
        return local_place(folder / "local")
    if kind == "manual":
        return ManualPlace(folder / "manual")
    if kind == "ssh":
        if detail and detail not in settings.hosts:
            raise UserError(
                f"there is no host {detail!r} in this project",
                why=f"graft.yaml names: {', '.join(settings.hosts) or 'none'}",
                fix="use one of these, or add it under fleet.hosts",
                where="--place",
            )
        hosts = {detail: settings.hosts[detail]} if detail else settings.hosts
        return ssh_place(hosts)
    if kind in ("slurm", "ray"):
        slurm, ray = settings.slurm or SlurmSettings(), settings.ray or RaySettings()
        return SlurmPlace(slurm) if kind == "slurm" else RayPlace(ray)
    if kind in CLOUDS:
        return _open_cloud(kind, settings, state=folder / kind)
    if name not in (added := extension_names("graftwork.places")):
        raise UserError(
            f"there is no place {name!r}",
            why=f"the places are {', '.join((*BUILT_IN, *added))}",
            fix="use one of these; an installed package may add more",
            where="--place",
        )
    place_class = load_extension("graftwork.places", name, attributes=REQUIRED)
    return cast("Place", place_class())


def catalog_name(kind: str) -> str:
    """Name of this place in the catalog of prices."""
    return "own" if kind in ("local", "manual") else (CLOUDS[kind].catalog if kind in CLOUDS else "") or kind


def _cloud_settings(kind: str, settings: FleetSettings) -> Record | None:
    """The section of a provider; None: it is not configured."""
    section: Record | None = getattr(settings, CLOUDS[kind].section or kind)
    return section


def _open_cloud(kind: str, settings: FleetSettings, *, state: Path) -> Place:
    cloud, section = CLOUDS[kind], _cloud_settings(kind, settings)
    if section is None:
        name = cloud.section or kind
        raise UserError(
            f"the place {kind} is not configured",
            fix=f"add `fleet: {{{name}: {cloud.example}}}` to graft.yaml; docs/places/{kind}.md has the rest",
            where=f"fleet.{name}",
        )
    prices = (offer for offer in list_offers() if offer.place == catalog_name(kind))
    return cloud.open(section, state=state, prices=prices)


def control(work: OpenProject, name: str) -> Controller:
    """The controller of a place with the times of the settings."""
    return Controller(open_place(work, name), work.jobs, safety_of(work))


def safety_of(work: OpenProject) -> Safety:
    settings = work.settings.fleet
    return Safety(boot_seconds=settings.boot_minutes * 60, reconcile_seconds=settings.reconcile_minutes * 60)


def place_names(work: OpenProject) -> tuple[str, ...]:
    """The places that are configured, and those of installed packages."""
    settings = work.settings.fleet
    configured = {"ssh": bool(settings.hosts)}
    configured |= {"slurm": settings.slurm is not None, "ray": settings.ray is not None}
    configured |= {name: _cloud_settings(name, settings) is not None for name in CLOUDS}
    names = (name for name in BUILT_IN if configured.get(name, True))
    return (*names, *extension_names("graftwork.places"))


def list_places(work: OpenProject, *, only: str = "") -> FleetPlaces:
    """Ask every place; one that does not answer is listed with the reason."""
    jobs = [job for job in work.jobs.list() if job.is_open]
    if only:
        # A wrong name is a mistake; a place that does not answer is a fact.
        open_place(work, only)
    names = (only,) if only else place_names(work)
    return FleetPlaces(
        places=tuple(_facts(work, name, sum(job.place == name for job in jobs)) for name in names),
        unconfigured=tuple(name for name in BUILT_IN if name not in place_names(work)) if not only else (),
    )


def _facts(work: OpenProject, name: str, open_jobs: int) -> PlaceFacts:
    try:
        place = open_place(work, name)
        offers = place.offer()
    except GraftError as error:
        return PlaceFacts(name=name, reachable=False, open_jobs=open_jobs, note=error.what, fix=error.fix)
    return PlaceFacts(name=name, reachable=True, paid=place.paid, offers=offers, open_jobs=open_jobs)


FOLDER = "engine"
"""In the state folder of the project, which all nodes share."""


def map_engine(work: OpenProject) -> MapEngine:
    """The engine of this project for maps over pieces."""
    return MapEngine(
        piece_runner(work), folder=(work.project.state / FOLDER).absolute(), say=work.reporter.info
    )


def piece_runner(work: OpenProject) -> RayTasks | None:
    """The cluster that works on pieces; None: this machine."""
    if work.project.settings.engine == "ray":
        ray = work.project.settings.fleet.ray or RaySettings()
        return RayTasks(ray.address, ray_variables(ray))
    return None


def shard_runner(work: OpenProject) -> RayTasks | None:
    """The cluster that answers shards of an evaluation, each with the cores and GPUs of a job."""
    runner, ray = piece_runner(work), work.project.settings.fleet.ray or RaySettings()
    return replace(runner, cpus=ray.cpus, gpus=ray.gpus) if runner is not None else None


def shard_environment(work: OpenProject) -> dict[str, str]:
    """Environment that an evaluation worker needs to let nodes answer its shards; empty: this machine
    answers.
    """
    runner = shard_runner(work)
    if runner is None:
        return {}
    arguments = {field.name: getattr(runner, field.name) for field in fields(runner) if field.init}
    return {ENGINE_VARIABLE: json.dumps(arguments)}


def ray_variables(ray: RaySettings) -> dict[str, str]:
    """The environment of processes that talk to this cluster."""
    token = str(Path(ray.token).expanduser()) if ray.token else ""
    return ray_environment(token=token, open_cluster=ray.authentication == "none")
