"""A stand-in for Lambda's REST API v1 on the simulated provider. Requests are checked strictly.

The fields, patterns and error codes are those of the published OpenAPI description; unknown fields are
refused.
"""

import json
import re

from cloud_server import Answer, CloudStandIn
from fleet_simulator import CARD, OTHER_GPU

from graftwork.fleet.place import Refused

KEY = "secret_stand1n_key"
TYPE, OTHER_TYPE, EIGHT, SOLD_OUT = "gpu_1x_rtx4090", "gpu_1x_rtx3090", "gpu_8x_rtx4090", "gpu_1x_sold_out"
REGION = {"name": "us-east-1", "description": "Virginia, USA"}
PUBLIC_KEY = "ssh-ed25519 AAAA me@here"
FIELDS = {
    "region_name": str,
    "instance_type_name": str,
    "ssh_key_names": list,
    "file_system_names": list,
    "file_system_mounts": list,
    "hostname": str,
    "name": str,
    "image": dict,
    "user_data": str,
    "tags": list,
    "firewall_rulesets": list,
}


def problems(body) -> list[str]:
    """What Lambda's own validation would complain about."""
    found = [f"{name}: unknown" for name in body if name not in FIELDS]
    found += [
        f"{name}: wrong type" for name in body if name in FIELDS and type(body[name]) is not FIELDS[name]
    ]
    found += [
        f"{name}: missing"
        for name in ("region_name", "instance_type_name", "ssh_key_names")
        if name not in body
    ]
    if found:
        return found
    if len(body["ssh_key_names"]) != 1:
        found.append("ssh_key_names: exactly one")
    if len(body.get("name", "")) > 64:
        found.append("name: too long")
    for tag in body.get("tags", ()):
        good = set(tag) == {"key", "value"} and re.fullmatch(r"[a-z][a-z0-9-:]+", tag["key"])
        found += [] if good and len(tag["value"]) <= 128 else ["tags: invalid"]
    return found


class LambdaStandIn(CloudStandIn):
    def __init__(self, provider, root):
        super().__init__(provider, root)
        self.has_address = False
        """Whether machines that are up show their address."""
        self.status = "active"
        """Of machines that are up."""
        self.keys = [{"id": "1", "name": "mine", "public_key": PUBLIC_KEY}]

    def error(self, status, message, code=""):
        code = code or {401: "global/invalid-api-key", 429: "global/too-many-requests"}.get(
            status, "global/internal-error"
        )
        return Answer(status, {"error": {"code": code, "message": message}})

    def answer(self, request):
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return self.error(401, "API key was invalid, expired, or deleted.")
        body = json.loads(request.raw) if request.raw else None
        route = (request.method, request.path.removeprefix("/api/v1"))
        if route == ("GET", "/instance-types"):
            self.provider._answer()
            return Answer(200, {"data": self.types()})
        if route == ("GET", "/ssh-keys"):
            return Answer(200, {"data": self.keys})
        if route == ("GET", "/instances"):
            return Answer(200, {"data": [self.instance(machine) for machine in self.provider.list()]})
        if route == ("POST", "/instance-operations/launch"):
            return self.launch(body)
        if route == ("POST", "/instance-operations/terminate"):
            return self.terminate(body)
        found = re.fullmatch(r"/instances/([^/]+)", route[1])
        machine = self.provider.get(found[1]) if found and request.method == "GET" else None
        if machine is None:
            return self.error(404, "Specified instance does not exist.", "global/object-does-not-exist")
        return Answer(200, {"data": self.instance(machine)})

    def launch(self, body):
        wrong = problems(body)
        if wrong:
            return self.error(400, "; ".join(wrong), "global/invalid-parameters")
        entry = self.types().get(body["instance_type_name"])
        known = {key["name"] for key in self.keys}
        if entry is None or not known.issuperset(body["ssh_key_names"]):
            return self.error(404, "the type or the SSH key", "global/object-does-not-exist")
        if body["region_name"] not in {region["name"] for region in entry["regions_with_capacity_available"]}:
            code = "instance-operations/launch/insufficient-capacity"
            return self.error(400, "Not enough capacity to fulfill launch request.", code)
        self.creations += 1
        gpu = CARD if body["instance_type_name"] == TYPE else OTHER_GPU
        try:
            machine = self.provider.create(body["name"], gpu=gpu, seconds=3600)
        except Refused:
            return self.error(400, "Quota exceeded.", "global/quota-exceeded")
        return Answer(200, {"data": {"instance_ids": [machine.id]}})

    def terminate(self, body):
        (machine_id,) = body["instance_ids"]
        machine = self.provider.get(machine_id)
        if machine is None:
            return self.error(404, "Specified instance does not exist.", "global/object-does-not-exist")
        self.provider.terminate(machine_id)
        return Answer(200, {"data": {"terminated_instances": [self.instance(machine)]}})

    def instance(self, machine):
        up = machine.boots_at is not None and self.provider.now >= machine.boots_at
        kind = TYPE if machine.gpu == CARD else OTHER_TYPE
        found = {
            "id": machine.id,
            "name": machine.label,
            "status": self.status if up else "booting",
            "ssh_key_names": ["mine"],
            "file_system_names": [],
            "region": REGION,
            "instance_type": kind_of(kind, machine.usd_per_hour),
            "actions": {},
        }
        return found | ({"ip": "127.0.0.1"} if up and self.has_address else {})

    def types(self):
        price = self.provider.usd_per_hour
        rows = {TYPE: (price, [REGION]), OTHER_TYPE: (price / 2, [REGION])}
        rows |= {EIGHT: (price * 8, [REGION]), SOLD_OUT: (0.1, [])}
        return {
            name: {"instance_type": kind_of(name, usd), "regions_with_capacity_available": regions}
            for name, (usd, regions) in rows.items()
        }


def kind_of(name, usd):
    card = {TYPE: CARD, EIGHT: CARD, OTHER_TYPE: OTHER_GPU}.get(name, "Sold out")
    gpus = 8 if name == EIGHT else 1
    return {
        "name": name,
        "description": f"{gpus}x {card} (24 GB PCIe)",
        "gpu_description": f"{card} (24 GB PCIe)",
        "price_cents_per_hour": round(usd * 100),
        "specs": {"vcpus": 30, "memory_gib": 200, "storage_gib": 512, "gpus": gpus},
    }
