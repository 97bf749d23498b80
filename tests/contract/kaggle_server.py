# ruff: noqa: N802 - methods are named after the requests
"""A stand-in for Kaggle's API: requests must have the fields and types of Kaggle's own client."""

import base64
import json
from datetime import UTC, datetime

from cloud_server import PYTHON, Answer, CloudStandIn, Denied, python_path
from fleet_simulator import CARD
from kagglesdk.blobs.types import blob_api_service
from kagglesdk.datasets.types import dataset_api_service
from kagglesdk.kaggle_object import KaggleObject
from kagglesdk.kernels.types import kernels_api_service
from kagglesdk.security.types import oauth_service

from graftwork.fleet.place import LABEL, Refused

USER, KEY = "me", "k4ggle-key"
TYPES = {
    "kernels.KernelsApiService": kernels_api_service,
    "datasets.DatasetApiService": dataset_api_service,
    "blobs.BlobApiService": blob_api_service,
    "security.OAuthService": oauth_service,
}
SITE = """
import os, sys
if "script.py" in " ".join(sys.orig_argv):
    import kagglesdk.kaggle_env as e
    e._env_to_endpoint[e.KaggleEnv.TEST] = os.environ["STAND_IN"]
"""
SECRETS = """
import json, os
class UserSecretsClient:
    def get_secret(self, name):
        return json.loads(os.environ["KAGGLE_STAND_IN_SECRETS"])[name]
"""


def problems(kind, body) -> list[str]:
    """Fields that the client's type does not have, and values of another type."""
    fields = {field.json_name: field for field in kind._fields}
    found = [f"{kind.__name__}.{name}: unknown" for name in body if name not in fields]
    for name, value in body.items():
        field = fields.get(name)
        if field is None or value is None:
            continue
        values = value if isinstance(value, list) else [value]
        for item in values:
            if isinstance(field.field_type, type) and issubclass(field.field_type, KaggleObject):
                found += problems(field.field_type, item)
            elif field.field_type in (str, int, bool) and type(item) is not field.field_type:
                found.append(f"{kind.__name__}.{name}: {item!r} is no {field.field_type.__name__}")
    return found


class KaggleStandIn(CloudStandIn):
    def __init__(self, provider, root):
        super().__init__(provider, root)
        self.kernels, self.datasets, self.blobs = {}, {}, {}
        self.quota_seconds, self.secrets = 30 * 3600, {}

    def error(self, status, message):
        return Answer(status, {"code": status, "message": message})

    def answer(self, request):
        if request.path.startswith("/blobs/"):
            self.blobs[request.path.rpartition("/")[2]]["content"] = request.raw
            return Answer(200)
        if request.path.startswith("/output/"):
            return Answer(200, (self.root / request.path.removeprefix("/output/")).read_bytes())
        expected = "Basic " + base64.b64encode(f"{USER}:{KEY}".encode()).decode()
        if request.headers.get("Authorization") != expected:
            raise Denied("Unauthenticated")
        service, name = request.path.removeprefix("/api/v1/").split("/")
        kind = getattr(TYPES[service], f"Api{name}Request", None) or getattr(TYPES[service], f"{name}Request")
        body = json.loads(request.raw or b"{}")
        wrong = problems(kind, body)
        if wrong:
            return self.error(400, "; ".join(wrong))
        return getattr(self, f"do_{name}")(body)

    def do_GetAcceleratorQuotaStatistics(self, _body):
        self.provider._answer()
        quota = {"totalTimeAllowed": f"{self.quota_seconds}s", "timeUsed": "0s", "timeReserved": "0s"}
        return Answer(200, {"quotaRefreshTime": "2026-11-21T00:00:00.000Z", "gpuQuota": quota})

    def do_StartBlobUpload(self, body):
        token = f"token{len(self.blobs)}"
        self.blobs[token] = {"name": body["name"], "size": body["contentLength"]}
        return Answer(200, {"token": token, "createUrl": f"{self.url}/blobs/{token}"})

    def do_CreateDataset(self, body):
        assert body["isPrivate"] is True
        assert 6 <= len(body["slug"]) <= 50
        if body["slug"] in self.datasets:
            return Answer(200, {"status": "error", "error": "the slug is in use"})
        files = [self.blobs[file["token"]] for file in body["files"]]
        assert all(len(file["content"]) == file["size"] for file in files)
        self.datasets[body["slug"]] = {file["name"]: file["content"] for file in files}
        return Answer(200, {"ref": f"{USER}/{body['slug']}", "status": "ok"})

    def do_GetDatasetStatus(self, body):
        if body["datasetSlug"] not in self.datasets:
            return self.error(403, "Permission 'datasets.get' was denied")
        return Answer(200, {"status": "READY"})

    def do_SaveKernel(self, body):
        slug = body["slug"].rpartition("/")[2]
        assert body["newTitle"] == slug
        assert body["isPrivate"] is True
        assert body["sessionTimeoutSeconds"] <= 12 * 3600
        missing = [
            name for name in body["datasetDataSources"] if name.rpartition("/")[2] not in self.datasets
        ]
        if missing:
            return Answer(200, {"ref": "", "invalidDatasetSources": missing})
        self.creations += 1
        self.kernels[slug] = body
        gpu = body.get("machineShape", "") and CARD
        self.provider.create(slug, gpu=gpu, seconds=body["sessionTimeoutSeconds"] - 900)
        return Answer(200, {"ref": f"/code/{USER}/{slug}", "versionNumber": 1})

    def do_GetKernelSessionStatus(self, body):
        machine = self.seen(body["kernelSlug"])
        if machine is None:
            return self.error(403, "Permission 'kernels.get' was denied")
        phase = self.phase(machine)
        names = {
            "waiting": "QUEUED",
            "running": "RUNNING",
            "done": "COMPLETE",
            "ended": "CANCEL_ACKNOWLEDGED",
        }
        return Answer(200, {"status": names[phase]})

    def seen(self, slug):
        """The kernel, unless it was deleted."""
        self.provider._answer()
        machine = self.machine(slug)
        there = machine is not None and slug in self.kernels and machine.created_at <= self.provider.now
        return machine if there else None

    def do_ListKernelSessionOutput(self, body):
        machine = self.seen(body["kernelSlug"])
        if machine is None:
            return self.error(404, "not found")
        label = machine.label
        folder = self.root / label / "working"
        if label not in self.processes and self.phase(machine) == "done":
            (folder / "work").mkdir(parents=True, exist_ok=True)
            (folder / "work" / "exit.json").write_text(json.dumps(self.simulated_exit(machine)))
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if self.phase(machine) not in ("done", "ended"):
            files = []
        at = int(body.get("pageToken") or 0)
        page = [
            {
                "fileName": path.relative_to(folder).as_posix(),
                "url": f"{self.url}/output/{path.relative_to(self.root).as_posix()}",
            }
            for path in files[at : at + 5]
        ]
        log = json.dumps([{"stream_name": "stdout", "time": 0, "data": self.output(label)}])
        following = {"nextPageToken": str(at + 5)} if at + 5 < len(files) else {}
        return Answer(200, {"files": page, "log": log, **following})

    def do_DeleteKernel(self, body):
        machine = self.seen(body["kernelSlug"])
        if machine is None:
            return self.error(404, "not found")
        same = [other for other in self.provider.machines if other.label == machine.label]
        for other in same:
            self.provider.terminate(other.id)
        if all(other.ended_at is not None for other in same):
            del self.kernels[machine.label]
        return Answer(200, {})

    def do_ListKernels(self, body):
        assert (body["group"], body["search"]) == ("PROFILE", "graft-")
        found = [machine for machine in self.provider.list() if machine.label in self.kernels]
        rows = [
            {
                "ref": f"{USER}/{machine.label}",
                "machineShape": self.shape(machine),
                "lastRunTime": datetime.fromtimestamp(machine.created_at, UTC).isoformat()[:19] + "Z",
            }
            for machine in found
        ]
        other = {"ref": f"{USER}/graft-of-another-person", "machineShape": ""}
        assert not LABEL.fullmatch("graft-of-another-person")
        return Answer(200, {"kernels": [*rows, other]})

    def shape(self, machine):
        asked = self.kernels[machine.label].get("machineShape", "")
        return asked if not asked or machine.gpu == CARD else "NvidiaTeslaP100"

    def command(self, label):
        folder = self.root / label
        for source in self.kernels[label]["datasetDataSources"]:
            slug = source.rpartition("/")[2]
            (folder / "input" / slug).mkdir(parents=True, exist_ok=True)
            for name, content in self.datasets[slug].items():
                (folder / "input" / slug / name).write_bytes(content)
        (folder / "working").mkdir(parents=True, exist_ok=True)
        text = self.kernels[label]["text"].replace("/kaggle/", f"{folder}/")
        (folder / "script.py").write_text(text)
        site = self.root / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(SITE)
        (site / "kaggle_secrets.py").write_text(SECRETS)
        environment = {
            "PYTHONPATH": python_path(site),
            "KAGGLE_API_ENVIRONMENT": "TEST",
            "STAND_IN": self.url,
            "KAGGLE_STAND_IN_SECRETS": json.dumps(self.secrets),
            "HOME": str(folder),
        }
        # Inside of a kernel Kaggle's client is logged in as its owner.
        (folder / ".kaggle").mkdir(exist_ok=True)
        (folder / ".kaggle" / "kaggle.json").write_text(json.dumps({"username": USER, "key": KEY}))
        if not self.kernels[label]["enableInternet"]:
            raise Refused("no network")
        return [PYTHON, str(folder / "script.py")], environment, folder
