"""SkyPilot as a place, by its command in an environment of its own. Contract-tested, not live-validated.

Input: an order. Output: a managed job of SkyPilot whose name is the job's label; SkyPilot finds a machine in
any of its clouds, recovers the job after a preemption, and takes the machine down at its end. Bundles and
results go through a bucket that the job mounts. Secrets are those of SkyPilot, passed in the environment of
the command.
"""

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from graftwork.fleet.place import LABEL, PlaceUnreachable, Refused
from graftwork.fleet.places.storage import StoragePlace, UrlStorage, start_command
from graftwork.records.base import NotSecret, Record
from graftwork.records.errors import GraftError
from graftwork.records.fleet import JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

MOUNT = "/graftwork"
DISK_GB = 100
COMMAND_SECONDS = 600
"""SkyPilot starts its own controller machine at the first job."""
WAITING = ("PENDING", "SUBMITTED", "STARTING")
RUNNING = ("RUNNING", "RECOVERING", "CANCELLING")

RunSky = Callable[[Sequence[str], Mapping[str, str]], tuple[int, str, str]]
"""Runs the command with these words and this much more environment: exit code, output, errors."""


class SkyPilotSettings(Record):
    """Managed jobs of SkyPilot, which is installed in an environment of its own."""

    command: Annotated[str, NotSecret("the path of a program")] = Field(
        "sky", description="SkyPilot's command, such as ~/sky/bin/sky."
    )
    bucket: str = Field(
        pattern=r"^(s3|gs|r2|https)://[^/?#@]+",
        description="Bucket that jobs mount, as s3://name; files of jobs are kept in it.",
    )
    local_storage: str = Field("", description="The same bucket as an fsspec URL, if it differs.")
    accelerators: dict[str, float] = Field(
        min_length=1, description="GPUs as SkyPilot names them, and the maximum price per hour."
    )
    infra: str = Field(
        "", description="Where SkyPilot looks, such as aws or gcp/us-central1. Default: all clouds."
    )
    spot: bool = Field(True, description="Use spot machines; SkyPilot recovers a preempted job.")
    image: str = Field("", description="Docker image of the job. Default: SkyPilot's own image.")


class SkyPilotPlace(StoragePlace):
    name = "skypilot"
    example = "{bucket: URL, accelerators: {A10G: 1.5}}"

    def __init__(self, settings: SkyPilotSettings, *, run: RunSky | None = None) -> None:
        self._settings = settings
        self._run = run or self._run_command
        self._storage = UrlStorage(settings.local_storage or settings.bucket, setting="fleet.skypilot.bucket")

    def offer(self) -> tuple[Offer, ...]:
        """The GPUs of the settings at their highest hourly price; SkyPilot looks for a lower one."""
        self._queue(finished=False)
        return tuple(
            Offer(
                place=self.name,
                gpu=gpu,
                usd_per_hour=price,
                source="fleet.skypilot.accelerators, the most that is paid",
                dated=date.today().isoformat(),
            )
            for gpu, price in self._settings.accelerators.items()
        )

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        if order.gpu not in self._settings.accelerators:
            raise Refused(
                f"fleet.skypilot does not list the GPU {order.gpu or 'none'}",
                why=f"it lists: {', '.join(self._settings.accelerators)}",
                fix="use one of these, or add it with the maximum price per hour",
                where="--gpu",
            )
        existing = [row for row in self._queue(finished=True) if row.get("job_name") == order.label]
        if existing:
            return self._placed(existing[0])
        self.ship(order)
        names = [word for name in sorted(secrets) for word in ("--secret", name)]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "task.yaml"
            file.write_text(yaml.safe_dump(self.task_of(order), sort_keys=False))
            self._text(
                *("jobs", "launch", "-n", order.label, "-d", "-y", *names, str(file)), environment=secrets
            )
        rows, why = [], "it may have been made"
        try:
            rows = [row for row in self._queue(finished=True) if row.get("job_name") == order.label]
        except Refused as refused:
            # SkyPilot has taken the job: whatever it says now is not a refusal of it.
            why = refused.what
        if not rows:
            raise PlaceUnreachable(
                "SkyPilot does not show the job yet", why=why, fix="`graft fleet reconcile`"
            )
        return self._placed(rows[0])

    def task_of(self, order: JobOrder) -> dict[str, Any]:
        """The task as SkyPilot reads it from YAML."""
        settings = self._settings
        command = start_command(order.label, order.seconds, root=MOUNT, work="/tmp/work")
        command += ["--out", f"{MOUNT}/jobs/{order.label}/out"]
        resources: dict[str, Any] = {
            "accelerators": f"{order.gpu}:1",
            "use_spot": settings.spot,
            "disk_size": DISK_GB,
            "max_hourly_cost": settings.accelerators[order.gpu],
        }
        if settings.infra:
            resources["infra"] = settings.infra
        if settings.image:
            resources["image_id"] = f"docker:{settings.image}"
        return {
            "name": order.label,
            "resources": resources,
            "file_mounts": {MOUNT: {"source": settings.bucket, "mode": "MOUNT"}},
            "run": shlex.join(command),
        }

    def show(self, job: PlacedJob) -> JobPoll | None:
        row = self._find(job)
        if row is None:
            return None
        status = str(row.get("status", ""))
        if status in (*WAITING, *RUNNING):
            phase = "starting" if status in WAITING else "running"
            return JobPoll(phase=phase, message=status.lower())
        why = str(row.get("failure_reason") or row.get("details") or "")
        code = 75 if status == "CANCELLED" else 1
        return JobPoll(phase="ended", exit_code=code, message=f"SkyPilot: {status.lower()} {why}".strip())

    def log(self, job: PlacedJob) -> str:
        row = self._find(job)
        return self._text("jobs", "logs", "--no-follow", str(row["job_id"])) if row is not None else ""

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        row = self._find(job)
        if row is None or str(row.get("status")) not in (*WAITING, *RUNNING):
            return
        if at_once:
            self._text("jobs", "cancel", "-y", str(row["job_id"]))
        else:
            self.ask_to_stop(job.label)

    def list(self) -> tuple[PlacedJob, ...]:
        rows = self._queue(finished=False)
        return tuple(self._placed(row) for row in rows if LABEL.fullmatch(str(row.get("job_name"))))

    def _find(self, job: PlacedJob) -> dict[str, Any] | None:
        key = "job_name" if job.id == job.label else "job_id"
        rows = self._queue(finished=True)
        return next((row for row in rows if str(row.get(key)) == job.id), None)

    def _queue(self, *, finished: bool) -> Any:
        command = ("jobs", "queue", "-o", "json", *(() if finished else ("--skip-finished",)))
        text = self._text(*command)
        # SkyPilot may write notes before the document.
        start = text.find("[")
        try:
            return json.loads(text[start:]) if start >= 0 else []
        except ValueError:
            raise PlaceUnreachable(
                "SkyPilot wrote something that is not JSON",
                why=text[:200],
                fix="try `sky jobs queue -o json`; fleet.skypilot.command names the command",
            ) from None

    def _placed(self, row: Mapping[str, Any]) -> PlacedJob:
        accelerators = row.get("accelerators") or {}
        gpu = next(iter(accelerators), "")
        return PlacedJob(
            place=self.name,
            id=str(row["job_id"]),
            label=str(row["job_name"]),
            gpu=gpu,
            usd_per_hour=self._settings.accelerators.get(gpu, 0.0),
            created_at=float(row.get("submitted_at") or 0.0),
        )

    def _text(self, *words: str, environment: Mapping[str, str] | None = None) -> str:
        code, output, errors = self._run(words, environment or {})
        if code:
            raise _explain(errors.strip() or output.strip())
        return output

    def _run_command(self, words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str, str]:
        command = str(Path(self._settings.command).expanduser())
        try:
            done = subprocess.run(
                [command, *words],
                capture_output=True,
                text=True,
                check=False,
                timeout=COMMAND_SECONDS,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", **environment},
            )
        except OSError as error:
            raise Refused(
                f"there is no command {command}",
                why=str(error.strerror),
                fix="install SkyPilot in a separate environment; fleet.skypilot.command names its `sky`",
                where="fleet.skypilot.command",
            ) from error
        except subprocess.TimeoutExpired:
            raise PlaceUnreachable(
                "SkyPilot is not responding",
                why="it may still be working on the request",
                fix="`graft fleet reconcile` finds out; `sky status` shows its controller",
            ) from None
        return done.returncode, done.stdout, done.stderr


def _explain(errors: str) -> GraftError:
    text = (errors.splitlines() or ["no output"])[-1][:300]
    if any(part in errors for part in ("ResourcesUnavailable", "No resource satisfying", "quota")):
        return Refused(
            f"SkyPilot finds no machine: {text}",
            why="no enabled cloud has the GPU below that price, or the quota is used up",
            fix="raise the price in fleet.skypilot.accelerators, use another GPU, or run `sky check`",
        )
    if any(part in errors for part in ("No cloud", "credentials", "sky check", "Unauthorized", "API key")):
        return Refused(
            f"SkyPilot has no cloud to use: {text}", fix="run `sky check`", where="fleet.skypilot.command"
        )
    invalid = ("Invalid task", "Invalid resources", "No such option", "Invalid value")
    if any(part in errors for part in invalid):
        return Refused(
            f"SkyPilot refuses it: {text}",
            fix="check infra, image and accelerators in fleet.skypilot, and the version of SkyPilot",
            where="fleet.skypilot",
        )
    # Anything else may have come after the job was made.
    return PlaceUnreachable(f"SkyPilot returned an unexpected response: {text}", fix="try again later")
