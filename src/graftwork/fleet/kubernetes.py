"""A Kubernetes cluster as a place, by kubectl. Contract-tested against a stand-in, not live-validated.

In: an order. Out: a Job, JobSet or RayJob whose name is the job's label: the cluster refuses a second one.
Bundles and results go through a volume that pods mount and this machine sees as a folder or fsspec URL.
Secrets are a Secret of the cluster, given on kubectl's standard input.
"""

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

from graftwork.fleet.manifests import MARK, MOUNT, RESOURCES, manifest_of, secret_of
from graftwork.fleet.place import LABEL, NotThere, PlaceUnreachable, Refused, unknown_job
from graftwork.fleet.settings import KubernetesSettings
from graftwork.fleet.storage import (
    UrlStorage,
    ask_to_stop,
    fetch_results,
    read_beat_of,
    read_exit,
    ship,
    start_words,
)
from graftwork.records.errors import GraftError
from graftwork.records.fleet import JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

COMMAND_SECONDS = 60
OVER = ("Complete", "Failed", "Completed")


@dataclass(frozen=True)
class CommandResult:
    code: int
    output: str
    errors: str


RunCommand = Callable[[Sequence[str], str], CommandResult]
"""Runs kubectl with these words and this standard input."""


class KubernetesPlace:
    name = "kubernetes"

    def __init__(self, settings: KubernetesSettings, *, run: RunCommand | None = None) -> None:
        self._settings = settings
        self._run = run or run_kubectl
        self._files: UrlStorage | None = None
        self.paid = settings.usd_per_hour > 0
        self.sent_bytes = 0

    @property
    def _storage(self) -> UrlStorage:
        self._files = self._files or UrlStorage(self._settings.storage, setting="fleet.kubernetes.storage")
        return self._files

    def offer(self) -> tuple[Offer, ...]:
        """The card of the settings; asks the cluster whether jobs may be made."""
        resource = RESOURCES[self._settings.kind]
        self._ask("auth", "can-i", "create", resource)
        return (
            Offer(
                place=self.name,
                gpu=self._settings.gpu,
                gpus=1 if self._settings.gpu else 0,
                usd_per_hour=self._settings.usd_per_hour,
                source="fleet.kubernetes",
                dated=date.today().isoformat(),
            ),
        )

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        if order.gpu and order.gpu != self._settings.gpu:
            raise Refused(
                f"the cluster has no card {order.gpu}",
                why=f"fleet.kubernetes.gpu is {self._settings.gpu or 'empty'}",
                fix="name that card, or change the setting",
                where="--gpu",
            )
        found = self._get(order.label)
        if found is not None:
            return self._placed(found)
        self.sent_bytes = ship(self._storage, Path(order.bundle), order.label).sent_bytes
        words = start_words(order.label, order.seconds, root=MOUNT, work="/tmp/work")
        words += ["--out", f"{MOUNT}/jobs/{order.label}/out"]
        body = manifest_of(
            order.label,
            words,
            self._settings,
            seconds=order.seconds,
            secrets=bool(secrets),
            gpu=bool(order.gpu),
        )
        with suppress(_Exists):
            if secrets:
                self._ask("create", "-f", "-", given=secret_of(order.label, dict(secrets), self._settings))
        try:
            made = self._ask("create", "-f", "-", "-o", "json", given=body)
        except _Exists:
            made = self._get(order.label) or body
        except Refused:
            self._forget_secrets(order.label)
            raise
        return self._placed(made)

    def poll(self, job: PlacedJob) -> JobPoll:
        found = self._get(job.label)
        if found is None:
            return JobPoll(phase="gone")
        over, message = _end_of(found)
        ended = read_exit(self._storage, job.label)
        if ended is not None:
            self._forget_secrets(job.label)
            return ended
        if over:
            self._forget_secrets(job.label)
            code = 75 if "DeadlineExceeded" in message else 1
            words = [message or "the pod ended without a result", *self._pod_reasons(job.label)]
            return JobPoll(phase="ended", exit_code=code, message="; ".join(words))
        status = found.get("status") or {}
        active = status.get("ready") or status.get("jobStatus") == "RUNNING" or _is_active(status)
        if not active:
            return JobPoll(phase="starting", message="waiting for a node")
        return JobPoll(phase="running", beat=read_beat_of(self._storage, job.label))

    def _pod_reasons(self, label: str) -> list[str]:
        """Why the pods of a job ended, or did not start; the job itself counts them only."""
        with suppress(GraftError):
            pods = self._ask("get", "pods", "-l", f"{MARK}={label}", "-o", "json")
            with suppress(AttributeError, KeyError, TypeError):
                return list(dict.fromkeys(reason for pod in pods["items"] for reason in _reasons_of(pod)))
        return []

    def log(self, job: PlacedJob) -> str:
        try:
            return str(self._text("logs", "-l", f"{MARK}={job.label}", "--tail=-1", "--ignore-errors"))
        except NotThere:
            return ""

    def fetch(self, job: PlacedJob, folder: Path) -> None:
        if not fetch_results(self._storage, job.label, folder) and self._get(job.label) is None:
            raise unknown_job(self.name, job.label)

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        if not at_once:
            ask_to_stop(self._storage, job.label)
            return
        self._text(
            *("delete", RESOURCES[self._settings.kind], job.label),
            *("--ignore-not-found", "--cascade=foreground", "--wait=false"),
        )
        self._forget_secrets(job.label)

    def list(self) -> tuple[PlacedJob, ...]:
        found = self._ask("get", RESOURCES[self._settings.kind], "-l", MARK, "-o", "json")
        return tuple(
            self._placed(entry)
            for entry in found["items"]
            if LABEL.fullmatch(str(entry["metadata"]["name"])) and not _end_of(entry)[0]
        )

    def _get(self, label: str) -> dict[str, Any] | None:
        text = self._text("get", RESOURCES[self._settings.kind], label, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def _placed(self, found: Mapping[str, Any]) -> PlacedJob:
        created = str(found["metadata"].get("creationTimestamp") or "")
        with suppress(ValueError):
            seconds = datetime.fromisoformat(created).timestamp()
            return self._named(str(found["metadata"]["name"]), seconds)
        return self._named(str(found["metadata"]["name"]), 0.0)

    def _named(self, label: str, created: float) -> PlacedJob:
        price = self._settings.usd_per_hour
        return PlacedJob(place=self.name, id=label, label=label, usd_per_hour=price, created_at=created)

    def forget(self, label: str) -> None:
        self._text("delete", "secret", label, "--ignore-not-found", "--wait=false")

    def _forget_secrets(self, label: str) -> None:
        with suppress(GraftError):
            self.forget(label)

    def _ask(self, *words: str, given: dict[str, Any] | None = None) -> Any:
        text = self._text(*words, given=given)
        try:
            return json.loads(text) if text.lstrip().startswith("{") else {}
        except ValueError:
            raise PlaceUnreachable(
                "kubectl wrote something that is no JSON",
                why=text[:200],
                fix="try `kubectl get jobs -o json`; fleet.kubernetes.context names the cluster",
            ) from None

    def _text(self, *words: str, given: dict[str, Any] | None = None) -> str:
        settings = self._settings
        context = (f"--context={settings.context}",) if settings.context else ()
        limit = f"--request-timeout={COMMAND_SECONDS}s"
        full = (*words, f"--namespace={settings.namespace}", limit, *context)
        done = self._run(full, json.dumps(given) if given is not None else "")
        if done.code:
            raise _explain(done.errors.strip() or done.output.strip())
        return done.output


def run_kubectl(words: Sequence[str], given: str) -> CommandResult:
    try:
        done = subprocess.run(
            ["kubectl", *words],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * COMMAND_SECONDS,
        )
    except OSError as error:
        raise Refused(
            "there is no kubectl on this machine",
            why=str(error.strerror),
            fix="install kubectl and make `kubectl get pods` work",
        ) from error
    except subprocess.TimeoutExpired:
        raise PlaceUnreachable("kubectl does not answer", fix="try again later") from None
    return CommandResult(done.returncode, done.stdout, done.stderr)


class _Exists(Refused):
    """An object of that name exists already."""


def _end_of(found: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether the object has run to an end, and what the cluster says about it."""
    status = found.get("status") or {}
    if status.get("jobStatus") in ("SUCCEEDED", "FAILED", "STOPPED"):
        return True, str(status.get("message") or "")
    for condition in status.get("conditions") or ():
        if condition.get("type") in OVER and condition.get("status") == "True":
            return True, f"{condition.get('reason', '')} {condition.get('message', '')}".strip()
    return False, ""


def _reasons_of(pod: Mapping[str, Any]) -> Iterator[str]:
    """An eviction, a container that was killed (OOMKilled), an image that cannot be pulled."""
    status = pod.get("status") or {}
    if status.get("reason"):
        yield f"the pod: {status['reason']} {status.get('message') or ''}".strip()[:300]
    for container in status.get("containerStatuses") or ():
        ended = container["state"].get("terminated") or container["state"].get("waiting") or {}
        code = f", exit code {ended['exitCode']}" if ended.get("exitCode") else ""
        if code or ("exitCode" not in ended and ended.get("reason")):
            why = f"{ended.get('reason', 'ended')}{code} {ended.get('message') or ''}".strip()
            yield f"its container: {why[:300]}"


def _is_active(status: Mapping[str, Any]) -> bool:
    jobs = status.get("replicatedJobsStatus") or ()
    return any(job.get("ready") for job in jobs)


_REASON = re.compile(r"Error from server \((\w+)\)")
_DENIED = re.compile(
    r"Unauthorized|Forbidden|must be logged in|provide credentials|getting credentials"
    r"|context .* does not exist|no context exists"
)
_UNREACHED = re.compile(
    r"connection refused|refused - did you specify|no such host|i/o timeout|network is unreachable"
)
_INVALID = re.compile(
    r"^The \S+ .* is invalid|\((?:Invalid|BadRequest)\)|denied the request"
    r"|error validating|no matches for kind|have a resource type",
    re.MULTILINE,
)


def _explain(errors: str) -> GraftError:
    """`Refused` only where the cluster certainly did nothing; after any other error it may have."""
    text = errors.splitlines()[-1][:300] if errors else "no output"
    found = _REASON.search(errors)
    # The reason decides where there is one: the message may quote anything.
    basis = f"({found[1]})" if found else errors
    if "(AlreadyExists)" in basis:
        return _Exists(text)
    if "exceeded quota" in errors and (found is None or found[1] == "Forbidden"):
        return Refused(
            f"the quota of the namespace is used up: {text}", fix="wait, or ask who runs the cluster for more"
        )
    if "(NotFound)" in basis:
        return NotThere(
            f"the cluster does not have it: {text}",
            fix="check namespace, kind and claim in fleet.kubernetes",
            where="fleet.kubernetes",
        )
    if _DENIED.search(basis) or text == "no":
        return Refused(
            f"the cluster refuses the login: {text}",
            fix="make `kubectl auth can-i create jobs` say yes; fleet.kubernetes.context names the cluster",
            where="fleet.kubernetes.context",
        )
    # A cluster that cannot be reached lacks every type of resource, and validates nothing.
    if _INVALID.search(basis) and (found is not None or not _UNREACHED.search(errors)):
        return Refused(
            f"the cluster refuses it: {text}",
            fix="check kind, image, claim and gpu in fleet.kubernetes",
            where="fleet.kubernetes",
        )
    return PlaceUnreachable(
        f"the cluster does not answer as it should: {text}",
        fix="make `kubectl get jobs` work, or try again later; fleet.kubernetes.context names the cluster",
        where="fleet.kubernetes.context",
    )
