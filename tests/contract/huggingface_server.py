"""A stand-in for the Hub and its Jobs: repositories of one account, and jobs on the simulated provider.

The body of a job must have the fields that huggingface_hub writes, and nothing else.
"""

import base64
import hashlib
import json
import re
from datetime import UTC, datetime
from urllib.parse import unquote

from cloud_server import PYTHON, SOURCES, Answer, CloudStandIn, Denied, python_path
from fleet_simulator import CARD, OTHER_GPU
from hub_server import git_hash

TOKEN, NAMESPACE, REPOSITORY = "hf_token0fthestandin", "me", "me/jobs"
FLAVOR, OTHER_FLAVOR = "a10g-small", "t4-small"
FIELDS = {
    "command": list,
    "arguments": list,
    "environment": dict,
    "secrets": dict,
    "flavor": str,
    "timeoutSeconds": int,
    "attempts": int,
    "labels": dict,
    "volumes": list,
    "expose": dict,
    "ssh": dict,
    "network": dict,
    "resourceGroupId": str,
    "spaceId": str,
    "dockerImage": str,
}
VOLUME = {"type", "source", "mountPath", "revision", "readOnly", "path"}


def problems(body) -> list[str]:
    found = [f"{name}: unknown" for name in body if name not in FIELDS]
    found += [
        f"{name}: wrong type" for name in body if name in FIELDS and type(body[name]) is not FIELDS[name]
    ]
    found += [f"{name}: missing" for name in ("command", "flavor") if not body.get(name)]
    if ("dockerImage" in body) == ("spaceId" in body):
        found.append("exactly one of dockerImage and spaceId")
    for volume in body.get("volumes", ()):
        found += [f"volumes.{name}: unknown" for name in volume if name not in VOLUME]
    if body.get("flavor") not in (FLAVOR, OTHER_FLAVOR, "cpu-basic"):
        found.append("flavor: no such one")
    return found


class HuggingFaceStandIn(CloudStandIn):
    def __init__(self, provider, root):
        super().__init__(provider, root)
        self.files: dict[str, bytes] | None = None
        self.private = True
        self.large, self.jobs = {}, {}

    def answer(self, request):
        path = unquote(request.path)
        if path.startswith("/lfs/"):
            assert hashlib.sha256(request.raw).hexdigest() == path.removeprefix("/lfs/")
            self.large[path.removeprefix("/lfs/")] = request.raw
            return Answer(200, {})
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Denied("Invalid credentials in Authorization header")
        for method, pattern, name in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and request.method in method.split():
                return getattr(self, name)(request, *match.groups())
        return self.error(404, f"no such page: {request.method} {path}")

    # Repositories.

    def create_repo(self, request):
        body = json.loads(request.raw)
        assert (body["name"], body["type"], body["visibility"]) == ("jobs", "dataset", "private"), body
        there, self.files = self.files is not None, self.files or {}
        return Answer(409 if there else 200, {"url": f"{self.url}/datasets/{REPOSITORY}", "name": REPOSITORY})

    def preupload(self, request):
        if self.files is None:
            return self.missing("RepoNotFound")
        rows = []
        for file in json.loads(request.raw)["files"]:
            data, lfs = self.files.get(file["path"]), file["path"].startswith("blobs/")
            oid = None if data is None else hashlib.sha256(data).hexdigest() if lfs else git_hash(data)
            rows.append({"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "oid": oid})
        return Answer(200, {"files": [{**row, "shouldIgnore": False} for row in rows]})

    def batch(self, request):
        objects = []
        for entry in json.loads(request.raw)["objects"]:
            answer = {"oid": entry["oid"], "size": entry["size"]}
            if entry["oid"] not in self.large:
                answer["actions"] = {"upload": {"href": f"{self.url}/lfs/{entry['oid']}"}}
            objects.append(answer)
        return Answer(200, {"transfer": "basic", "objects": objects})

    def commit(self, request):
        for line in request.raw.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.files[value["path"]] = self.large[value["oid"]]
        return Answer(
            200,
            {
                "commitUrl": f"{self.url}/datasets/{REPOSITORY}/commit/{'0' * 40}",
                "commitOid": "0" * 40,
                "success": True,
            },
        )

    def tree(self, _request, folder=""):
        self.simulate()
        if self.files is None:
            return self.missing("RepoNotFound")
        names = [name for name in sorted(self.files) if name.startswith(f"{folder.strip('/')}/")]
        if not names:
            return self.missing("EntryNotFound")
        rows = [
            {"type": "file", "path": name, "size": len(self.files[name]), "oid": git_hash(self.files[name])}
            for name in names
        ]
        return Answer(200, rows)

    def resolve(self, _request, name):
        self.simulate()
        data = (self.files or {}).get(name)
        if data is None:
            return self.missing("EntryNotFound")
        headers = {"X-Repo-Commit": "0" * 40, "ETag": f'"{git_hash(data)}"', "Content-Length": str(len(data))}
        return Answer(200, data, headers)

    def missing(self, code):
        return Answer(404, {"error": code}, {"X-Error-Code": code})

    def info(self, _request):
        if self.files is None:
            return self.missing("RepoNotFound")
        return Answer(200, {"id": REPOSITORY, "sha": "0" * 40, "siblings": [], "private": self.private})

    # Jobs.

    def hardware(self, _request):
        self.provider._answer()
        minute = self.provider.usd_per_hour / 60

        def row(name, model, price):
            card = {"type": "gpu", "model": model, "quantity": "1", "vram": "24 GB", "manufacturer": "Nvidia"}
            return {
                "name": name,
                "prettyName": name,
                "cpu": "4 vCPU",
                "ram": "15 GB",
                "accelerator": card if model else None,
                "unitCostMicroUSD": int(price * 1e6),
                "unitCostUSD": price,
                "unitLabel": "minute",
            }

        cards = [row(FLAVOR, CARD, minute), row(OTHER_FLAVOR, OTHER_GPU, minute / 2)]
        return Answer(200, [row("cpu-basic", "", 0.0002), *cards])

    def create_job(self, request):
        body = json.loads(request.raw)
        wrong = problems(body)
        if wrong:
            return self.error(422, "; ".join(wrong))
        label = body["labels"]["name"]
        self.creations += 1
        self.jobs[label] = body
        gpu = CARD if body["flavor"] == FLAVOR else OTHER_GPU
        machine = self.provider.create(label, gpu=gpu, seconds=body["timeoutSeconds"] - 900)
        return Answer(200, self.job(machine))

    def list_jobs(self, request):
        stages = re.findall(r"stage=(\w+)", request.path + "?" + "&".join(self.queries(request)))
        label = request.query.get("label", "").removeprefix("name=")
        if label:
            self.provider._answer()
            now = self.provider.now
            machines = [
                found for found in self.provider.machines if found.label == label and found.created_at <= now
            ]
        else:
            machines = self.provider.list()
        rows = [self.job(machine) for machine in machines]
        rows = [row for row in rows if not stages or row["status"]["stage"] in stages]
        other = self.job(machines[0]) | {"labels": {"name": "graft-of-another"}} if machines else None
        return Answer(200, [*rows, *([other] if other and not label else [])])

    def queries(self, _request):
        """Repeated parameters, which the dictionary of the request does not keep."""
        return [self.raw[-1].split(b" ")[1].decode()]

    def inspect(self, _request, job_id):
        self.provider._answer()
        machine = next((found for found in self.provider.machines if found.id == job_id), None)
        if machine is None or machine.created_at > self.provider.now:
            return self.missing("JobNotFound")
        return Answer(200, self.job(machine))

    def cancel(self, _request, job_id):
        self.provider.terminate(job_id)
        return Answer(200, {})

    def logs(self, _request, job_id):
        label = next(found.label for found in self.provider.machines if found.id == job_id)
        lines = [
            f"data: {json.dumps({'data': line, 'timestamp': ''})}\n\n"
            for line in self.output(label).splitlines()
        ]
        return Answer(200, "".join(lines).encode(), {"Content-Type": "text/event-stream"})

    def job(self, machine):
        stages = {"waiting": "SCHEDULING", "running": "RUNNING", "done": "COMPLETED", "ended": "CANCELED"}
        created = machine.created_at + self.provider.clock() - self.provider.now
        body = self.jobs[machine.label]
        return {
            "id": machine.id,
            "createdAt": datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")[:23] + "Z",
            "dockerImage": body["dockerImage"],
            "command": body["command"],
            "arguments": [],
            "environment": {},
            "secrets": dict.fromkeys(body.get("secrets", {}), ""),
            "flavor": FLAVOR if machine.gpu == CARD else OTHER_FLAVOR,
            "labels": body["labels"],
            "status": {"stage": stages[self.phase(machine)], "message": None},
            "owner": {"id": "1", "name": NAMESPACE, "type": "user"},
        }

    def simulate(self):
        """What jobs that are not really run leave in the repository."""
        for machine in self.provider.machines:
            if (
                machine.label not in self.processes
                and self.phase(machine) == "done"
                and self.files is not None
            ):
                exit_file = f"jobs/{machine.label}/out/exit.json"
                self.files.setdefault(exit_file, json.dumps(self.simulated_exit(machine)).encode())

    def command(self, label):
        job, folder = self.jobs[label], self.root / label
        (volume,) = job["volumes"]
        assert (volume["type"], volume["source"]) == ("dataset", REPOSITORY)
        for name, content in self.files.items():
            target = folder / "mount" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        words = [
            word.replace("/tmp/", f"{folder}/tmp/")
            .replace(volume["mountPath"] + "/jobs", f"{folder}/mount/jobs")
            .replace(volume["mountPath"] + "/blobs", f"{folder}/mount/blobs")
            .replace("python3", PYTHON)
            for word in job["command"]
        ]
        environment = {
            **job["secrets"],
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "PYTHONPATH": python_path(SOURCES / "nothing"),
        }
        return words, environment, folder


_DATASET = f"/api/datasets/{REPOSITORY}"
ROUTES = (
    ("POST", r"/api/repos/create", "create_repo"),
    ("POST", rf"{_DATASET}/preupload/main", "preupload"),
    ("POST", rf"{_DATASET}/commit/main", "commit"),
    ("POST", rf"/datasets/{REPOSITORY}\.git/info/lfs/objects/batch", "batch"),
    ("GET", rf"{_DATASET}/tree/main(/.*)?", "tree"),
    ("GET", rf"{_DATASET}(?:/revision/main)?", "info"),
    ("GET HEAD", rf"/datasets/{REPOSITORY}/resolve/main/(.+)", "resolve"),
    ("GET", r"/api/jobs/hardware", "hardware"),
    ("POST", rf"/api/jobs/{NAMESPACE}", "create_job"),
    ("GET", rf"/api/jobs/{NAMESPACE}", "list_jobs"),
    ("GET", rf"/api/jobs/{NAMESPACE}/([^/]+)", "inspect"),
    ("POST", rf"/api/jobs/{NAMESPACE}/([^/]+)/cancel", "cancel"),
    ("GET", rf"/api/jobs/{NAMESPACE}/([^/]+)/logs", "logs"),
)
