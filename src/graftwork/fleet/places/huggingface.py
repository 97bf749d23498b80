"""Jobs of Hugging Face as a place, by huggingface_hub. Contract-tested with a stand-in, not live-validated.

Input: an order. Output: a job whose name is the job's label, with the provider's own time limit. Bundles and
results go through a private dataset repository, which the job mounts to read and commits to. Secrets are
those of the Jobs API; the job gets the token, to push.
"""

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import IO, Any

from pydantic import Field

from graftwork.fleet.place import LABEL, Login, NotThere, PlaceUnreachable, Refused
from graftwork.fleet.places.storage import StoragePlace, start_command
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, needs_extra
from graftwork.records.fleet import JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

MOUNT = "/graftwork"
SPARE_SECONDS = 900
"""The limit at Hugging Face comes this long after that of the job."""
OPEN_STAGES = ("SCHEDULING", "RUNNING")
MINUTES = {"minute": 60.0, "hour": 1.0, "second": 3600.0}
"""Number of a price's unit per hour."""
CLIENT = "python3 -c 'import huggingface_hub' 2>/dev/null || pip install -q 'huggingface_hub>=1.0'"


class HuggingFaceSettings(Record):
    """Jobs of Hugging Face. The token is that of `hf auth login`, or HF_TOKEN."""

    repository: str = Field(
        pattern=r"^[\w.-]+/[\w.-]+$",
        description="A private dataset repository for bundles and results; created if it does not exist.",
    )
    namespace: str = Field(
        "", description="User or organization that pays. Default: the owner of the repository."
    )
    image: str = Field(
        "pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime",
        description="Docker image with Python 3.11 or later; `graft fleet image` writes one.",
    )


class HuggingFacePlace(StoragePlace):
    name = "huggingface"
    login = Login(
        "Hugging Face",
        (("HF_TOKEN",), ("HUGGING_FACE_HUB_TOKEN",)),
        ".cache/huggingface/token",
        "gated models, uploads",
        url="https://huggingface.co",
    )
    example = "{repository: ME/jobs}"
    catalog = "huggingface-jobs"

    def __init__(self, settings: HuggingFaceSettings) -> None:
        self._settings = settings
        self._namespace = settings.namespace or settings.repository.partition("/")[0]
        self._hub = HubClient()
        self._storage = HubStorage(self._hub, settings.repository)
        self._hardware: tuple[Any, ...] = ()

    def offer(self) -> tuple[Offer, ...]:
        """The flavors of Jobs with their prices now."""
        self._hardware = ()
        today = date.today().isoformat()
        return tuple(
            Offer(
                place=self.name,
                gpu=_gpu_of(flavor),
                gpus=int(flavor.accelerator.quantity) if flavor.accelerator else 0,
                usd_per_hour=_price(flavor),
                instance=str(flavor.name),
                source="Hugging Face's list of hardware",
                dated=today,
            )
            for flavor in self._flavors()
        )

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        existing = self._find(order.label)
        if existing:
            return self._placed(existing[0])
        flavors = [
            flavor
            for flavor in self._flavors()
            if _gpu_of(flavor) == order.gpu and order.instance in ("", flavor.name)
        ]
        if not flavors:
            flavor_name = f"flavor {order.instance}" if order.instance else "flavor"
            raise Refused(
                f"Hugging Face has no {flavor_name} with the GPU {order.gpu or 'none'}",
                why=f"it has: {', '.join(sorted({_gpu_of(flavor) or 'none' for flavor in self._flavors()}))}",
                fix="use one of `graft fleet offers --place huggingface`",
                where="--gpu",
            )
        token = self._hub.token()
        self.ship(order)
        command = start_command(order.label, order.seconds, root=MOUNT, work="/tmp/work")
        command += ["--hub", self._settings.repository]
        with needs_extra("huggingface", why="the place `huggingface` is used"):
            from huggingface_hub import Volume
        volume = Volume(type="dataset", source=self._settings.repository, mount_path=MOUNT)
        job = self._hub.ask(
            lambda api: api.run_job(
                image=self._settings.image,
                command=["bash", "-c", f"{CLIENT}; exec {shlex.join(command)}"],
                secrets={**secrets, "HF_TOKEN": token},
                flavor=min(flavors, key=_price).name,
                timeout=int(order.seconds) + SPARE_SECONDS,
                name=order.label,
                volumes=[volume],
                namespace=self._namespace,
            )
        )
        return self._placed(job)

    def show(self, job: PlacedJob) -> JobPoll | None:
        info = self._inspect(job)
        if info is None:
            return None
        stage = str(getattr(info.status.stage, "value", info.status.stage))
        if stage in OPEN_STAGES:
            return JobPoll(phase="starting" if stage == "SCHEDULING" else "running")
        why = f", {info.status.message}" if info.status.message else ""
        message = f"Hugging Face: {stage.lower()}{why}"
        # What was committed before a cancellation or the time limit can be gone on from.
        code = 1 if stage == "ERROR" and "imeout" not in message else 75
        return JobPoll(phase="ended", exit_code=code, message=message)

    def log(self, job: PlacedJob) -> str:
        info = self._inspect(job)
        if info is None:
            return ""
        lines = self._hub.ask(
            lambda api: [*api.fetch_job_logs(job_id=info.id, follow=False, namespace=self._namespace)]
        )
        return "".join(f"{line}\n" for line in lines)

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        info = self._inspect(job)
        if info is None or str(getattr(info.status.stage, "value", info.status.stage)) not in OPEN_STAGES:
            return
        if at_once:
            with suppress(NotThere):
                self._hub.ask(lambda api: api.cancel_job(job_id=info.id, namespace=self._namespace))
        else:
            self.ask_to_stop(job.label)

    def list(self) -> tuple[PlacedJob, ...]:
        jobs = self._hub.ask(lambda api: [*api.list_jobs(status=[*OPEN_STAGES], namespace=self._namespace)])
        return tuple(self._placed(job) for job in jobs if LABEL.fullmatch(_name(job)))

    def _find(self, label: str) -> Any:
        """Jobs of this name, whatever became of them."""
        return self._hub.ask(lambda api: [*api.list_jobs(labels={"name": label}, namespace=self._namespace)])

    def _inspect(self, job: PlacedJob) -> Any:
        if job.id == job.label:
            matches = self._find(job.label)
            return matches[0] if matches else None
        try:
            return self._hub.ask(lambda api: api.inspect_job(job_id=job.id, namespace=self._namespace))
        except NotThere:
            return None

    def _flavors(self) -> tuple[Any, ...]:
        if not self._hardware:
            self._hardware = tuple(self._hub.ask(lambda api: api.list_jobs_hardware()))
        return self._hardware

    def _placed(self, job: Any) -> PlacedJob:
        flavors = {flavor.name: flavor for flavor in self._flavors()}
        flavor = flavors.get(str(getattr(job.flavor, "value", job.flavor)))
        return PlacedJob(
            place=self.name,
            id=str(job.id),
            label=_name(job),
            gpu=_gpu_of(flavor) if flavor is not None else "",
            usd_per_hour=_price(flavor) if flavor is not None else 0.0,
            created_at=job.created_at.timestamp() if job.created_at else 0.0,
        )


class HubClient:
    """The client of the Hub, created on first use; its errors as what, why and fix."""

    def ask(self, call: Callable[[Any], Any]) -> Any:
        with needs_extra("huggingface", why="the place `huggingface` is used"):
            from huggingface_hub import HfApi, errors
            from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
        # Of the HTTP client, which has changed its name between versions.
        no_answer: type[Exception] = vars(errors)["HTTPError"]
        try:
            return call(HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None))
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            raise _explain(status, str(error.server_message or error)) from None
        except LocalTokenNotFoundError:
            raise _no_token() from None
        except no_answer as error:
            raise PlaceUnreachable(
                f"Hugging Face is not responding: {type(error).__name__}", fix="try again later"
            ) from None

    def token(self) -> str:
        with needs_extra("huggingface", why="the place `huggingface` is used"):
            from huggingface_hub import get_token
        login_token = get_token()
        if not login_token:
            raise _no_token()
        return str(login_token)


class HubStorage:
    """The files of jobs in a dataset repository; what is written is committed by `flush`, all at once."""

    def __init__(self, hub: HubClient, repository: str) -> None:
        self._hub, self._repository = hub, repository
        self._pending: dict[str, Path | bytes] = {}

    def sizes(self, prefix: str) -> dict[str, int]:
        def tree(api: Any) -> dict[str, int]:
            files = api.list_repo_tree(
                self._repository, prefix.rstrip("/"), recursive=True, repo_type="dataset"
            )
            return {file.path: int(file.size) for file in files if hasattr(file, "size")}

        try:
            found: dict[str, int] = self._hub.ask(tree)
        except NotThere:
            return {}
        return found

    def put(self, name: str, source: Path) -> None:
        self._pending[name] = source

    def write(self, name: str, content: bytes) -> None:
        self._pending[name] = content

    def flush(self) -> None:
        from huggingface_hub import CommitOperationAdd

        # An empty file would be an upload without content, which the Hub refuses.
        operations = [
            CommitOperationAdd(name, content if isinstance(content, Path) else content or b"\n")
            for name, content in self._pending.items()
        ]
        self._pending = {}

        def commit(api: Any) -> None:
            api.create_repo(self._repository, repo_type="dataset", private=True, exist_ok=True)
            # A repository that exists keeps its visibility.
            if not api.repo_info(self._repository, repo_type="dataset").private:
                raise Refused(
                    f"the dataset repository {self._repository} is public",
                    why="the files of jobs hold the training data",
                    fix="make it private in its settings at huggingface.co, or use another repository",
                    where="fleet.huggingface.repository",
                )
            api.create_commit(
                self._repository, operations, commit_message="files of a job", repo_type="dataset"
            )

        self._hub.ask(commit)

    def copy(self, name: str, target: IO[bytes]) -> None:
        def download(api: Any) -> None:
            with tempfile.TemporaryDirectory() as folder:
                path = api.hf_hub_download(
                    self._repository, name, repo_type="dataset", local_dir=folder, force_download=True
                )
                with Path(path).open("rb") as content:
                    shutil.copyfileobj(content, target)

        self._hub.ask(download)


def _name(job: Any) -> str:
    return str((job.labels or {}).get("name", ""))


def _gpu_of(flavor: Any) -> str:
    return str(flavor.accelerator.model) if flavor.accelerator else ""


def _price(flavor: Any) -> float:
    return float(flavor.unit_cost_usd) * MINUTES.get(str(flavor.unit_label), 60.0)


def _no_token() -> GraftError:
    return Refused(
        "there is no token of Hugging Face",
        fix="run `hf auth login`, or set HF_TOKEN to a token that may write and run jobs",
        where="HF_TOKEN",
    )


def _explain(status: int, message: str) -> GraftError:
    text = message.strip()[:300]
    if status == 401:
        return Refused(
            f"Hugging Face rejected the token: {text}",
            fix="run `hf auth login`, or set HF_TOKEN to a token that may write and run jobs",
            where="HF_TOKEN",
        )
    if status in (402, 403):
        return Refused(
            f"Hugging Face does not allow it: {text}",
            why="Jobs need a paid plan or credits, and a token with the right to run them",
            fix="add credits at huggingface.co/settings/billing, or use another place",
        )
    if status == 404:
        return NotThere(
            f"Hugging Face does not have it, or does not show it to this token: {text}",
            fix="check fleet.huggingface.repository and namespace",
            where="fleet.huggingface",
        )
    if status == 429 or status >= 500 or not status:
        return PlaceUnreachable(f"Hugging Face answered with status {status}: {text}", fix="try again later")
    return Refused(
        f"Hugging Face rejected the request: {text}",
        why=f"status {status}",
        fix="`graft fleet offers --place huggingface` lists the flavors; check fleet.huggingface",
        where="fleet.huggingface",
    )
