"""One run on several processes and machines: who starts what, and how the others learn of it.

The first machine plans, supervises and calls; every further one waits for the call in the shared
project folder and answers each with its part. A crash anywhere ends the part of all; the first
machine's supervisor then calls again, and all machines resume from the last checkpoint. Machines are started
manually, or Ray or Slurm provides them: then every one runs `graft train --nodes N --node-rank R`.
"""

import json
import os
import shlex
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path

from graftwork.files.disk import write_atomic
from graftwork.fleet.places.ray import RaySettings
from graftwork.fleet.places.slurm import SlurmSettings
from graftwork.fleet.project import FOLDER, ray_variables
from graftwork.process.local_workers import LocalWorkers, WorkerHost
from graftwork.process.pieces import code_stamp
from graftwork.process.ray_cluster import DRIVER, LOST, machine_log, require_ray, to_error
from graftwork.process.worker import interruption_error
from graftwork.project.folder import ProjectFolder
from graftwork.project.open_project import OpenProject
from graftwork.project.reporter import Reporter
from graftwork.project.settings import ProjectSettings
from graftwork.project.supervise import JOB_FILE, POLL_SECONDS, STOP_SECONDS
from graftwork.records.base import Record
from graftwork.records.errors import EnvironmentFailure, UserError, WorkerFailed
from graftwork.records.fleet import Job, JobStatus
from graftwork.train.distributed.launch import (
    DEFAULT_PORT,
    LAUNCHER,
    NodeGroup,
    parse_address,
    torchrun_arguments,
)
from graftwork.train.settings import TrainSettings

WORKER = "graftwork.train.worker_process"
CALL_FILE = "call.json"
LEAVING_SECONDS = 60.0
"""Time for a finished part to end; one that still works belongs to an obsolete run."""


class Call(Record):
    """The first machine's call to the others: one for each attempt. `over`: no more will come."""

    id: str
    job_file: str
    processes: int
    nodes: int
    over: bool = False


@dataclass(frozen=True)
class Launch:
    """How the worker of a run is started on the first machine."""

    module: str
    arguments: tuple[str, ...]
    asked: Call | None
    file: Path

    def call(self) -> None:
        """Notify the other machines that an attempt begins."""
        self._write(over=False)

    def over(self) -> None:
        """Release the other machines."""
        self._write(over=True)

    def _write(self, *, over: bool) -> None:
        if self.asked is not None:
            call = self.asked.model_copy(update={"id": uuid.uuid4().hex, "over": over})
            write_atomic(self.file, call.to_json())


def launch_of(work: OpenProject, folder: Path) -> Launch:
    """The worker itself, or torchrun around it if several processes share the work."""
    settings, job_file = work.settings.train, str(folder / JOB_FILE)
    nodes, file = settings.run.nodes, work.project.state / CALL_FILE
    if settings.strategy == "single":
        require_strategy(settings)
        return Launch(WORKER, (), None, file)
    arguments = torchrun_arguments(
        processes=settings.processes, machines=machines_of(settings), module=WORKER, job_file=job_file
    )
    call = Call(id="", job_file=job_file, processes=settings.processes, nodes=nodes)
    return Launch(LAUNCHER, arguments, call if nodes > 1 else None, file)


def require_strategy(settings: TrainSettings) -> None:
    """Refuse several devices for a run that one process trains."""
    if settings.strategy == "single" and (settings.processes > 1 or settings.run.nodes > 1):
        raise UserError(
            "`train.strategy: single` cannot use several processes",
            why=f"{settings.processes} process(es) on {settings.run.nodes} machine(s) are requested",
            fix="set `train.strategy: ddp`, or `fsdp` where one device is too small for the model",
        )


def machines_of(settings: TrainSettings, *, rank: int = 0) -> NodeGroup:
    nodes = settings.run.nodes
    if nodes == 1:
        return NodeGroup()
    if settings.run.main_address is None:
        raise UserError(
            "several machines need to know where the first of them is",
            fix="graft train --nodes N --main-address HOST:PORT --node-rank R",
        )
    host, port = parse_address(settings.run.main_address)
    return NodeGroup(count=nodes, rank=rank, address=host, port=port)


def with_machines(settings: ProjectSettings, *, nodes: int, main_address: str | None) -> ProjectSettings:
    """The settings with the machines that the command line names."""
    run = settings.train.run
    address = main_address or run.main_address
    run = run.model_copy(update={"nodes": nodes, "main_address": address})
    return settings.model_copy(update={"train": settings.train.model_copy(update={"run": run})})


def machine_commands(project: ProjectFolder, *, model: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The exact command for every machine, in order, and what they must have in common."""
    settings = project.settings.of_model(model or project.settings.main_model).train
    require_strategy(settings)
    nodes, address = settings.run.nodes, settings.run.main_address or f"MACHINE_0:{DEFAULT_PORT}"
    parse_address(address)
    model_option = ["--model", model] if model else []
    commands = tuple(
        shlex.join(
            [
                *("graft", "train", "--nodes", str(nodes), "--node-rank", str(rank)),
                *("--main-address", address, "--project", str(project.root.resolve()), *model_option),
            ]
        )
        for rank in range(nodes)
    )
    notes = (
        f"{nodes} machines with {settings.processes} process(es) each ({settings.strategy}).",
        "Every machine needs this project under the same path (a shared file system), the base model "
        "under the same path, and the same versions of graftwork and torch.",
        f"Port {parse_address(address)[1]} of machine 0 must be open to the others, and all ports between "
        "them. Where a machine has several networks, name the one to use on each before it starts: "
        "export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0",
    )
    return commands, notes


def answer_calls(project: ProjectFolder, settings: TrainSettings, *, rank: int, reporter: Reporter) -> None:
    """Work as machine number `rank`, attempt after attempt, until the first machine says it is over."""
    machines, file = machines_of(settings, rank=rank), project.state / CALL_FILE
    workers, folder = LocalWorkers(), project.state / "machines" / str(rank)
    # A call that is already over belongs to an earlier run; one that is not may be ours.
    earlier = _read(file)
    answered = earlier.id if earlier is not None and earlier.over else None
    reporter.info(f"machine {rank} of {machines.count} waits for the first one to call ({file})")
    try:
        while True:
            call = _read(file)
            if call is None or call.id == answered:
                threading.Event().wait(POLL_SECONDS)
                continue
            if call.over:
                return
            answered = call.id
            reporter.info(f"machine {rank} joins {Path(call.job_file).parent.name}")
            code = _answer(call, machines, folder, file, workers=workers)
            reporter.info(f"the part of machine {rank} ended with exit code {code}")
    except KeyboardInterrupt as interrupt:
        raise interruption_error() from interrupt


def _answer(call: Call, machines: NodeGroup, folder: Path, file: Path, *, workers: WorkerHost) -> int:
    """Start this machine's part and watch it; a newer call means that the first machine restarted."""
    if call.nodes != machines.count:
        raise UserError(
            f"the first machine expects {call.nodes} machines, not {machines.count}",
            fix=f"start this one with --nodes {call.nodes}",
        )
    if not Path(call.job_file).exists():
        raise EnvironmentFailure(
            "the job of the first machine is not here",
            why="the project's folder must be shared, under the same path on every machine",
            fix="mount it there, and run the same command again",
            where=call.job_file,
        )
    arguments = torchrun_arguments(
        processes=call.processes, machines=machines, module=WORKER, job_file=call.job_file
    )
    job = Job(module=LAUNCHER, job_file=call.job_file, folder=str(folder), arguments=arguments)
    job_id = workers.submit(job)
    try:
        while (status := workers.poll(job_id, seconds=POLL_SECONDS)).running:
            latest = _read(file)
            if latest is not None and latest.over:
                # The first machine has ended, and mostly so has our part, which then exits by itself: stopped
                # at that moment it would report a signal after a good run.
                status = workers.poll(job_id, seconds=LEAVING_SECONDS)
                return _stop(workers, job_id) if status.running else _exit_code(status)
            if latest is not None and latest.id != call.id:
                workers.stop(job_id, at_once=True)
        return _exit_code(status)
    finally:
        if workers.poll(job_id).running:
            _stop(workers, job_id)


def _stop(workers: WorkerHost, job_id: str) -> int:
    """Ask the part to stop at its next safe point; end it if it does not."""
    workers.stop(job_id)
    if workers.poll(job_id, seconds=STOP_SECONDS).running:
        workers.stop(job_id, at_once=True)
    return _exit_code(workers.poll(job_id))


def _exit_code(status: JobStatus) -> int:
    return status.exit_code if status.exit_code is not None else 0


def _read(file: Path) -> Call | None:
    return Call.from_json(file.read_bytes()) if file.exists() else None


QUEUE_SECONDS = 2.0


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
    command = [
        sys.executable,
        "-m",
        "graftwork.cli.main",
        "train",
        "--nodes",
        str(nodes),
        "--node-rank",
        rank,
    ]
    command += ["--main-address", f"{host}:{port}", "--project", str(project.root.resolve())]
    return [*command, *(["--model", model] if model else [])]


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
            [sys.executable, "-m", DRIVER, json.dumps(order)],
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
            raise EnvironmentFailure(event["lost"], fix=fix, where="fleet.ray.address")
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
    command = machine_command(project, nodes=nodes, model=model, rank="@RANK@", host="@HOST@")
    inner = shlex.join(command).replace("@RANK@", '"$SLURM_NODEID"').replace("@HOST@", '"$GRAFT_MAIN_HOST"')
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
        raise EnvironmentFailure(
            "there is no sbatch on this machine", why=str(error.strerror), fix="run it on a login node"
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
        raise EnvironmentFailure(
            f"Slurm rejected the job: {last}", fix="check fleet.slurm", where="fleet.slurm"
        )
    number = done.stdout.strip().partition(";")[0]
    pause = threading.Event()
    try:
        while True:
            # Until the job has left the queue.
            squeue = subprocess.run(
                ["squeue", "-h", "-j", number, "-o", "%T"], capture_output=True, text=True, check=False
            )
            unknown = squeue.returncode and "nvalid job id" in squeue.stderr
            if unknown or (not squeue.returncode and not squeue.stdout.strip()):
                break
            pause.wait(QUEUE_SECONDS)
    except KeyboardInterrupt:
        subprocess.run(["scancel", number], check=False, capture_output=True)
        raise
    code = code_file.read_text().strip() if code_file.exists() else ""
    if code != "0":
        raise _failed("slurm", {0: int(code)} if code else {}, folder / "machines.log")


def _failed(engine: str, failed: dict[int, int], log: Path) -> WorkerFailed:
    failures = ", ".join(
        f"machine {rank} was lost" if code == LOST else f"machine {rank} ended with {code}"
        for rank, code in sorted(failed.items())
    )
    return WorkerFailed(
        f"the training on machines of {engine} did not finish" + (f": {failures}" if failures else ""),
        why="what was saved is kept",
        fix="check the output; the same command resumes from the last checkpoint",
        where=str(log),
    )
