"""The engine that `engine:` of graft.yaml names, made from the settings of the fleet.

In: an open project. Out: a `MapEngine`: this machine, or tasks of a Ray cluster.
"""

import json
from dataclasses import fields, replace
from pathlib import Path

from graftwork.evaluate.ask.shards import ENGINE_VARIABLE
from graftwork.fleet.settings import RaySettings
from graftwork.process.cluster.pieces import MapEngine
from graftwork.process.cluster.ray_tasks import RayTasks, ray_environment
from graftwork.project.open_project import OpenProject

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
    """What an evaluation worker needs to let nodes answer its shards; empty: this machine does."""
    runner = shard_runner(work)
    if runner is None:
        return {}
    arguments = {field.name: getattr(runner, field.name) for field in fields(runner) if field.init}
    return {ENGINE_VARIABLE: json.dumps(arguments)}


def ray_variables(ray: RaySettings) -> dict[str, str]:
    """The environment of processes that talk to this cluster."""
    token = str(Path(ray.token).expanduser()) if ray.token else ""
    return ray_environment(token=token, open_cluster=ray.authentication == "none")
