"""Lambda Cloud as a place, by its REST API v1. Contract-tested against a stand-in, not live-validated.

Input: an order. Output: an instance whose name is the job's label. Lambda bills it until it is terminated,
also when the machine is shut down from within. LAMBDA_API_KEY holds the key of the account,
LAMBDA_API_BASE_URL another address of the API.
"""

from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import quote

from pydantic import Field

from graftwork.fleet.place import LABEL, Login, PlaceUnreachable, Refused
from graftwork.fleet.places.rented import (
    RentedMachine,
    RentedPlace,
    RestClient,
    explain_malformed,
    read_public_key,
)
from graftwork.process.http_client import may_pass
from graftwork.records.base import NotSecret, Record
from graftwork.records.errors import GraftError
from graftwork.records.fleet import JobOrder, PlacedJob
from graftwork.records.hardware import Offer

GONE = ("terminated", "preempted")
QUOTA, CAPACITY = "global/quota-exceeded", "instance-operations/launch/insufficient-capacity"


class LambdaSettings(Record):
    """Instances of Lambda Cloud. The key of the account is in LAMBDA_API_KEY."""

    ssh_key: Annotated[str, NotSecret("the name of a key")] = Field(
        "", description="Name of the SSH key in Lambda's console. Default: the one that matches `public_key`."
    )
    public_key: Annotated[str, NotSecret("the path of a public key")] = Field(
        "~/.ssh/id_ed25519.pub", description="The SSH key that may log in to the instance."
    )
    regions: tuple[str, ...] = Field((), description="Regions to use. Default: all.")
    python: str = Field("python3", description="Python 3.11 or later in the image.")


class LambdaClient(RestClient):
    """Lambda accepts one request per second, and one launch every 12 seconds."""

    name = "Lambda"

    def explain(self, status: int, content: dict[str, Any]) -> GraftError:
        error = content.get("error") or {}
        code, text = str(error.get("code", "")), str(error.get("message", ""))[:300]
        if code == QUOTA:
            return Refused(
                f"the quota of the account does not allow this machine: {text}",
                fix="terminate other instances, or ask Lambda's support for more",
            )
        if code == CAPACITY:
            return Refused(
                f"Lambda has no such machine now: {text}",
                fix="use one of `graft fleet offers --place lambda`; fleet.lambda_cloud.regions limits them",
                where="--gpu",
            )
        if status in (401, 403):
            return Refused(
                f"Lambda rejected the key: {text or status}",
                fix="set LAMBDA_API_KEY to a key of the console; the account needs a way to pay",
                where="LAMBDA_API_KEY",
            )
        if may_pass(status):
            return PlaceUnreachable(f"Lambda answered with status {status}: {text}", fix="try again later")
        return Refused(
            f"Lambda rejected the request: {text or status}",
            why=f"{code}, status {status}",
            fix="check fleet.lambda_cloud; quota and credit are in Lambda's console",
        )


class LambdaPlace(RentedPlace):
    name = "lambda"
    client_type = LambdaClient
    user, ssh_port = "ubuntu", 22
    folder = "/home/ubuntu/graftwork"
    login = Login(
        "Lambda",
        (("LAMBDA_API_KEY",),),
        None,
        "jobs there",
        url="https://cloud.lambda.ai",
        url_variable="LAMBDA_API_BASE_URL",
    )
    section = "lambda_cloud"
    """`lambda` is a Python keyword."""

    @classmethod
    def open(cls, settings: LambdaSettings, *, state: Path, prices: Iterable[Offer]) -> Self:
        return cls(settings, state=state, prices=prices)

    def __init__(
        self,
        settings: LambdaSettings,
        *,
        state: Path,
        prices: Iterable[Offer] = (),
        client: LambdaClient | None = None,
    ) -> None:
        super().__init__(state=state, python=settings.python, client=client)
        self._settings = settings
        self._gpu_by_type = {offer.instance: offer.gpu for offer in prices}

    def offer(self) -> tuple[Offer, ...]:
        """The instance types with one GPU that some region has now."""
        today = date.today().isoformat()
        return tuple(
            Offer(
                place=self.name,
                gpu=self._gpu_of(kind),
                usd_per_hour=kind["price_cents_per_hour"] / 100,
                instance=str(kind["name"]),
                region=region,
                vcpus=float(kind["specs"]["vcpus"]),
                memory_gib=float(kind["specs"]["memory_gib"]),
                source="Lambda's catalog",
                dated=today,
            )
            for kind, region in self._available()
        )

    def _available(self) -> list[tuple[dict[str, Any], str]]:
        """Instance types with one GPU, and a region that has them."""
        allowed, available = self._settings.regions, []
        for entry in self._client.get("/api/v1/instance-types")["data"].values():
            kind = entry["instance_type"]
            with_capacity = [str(region["name"]) for region in entry["regions_with_capacity_available"]]
            regions = [name for name in with_capacity if not allowed or name in allowed]
            if regions and kind["specs"]["gpus"] == 1:
                available.append((kind, regions[0]))
        return available

    def rent(self, order: JobOrder) -> PlacedJob:
        request = self.request_of(order)
        with explain_malformed("Lambda"):
            launched = self._client.create("/api/v1/instance-operations/launch", request)
            (instance_id,) = launched["data"]["instance_ids"]
        return PlacedJob(
            place=self.name,
            id=str(instance_id),
            label=order.label,
            gpu=order.gpu,
            usd_per_hour=order.usd_per_hour,
        )

    def request_of(self, order: JobOrder) -> dict[str, Any]:
        """The body of the request that launches the instance."""
        rows = [
            (kind, region)
            for kind, region in self._available()
            if self._gpu_of(kind) == order.gpu and order.instance in ("", kind["name"])
        ]
        if not rows:
            raise Refused(
                f"Lambda has no machine with the GPU {order.gpu or 'none'} now",
                fix="use one of `graft fleet offers --place lambda`",
                where="--gpu",
            )
        kind, region = min(rows, key=lambda row: float(row[0]["price_cents_per_hour"]))
        return {
            "region_name": region,
            "instance_type_name": str(kind["name"]),
            "ssh_key_names": [self._key_name()],
            "name": order.label,
            "tags": [{"key": "graftwork", "value": order.label}],
        }

    def _key_name(self) -> str:
        """The name that the account gives to our public key."""
        key_name = self._settings.ssh_key
        keys = self._client.get("/api/v1/ssh-keys")["data"]
        if key_name:
            matching = [key for key in keys if key["name"] == key_name]
        else:
            text = read_public_key(self._settings.public_key, setting="fleet.lambda_cloud.public_key")
            matching = [key for key in keys if str(key["public_key"]).split()[:2] == text.split()[:2]]
        if matching:
            return str(matching[0]["name"])
        raise Refused(
            "the account at Lambda does not have the SSH key",
            why=f"it has: {', '.join(str(key['name']) for key in keys) or 'none'}",
            fix=f"add {key_name or self._settings.public_key} below SSH keys in Lambda's console, or "
            "use another one in fleet.lambda_cloud.ssh_key",
            where="fleet.lambda_cloud.ssh_key",
        )

    def list(self) -> tuple[PlacedJob, ...]:
        with explain_malformed("Lambda"):
            return tuple(
                self._placed(instance)
                for instance in self._client.get("/api/v1/instances")["data"]
                if LABEL.fullmatch(str(instance.get("name") or "")) and instance["status"] not in GONE
            )

    def machine_of(self, job: PlacedJob) -> RentedMachine | None:
        answer = self._client.find(f"/api/v1/instances/{quote(job.id, safe='')}")
        with explain_malformed("Lambda"):
            if answer is None or answer["data"]["status"] in GONE:
                return None
            instance = answer["data"]
            status = instance["status"]
            has_address = status in ("active", "unhealthy") and instance.get("ip")
            return RentedMachine(
                self._placed(instance),
                address=f"{self.user}@{instance['ip']}" if has_address else "",
                port=self.ssh_port,
                failure=f"the instance is {status}" if status in ("unhealthy", "terminating") else "",
            )

    def give_back(self, job: PlacedJob) -> None:
        path, body = "/api/v1/instance-operations/terminate", {"instance_ids": [job.id]}
        status, content = self._client.repeat("POST", path, body)
        if status != 404:
            self._client.checked(status, content)

    def _placed(self, instance: dict[str, Any]) -> PlacedJob:
        kind = instance["instance_type"]
        return PlacedJob(
            place=self.name,
            id=str(instance["id"]),
            label=str(instance.get("name") or ""),
            gpu=self._gpu_of(kind),
            usd_per_hour=kind["price_cents_per_hour"] / 100,
        )

    def _gpu_of(self, kind: dict[str, Any]) -> str:
        """Name the GPU as in the catalog; else by the start of Lambda's description, such as A10 in `A10 (24
        GB PCIe)`.
        """
        return self._gpu_by_type.get(str(kind["name"])) or str(kind["gpu_description"]).partition(" (")[0]
