"""The engine that `engine:` of graft.yaml names, made from the settings of the fleet.

In: an open project. Out: a `MapEngine`: this machine, tasks of a Ray cluster, or a Slurm array.
"""

import json
from dataclasses import fields, replace
from pathlib import Path

from graftwork.evaluate.ask.cluster_shards import ENGINE_VARIABLE
from graftwork.fleet.settings import RaySettings, SlurmSettings
from graftwork.pipeline.open_project import OpenProject
from graftwork.process.cluster.engine import MapEngine
from graftwork.process.cluster.ray_tasks import RayTasks, ray_environment
from graftwork.process.cluster.slurm_array import SlurmArray

FOLDER = "engine"
"""In the state folder of the project, which all nodes share."""


def map_engine(work: OpenProject) -> MapEngine:
    """The engine of this project for maps over pieces."""
    return MapEngine(
        piece_runner(work), folder=(work.project.state / FOLDER).absolute(), say=work.reporter.info
    )


def piece_runner(work: OpenProject) -> RayTasks | SlurmArray | None:
    """The cluster that works on pieces; None: this machine."""
    fleet = work.project.settings.fleet
    if work.project.settings.engine == "ray":
        ray = fleet.ray or RaySettings()
        return RayTasks(ray.address, ray_variables(ray))
    if work.project.settings.engine == "slurm":
        slurm = fleet.slurm or SlurmSettings()
        partition = (f"--partition={slurm.partition}",) if slurm.partition else ()
        return SlurmArray(slurm.tasks, (*partition, *slurm.options), slurm.python)
    return None


def shard_runner(work: OpenProject) -> RayTasks | SlurmArray | None:
    """The cluster that answers shards of an evaluation, each with the cores and cards of a job."""
    runner, fleet = piece_runner(work), work.project.settings.fleet
    if isinstance(runner, RayTasks):
        ray = fleet.ray or RaySettings()
        return replace(runner, cpus=ray.cpus, gpus=ray.gpus)
    if isinstance(runner, SlurmArray) and fleet.slurm is not None and fleet.slurm.gpus:
        return replace(runner, options=(f"--gres=gpu:{fleet.slurm.gpus}", *runner.options))
    return runner


def shard_environment(work: OpenProject) -> dict[str, str]:
    """What an evaluation worker needs to let nodes answer its shards; empty: this machine does."""
    runner = shard_runner(work)
    if runner is None:
        return {}
    order = {field.name: getattr(runner, field.name) for field in fields(runner) if field.init}
    return {ENGINE_VARIABLE: json.dumps({"engine": runner.name, **order})}


def ray_variables(ray: RaySettings) -> dict[str, str]:
    """The environment of processes that talk to this cluster."""
    token = str(Path(ray.token).expanduser()) if ray.token else ""
    return ray_environment(token=token, open_cluster=ray.authentication == "none")
