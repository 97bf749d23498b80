"""A Ray cluster as a place, by its Jobs API; needs `ray[default]` and a folder that all nodes share.

Input: an order. Output: a Ray job whose submission id is the job's label: a second submit of it is refused by
Ray. Its state comes from Ray while the job is there, then from the files that it wrote. Ray does not start a
job again whose node died: the next submit does, under the label with a number, and the job continues from its
checkpoint. An id is not used twice: Ray may take the end of its first job for that of the second.
"""

import json
import os
import re
import shlex
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from graftwork.files.disk import write_atomic
from graftwork.fleet.place import LABEL, NotThere, PlaceUnreachable, Refused
from graftwork.fleet.places.hosts import SharedFolderPlace
from graftwork.process.http_client import HttpClient, NoAnswer
from graftwork.process.ray_cluster import require_ray
from graftwork.records.base import NotSecret, Record
from graftwork.records.errors import GraftError
from graftwork.records.fleet import JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

TOKEN_FILE = "~/.ray/auth_token"
TOKEN_VARIABLE, TOKEN_PATH_VARIABLE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
SECRETS = "secrets.json"
STOP, ATTEMPT = "work/stop", "attempt"
SUBMISSION = re.compile(rf"(?P<label>{LABEL.pattern})(-\d+)?")
ASK_SECONDS = 20.0
KILL_SECONDS = 1
"""Ray sends TERM and, this long after it, KILL. A graceful stop uses a file instead."""
WAITING, RUNNING = "PENDING", "RUNNING"
STATUS = re.compile(r"status code (\d{3})\b")
"""How Ray's client states the HTTP status in its errors."""
Answer = TypeVar("Answer")


class RaySettings(Record):
    """A running Ray cluster."""

    address: Annotated[str, NotSecret("a host and a port")] = Field(
        "auto", description="HOST:PORT of the head; auto: the head of this machine's node."
    )
    jobs: str = Field("http://127.0.0.1:8265", description="Address of the dashboard, which accepts jobs.")
    folder: str = Field("~/.graftwork", description="Where jobs are kept; must be visible to all nodes.")
    token: Annotated[str, NotSecret("the path of a file")] = Field(
        "", description="File with the cluster token. Default: Ray's own (~/.ray/auth_token)."
    )
    authentication: Literal["token", "none"] = Field(
        "token", description="none: use a cluster that accepts jobs from anyone who can reach it."
    )
    cpus: float = Field(1.0, gt=0, description="CPU cores per job.")
    gpus: float = Field(0.0, ge=0, description="GPUs per job.")
    python: str = Field("", description="Python 3.11 or later on the nodes. Default: this one.")


class RayPlace(SharedFolderPlace):
    name = "ray"

    def __init__(self, settings: RaySettings) -> None:
        super().__init__(settings.folder)
        self._settings = settings

    def offer(self) -> tuple[Offer, ...]:
        nodes = [node for node in self._nodes() if node.get("raylet", {}).get("state") == "ALIVE"]
        today = date.today().isoformat()
        return tuple(
            Offer(
                place=self.name,
                gpu=gpus[0].get("name", "GPU") if gpus else "",
                gpus=len(gpus),
                usd_per_hour=0.0,
                instance=str(node.get("hostname", "node")),
                source=self._settings.jobs,
                dated=today,
            )
            for node in nodes
            for gpus in [node.get("gpus") or []]
        )

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        placed = PlacedJob(place=self.name, id=order.label, label=order.label)
        state = self._state(order.label)
        if state in (WAITING, RUNNING):
            return placed
        if not self.lay_out(order):
            return placed
        folder, settings = self.job_folder(order.label), self._settings
        command = self.bootstrap(order, settings.python)
        if secrets:
            # Not by Ray's environment, which its agents write to their logs. The job removes the file.
            write_atomic(folder / SECRETS, json.dumps(dict(secrets)), private=True)
            command += ["--secrets", str(folder / SECRETS)]
        if state is not None:
            # Its node died, or it was ended. Two submitters write the same number: Ray takes one.
            write_atomic(folder / ATTEMPT, str(self._attempt(order.label) + 1))
        # Ray sets it to the cores of the job; the plan of the run says how many threads it has.
        threads = os.environ.get("OMP_NUM_THREADS")
        threads_setting = f"OMP_NUM_THREADS={threads}" if threads else "-u OMP_NUM_THREADS"
        log = shlex.quote(str(folder / "job.log"))
        # The mark is that of the job's own processes: in the environment of Ray it would be its agent's too.
        prefix = f"cd {shlex.quote(str(folder))} && exec env {threads_setting} GRAFT_FLEET_JOB={order.label}"
        try:
            self._ask(
                lambda: self._client.submit_job(
                    entrypoint=f"{prefix} {shlex.join(command)} >> {log} 2>&1",
                    submission_id=self._submission(order.label),
                    runtime_env={"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(KILL_SECONDS)}},
                    entrypoint_num_cpus=settings.cpus,
                    entrypoint_num_gpus=settings.gpus,
                    metadata={"run": order.run_id},
                )
            )
        except _SubmittedBefore:
            return placed
        except Refused:
            self.forget(order.label)
            raise
        return placed

    def _attempt(self, label: str) -> int:
        try:
            return int((self.job_folder(label) / ATTEMPT).read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _submission(self, label: str) -> str:
        """The id of the last job that was submitted for this label."""
        number = self._attempt(label)
        return f"{label}-{number}" if number else label

    def poll(self, job: PlacedJob) -> JobPoll:
        state = self._state(job.label)
        if state == WAITING:
            return JobPoll(phase="starting", message="waiting for a node")
        return self.status(job.label, queued=state == RUNNING)

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        state = self._state(job.label)
        if state == RUNNING and not at_once:
            write_atomic(self.job_folder(job.label) / STOP, "")
            return
        if state in (WAITING, RUNNING):
            self._ask(lambda: self._client.stop_job(self._submission(job.label)))
        self.forget(job.label)

    def forget(self, label: str) -> None:
        """A job that never started did not remove its secrets."""
        (self.job_folder(label) / SECRETS).unlink(missing_ok=True)

    def list(self) -> tuple[PlacedJob, ...]:
        jobs = self._ask(lambda: tuple(self._client.list_jobs()))
        labels = {
            match["label"]
            for job in jobs
            if str(job.status) in (WAITING, RUNNING)
            and (match := SUBMISSION.fullmatch(str(job.submission_id))) is not None
        }
        return tuple(PlacedJob(place=self.name, id=label, label=label) for label in sorted(labels))

    def _state(self, label: str) -> str | None:
        """Ray's state of the job; None if it does not know it."""
        try:
            return str(self._ask(lambda: self._client.get_job_status(self._submission(label))).value)
        except _Unknown:
            return None

    @cached_property
    def _client(self) -> Any:
        require_ray()
        from ray.job_submission import JobSubmissionClient

        self._require_authentication()
        return JobSubmissionClient(self._settings.jobs, headers=self._headers())

    def _ask(self, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except GraftError:
            raise
        except Exception as error:  # the client raises plain RuntimeErrors
            raise self._explain(error) from None

    def _explain(self, error: Exception) -> GraftError:
        text = str(error)
        last = text.strip().splitlines()[-1][:300] if text.strip() else type(error).__name__
        status = int(match[1]) if (match := STATUS.search(text)) else None
        if status == 404:
            return _Unknown(last)
        if "already exists" in text:
            return _SubmittedBefore(last)
        if status in (401, 403) or (status is None and ("nauthorized" in text or "uthentication" in text)):
            return Refused(
                "the Ray cluster rejected the token",
                why=last,
                fix="copy the token of its head (`ray get-auth-token`), and specify its file in "
                "fleet.ray.token",
                where="fleet.ray.token",
            )
        if isinstance(error, ConnectionError):
            return _unreachable(self._settings.jobs, last)
        return PlaceUnreachable(f"Ray says: {last}", fix="try again later", where=self._settings.jobs)

    def _headers(self) -> dict[str, str]:
        if self._settings.authentication == "none":
            return {}
        return {"Authorization": f"Bearer {self._token()}"}

    def _token(self) -> str:
        path_setting = self._settings.token or os.environ.get(TOKEN_PATH_VARIABLE, "")
        if not path_setting and (token := os.environ.get(TOKEN_VARIABLE)):
            return token
        path = Path(path_setting or TOKEN_FILE).expanduser()
        try:
            return path.read_text().strip()
        except OSError as error:
            raise Refused(
                "there is no token for the Ray cluster",
                why=f"{path}: {error.strerror}",
                fix="copy it from the head: `ray get-auth-token`; or specify its file in fleet.ray.token",
                where="fleet.ray.token",
            ) from None

    def _require_authentication(self) -> None:
        """Refuse a cluster that runs anybody's code, unless the settings allow it."""
        if self._settings.authentication == "none":
            return
        try:
            status, _ = self._get("/api/jobs/", {})
        except NoAnswer as error:
            raise _unreachable(self._settings.jobs, str(error)) from None
        if status >= 400:
            return
        raise Refused(
            "this Ray cluster accepts jobs from anyone who can reach it",
            why="it was started without RAY_AUTH_MODE=token",
            fix="start it with RAY_AUTH_MODE=token; or set `fleet.ray.authentication: none`",
            where=self._settings.jobs,
        )

    def _nodes(self) -> Iterable[dict[str, Any]]:
        client = self._ask(lambda: self._client)
        assert client is not None
        try:
            status, content = self._get("/nodes?view=summary", self._headers())
            why = f"it answers with status {status}"
            if status < 400:
                nodes: Iterable[dict[str, Any]] = json.loads(content)["data"]["summary"]
                return nodes
        except (NoAnswer, ValueError, KeyError, TypeError) as error:
            why = str(error)
        raise PlaceUnreachable(
            "the Ray cluster does not list its nodes",
            why=why,
            fix="check that fleet.ray.jobs is the address of its dashboard",
            where=self._settings.jobs,
        )

    def _get(self, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        request = urllib.request.Request(self._settings.jobs.rstrip("/") + path, headers=headers)
        with HttpClient().send(request, seconds=ASK_SECONDS) as answer:
            return answer.status, answer.read()


class _Unknown(NotThere):
    """Ray does not know the job."""


class _SubmittedBefore(GraftError):
    """Another submit came first."""


def _unreachable(address: str, why: str) -> PlaceUnreachable:
    return PlaceUnreachable(
        "the Ray cluster is not responding",
        why=why,
        fix="start it with `ray start --head`, or set the address of its dashboard in fleet.ray.jobs",
        where=address,
    )
