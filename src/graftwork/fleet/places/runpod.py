"""RunPod as a place, by its REST API v2 (beta). Contract-tested against a stand-in, not live-validated.

Input: an order. Output: a pod whose name is the job's label, with a timer that ends it. RUNPOD_API_KEY holds
the key of the account, RUNPOD_API_BASE_URL another address of the API.
"""

import shlex
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote

from pydantic import Field

from graftwork.fleet.place import LABEL, Login, Refused
from graftwork.fleet.places.rented import (
    RentedMachine,
    RentedPlace,
    RestClient,
    explain_malformed,
    read_public_key,
)
from graftwork.records.base import NotSecret, Record
from graftwork.records.errors import GraftError
from graftwork.records.fleet import JobOrder, PlacedJob
from graftwork.records.hardware import Offer

ENDED = "TERMINATED"
FAILED = ("EXITED", "ERROR")
SSH_PORT = 22
START = "/start.sh"
"""Starts sshd in RunPod's images."""
TIMER_SPARE = 1800.0
"""Seconds after the job's own limit at which the pod ends itself."""


class RunPodSettings(Record):
    """Pods of RunPod. The key of the account is in RUNPOD_API_KEY."""

    cloud: Literal["secure", "community"] = Field("secure", description="Tier of the pods.")
    image: str = Field(
        "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404",
        description="Docker image with sshd and Python 3.11 or later.",
    )
    timer: bool = Field(
        True, description="Let the pod end itself after the time limit, by runpodctl in the image."
    )
    python: str = Field("python3", description="Python 3.11 or later in the image.")
    disk_gb: int = Field(40, ge=10, description="Disk of the pod in GB.")
    public_key: Annotated[str, NotSecret("the path of a public key")] = Field(
        "~/.ssh/id_ed25519.pub", description="The SSH key that may log in to the pod."
    )


class RunPodClient(RestClient):
    name = "RunPod"

    def explain(self, status: int, content: dict[str, Any]) -> GraftError:
        if status in (401, 403):
            return Refused(
                f"RunPod rejected the key: {str(content.get('detail', ''))[:300] or status}",
                fix="set RUNPOD_API_KEY to a key that may read and write pods",
                where="RUNPOD_API_KEY",
            )
        return super().explain(status, content)


class RunPodPlace(RentedPlace):
    name = "runpod"
    client_type = RunPodClient
    folder = "/root/graftwork"
    login = Login(
        "RunPod",
        (("RUNPOD_API_KEY",),),
        ".runpod/config.toml",
        "jobs there",
        url="https://api.runpod.io",
        url_variable="RUNPOD_API_BASE_URL",
    )

    @classmethod
    def open(cls, settings: RunPodSettings, *, state: Path, prices: Iterable[Offer]) -> Self:
        del prices
        return cls(settings, state=state)

    def __init__(self, settings: RunPodSettings, *, state: Path, client: RunPodClient | None = None) -> None:
        super().__init__(state=state, python=settings.python, client=client)
        self._settings = settings

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
            for gpu in self._client.get("/v2/catalog/gpus?include=AVAILABILITY")["gpus"]
            if gpu[cloud] and gpu["price"][cloud] and gpu.get("availability") != "NONE"
        )

    def rent(self, order: JobOrder) -> PlacedJob:
        pod = self._client.create("/v2/pods", self.request_of(order))
        with explain_malformed("RunPod"):
            return self._placed(pod)

    def request_of(self, order: JobOrder) -> dict[str, Any]:
        """The body of the request that creates the pod."""
        settings = self._settings
        seconds = order.seconds + TIMER_SPARE
        timer = f"(sleep {seconds:.0f}; runpodctl remove pod $RUNPOD_POD_ID) & exec {START}"
        public_key = read_public_key(settings.public_key, setting="fleet.runpod.public_key")
        return {
            "name": order.label,
            "image": settings.image,
            **({"args": f"bash -c {shlex.quote(timer)}"} if settings.timer else {}),
            "disk": settings.disk_gb,
            "ports": [f"{SSH_PORT}/tcp"],
            "env": {"PUBLIC_KEY": public_key},
            "gpu": {"id": order.gpu, "count": 1},
            "cloud": settings.cloud.upper(),
        }

    def list(self) -> tuple[PlacedJob, ...]:
        with explain_malformed("RunPod"):
            return tuple(
                self._placed(pod)
                for pod in self._client.get("/v2/pods")["pods"]
                if LABEL.fullmatch(str(pod.get("name"))) and pod.get("status") != ENDED
            )

    def machine_of(self, job: PlacedJob) -> RentedMachine | None:
        pod = self._client.find(f"/v2/pods/{quote(job.id, safe='')}")
        with explain_malformed("RunPod"):
            if pod is None or pod["status"] == ENDED:
                return None
            placed, status = self._placed(pod), str(pod["status"])
            if status in FAILED:
                return RentedMachine(placed, failure=f"the pod is {status.lower()}")
            ports = (pod.get("runtime") or {}).get("ports") or ()
            ssh = [port for port in ports if port.get("private") == SSH_PORT and port.get("ip")]
            if status != "RUNNING" or not ssh or not ssh[0].get("public"):
                return RentedMachine(placed)
            return RentedMachine(placed, address=f"root@{ssh[0]['ip']}", port=int(ssh[0]["public"]))

    def give_back(self, job: PlacedJob) -> None:
        status, body = self._client.repeat("DELETE", f"/v2/pods/{quote(job.id, safe='')}")
        if status not in (204, 404):
            self._client.checked(status, body)

    def _placed(self, pod: dict[str, Any]) -> PlacedJob:
        """Return a pod that costs money. Only its id and name are required: they suffice to terminate it."""
        try:
            created_at = datetime.fromisoformat(str(pod.get("createdAt"))).astimezone(UTC).timestamp()
        except ValueError:
            created_at = 0.0
        return PlacedJob(
            place=self.name,
            id=str(pod["id"]),
            label=str(pod["name"]),
            gpu=str((pod.get("gpu") or {}).get("id", "")),
            usd_per_hour=float(pod.get("cost") or 0.0),
            created_at=created_at,
        )
