"""Azure Machine Learning as a place, by azure-ai-ml. Contract-tested against a stand-in, not live-validated.

Input: an order. Output: a command job whose name is the job's label: a second request with that name makes no
second job. Bundles and results go through a datastore of the workspace, which the job mounts. Secrets go
through Key Vault, which the job reads on behalf of the user.
"""

import json
import logging
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any, Self

from pydantic import Field

from graftwork.fleet.place import LABEL, Login, NotThere, PlaceUnreachable, Refused
from graftwork.fleet.places.rented import RestClient
from graftwork.fleet.places.storage import MachinePrices, StoragePlace, read_file, start_command
from graftwork.records.base import NotSecret, Record
from graftwork.records.errors import GraftError, needs_extra
from graftwork.records.fleet import JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

SPARE_SECONDS = 600
"""Azure's own limit comes this long after that of the job: for the download of the image."""
TAG = "graftwork"
FOLDER = "graftwork"
"""Folder in the datastore."""
WORK, LOG = "/tmp/graftwork/work", "job.log"
OVER = {"Completed": 0, "Failed": 1, "Canceled": 75}
RUNNING = ("Running", "Finalizing", "CancelRequested", "NotResponding")
RETRIES = 3
VAULT_SCOPE = "https://vault.azure.net/.default"
VAULT_VERSION = "api-version=7.4"
# The client would send branch and commit of the folder that it is called in, unless one is given.
NO_GIT = dict.fromkeys(("mlflow.source.git.commit", "mlflow.source.git.branch", "azureml.git.dirty"), "")


class AzureMLSettings(Record):
    """Jobs of Azure Machine Learning. The login is that of azure-identity: `az login`, or AZURE_CLIENT_ID,
    AZURE_TENANT_ID and AZURE_CLIENT_SECRET."""

    subscription: Annotated[str, NotSecret("an id, not a login")] = Field(
        min_length=1, description="Id of the subscription."
    )
    resource_group: str = Field(min_length=1, description="Resource group of the workspace.")
    workspace: str = Field(min_length=1, description="Name of the workspace.")
    image: str = Field(
        "pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime",
        description="Docker image with Python 3.11 or later (`graft fleet image`).",
    )
    instances: dict[str, float] = Field(
        {},
        description="Machine sizes to use, with their hourly price in your region. Default: those in the "
        "catalog.",
    )
    spot: bool = Field(True, description="Use low-priority machines: cheaper, but may be preempted.")
    compute: str = Field("", description="A compute cluster of the workspace. Default: serverless.")
    datastore: Annotated[str, NotSecret("a name")] = Field(
        "workspaceblobstore", description="Datastore for bundles and results."
    )
    container: Annotated[str, NotSecret("an address without a login")] = Field(
        "", description="Address of the datastore's container, if not in the public cloud."
    )
    vault: Annotated[str, NotSecret("an address without a login")] = Field(
        "", description="Address of the Key Vault for secrets. Default: that of the workspace."
    )


class AzureMLPlace(StoragePlace):
    name = "azureml"
    login = Login(
        "Azure",
        (("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET"),),
        ".azure/azureProfile.json",
        "Azure ML",
        url="https://management.azure.com",
    )
    example = "{subscription: ID, resource_group: NAME, workspace: NAME}"
    catalog = "azure-ml"
    ends_late = True

    @classmethod
    def open(cls, settings: AzureMLSettings, *, state: Path, prices: Iterable[Offer]) -> Self:
        del state
        return cls(settings, prices=prices)

    def __init__(self, settings: AzureMLSettings, *, prices: Iterable[Offer] = ()) -> None:
        self._settings = settings
        self._machines = MachinePrices(
            self.name, settings.instances, (row for row in prices if row.gpus <= 1)
        )
        self._azure = AzureClients(settings)
        self._storage = BlobStorage(self._azure, FOLDER)

    def offer(self) -> tuple[Offer, ...]:
        """The machine sizes of the settings, or of the catalog, at their dedicated price.

        What a low-priority machine costs is not known before; it is never above that price.
        """
        _ask(lambda: next(iter(self._azure.jobs.list(tag=TAG)), None))
        return self._machines.rows()

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        offer = self._machines.choose(order)
        job = self._machines.placed(order.label, offer.instance)
        if self._get(order.label) is not None:
            return job
        self.ship(order)
        if secrets:
            self._azure.forgotten.discard(order.label)
            self._ask_vault("PUT", order.label, {"value": json.dumps(dict(secrets))})
        command = _ask(lambda: self._command(order, offer.instance, with_secrets=bool(secrets)))
        try:
            _ask(lambda: self._azure.jobs.create_or_update(command))
        except Refused:
            self.forget_secrets(order.label)
            raise
        return job

    def command_line(self, order: JobOrder, *, with_secrets: bool = False) -> str:
        """The command of the machine. `${{…}}` are the mounted folders."""
        root, out = "${{inputs.files}}", "${{outputs.job}}/out"
        arguments = start_command(order.label, order.seconds, root=root, work=WORK)
        arguments += ["--out", out]
        if with_secrets:
            arguments += ["--secrets", f"azure:{self._azure.vault_address}/secrets/{order.label}"]
        # Azure fills in the folders before the shell reads the line.
        line = " ".join(word if "${{" in word else shlex.quote(word) for word in arguments)
        return f"mkdir -p {WORK} && {line} 2>&1 | tee {WORK}/{LOG}"

    def _command(self, order: JobOrder, instance: str, *, with_secrets: bool) -> Any:
        from azure.ai.ml import Input, Output, UserIdentityConfiguration, command
        from azure.ai.ml.entities import Environment, QueueSettings

        settings = self._settings
        files = f"azureml://datastores/{settings.datastore}/paths/{FOLDER}"
        job = command(
            name=order.label,
            display_name=order.label,
            experiment_name="graftwork",
            tags={TAG: order.label, "instance": instance},
            command=self.command_line(order, with_secrets=with_secrets),
            environment=Environment(image=settings.image),
            inputs={"files": Input(type="uri_folder", path=f"{files}/", mode="ro_mount")},
            outputs={"job": Output(type="uri_folder", path=f"{files}/jobs/{order.label}/", mode="rw_mount")},
            compute=settings.compute or None,
            instance_type=None if settings.compute else instance,
            instance_count=1,
            timeout=int(order.seconds) + SPARE_SECONDS,
            identity=UserIdentityConfiguration(),
        )
        if not settings.compute:
            job.queue_settings = QueueSettings(job_tier="spot" if settings.spot else "standard")
        job.properties = {**(job.properties or {}), **NO_GIT}
        return job

    def show(self, job: PlacedJob) -> JobPoll | None:
        job_status = self._get(job.label)
        if job_status is None:
            return None
        status = _status_of(job_status)
        if status in OVER:
            return JobPoll(
                phase="ended",
                exit_code=OVER[status] or 1,
                message=f"Azure reports: {status.lower()}, and there is no result; "
                f"{job_status.studio_url or ''}",
            )
        return JobPoll(phase="running") if status in RUNNING else JobPoll(phase="starting", message=status)

    def log(self, job: PlacedJob) -> str:
        content = read_file(self._storage, f"jobs/{job.label}/out/{LOG}") or b""
        return content.decode(errors="replace")

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        """Set the flag, which lets the job write a checkpoint; canceling gives it no time."""
        if not at_once:
            self.ask_to_stop(job.label)
            return
        with suppress(_JobIsOver, NotThere):
            _ask(lambda: self._azure.jobs.begin_cancel(job.label, polling=False))
        self.forget_secrets(job.label)

    def list(self) -> tuple[PlacedJob, ...]:
        entries = _ask(lambda: [*self._azure.jobs.list(tag=TAG)])
        jobs = []
        for entry in entries:
            if entry is None or not LABEL.fullmatch(str(entry.name)) or _status_of(entry) in OVER:
                continue
            instance = getattr(getattr(entry, "resources", None), "instance_type", None)
            created = getattr(getattr(entry, "creation_context", None), "created_at", None)
            instance = instance or str(entry.tags.get("instance", ""))
            created_at = created.timestamp() if created is not None else 0.0
            jobs.append(self._machines.placed(str(entry.name), instance, created_at=created_at))
        return tuple(jobs)

    def _get(self, label: str) -> Any:
        try:
            return _ask(lambda: self._azure.jobs.get(label))
        except NotThere:
            return None

    def forget(self, label: str) -> None:
        if label not in self._azure.forgotten:
            self._ask_vault("DELETE", label)
            self._azure.forgotten.add(label)

    def _ask_vault(self, method: str, label: str, body: Any = None) -> None:
        client = VaultClient(self._azure.token(VAULT_SCOPE), self._azure.vault_address)
        status, content = client.repeat(method, f"/secrets/{label}?{VAULT_VERSION}", body)
        if status != 404:
            client.checked(status, content)


class VaultClient(RestClient):
    name = "Key Vault"

    def explain(self, status: int, content: dict[str, Any]) -> GraftError:
        text = str((content.get("error") or {}).get("message", ""))[:200]
        if status in (401, 403):
            return Refused(
                f"Key Vault rejected the login: {text or status}",
                fix="give your user the role `Key Vault Secrets Officer` at the vault of the workspace",
                where="fleet.azureml.vault",
            )
        return super().explain(status, {"detail": text})


class BlobStorage:
    """The files of jobs in a folder of the datastore's container."""

    def __init__(self, azure: "AzureClients", prefix: str) -> None:
        self._azure, self._prefix = azure, f"{prefix}/"

    def sizes(self, prefix: str) -> dict[str, int]:
        def rows() -> dict[str, int]:
            found = self._azure.container.list_blobs(name_starts_with=self._prefix + prefix)
            return {str(blob.name).removeprefix(self._prefix): int(blob.size) for blob in found}

        found: dict[str, int] = _ask(rows)
        return found

    def put(self, name: str, source: Path) -> None:
        def upload() -> None:
            with source.open("rb") as content:
                self._azure.container.upload_blob(self._prefix + name, content, overwrite=True)

        _ask(upload)

    def write(self, name: str, content: bytes) -> None:
        _ask(lambda: self._azure.container.upload_blob(self._prefix + name, content, overwrite=True))

    def flush(self) -> None:
        """Every write is complete when it returns."""

    def copy(self, name: str, target: IO[bytes]) -> None:
        _ask(lambda: self._azure.container.download_blob(self._prefix + name).readinto(target))


class AzureClients:
    """Clients of one login, created on first use. None of them sends telemetry."""

    def __init__(self, settings: AzureMLSettings) -> None:
        self._settings = settings
        self.forgotten: set[str] = set()
        """Labels whose secrets are deleted."""

    @cached_property
    def credential(self) -> Any:
        with needs_extra("azureml", why="the place `azureml` is used"):
            from azure.identity import DefaultAzureCredential
        return DefaultAzureCredential()

    def token(self, scope: str) -> str:
        return str(_ask(lambda: self.credential.get_token(scope)).token)

    @cached_property
    def workspace(self) -> Any:
        """The client of the workspace."""
        os.environ.setdefault("AZURE_CORE_COLLECT_TELEMETRY", "0")
        with needs_extra("azureml", why="the place `azureml` is used"):
            from azure.ai.ml import MLClient
        for name in ("azure.ai.ml", "azure.identity"):
            # It warns of classes that may change; the version is pinned.
            logging.getLogger(name).setLevel(logging.ERROR)
        settings = self._settings
        return MLClient(
            self.credential,
            settings.subscription,
            settings.resource_group,
            settings.workspace,
            enable_telemetry=False,
            show_progress=False,
            retry_total=RETRIES,
        )

    @property
    def jobs(self) -> Any:
        return self.workspace.jobs

    @cached_property
    def container(self) -> Any:
        """The container of the datastore, with the login that the datastore has; else that of the user."""
        store = self.workspace.datastores.get(self._settings.datastore, include_secrets=True)
        from azure.storage.blob import ContainerClient

        address = self._settings.container or (
            f"{store.protocol}://{store.account_name}.blob.{store.endpoint}/{store.container_name}"
        )
        credentials = store.credentials
        login = (
            getattr(credentials, "account_key", None)
            or getattr(credentials, "sas_token", None)
            or self.credential
        )
        return ContainerClient.from_container_url(address, credential=login, retry_total=RETRIES)

    @cached_property
    def vault_address(self) -> str:
        if self._settings.vault:
            return self._settings.vault.rstrip("/")
        workspace = _ask(lambda: self.workspace.workspaces.get(self._settings.workspace))
        return f"https://{str(workspace.key_vault).rpartition('/')[2]}.vault.azure.net"


def _status_of(job: Any) -> str:
    """The client returns text, or a member of an enumeration whose text is prefixed by its name."""
    return str(getattr(job.status, "value", job.status))


class _JobIsOver(Refused):
    """The job has ended."""


def _ask(call: Callable[[], Any]) -> Any:
    """Call Azure; errors become what, why and fix."""
    with needs_extra("azureml", why="the place `azureml` is used"):
        from azure.ai.ml.exceptions import MlException, ValidationException
        from azure.core.exceptions import (
            AzureError,
            ClientAuthenticationError,
            HttpResponseError,
            ServiceRequestError,
            ServiceResponseError,
        )
    try:
        return call()
    except ClientAuthenticationError as error:
        raise _denied(str(error)) from None
    except (ServiceRequestError, ServiceResponseError) as error:
        raise PlaceUnreachable(
            f"Azure is not responding: {str(error)[:200]}", fix="try again later"
        ) from None
    except HttpResponseError as error:
        code = str(getattr(error.error, "code", "") or getattr(error, "error_code", "") or "")
        raise _explain(code, str(error.message or error), int(error.status_code or 0)) from None
    except AzureError as error:
        raise PlaceUnreachable(
            f"Azure returned an unexpected response: {str(error)[:200]}", fix="try again later"
        ) from None
    except ValidationException as error:
        raise Refused(
            f"azure-ai-ml rejected the job: {str(error)[:300]}",
            fix="check the names in fleet.azureml",
            where="fleet.azureml",
        ) from None
    except MlException as error:
        # It may have sent the request before.
        raise PlaceUnreachable(
            f"azure-ai-ml failed: {str(error)[:300]}",
            fix="`graft fleet reconcile` finds out whether the job was created; then run the command again",
        ) from None


def _denied(text: str) -> Refused:
    return Refused(
        f"Azure rejected the login: {text.splitlines()[0][:200] if text else 'no reason'}",
        fix="make `az account show` work (`az login`); the user needs the roles `AzureML Data Scientist` "
        "at the workspace and `Storage Blob Data Contributor` at its storage",
        where="fleet.azureml",
    )


def _explain(code: str, message: str, status: int) -> GraftError:
    text = message.splitlines()[0][:300] if message else str(status)
    if status in (401, 403):
        return _denied(text)
    if status == 404:
        return NotThere(
            f"Azure does not have it: {text}",
            fix="check subscription, resource_group, workspace and datastore in fleet.azureml",
            where="fleet.azureml",
        )
    if "quota" in f"{code} {message}".lower():
        return Refused(
            f"the quota of the subscription does not allow this machine: {text}",
            why="Azure has a quota of cores for each family of machines, and a separate one for "
            "low-priority machines; it starts at 0",
            fix="request more under Quotas in the studio of the workspace, or use another GPU",
        )
    if status == 429 or status >= 500 or not status:
        return PlaceUnreachable(
            f"Azure returned an unexpected response: {status} {text}", fix="try again later"
        )
    if "terminal state" in message or code == "JobNotCancelable":
        return _JobIsOver(text)
    return Refused(
        f"Azure rejected the request: {text}",
        why=f"{code}, status {status}",
        fix="check fleet.azureml: image, instances and compute",
        where="fleet.azureml",
    )
