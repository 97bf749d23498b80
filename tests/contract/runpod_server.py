"""A stand-in for RunPod's REST API v2 on the simulated provider. Requests are checked strictly.

The fields are those of the published OpenAPI description: unknown ones are refused, as RunPod does.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from cloud_server import Answer, CloudStandIn, Denied, serving
from fleet_simulator import SimulatedProvider

from graftwork.fleet.places.runpod import TIMER_SPARE

KEY = "rpa_stand1nkey"
CARD = "NVIDIA GeForce RTX 4090"
TEXT, NUMBER, LIST, DICT = str, int, list, dict
FIELDS = {
    "name": TEXT,
    "image": TEXT,
    "args": TEXT,
    "disk": NUMBER,
    "ports": LIST,
    "env": DICT,
    "registry": TEXT,
    "mounts": DICT,
    "gpu": DICT,
    "cpu": DICT,
    "cloud": TEXT,
    "dataCenterIds": LIST,
    "globalNetworking": bool,
}


def problems(body) -> list[str]:
    """What RunPod's own validation would complain about."""
    if not isinstance(body, dict):
        return ["$: no object"]
    found = [f"$: additional properties '{name}' not allowed" for name in body if name not in FIELDS]
    found += [f"$.{name}: missing" for name in ("name", "image") if not body.get(name)]
    known = [name for name in body if name in FIELDS]
    found += [f"$.{name}: wrong type" for name in known if type(body[name]) is not FIELDS[name]]
    if found:
        return found
    if ("gpu" in body) == ("cpu" in body):
        found.append("$: exactly one of gpu and cpu")
    gpu = body.get("gpu", {"id": CARD})
    if set(gpu) - {"id", "count"} or not isinstance(gpu.get("id"), str) or gpu.get("count", 1) < 1:
        found.append("$.gpu: invalid")
    if body.get("cloud", "SECURE") not in ("SECURE", "COMMUNITY") or body.get("disk", 1) < 1:
        found.append("$.cloud or $.disk: invalid")
    if not all(re.fullmatch(r"\d+/(tcp|http)", port) for port in body.get("ports", ())):
        found.append("$.ports: invalid")
    if not all(isinstance(value, str) for value in body.get("env", {}).values()):
        found.append("$.env: invalid")
    return found


class RunPodStandIn(CloudStandIn):
    def __init__(self, provider: SimulatedProvider, *, ssh_port: int | None) -> None:
        super().__init__(provider, Path())
        self.ssh_port = ssh_port
        self.card = CARD
        self.has_address = ssh_port is not None
        """Whether pods that are up show the port of their sshd."""
        self.seconds_per_request = 0.0
        self.bodies: dict[str, dict] = {}
        self.requests: Counter[str] = Counter()

    def error(self, status, message):
        return Answer(status, problem(status, message), {"Retry-After": "1"} if status == 429 else {})

    def answer(self, request):
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise Denied("missing bearer token")
        self.requests[f"{request.method} {request.path}"] += 1
        self.creations = self.requests["POST /v2/pods"]
        return Answer(*self.describe(request.method, request.path, request))

    def describe(self, method, path, request):
        """Status and content, as the description has them."""
        if path == "/clock":
            # Of the tests: time passes with the requests.
            self.provider.advance(self.seconds_per_request)
            return 200, {"now": self.provider.now}
        if (method, path) == ("GET", "/v2/catalog/gpus"):
            assert request.query == {"include": "AVAILABILITY"}
            return 200, {"gpus": [gpu(self.card, self.provider.usd_per_hour), gpu("Sold out", 0.1, "NONE")]}
        if (method, path) == ("GET", "/v2/pods"):
            return 200, {"pods": [self.pod(machine) for machine in self.provider.list()]}
        if (method, path) == ("POST", "/v2/pods"):
            body = json.loads(request.raw)
            wrong = problems(body)
            if wrong:
                return 422, problem(422, "validation failed", wrong)
            if body["gpu"]["id"] != self.card:
                return 400, problem(400, f"there are no machines with {body['gpu']['id']}")
            self.bodies[body["name"]] = body
            machine = self.provider.create(body["name"], gpu=self.card, seconds=limit_of(body))
            return 201, self.pod(machine)
        found = re.fullmatch(r"/v2/pods/([^/]+)", path)
        machine = self.provider.get(found[1]) if found else None
        if machine is None:
            return 404, problem(404, "pod not found")
        if method == "DELETE":
            self.provider.terminate(machine.id)
            return 204, None
        return 200, self.pod(machine)

    def pod(self, machine):
        up = machine.boots_at is not None and self.provider.now >= machine.boots_at
        public = (self.ssh_port or 1) if self.has_address else None
        port = {"private": 22, "public": public, "type": "tcp", "ip": "127.0.0.1"}
        body = self.bodies[machine.label]
        created = datetime.fromtimestamp(machine.created_at, UTC).isoformat()
        return {
            "id": machine.id,
            "name": machine.label,
            "status": "RUNNING" if up else "PROVISIONING",
            "actions": ["terminate"],
            "image": body["image"],
            "args": body.get("args", ""),
            "disk": body["disk"],
            "mounts": {},
            "ports": body["ports"],
            "env": body["env"],
            "registry": None,
            "gpu": {"id": machine.gpu, "count": 1},
            "cloud": body["cloud"],
            "dataCenterId": None,
            "template": None,
            "cost": machine.usd_per_hour,
            "locked": False,
            "globalNetworking": {"enabled": False},
            "runtime": {"uptime": int(self.provider.now - machine.boots_at), "ports": [port]} if up else None,
            "createdAt": created,
            "startedAt": created if up else None,
        }


def limit_of(body) -> float:
    """The time limit of the job, by the timer of its pod."""
    timer = re.search(r"sleep (\d+)", body.get("args", ""))
    return float(timer[1]) - TIMER_SPARE if timer else 3600.0


def gpu(name, price, availability="HIGH"):
    return {
        "id": name,
        "name": name,
        "pool": None,
        "manufacturer": "NVIDIA",
        "memory": 24,
        "secure": True,
        "community": False,
        "price": {"secure": price, "community": 0.0},
        "maxCount": {"secure": 8, "community": 0},
        "availability": availability,
        "dataCenters": [],
    }


def problem(status, detail, errors=None):
    found = {"title": "Error", "status": status, "detail": detail}
    return found | ({"errors": errors} if errors else {})


@contextmanager
def running_runpod(provider: SimulatedProvider, *, ssh_port: int | None = None) -> Iterator[tuple]:
    """The stand-in and its address."""
    with serving(RunPodStandIn(provider, ssh_port=ssh_port)) as api:
        yield api, api.url
