"""A stand-in for Azure: a workspace of Azure ML, its blob storage, its Key Vault, and the tokens for them.

The body of a job is checked by azure-ai-ml's own models of the service: unknown fields are refused.
"""

import base64
import json
import re
import time
from datetime import UTC, datetime
from urllib.parse import unquote
from xml.sax.saxutils import escape

from azure.ai.ml._restclient.arm_ml_service import models
from cloud_server import PYTHON, Answer, CloudStandIn, Denied
from fleet_simulator import CARD

from graftwork.fleet.place import PlaceUnreachable

SUBSCRIPTION, GROUP, WORKSPACE = "00000000-aaaa", "group", "workspace"
ACCOUNT, CONTAINER, KEY = "account", "container", base64.b64encode(b"key of the account").decode()
SIZE, OTHER_SIZE = "Standard_NC24ads_A100_v4", "Standard_NC4as_T4_v3"
HEADER = "of the machine"
ROOT = (
    f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.MachineLearningServices"
    f"/workspaces/{WORKSPACE}"
)
KINDS = {
    "uri_folder in": models.UriFolderJobInput,
    "uri_folder out": models.UriFolderJobOutput,
}


def problems(body) -> list[str]:
    """What the service would complain about, by the models of its client."""
    if set(body) != {"properties"}:
        return [f"unknown fields {set(body) - {'properties'}}"]
    job = body["properties"]
    found = unknown_fields(models.CommandJob, job, "")
    found += unknown_fields(models.JobResourceConfiguration, job.get("resources", {}), "resources.")
    found += unknown_fields(models.CommandJobLimits, job.get("limits", {}), "limits.")
    found += unknown_fields(models.QueueSettings, job.get("queueSettings", {}), "queueSettings.")
    for name, entry in job.get("inputs", {}).items():
        found += unknown_fields(KINDS[f"{entry['jobInputType']} in"], entry, f"inputs.{name}.")
    for name, entry in job.get("outputs", {}).items():
        found += unknown_fields(KINDS[f"{entry['jobOutputType']} out"], entry, f"outputs.{name}.")
    found += [f"{name}: missing" for name in ("command", "environmentId") if not job.get(name)]
    if job.get("queueSettings", {}).get("jobTier") not in ("Spot", "Standard"):
        found.append("queueSettings.jobTier: no such one")
    return found


def unknown_fields(model, entry, where) -> list[str]:
    known = {field._rest_name for field in model._attr_to_rest_field.values()}
    return [f"{where}{name}: unknown" for name in entry if name not in known]


def make_token(audience) -> str:
    """In the form of a JSON Web Token, which the client looks into."""
    claims = {"aud": audience, "tid": "tenant", "exp": int(time.time()) + 3600}
    parts = (json.dumps({"alg": "none"}), json.dumps(claims), "signature")
    return ".".join(base64.urlsafe_b64encode(part.encode()).rstrip(b"=").decode() for part in parts)


class AzureMLStandIn(CloudStandIn):
    def __init__(self, provider, root):
        super().__init__(provider, root)
        self.blobs: dict[str, bytes] = {}
        self.jobs, self.secrets, self.environments = {}, {}, {}
        self.is_blob = False

    def error(self, status, message, code="Error"):
        if self.is_blob:
            body = (
                f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
            )
            return Answer(status, body.encode(), {"Content-Type": "application/xml", "x-ms-error-code": code})
        return Answer(status, {"error": {"code": code, "message": message}})

    def answer(self, request):
        path = unquote(request.path)
        self.is_blob = path.startswith(f"/{ACCOUNT}/")
        if path in ("/token", "/obo"):
            return self.token(request)
        if self.is_blob:
            if not request.headers.get("Authorization", "").startswith(f"SharedKey {ACCOUNT}:"):
                raise Denied("AuthenticationFailed")
            return self.blob(request, path.removeprefix(f"/{ACCOUNT}/{CONTAINER}").lstrip("/"))
        if not request.headers.get("Authorization", "").startswith("Bearer "):
            raise Denied("The access token is missing")
        if path.startswith("/vault/"):
            return self.vault(request, path.removeprefix("/vault/secrets/"))
        if not path.startswith(ROOT):
            return self.error(404, "The workspace was not found", "ResourceNotFound")
        for method, pattern, name in ROUTES:
            match = re.fullmatch(ROOT + pattern, path)
            if match and request.method == method:
                return getattr(self, name)(request, *match.groups())
        return self.error(404, f"no such page: {request.method} {path}", "NotFound")

    def token(self, request):
        """As the endpoint of a managed identity, and as that for jobs on behalf of a user."""
        if request.path == "/token" and request.headers.get("X-Identity-Header") != HEADER:
            return Answer(401, {"error": "invalid_client", "error_description": "wrong header"})
        token = make_token(request.query["resource"])
        return Answer(
            200,
            {"access_token": token, "expires_on": str(int(time.time()) + 3600), "token_type": "Bearer"},
        )

    # Storage.

    def blob(self, request, name):
        if request.query.get("comp") == "list":
            self.collect()
            return self.list_blobs(request.query.get("prefix", ""))
        if request.method == "PUT":
            assert request.headers["X-Ms-Blob-Type"] == "BlockBlob"
            self.blobs[name] = request.raw
            return Answer(201, b"", {"ETag": '"x"', "Last-Modified": "Mon, 16 Nov 2026 10:00:00 GMT"})
        self.collect()
        if name not in self.blobs:
            return self.error(404, "The specified blob does not exist.", "BlobNotFound")
        return self.part_of(self.blobs[name], request.headers.get("X-Ms-Range", ""))

    def part_of(self, data, asked):
        headers = {"ETag": '"x"', "x-ms-blob-type": "BlockBlob", "Content-Type": "application/octet-stream"}
        headers["Last-Modified"] = "Mon, 16 Nov 2026 10:00:00 GMT"
        if not asked:
            return Answer(200, data, headers)
        if not data:
            return self.error(416, "The range is invalid", "InvalidRange")
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return Answer(206, part, headers)

    def list_blobs(self, prefix):
        rows = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Content-Length>{len(data)}</Content-Length>"
            "<BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name, data in sorted(self.blobs.items())
            if name.startswith(prefix)
        )
        body = f"<EnumerationResults><Blobs>{rows}</Blobs><NextMarker/></EnumerationResults>"
        return Answer(200, body.encode(), {"Content-Type": "application/xml"})

    # Key Vault.

    def vault(self, request, name):
        if request.method == "PUT":
            self.secrets[name] = json.loads(request.raw)["value"]
        elif name not in self.secrets:
            return self.error(404, "the secret was not found", "SecretNotFound")
        if request.method == "DELETE":
            return Answer(200, {"id": name, "value": self.secrets.pop(name) and None})
        return Answer(200, {"id": name, "value": self.secrets[name] if request.method == "GET" else None})

    # The workspace.

    def datastore(self, _request, name):
        properties = {"datastoreType": "AzureBlob", "accountName": ACCOUNT, "containerName": CONTAINER}
        properties |= {"endpoint": "core.windows.net", "protocol": "https", "isDefault": True}
        properties["credentials"] = {"credentialsType": "AccountKey"}
        return Answer(200, {"id": f"{ROOT}/datastores/{name}", "name": name, "properties": properties})

    def datastore_key(self, _request, _name):
        return Answer(200, {"secretsType": "AccountKey", "key": KEY})

    def environment(self, request, version):
        body = json.loads(request.raw)
        found = unknown_fields(models.EnvironmentVersionProperties, body["properties"], "")
        assert not found, found
        identity = f"{ROOT}/environments/CliV2AnonymousEnvironment/versions/{version}"
        self.environments[identity] = body["properties"]["image"]
        return Answer(201, {**body, "id": identity, "name": version})

    def create_job(self, request, name):
        body = json.loads(request.raw)
        wrong = problems(body)
        if wrong:
            return self.error(400, "; ".join(wrong), "UserError")
        job = body["properties"]
        assert job["environmentId"] in self.environments
        if name in self.jobs:
            # A job that exists is updated: what it runs stays as it is.
            return Answer(200, self.job(self.machine(name)))
        self.creations += 1
        seconds = seconds_of(job["limits"]["timeout"]) - 600
        try:
            machine = self.provider.create(name, gpu=CARD, seconds=seconds)
        except Exception as error:
            if "quota" in str(error):
                return self.error(400, "The specified subscription has insufficient quota", "UserError")
            if isinstance(error, PlaceUnreachable) and self.machine(name) is not None:
                self.jobs[name] = job
                self.one_of_a_name(name)
            raise
        self.jobs[name] = job
        self.one_of_a_name(name)
        return Answer(201, self.job(machine))

    def there(self, name):
        machine = self.machine(name)
        return machine if machine is not None and machine.created_at <= self.provider.now else None

    def get_job(self, _request, name):
        self.provider._answer()
        machine = self.there(name)
        if machine is None:
            return self.error(404, f"Run {name} was not found", "UserError")
        return Answer(200, self.job(machine))

    def list_jobs(self, request):
        assert request.query["tag"] == "graftwork"
        found = [machine for machine in self.provider.list() if machine.label in self.jobs]
        rows = [self.job(machine) for machine in found]
        if rows:
            rows.append({**rows[0], "name": "graft-of-another-person"})
        return Answer(200, {"value": rows})

    def cancel(self, _request, name):
        machine = self.there(name)
        if machine is None:
            return self.error(404, f"Run {name} was not found", "UserError")
        if self.phase(machine) in ("done", "ended"):
            return self.error(400, "The job is in a terminal state and cannot be canceled", "UserError")
        self.provider.terminate(machine.id)
        return Answer(202, b"", {"Location": f"{self.url}{ROOT}/operations/1"})

    def job(self, machine):
        status = {"waiting": "Queued", "running": "Running", "done": "Completed", "ended": "Canceled"}
        created = machine.created_at + self.provider.clock() - self.provider.now
        job = self.jobs[machine.label]
        size = SIZE if machine.gpu == CARD else OTHER_SIZE
        return {
            "id": f"{ROOT}/jobs/{machine.label}",
            "name": machine.label,
            "type": "Microsoft.MachineLearningServices/workspaces/jobs",
            "properties": {
                **job,
                "status": status[self.phase(machine)],
                "resources": {**job["resources"], "instanceType": size},
            },
            "systemData": {"createdAt": datetime.fromtimestamp(created, UTC).isoformat()},
        }

    # Running a job.

    def command(self, label):
        job, folder = self.jobs[label], self.root / label
        (files,), (out,) = job["inputs"].values(), job["outputs"].values()
        mounts = {"inputs.files": folder / "files", "outputs.job": folder / "mounted"}
        for name, entry in zip(mounts, (files, out), strict=True):
            prefix = entry["uri"].removeprefix("azureml://datastores/workspaceblobstore/paths/")
            mounts[name].mkdir(parents=True, exist_ok=True)
            for blob, data in self.blobs.items():
                if blob.startswith(prefix):
                    target = mounts[name] / blob.removeprefix(prefix)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(data)
        line = job["command"].replace("/tmp/graftwork", f"{folder}/tmp").replace("python3 ", f"{PYTHON} ")
        for name, path in mounts.items():
            line = line.replace(f"${{{{{name}}}}}", str(path))
        assert "${{" not in line
        return ["bash", "-c", line], {"OBO_ENDPOINT": f"{self.url}/obo"}, folder

    def collect(self):
        """What the mount writes to the storage, and what jobs that were only simulated leave."""
        for label, job in self.jobs.items():
            (out,) = job["outputs"].values()
            prefix = out["uri"].removeprefix("azureml://datastores/workspaceblobstore/paths/")
            folder = self.root / label / "mounted"
            for path in folder.rglob("*"):
                if path.is_file():
                    self.blobs[prefix + path.relative_to(folder).as_posix()] = path.read_bytes()
            machine = self.machine(label)
            if label not in self.processes and machine is not None and self.phase(machine) == "done":
                content = json.dumps(self.simulated_exit(machine)).encode()
                self.blobs.setdefault(f"{prefix}out/exit.json", content)


def seconds_of(duration) -> int:
    """Of an ISO 8601 duration."""
    found = re.fullmatch(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)S)?)?", duration)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


ROUTES = (
    ("GET", r"/datastores/([^/]+)", "datastore"),
    ("POST", r"/datastores/([^/]+)/listSecrets", "datastore_key"),
    ("PUT", r"/environments/CliV2AnonymousEnvironment/versions/([^/]+)", "environment"),
    ("PUT", r"/jobs/([^/]+)", "create_job"),
    ("GET", r"/jobs", "list_jobs"),
    ("GET", r"/jobs/([^/]+)", "get_job"),
    ("POST", r"/jobs/([^/]+)/cancel", "cancel"),
)
