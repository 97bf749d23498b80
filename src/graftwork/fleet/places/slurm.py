"""A Slurm cluster as a place, by `sbatch`, `squeue` and `scancel` on this machine; works without accounting.

Input: an order. Output: a batch job whose name is the job's label, in a folder that all nodes share. Its
state comes from the queue; once it has left the queue, from the files that it wrote. A job whose node dies is
queued again by Slurm and continues from its checkpoint.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from datetime import date

from pydantic import Field

from graftwork.files.disk import write_atomic
from graftwork.fleet.place import LABEL, PlaceUnreachable, Refused
from graftwork.fleet.places.hosts import SharedFolderPlace
from graftwork.records.base import Record
from graftwork.records.fleet import JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

NOTICE_SECONDS = 120
"""Slurm sends TERM this long before the time limit."""
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESV_DEL_HOLD")
COMMAND_SECONDS = 60.0
UNTYPED = "gpu"
"""A GPU whose kind the cluster does not name."""
SCRIPT = "job.sh"


class SlurmSettings(Record):
    """A Slurm cluster whose commands are on this machine."""

    folder: str = Field("~/.graftwork", description="Where jobs are kept; must be visible to all nodes.")
    partition: str = Field("", description="The partition; empty: the default one.")
    gpus: int = Field(0, ge=0, description="GPUs per job (--gres=gpu:N); 0: one if --gpu names it.")
    options: tuple[str, ...] = Field((), description="More options for sbatch, such as --account=NAME.")
    python: str = Field("", description="Python 3.11 or later on the nodes. Default: this one.")


class SlurmPlace(SharedFolderPlace):
    name = "slurm"

    def __init__(self, settings: SlurmSettings) -> None:
        super().__init__(settings.folder)
        self._settings = settings

    def offer(self) -> tuple[Offer, ...]:
        """The nodes of each partition with their GPUs. A job gets a GPU if settings or order ask for one."""
        partition = ("-p", self._settings.partition) if self._settings.partition else ()
        lines = _run("sinfo", "-h", "-o", "%P %D %G", *partition).splitlines()
        today = date.today().isoformat()
        return tuple(
            Offer(
                place=self.name,
                gpu=kind,
                gpus=count,
                usd_per_hour=0.0,
                instance=f"{name.rstrip('*')}, {nodes} nodes",
                source="sinfo",
                dated=today,
            )
            for name, nodes, resources in (line.split(maxsplit=2) for line in lines)
            for gpus in (gpus_of(resources),)
            # With which GPUs a node can be had, the default first.
            for kind, count in (gpus if gpus and self._settings.gpus else {"": 0, **gpus}).items()
        )

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        if self._queue(order.label):
            return self._placed(order.label)
        if not self.lay_out(order):
            return self._placed(order.label)
        script = self.job_folder(order.label) / SCRIPT
        command = shlex.join(self.bootstrap(order, self._settings.python))
        # The batch process itself: it gets the signals of the queue.
        write_atomic(script, f"#!/bin/sh\nexport GRAFT_FLEET_JOB={order.label}\nexec {command}\n")
        arguments = [*self._options(order), f"--export={','.join(['ALL', *secrets])}", str(script)]
        # Names in the arguments, values in the environment, which Slurm gives to the job.
        _run("sbatch", *arguments, environment=secrets)
        return self._placed(order.label)

    def poll(self, job: PlacedJob) -> JobPoll:
        queued = self._queue(job.label)
        if any(state in WAITING for state in queued):
            return JobPoll(phase="starting", message="waiting in the queue")
        return self.status(job.label, queued=bool(queued))

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        if not self._queue(job.label):
            return
        if at_once:
            _run("scancel", "--signal=KILL", "--full", f"--name={job.label}")
            _run("scancel", f"--name={job.label}")
        elif any(state in WAITING for state in self._queue(job.label)):
            _run("scancel", f"--name={job.label}")
        else:
            _run("scancel", "--signal=TERM", "--batch", f"--name={job.label}")

    def list(self) -> tuple[PlacedJob, ...]:
        names = _run("squeue", "-h", "--me", "-o", "%j").split()
        return tuple(self._placed(name) for name in sorted(set(names)) if LABEL.fullmatch(name))

    def _queue(self, label: str) -> tuple[str, ...]:
        """The states of the jobs of this name in the queue."""
        return tuple(_run("squeue", "-h", "--me", "-n", label, "-o", "%T").split())

    def _placed(self, label: str) -> PlacedJob:
        return PlacedJob(place=self.name, id=label, label=label)

    def _options(self, order: JobOrder) -> tuple[str, ...]:
        settings = self._settings
        gpus = settings.gpus or (1 if order.gpu else 0)
        kind = f"{order.gpu}:" if order.gpu not in ("", UNTYPED) else ""
        minutes = max(int(order.seconds / 60) + 3, 5)
        return (
            f"--job-name={order.label}",
            f"--time={minutes}",
            "--requeue",
            f"--signal=B:TERM@{NOTICE_SECONDS}",
            "--open-mode=append",
            f"--output={self.job_folder(order.label) / 'job.log'}",
            f"--chdir={self.job_folder(order.label)}",
            *([f"--partition={settings.partition}"] if settings.partition else []),
            *([f"--gres=gpu:{kind}{gpus}"] if gpus else []),
            *settings.options,
        )


def gpus_of(resources: str) -> dict[str, int]:
    """How many GPUs of each kind a node has: `gpu:a100:4(S:0-1),gpu:t4:2,shard:8`, `gpu:4` or `(null)`."""
    counts: dict[str, int] = {}
    for entry in re.sub(r"\([^)]*\)", "", resources).split(","):
        name, *details = entry.strip().split(":")
        count = int(details.pop()) if details and details[-1].isdigit() else 1
        if name == "gpu":
            kind = details[0] if details else UNTYPED
            counts[kind] = counts.get(kind, 0) + count
    return counts


def _run(*words: str, environment: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
            env={**os.environ, **(environment or {})},
        )
    except OSError as error:
        raise Refused(
            f"there is no {words[0]} on this machine",
            why=str(error.strerror),
            fix="run it on a login node of the cluster",
        ) from error
    except subprocess.TimeoutExpired:
        raise PlaceUnreachable(f"{words[0]} is not responding", fix="try again later") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
        if words[0] == "sbatch" and "ontact" not in last:
            fix = "check partition, gpus, python and options"
            if "QOS" in last or "limit" in last.lower():
                fix = "wait until other jobs have ended, or ask for more; `sacctmgr show assoc` lists limits"
            raise Refused(f"Slurm rejected the job: {last}", fix=fix, where="fleet.slurm")
        raise PlaceUnreachable(
            f"{words[0]} failed: {last}",
            fix="make `sinfo` work on this machine; SLURM_CONF names the configuration of the cluster",
            where="fleet.slurm",
        )
    return done.stdout
