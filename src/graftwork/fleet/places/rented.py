"""Machines that are rented by a REST API and reached over SSH, and the client of such an API.

Input: a provider's requests, as a subclass states them. Output: a place. The machine gets a public SSH key;
the bundle and the secrets go to it over SSH once it is up (`deliver`), never through the API. Requests that
may be repeated are, while the server is busy or broken; a creation is sent once.
"""

import json
import os
import time
import urllib.request
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from graftwork.fleet.place import CloudPlace, Login, PlaceUnreachable, Refused, unknown_job
from graftwork.fleet.places.hosts import ALIVE, HostsPlace, ProcessConnection, shared_connection
from graftwork.process.http_client import HttpClient, NoAnswer, Retries, may_pass, retry_after
from graftwork.process.ssh import ssh_command
from graftwork.records.errors import EnvironmentFailure, GraftError, UserError
from graftwork.records.fleet import JobOrder, JobPoll, PlacedJob

SECONDS = 30.0
ATTEMPTS = 4


class RestClient:
    """`key` is sent as a bearer token."""

    name: str
    """Name of the provider, for errors."""

    def __init__(self, key: str, base_url: str, *, wait: Callable[[float], None] = time.sleep) -> None:
        self._key, self._base, self._wait = key, base_url.rstrip("/"), wait
        self._http = HttpClient()

    def get(self, path: str) -> dict[str, Any]:
        return self.checked(*self.repeat("GET", path))

    def find(self, path: str) -> dict[str, Any] | None:
        """As `get`; None if the provider does not have it."""
        status, body = self.repeat("GET", path)
        return None if status == 404 else self.checked(status, body)

    def repeat(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Send a request that may safely be repeated; returns the answer."""
        retries = Retries(attempts=ATTEMPTS)
        while True:
            retry_after: float | None = None
            try:
                status, content, retry_after = self._send(method, path, body)
            except PlaceUnreachable:
                pause = retries.after_failure()
                if pause is None:
                    raise
            else:
                pause = retries.after_failure(asked=retry_after) if may_pass(status) else None
                if pause is None:
                    return status, content
            self._wait(pause)

    def create(self, path: str, body: Any) -> dict[str, Any]:
        """Sent once: a second attempt could create a second machine."""
        status, content, _ = self._send("POST", path, body)
        if status == 429 or status >= 500:
            raise PlaceUnreachable(
                f"{self.name} answered with status {status}",
                why="a machine may have been created anyway",
                fix="`graft fleet reconcile` finds it; then run the command again",
            )
        return self.checked(status, content)

    def checked(self, status: int, body: bytes) -> dict[str, Any]:
        """Return the content of an answer; raises the provider's errors."""
        try:
            content: dict[str, Any] = json.loads(body) if body else {}
        except ValueError:
            raise PlaceUnreachable(
                f"{self.name} sent something that is not JSON",
                fix="try again later; a proxy may answer for it",
            ) from None
        with explain_malformed(self.name):
            if not isinstance(content, dict):
                raise TypeError
            if status < 300:
                return content
            raise self.explain(status, content)

    def explain(self, status: int, content: dict[str, Any]) -> GraftError:
        """Return the error of an unsuccessful answer."""
        detail = str(content.get("detail", ""))[:300]
        if may_pass(status):
            return PlaceUnreachable(
                f"{self.name} answered with status {status}: {detail}", fix="try again later"
            )
        return Refused(
            f"{self.name} rejected the request: {detail or status}",
            why=f"status {status}",
            fix="`graft fleet offers` lists what it has now; quota and credit are in its console",
        )

    def _send(self, method: str, path: str, body: Any) -> tuple[int, bytes, float | None]:
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._base + path, data=data, headers=headers, method=method)
        try:
            with self._http.send(request, seconds=SECONDS) as answer:
                return answer.status, answer.read(), retry_after(answer.header("Retry-After"))
        except NoAnswer as error:
            raise PlaceUnreachable(
                f"{self.name} is not responding: {error}", fix="try again later"
            ) from error


@contextmanager
def explain_malformed(name: str) -> Iterator[None]:
    """An answer that lacks promised fields is an error: the request may have been carried out."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise PlaceUnreachable(
            f"{name} sent an answer that cannot be understood",
            why=f"a field is missing or has an unexpected type ({type(error).__name__})",
            fix="try again later; a proxy may answer for it, or its API has changed",
        ) from error


@dataclass(frozen=True)
class RentedMachine:
    """A machine as its provider shows it now."""

    placed: PlacedJob
    address: str = ""
    """`user@host`, once it can be logged in to."""
    port: int = 22
    failure: str = ""
    """Why it will not start, or no longer runs."""


class RentedPlace(CloudPlace):
    """A place whose machines are billed until they are given back."""

    login: Login
    paid = True
    folder: str
    """Where a job works on the machine."""
    client_type: type[RestClient]

    def __init__(self, *, state: Path, python: str, client: RestClient | None = None) -> None:
        self._state, self._python = state, python
        self.sent_bytes = 0
        if client is not None:
            self._client = client

    @cached_property
    def _client(self) -> RestClient:
        """With the key of the account, at the address of its API."""
        ((variable,),) = self.login.groups
        key = os.environ.get(variable, "")
        if not key:
            raise Refused(
                f"there is no key for {self.login.name}",
                fix=f"create one in the console and set {variable}",
                where=variable,
            )
        return self.client_type(key, os.environ.get(self.login.url_variable) or self.login.url)

    @abstractmethod
    def list(self) -> tuple[PlacedJob, ...]: ...

    @abstractmethod
    def rent(self, order: JobOrder) -> PlacedJob:
        """Ask for the machine, once."""

    @abstractmethod
    def machine_of(self, job: PlacedJob) -> RentedMachine | None:
        """Return the machine; None if the provider no longer has it."""

    @abstractmethod
    def give_back(self, job: PlacedJob) -> None: ...

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        """Rent the machine. The bundle follows once it is up (`deliver`)."""
        del secrets
        existing = [job for job in self.list() if job.label == order.label]
        return existing[0] if existing else self.rent(order)

    def deliver(self, order: JobOrder, job: PlacedJob, *, secrets: Mapping[str, str]) -> bool:
        """Send the bundle and start the job, if the machine is up; may be called again at any time."""
        host = self._host(job)
        if host is None:
            return False
        host.submit(order, secrets=secrets)
        self.sent_bytes = host.sent_bytes
        return True

    def poll(self, job: PlacedJob) -> JobPoll:
        machine = self.machine_of(job)
        if machine is None:
            return JobPoll(phase="gone")
        if machine.failure:
            return JobPoll(phase="ended", exit_code=1, message=machine.failure)
        host = self._host_of(machine)
        if host is None:
            return JobPoll(phase="starting")
        status = host.poll(_on_host(job))
        return status if status.phase != "gone" else JobPoll(phase="starting", message="the machine is up")

    def log(self, job: PlacedJob) -> str:
        host = self._host(job)
        return host.log(_on_host(job)) if host is not None else ""

    def fetch(self, job: PlacedJob, folder: Path) -> None:
        """Fetch what is still available from a machine that has failed, so that it is not paid for until its
        time limit.
        """
        machine = self.machine_of(job)
        host = None if machine is None else self._host_of(machine)
        failed = machine is not None and bool(machine.failure)
        if host is None and not failed:
            raise unknown_job(self.name, job.label)
        try:
            if host is not None:
                host.fetch(_on_host(job), folder)
        except EnvironmentFailure:
            if not failed:
                raise

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        host = None if at_once else self._host(job)
        if host is not None:
            host.stop(_on_host(job))
        else:
            self.give_back(job)

    def _host(self, job: PlacedJob) -> HostsPlace | None:
        machine = self.machine_of(job)
        return None if machine is None or machine.failure else self._host_of(machine)

    def _host_of(self, machine: RentedMachine) -> HostsPlace | None:
        """The machine as a host, once its address is known."""
        if not machine.address:
            return None
        machine_id = machine.placed.id
        self._state.mkdir(parents=True, exist_ok=True)
        # Every machine has a new host key: it is learned once and compared from then on.
        host_key_options = (
            *("-o", "StrictHostKeyChecking=accept-new"),
            *("-o", f"UserKnownHostsFile={self._state}/{machine_id}"),
        )
        options = ("-p", str(machine.port), *ALIVE, *shared_connection(), *host_key_options)
        command = [*ssh_command(*options), machine.address, self._python]
        connection = ProcessConnection(
            machine_id, command, root=self.folder, far=True, address=machine.address
        )
        return HostsPlace(self.name, {machine_id: connection})


def read_public_key(path: str, *, setting: str) -> str:
    """The public SSH key in a file; a private one is refused."""
    key_file = Path(path).expanduser()
    try:
        text = key_file.read_text().strip()
    except OSError as error:
        raise UserError(
            "there is no public SSH key for the machine",
            why=f"{key_file}: {error.strerror}",
            fix=f"run `ssh-keygen -t ed25519`, or set {setting}",
            where=setting,
        ) from error
    if "PRIVATE KEY" in text or not text.startswith(("ssh-", "ecdsa-", "sk-")):
        raise UserError(
            "this is not a public SSH key", fix="specify the file that ends in .pub", where=str(key_file)
        )
    return text


def _on_host(job: PlacedJob) -> PlacedJob:
    """The job as the machine's own host knows it."""
    return job.model_copy(update={"host": job.id})
