"""RunPod as a place, by its REST API v2. Contract-tested against a stand-in, not live-validated.

In: an order. Out: a pod whose name is the job's label. The pod gets a public SSH key and a timer that ends
it; the bundle and the secrets go to it over SSH, never through the API. RUNPOD_API_KEY holds the key of the
account, RUNPOD_API_BASE_URL another address of the API.
"""

import json
import os
import shlex
import time
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from graftwork.fleet.hosts import ALIVE, HostsPlace, ProcessConnection, shared_connection
from graftwork.fleet.place import LABEL, PlaceUnreachable, Refused, unknown_job
from graftwork.fleet.settings import RunPodSettings
from graftwork.process.http_client import HttpClient, NoAnswer, Retries, may_pass, retry_after
from graftwork.process.ssh import ssh_command
from graftwork.records.errors import GraftError, UserMistake
from graftwork.records.fleet import JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

BASE_URL = "https://api.runpod.io"
SECONDS = 30.0
ATTEMPTS = 4
ENDED = "TERMINATED"
FAILED = ("EXITED", "ERROR")
SSH_PORT = 22
TIMER_SPARE = 1800.0
"""Seconds after the job's own limit at which the pod ends itself."""


class RunPodClient:
    """The five requests that a place needs."""

    def __init__(self, key: str, *, base_url: str, wait: Callable[[float], None] = time.sleep) -> None:
        self._key, self._base, self._wait = key, base_url.rstrip("/"), wait
        self._http = HttpClient()

    def list_gpus(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("/v2/catalog/gpus?include=AVAILABILITY")["gpus"]
        return found

    def list_pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("/v2/pods")["pods"]
        return found

    def get_pod(self, pod_id: str) -> dict[str, Any] | None:
        status, body = self._try(f"/v2/pods/{quote(pod_id, safe='')}")
        return None if status == 404 else self._checked(status, body)

    def create_pod(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sent once: a second attempt could make a second pod."""
        status, body, _ = self._send("POST", "/v2/pods", request)
        if status == 429 or status >= 500:
            raise PlaceUnreachable(
                f"RunPod answered with status {status}", why="a pod may have been made all the same"
            )
        return self._checked(status, body)

    def delete_pod(self, pod_id: str) -> None:
        status, body = self._try(f"/v2/pods/{quote(pod_id, safe='')}", method="DELETE")
        if status not in (204, 404):
            self._checked(status, body)

    def _get(self, path: str) -> dict[str, Any]:
        return self._checked(*self._try(path))

    def _try(self, path: str, *, method: str = "GET") -> tuple[int, bytes]:
        """Requests that may be repeated are, while the server is busy or broken."""
        retries = Retries(attempts=ATTEMPTS)
        while True:
            asked: float | None = None
            try:
                status, body, asked = self._send(method, path)
            except PlaceUnreachable:
                pause = retries.after_failure()
                if pause is None:
                    raise
            else:
                pause = retries.after_failure(asked=asked) if may_pass(status) else None
                if pause is None:
                    return status, body
            self._wait(pause)

    def _send(self, method: str, path: str, body: Any = None) -> tuple[int, bytes, float | None]:
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._base + path, data=data, headers=headers, method=method)
        try:
            with self._http.send(request, seconds=SECONDS) as answer:
                return answer.status, answer.read(), retry_after(answer.header("Retry-After"))
        except NoAnswer as error:
            raise PlaceUnreachable(f"RunPod does not answer: {error}", fix="try again later") from error

    def _checked(self, status: int, body: bytes) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(body) if body else {}
        except ValueError:
            raise PlaceUnreachable("RunPod sent something that is no JSON") from None
        if status < 300:
            return content
        raise _explain(status, str(content.get("detail", ""))[:300])


def _explain(status: int, detail: str) -> GraftError:
    if status in (401, 403):
        return Refused(
            f"RunPod refuses the key: {detail or status}",
            fix="set RUNPOD_API_KEY to a key that may read and write pods",
            where="RUNPOD_API_KEY",
        )
    if may_pass(status):
        return PlaceUnreachable(f"RunPod answered with status {status}: {detail}", fix="try again later")
    return Refused(f"RunPod refuses the request: {detail or status}", why=f"status {status}")


class RunPodPlace:
    name = "runpod"
    paid = True

    def __init__(self, settings: RunPodSettings, *, state: Path, client: RunPodClient | None = None) -> None:
        self._settings, self._state = settings, state
        self._own_client = client
        self.sent_bytes = 0

    @property
    def _client(self) -> RunPodClient:
        if self._own_client is None:
            key = os.environ.get("RUNPOD_API_KEY", "")
            if not key:
                raise Refused(
                    "there is no key for RunPod",
                    fix="create one in the console and set RUNPOD_API_KEY",
                    where="RUNPOD_API_KEY",
                )
            self._own_client = RunPodClient(key, base_url=os.environ.get("RUNPOD_API_BASE_URL") or BASE_URL)
        return self._own_client

    def offer(self) -> tuple[Offer, ...]:
        cloud, today = self._settings.cloud, date.today().isoformat()
        return tuple(
            Offer(
                place=self.name,
                gpu=str(gpu["id"]),
                usd_per_hour=float(gpu["price"][cloud]),
                memory_gib=float(gpu["memory"]),
                region=cloud,
                source="RunPod's catalog",
                dated=today,
            )
            for gpu in self._client.list_gpus()
            if gpu[cloud] and gpu["price"][cloud] and gpu.get("availability") != "NONE"
        )

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        """Create the pod. The bundle follows once the pod is up (`deliver`)."""
        del secrets
        existing = [job for job in self.list() if job.label == order.label]
        if existing:
            return existing[0]
        return self._placed(self._client.create_pod(self.request_of(order)))

    def request_of(self, order: JobOrder) -> dict[str, Any]:
        """The body of the request that creates the pod."""
        settings = self._settings
        seconds = order.seconds + TIMER_SPARE
        timer = f"(sleep {seconds:.0f}; runpodctl remove pod $RUNPOD_POD_ID) & exec {settings.start}"
        return {
            "name": order.label,
            "image": settings.image,
            **({"args": f"bash -c {shlex.quote(timer)}"} if settings.timer else {}),
            "disk": settings.disk_gb,
            "ports": [f"{SSH_PORT}/tcp"],
            "env": {"PUBLIC_KEY": self._public_key()},
            "gpu": {"id": order.gpu, "count": 1},
            "cloud": settings.cloud.upper(),
        }

    def deliver(self, order: JobOrder, job: PlacedJob, *, secrets: Mapping[str, str]) -> bool:
        """Send the bundle and start the job, if the pod is up; may be called again at any time."""
        host = self._host(job)
        if host is None:
            return False
        host.submit(order, secrets=secrets)
        self.sent_bytes = host.sent_bytes
        return True

    def poll(self, job: PlacedJob) -> JobPoll:
        pod = self._client.get_pod(job.id)
        if pod is None or pod["status"] == ENDED:
            return JobPoll(phase="gone")
        if pod["status"] in FAILED:
            return JobPoll(phase="ended", exit_code=1, message=f"the pod is {pod['status'].lower()}")
        host = self._host_of(pod)
        if host is None:
            return JobPoll(phase="starting")
        found = host.poll(_at(job))
        return found if found.phase != "gone" else JobPoll(phase="starting", message="the pod is up")

    def log(self, job: PlacedJob) -> str:
        host = self._host(job)
        return host.log(_at(job)) if host is not None else ""

    def fetch(self, job: PlacedJob, folder: Path) -> None:
        host = self._host(job)
        if host is None:
            raise unknown_job(self.name, job.label)
        host.fetch(_at(job), folder)

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        host = None if at_once else self._host(job)
        if host is not None:
            host.stop(_at(job))
        else:
            self._client.delete_pod(job.id)

    def list(self) -> tuple[PlacedJob, ...]:
        return tuple(
            self._placed(pod)
            for pod in self._client.list_pods()
            if LABEL.fullmatch(str(pod["name"])) and pod["status"] != ENDED
        )

    def _placed(self, pod: dict[str, Any]) -> PlacedJob:
        return PlacedJob(
            place=self.name,
            id=str(pod["id"]),
            label=str(pod["name"]),
            gpu=str((pod.get("gpu") or {}).get("id", "")),
            usd_per_hour=float(pod["cost"]),
            created_at=_seconds(str(pod["createdAt"])),
        )

    def _host(self, job: PlacedJob) -> HostsPlace | None:
        pod = self._client.get_pod(job.id)
        return None if pod is None else self._host_of(pod)

    def _host_of(self, pod: dict[str, Any]) -> HostsPlace | None:
        """The pod as a host, once its SSH port is known."""
        ports = (pod.get("runtime") or {}).get("ports") or ()
        found = [port for port in ports if port.get("private") == SSH_PORT and port.get("ip")]
        if pod["status"] != "RUNNING" or not found or not found[0].get("public"):
            return None
        pod_id = str(pod["id"])
        self._state.mkdir(parents=True, exist_ok=True)
        # Every pod has a new host key: it is learned once a pod and compared from then on.
        known = ("-o", "StrictHostKeyChecking=accept-new", "-o", f"UserKnownHostsFile={self._state}/{pod_id}")
        options = ("-p", str(found[0]["public"]), *ALIVE, *shared_connection(), *known)
        words = [*ssh_command(*options), f"root@{found[0]['ip']}"]
        python = self._settings.python
        connection = ProcessConnection(pod_id, [*words, python], root=self._settings.folder, far=True)
        return HostsPlace(self.name, {pod_id: connection})

    def _public_key(self) -> str:
        path = Path(self._settings.public_key).expanduser()
        try:
            text = path.read_text().strip()
        except OSError as error:
            raise UserMistake(
                "there is no public SSH key for the pod",
                why=f"{path}: {error.strerror}",
                fix="run `ssh-keygen -t ed25519`, or set fleet.runpod.public_key",
                where="fleet.runpod.public_key",
            ) from error
        if "PRIVATE KEY" in text or not text.startswith(("ssh-", "ecdsa-", "sk-")):
            raise UserMistake(
                "this is no public SSH key",
                fix="name the file that ends in .pub",
                where=str(path),
            )
        return text


def _at(job: PlacedJob) -> PlacedJob:
    """The job as the pod's own host knows it."""
    return job.model_copy(update={"host": job.id})


def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text).astimezone(UTC).timestamp()
    except ValueError:
        return 0.0
