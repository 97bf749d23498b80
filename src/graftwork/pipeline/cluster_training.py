"""One training run on several machines that Ray or Slurm gives: torchrun as on machines started by hand.

In: a project in a folder that all nodes share, and its engine. Out: the run's result in its folder. Every
machine runs `graft train --nodes N --node-rank R`; the first one supervises (`multi_node.py`).
"""

import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

from graftwork.fleet.settings import RaySettings, SlurmSettings
from graftwork.pipeline.engines import FOLDER, ray_variables
from graftwork.pipeline.reporter import Reporter
from graftwork.process.cluster.pieces import code_stamp
from graftwork.process.cluster.ray_gang import LOST, machine_log
from graftwork.process.cluster.ray_tasks import require_ray, to_error
from graftwork.project.load import ProjectFolder
from graftwork.records.errors import EnvironmentLacks, WorkerFailed
from graftwork.train.distributed.launch import DEFAULT_PORT, parse_address

POLL_SECONDS = 2.0
GANG = "graftwork.process.cluster.ray_gang"


def train_on_cluster(project: ProjectFolder, *, nodes: int, model: str | None, reporter: Reporter) -> None:
    """Run this project's training on `nodes` machines of its engine, to its end."""
    folder = project.state / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    engine = project.settings.engine
    log = f"{folder}/machine-*.log" if engine == "ray" else f"{folder}/machines.log"
    reporter.info(f"asking {engine} for {nodes} machines; output: {log}")
    if engine == "ray":
        _on_ray(project, nodes=nodes, model=model, folder=folder)
    else:
        _on_slurm(project, nodes=nodes, model=model, folder=folder)


def machine_command(
    project: ProjectFolder, *, nodes: int, model: str | None, rank: str, host: str
) -> list[str]:
    """What one machine runs."""
    address = project.settings.train.run.main_address
    port = parse_address(address)[1] if address else DEFAULT_PORT
    words = [sys.executable, "-m", "graftwork.cli.main", "train", "--nodes", str(nodes), "--node-rank", rank]
    words += ["--main-address", f"{host}:{port}", "--project", str(project.root.resolve())]
    return [*words, *(["--model", model] if model else [])]


def _on_ray(project: ProjectFolder, *, nodes: int, model: str | None, folder: Path) -> None:
    require_ray()
    settings = project.settings.fleet.ray or RaySettings()
    order = {
        "address": settings.address,
        "stamp": code_stamp(),
        "folder": str(folder.resolve()),
        "machines": nodes,
        "cpus": settings.cpus,
        "gpus": settings.gpus,
        "command": machine_command(project, nodes=nodes, model=model, rank="{rank}", host="{host}"),
    }
    with (folder / "machines.log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", GANG, json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **ray_variables(settings)},
        )
        try:
            assert child.stdout is not None
            events = [json.loads(line) for line in child.stdout]
            code = child.wait()
        finally:
            child.kill()
            child.wait()
    for event in events:
        if "lost" in event:
            fix = "start the cluster, or more nodes; or ask for fewer machines"
            raise EnvironmentLacks(event["lost"], fix=fix, where="fleet.ray.address")
        if "error" in event:
            raise to_error(event)
    # The first one that failed; the others were ended for it.
    failed = next(({event["rank"]: event["code"]} for event in events if event["code"]), {})
    if code or failed or len(events) < nodes:
        where = machine_log(folder, next(iter(failed))) if failed else folder / "machines.log"
        raise _failed("ray", failed, where)


def _on_slurm(project: ProjectFolder, *, nodes: int, model: str | None, folder: Path) -> None:
    settings = project.settings.fleet.slurm or SlurmSettings()
    code_file = folder / "machines.code"
    code_file.unlink(missing_ok=True)
    words = machine_command(project, nodes=nodes, model=model, rank="@RANK@", host="@HOST@")
    inner = shlex.join(words).replace("@RANK@", '"$SLURM_NODEID"').replace("@HOST@", '"$GRAFT_MAIN_HOST"')
    script = (
        '#!/bin/sh\nexport GRAFT_MAIN_HOST="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"\n'
        f"srun --ntasks-per-node=1 --kill-on-bad-exit=1 sh -c {shlex.quote(f'exec {inner}')}\n"
        f"echo $? > {shlex.quote(str(code_file))}\n"
    )
    options = [f"--nodes={nodes}", "--ntasks-per-node=1", "--job-name=graft-train", "--requeue"]
    options += [f"--output={folder}/machines.log", "--open-mode=append", "--export=ALL"]
    options += [f"--partition={settings.partition}"] if settings.partition else []
    options += [f"--gres=gpu:{settings.gpus}"] if settings.gpus else []
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *options, *settings.options],
            input=script,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise EnvironmentLacks(
            "there is no sbatch on this machine", why=str(error.strerror), fix="run it on a login node"
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
        raise EnvironmentLacks(f"Slurm refuses the job: {last}", fix="check fleet.slurm", where="fleet.slurm")
    number = done.stdout.strip().partition(";")[0]
    try:
        _wait_for_slurm(number)
    except KeyboardInterrupt:
        subprocess.run(["scancel", number], check=False, capture_output=True)
        raise
    code = code_file.read_text().strip() if code_file.exists() else ""
    if code != "0":
        raise _failed("slurm", {0: int(code)} if code else {}, folder / "machines.log")


def _wait_for_slurm(number: str) -> None:
    """Until the job has left the queue."""
    pause = threading.Event()
    while True:
        asked = subprocess.run(
            ["squeue", "-h", "-j", number, "-o", "%T"], capture_output=True, text=True, check=False
        )
        unknown = asked.returncode and "nvalid job id" in asked.stderr
        if unknown or (not asked.returncode and not asked.stdout.strip()):
            return
        pause.wait(POLL_SECONDS)


def _failed(engine: str, failed: dict[int, int], log: Path) -> WorkerFailed:
    named = ", ".join(
        f"machine {rank} was lost" if code == LOST else f"machine {rank} ended with {code}"
        for rank, code in sorted(failed.items())
    )
    return WorkerFailed(
        f"the training on machines of {engine} did not finish" + (f": {named}" if named else ""),
        why="what was saved is kept",
        fix="look at the output; the same command resumes from the last checkpoint",
        where=str(log),
    )
