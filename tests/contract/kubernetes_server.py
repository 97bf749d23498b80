"""A stand-in for the API server of a Kubernetes cluster, and a small kubectl in this process.

Objects must have the fields and types that the models of the official Python client list
(`tests/data/kubernetes_models.json`, version 37.0.1); others are refused.
"""

import json
import re
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

from cloud_server import PYTHON, Answer, CloudStandIn, Denied

from graftwork.fleet.kubernetes import CommandResult
from graftwork.fleet.place import PlaceUnreachable
from graftwork.fleet.simulator import CARD

TOKEN, NAMESPACE = "kube-token", "training"
MODELS = json.loads((Path(__file__).parents[1] / "data" / "kubernetes_models.json").read_text())
PLAIN = {"str": str, "int": int, "bool": bool, "datetime": str, "float": (int, float), "object": object}
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"


def problems(model: str, body, path: str = "$") -> list[str]:
    """What the models of the official client do not allow."""
    if not isinstance(body, dict):
        return [f"{path}: no object"]
    fields = MODELS[model]
    found = [f"{path}.{name}: unknown field" for name in body if name not in fields]
    for name, value in body.items():
        if name in fields:
            found += _check(fields[name], value, f"{path}.{name}")
    return found


def _check(kind: str, value, path: str) -> list[str]:
    if kind.lower().startswith("list["):
        if not isinstance(value, list):
            return [f"{path}: no list"]
        return [line for at, item in enumerate(value) for line in _check(kind[5:-1], item, f"{path}[{at}]")]
    if kind.startswith("Dict["):
        inner = kind[5:-1].split(", ")[1]
        return [line for key, item in value.items() for line in _check(inner, item, f"{path}.{key}")]
    if kind in MODELS:
        return problems(kind, value, path)
    return [] if isinstance(value, PLAIN[kind]) else [f"{path}: {value!r} is no {kind}"]


class KubernetesStandIn(CloudStandIn):
    def __init__(self, provider, root):
        super().__init__(provider, root)
        self.jobs, self.secrets = {}, {}
        self.needs_token = True
        self.storage = root / "volume"
        self.storage.mkdir(parents=True)

    def error(self, status, message, reason=None):
        reasons = {
            401: "Unauthorized",
            429: "TooManyRequests",
            500: "InternalError",
            504: "ServiceUnavailable",
        }
        reason = reason or reasons.get(status, "Invalid")
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message}
        return Answer(status, {**body, "reason": reason, "code": status})

    def answer(self, request):
        if self.needs_token and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Denied("Unauthorized")
        if request.path in DISCOVERY:
            return Answer(200, DISCOVERY[request.path])
        if request.path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews":
            review = json.loads(request.raw)
            return Answer(201, {**review, "status": {"allowed": True}})
        found = re.fullmatch(rf"({JOBS}|{SECRETS})(?:/([^/]+))?", request.path)
        if found:
            kind = "job" if found[1] == JOBS else "secret"
            return getattr(self, f"{request.method.lower()}_{kind}")(request, found[2])
        if request.path == f"/api/v1/namespaces/{NAMESPACE}/pods":
            return Answer(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": []})
        return self.error(404, f"no such page: {request.method} {request.path}", "NotFound")

    def post_job(self, request, _name):
        body = json.loads(request.raw)
        wrong = problems("V1Job", body)
        if wrong:
            return self.error(422, "; ".join(wrong))
        name = body["metadata"]["name"]
        if self.there(name):
            return self.error(409, f'jobs.batch "{name}" already exists', "AlreadyExists")
        self.creations += 1
        self.jobs[name] = body
        try:
            machine = self.provider.create(
                name, gpu=CARD, seconds=body["spec"]["activeDeadlineSeconds"] - 600
            )
        except Exception as error:
            if "quota" in str(error):
                del self.jobs[name]
                return self.error(403, f'jobs.batch "{name}" is forbidden: exceeded quota: gpus', "Forbidden")
            if isinstance(error, PlaceUnreachable):
                self.one_of_a_name(name)
            raise
        self.one_of_a_name(name)
        return Answer(201, self.job(machine))

    def there(self, name):
        machine = self.machine(name)
        gone = machine is None or name not in self.jobs or machine.created_at > self.provider.now
        return None if gone else machine

    def get_job(self, request, name):
        if name is None:
            assert request.query["labelSelector"] == "graftwork"
            machines = [machine for machine in self.provider.list() if machine.label in self.jobs]
            other = {"metadata": {"name": "graft-of-another"}, "status": {}}
            items = [*map(self.job, machines), other]
            return Answer(200, {"kind": "JobList", "apiVersion": "batch/v1", "metadata": {}, "items": items})
        self.provider._answer()
        machine = self.there(name)
        if machine is None:
            return self.error(404, f'jobs.batch "{name}" not found', "NotFound")
        return Answer(200, self.job(machine))

    def delete_job(self, _request, name):
        machine = self.there(name)
        if machine is None:
            return self.error(404, f'jobs.batch "{name}" not found', "NotFound")
        self.provider.terminate(machine.id)
        if machine.ended_at is not None:
            del self.jobs[name]
        return Answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def post_secret(self, request, _name):
        body = json.loads(request.raw)
        wrong = problems("V1Secret", body)
        if wrong:
            return self.error(422, "; ".join(wrong))
        self.secrets[body["metadata"]["name"]] = body["stringData"]
        return Answer(201, body)

    def delete_secret(self, _request, name):
        if self.secrets.pop(name, None) is None:
            return self.error(404, f'secrets "{name}" not found', "NotFound")
        return Answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def get_secret(self, _request, name):
        if name not in self.secrets:
            return self.error(404, f'secrets "{name}" not found', "NotFound")
        return Answer(200, {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": name}})

    def job(self, machine):
        phase = self.phase(machine)
        if machine.label not in self.processes and phase == "done":
            out = self.storage / "jobs" / machine.label / "out"
            out.mkdir(parents=True, exist_ok=True)
            (out / "exit.json").write_text(json.dumps(self.simulated_exit(machine)))
        kinds = {"done": ("Complete", "Completed"), "ended": ("Failed", "BackoffLimitExceeded")}
        status = {"active": 1, "ready": int(phase == "running")} if phase in ("waiting", "running") else {}
        if phase in kinds:
            kind, reason = kinds[phase]
            status["conditions"] = [{"type": kind, "status": "True", "reason": reason}]
        created = machine.created_at + self.provider.clock() - self.provider.now
        body = self.jobs[machine.label]
        stamp = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {**body, "metadata": {**body["metadata"], "creationTimestamp": stamp}, "status": status}

    def command(self, label):
        (container,) = self.jobs[label]["spec"]["template"]["spec"]["containers"]
        (mount,) = container["volumeMounts"]
        folder = self.root / label
        words = [
            word.replace("/tmp/", f"{folder}/tmp/").replace(mount["mountPath"] + "/", f"{self.storage}/")
            for word in container["command"]
        ]
        names = [entry["secretRef"]["name"] for entry in container.get("envFrom", ())]
        environment = {name: value for secret in names for name, value in self.secrets[secret].items()}
        return [PYTHON, *words[1:]], environment, folder


def _resources(*rows):
    return [
        {
            "name": name,
            "singularName": "",
            "namespaced": True,
            "kind": kind,
            "verbs": ["create", "get", "list", "delete"],
        }
        for name, kind in rows
    ]


def _group(name):
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


DISCOVERY = {
    "/version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [_group("batch"), _group("authorization.k8s.io")],
    },
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": _resources(("secrets", "Secret"), ("pods", "Pod")),
    },
    "/apis/batch/v1": {
        "kind": "APIResourceList",
        "groupVersion": "batch/v1",
        "resources": _resources(("jobs", "Job")),
    },
    "/apis/authorization.k8s.io/v1": {
        "kind": "APIResourceList",
        "groupVersion": "authorization.k8s.io/v1",
        "resources": _resources(("selfsubjectaccessreviews", "SelfSubjectAccessReview")),
    },
}
FLAGS = {"-f", "-o", "-l"}
SWITCHES = ("--ignore-not-found", "--wait=false", "--cascade=foreground", "--tail=-1", "--ignore-errors")


class SmallKubectl:
    """The words of kubectl that the place uses, as requests; any other word is an error."""

    def __init__(self, url, token):
        self.url, self.token = url, token

    def __call__(self, words, given):
        plain, options, at = [], {}, 0
        while at < len(words):
            word = words[at]
            if word in FLAGS:
                options[word] = words[at + 1]
                at += 1
            elif word.startswith("--"):
                known = word in SWITCHES or word.startswith(("--namespace=", "--request-timeout="))
                assert known, word
                options[word.split("=")[0]] = word.partition("=")[2]
            else:
                plain.append(word)
            at += 1
        assert options["--namespace"] == NAMESPACE
        return getattr(self, f"do_{plain[0]}")(plain[1:], options, given)

    def do_auth(self, words, _options, _given):
        assert words == ["can-i", "create", "jobs.batch"]
        body = {"spec": {"resourceAttributes": {"verb": "create", "resource": "jobs"}}}
        return self.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body, show="yes\n")

    def do_create(self, _words, options, given):
        assert options["-f"] == "-"
        body = json.loads(given)
        return self.ask("POST", JOBS if body["kind"] == "Job" else SECRETS, body)

    def do_get(self, words, options, _given):
        assert options["-o"] == "json"
        path = f"{JOBS}?labelSelector={options['-l']}" if "-l" in options else f"{JOBS}/{words[1]}"
        return self.ask("GET", path, missing_is_fine="--ignore-not-found" in options)

    def do_delete(self, words, options, _given):
        base = {"jobs.batch": JOBS, "secret": SECRETS}[words[0]]
        return self.ask("DELETE", f"{base}/{words[1]}", missing_is_fine="--ignore-not-found" in options)

    def do_logs(self, _words, _options, _given):
        return CommandResult(0, "", "")

    def ask(self, method, path, body=None, *, show=None, missing_is_fine=False):
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return CommandResult(0, show or answer.read().decode(), "")
        except urllib.error.HTTPError as error:
            status = json.loads(error.read())
            if status["reason"] == "NotFound" and missing_is_fine:
                return CommandResult(0, "", "")
            if status["reason"] == "Unauthorized":
                status["message"] = "You must be logged in to the server (Unauthorized)"
            return CommandResult(1, "", f"Error from server ({status['reason']}): {status['message']}")
        except OSError:
            return CommandResult(1, "", "Unable to connect to the server: connection refused")
