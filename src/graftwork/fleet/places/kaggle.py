"""Kaggle as a place, by Kaggle's own client. Contract-tested against a stand-in, not live-validated.

Input: an order. Output: a private kernel whose name is the job's label. Bundles travel as private datasets,
one for what seldom changes (data and base) and one for the rest; results are the kernel's output. A session
cannot be ended from outside: the job looks for a dataset named `<label>-stop`, and its time limit is set at
Kaggle too.
"""

import http.client
import io
import json
import os
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from pydantic import Field

from graftwork.fleet.bundle import BASE, BUNDLE_FILE, DATASET, parse_exit, read_bundle, take_files
from graftwork.fleet.far_start import EXIT_FILE
from graftwork.fleet.place import LABEL, CloudPlace, Login, NotThere, PlaceUnreachable, Refused, unknown_job
from graftwork.fleet.places.storage import PIECE, START_SOURCE, choose_results
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import GraftError, needs_extra
from graftwork.records.fleet import Bundle, JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

SESSION_HOURS = 12.0
SPARE_SECONDS = 900
"""A session that ends by Kaggle's own limit may lose its output: the job ends earlier."""
LEAST_HOURS = 0.25
STABLE = (f"{DATASET}/", f"{BASE}/")
"""Files that are the same from run to run."""
GPUS = {"NvidiaTeslaT4": "Tesla T4", "NvidiaTeslaP100": "Tesla P100", "NvidiaL4": "L4"}
"""Kaggle's machine shapes and the GPU of each."""
INPUT, WORKING, SCRATCH = "/kaggle/input", "/kaggle/working", "/kaggle/tmp/graftwork"
PAGE = 100
REQUESTS = {
    "get_kernel_session_status": ("kernels", "kernels_api", "ApiGetKernelSessionStatusRequest"),
    "list_kernel_session_output": ("kernels", "kernels_api", "ApiListKernelSessionOutputRequest"),
    "delete_kernel": ("kernels", "kernels_api", "ApiDeleteKernelRequest"),
    "list_kernels": ("kernels", "kernels_api", "ApiListKernelsRequest"),
    "save_kernel": ("kernels", "kernels_api", "ApiSaveKernelRequest"),
    "get_dataset_status": ("datasets", "dataset_api", "ApiGetDatasetStatusRequest"),
    "create_dataset": ("datasets", "dataset_api", "ApiCreateDatasetRequest"),
    "start_blob_upload": ("blobs", "blob_api", "ApiStartBlobUploadRequest"),
}
"""The methods of Kaggle's client: service, API and type of the request."""
DOWNLOAD_SECONDS = 120.0


class KaggleSettings(Record):
    """Kernels of Kaggle. The login is that of Kaggle's own client: KAGGLE_API_TOKEN, or KAGGLE_USERNAME and
    KAGGLE_KEY, or ~/.kaggle."""

    user: str = Field("", description="The account. Default: the owner of the login.")
    accelerator: str = Field(
        "NvidiaTeslaT4",
        description="Machine shape of kernels, as Kaggle names it; empty: no GPU.",
    )


class KagglePlace(CloudPlace):
    name = "kaggle"
    login = Login(
        "Kaggle",
        (("KAGGLE_USERNAME", "KAGGLE_KEY"), ("KAGGLE_API_TOKEN",)),
        ".kaggle/kaggle.json",
        "jobs there",
        url="https://www.kaggle.com",
    )
    paid = False

    def __init__(self, settings: KaggleSettings) -> None:
        self._settings = settings
        self._user = settings.user
        self.sent_bytes = 0

    def offer(self) -> tuple[Offer, ...]:
        """The GPU of the settings with what is left of this week's quota, and a machine without one."""
        quota = self._call(_quota)
        hours_left, shape = _hours_left(quota.gpu_quota), self._settings.accelerator
        refresh = quota.quota_refresh_time
        common: dict[str, Any] = {"place": self.name, "usd_per_hour": 0.0, "dated": date.today().isoformat()}
        spare = SPARE_SECONDS / 3600
        plain = Offer(
            **common, gpu="", gpus=0, longest_hours=SESSION_HOURS - spare, source="Kaggle, without a GPU"
        )
        if not shape:
            return (plain,)
        with_gpu = Offer(
            **common,
            gpu=GPUS.get(shape, shape),
            instance=shape,
            longest_hours=max(min(SESSION_HOURS, hours_left) - spare, 0.0),
            quota_hours=hours_left,
            quota_until=refresh.isoformat(timespec="minutes") if refresh else "",
            source="Kaggle's quota",
        )
        return (with_gpu, plain)

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        folder = Path(order.bundle)
        bundle = read_bundle(folder)
        job = self._placed(order.label, order.gpu)
        if self._status(order.label) is not None:
            return job
        if order.gpu:
            self._require_gpu(order)
        self.sent_bytes = 0
        sources = [self._dataset(folder, bundle, stable=stable) for stable in (True, False)]
        request = self._kernel(order, bundle, [name for name in sources if name], secrets)
        answer = self._ask("save_kernel", **request)
        if answer.error or answer.invalid_dataset_sources:
            why = answer.error or f"unknown datasets: {', '.join(answer.invalid_dataset_sources)}"
            raise Refused("Kaggle rejected the kernel", why=why, fix="run it again; check fleet.kaggle")
        return job

    def poll(self, job: PlacedJob) -> JobPoll:
        status = self._status(job.label)
        if status is None:
            return JobPoll(phase="gone")
        state, message = status
        if state in ("QUEUED", "NEW_SCRIPT"):
            return JobPoll(phase="starting", message="waiting for a Kaggle machine")
        if state in ("RUNNING", "CANCEL_REQUESTED"):
            return JobPoll(phase="running")
        url, content = dict(self._output(job.label)).get(f"work/{EXIT_FILE}"), io.BytesIO()
        if url:
            _download(url, content)
        ended = parse_exit(content.getvalue())
        if ended is not None:
            return ended
        if state == "CANCEL_ACKNOWLEDGED":
            return JobPoll(phase="ended", exit_code=75, message="the session was canceled at Kaggle")
        return JobPoll(phase="ended", exit_code=1, message=message or "the session ended without a result")

    def log(self, job: PlacedJob) -> str:
        if self._status(job.label) is None:
            return ""
        text = self._output_page(job.label).log or ""
        try:
            # Kaggle keeps the log as JSON: a list of pieces of output with their time.
            return "".join(str(piece["data"]) for piece in json.loads(text))
        except (ValueError, TypeError, KeyError):
            return str(text)

    def fetch(self, job: PlacedJob, folder: Path) -> None:
        if self._status(job.label) is None:
            raise unknown_job(self.name, job.label)
        urls = {name.removeprefix("work/"): url for name, url in self._output(job.label)}
        names = choose_results([*urls])
        take_files(((name.removeprefix("run/"), partial(_download, urls[name])) for name in names), folder)

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        """Set the flag; or, `at_once`, delete the kernel along with its output."""
        if self._status(job.label) is None:
            return
        flag = f"{job.label}-stop"
        if self._dataset_status(flag) is None:
            self._create_dataset(flag, {"stop": b"stop\n"})
        if at_once:
            self._ask("delete_kernel", user_name=self._user_name(), kernel_slug=job.label)

    def list(self) -> tuple[PlacedJob, ...]:
        with needs_extra("kaggle", why="the place `kaggle` is used"):
            from kagglesdk.kernels.types.kernels_enums import KernelsListSortType, KernelsListViewType
        order = {"group": KernelsListViewType.PROFILE, "sort_by": KernelsListSortType.DATE_RUN}
        kernels = []
        token, page = "", 1
        while page == 1 or token:
            user, search = self._user_name(), "graft-"
            answer = self._ask(
                "list_kernels", **order, user=user, search=search, page_size=PAGE, page_token=token
            )
            kernels += [kernel for kernel in answer.kernels or () if LABEL.fullmatch(_slug(kernel.ref))]
            token, page = answer.next_page_token or "", page + 1
        return tuple(
            self._placed(
                _slug(kernel.ref), GPUS.get(kernel.machine_shape or "", ""), created=kernel.last_run_time
            )
            for kernel in kernels
            if (self._status(_slug(kernel.ref)) or ("",))[0]
            in ("QUEUED", "RUNNING", "NEW_SCRIPT", "CANCEL_REQUESTED")
        )

    def _kernel(
        self, order: JobOrder, bundle: Bundle, sources: Sequence[str], secrets: Mapping[str, str]
    ) -> dict[str, Any]:
        """The fields of the request that saves the kernel."""
        seconds = min(order.seconds, SESSION_HOURS * 3600 - SPARE_SECONDS)
        arguments = ["--manifest", f"{SCRATCH}/{BUNDLE_FILE}", "--blobs", INPUT, "--work", f"{WORKING}/work"]
        arguments += ["--scratch", SCRATCH, "--seconds", f"{seconds:.0f}", "--label", order.label]
        arguments += ["--flag", f"{self._user_name()}/{order.label}-stop"]
        arguments += ["--secrets", f"kaggle:{','.join(sorted(secrets))}"] if secrets else []
        source = START_SOURCE.read_text().partition('\nif __name__ == "__main__":')[0]
        manifest = (Path(order.bundle) / BUNDLE_FILE).read_text()
        return {
            "slug": f"{self._user_name()}/{order.label}",
            "new_title": order.label,
            "text": (
                f"{source}\nPath({SCRATCH!r}).mkdir(parents=True, exist_ok=True)\n"
                f"Path({SCRATCH!r}, {BUNDLE_FILE!r}).write_text({manifest!r})\nmain({arguments!r})\n"
            ),
            "language": "python",
            "kernel_type": "script",
            # Packages and the Hub are on the network.
            "is_private": True,
            "enable_internet": True,
            "dataset_data_sources": sources,
            "session_timeout_seconds": int(seconds) + SPARE_SECONDS,
            "enable_gpu": bool(order.gpu),
            **({"machine_shape": self._settings.accelerator} if order.gpu else {}),
        }

    def _require_gpu(self, order: JobOrder) -> None:
        """The GPU of the settings, and some hours of its quota."""
        shape = self._settings.accelerator
        if order.gpu not in (shape, gpu := GPUS.get(shape, shape)):
            raise Refused(
                f"the place kaggle is set to the GPU {gpu or 'none'}, not to {order.gpu}",
                why=f"fleet.kaggle.accelerator is {shape or 'empty'}; Kaggle has {', '.join(GPUS)}",
                fix="use that GPU, or change the setting",
                where="fleet.kaggle.accelerator",
            )
        quota = self._call(_quota)
        hours_left, refresh = _hours_left(quota.gpu_quota), quota.quota_refresh_time
        if hours_left < LEAST_HOURS:
            when = f"; it is filled up at {refresh:%Y-%m-%d %H:%M} UTC" if refresh else ""
            raise Refused(
                f"{hours_left:.1f} h are left of this week's GPU quota at Kaggle",
                why=f"{_hours(quota.gpu_quota.total_time_allowed):.0f} h a week are free{when}",
                fix="wait, or continue at another place: `graft fleet offers`",
                where="kaggle",
            )

    def _dataset(self, folder: Path, bundle: Bundle, *, stable: bool) -> str:
        """A dataset with these files of the bundle, named by their content; its name with the owner."""
        files = {
            file.sha256: name for name, file in bundle.files.items() if name.startswith(STABLE) == stable
        }
        if not files:
            return ""
        slug = f"graft-{'data' if stable else 'run'}-{fingerprint(sorted(files))[:16]}"
        state = self._dataset_status(slug)
        if state in (None, "FAILED", "DELETED"):
            self._create_dataset(slug, {sha: folder / name for sha, name in files.items()})
            self.sent_bytes += sum((folder / name).stat().st_size for name in files.values())
        return f"{self._user_name()}/{slug}"

    def _create_dataset(self, slug: str, files: Mapping[str, Path | bytes]) -> None:
        with needs_extra("kaggle", why="the place `kaggle` is used"):
            from kagglesdk.datasets.types.dataset_api_service import ApiDatasetNewFile
        tokens = [self._upload(name, content) for name, content in sorted(files.items())]
        answer = self._ask(
            "create_dataset",
            owner_slug=self._user_name(),
            slug=slug,
            title=slug,
            license_name="unknown",
            is_private=True,
            files=[_fill(ApiDatasetNewFile(), token=token) for token in tokens],
        )
        if answer.error:
            raise Refused(
                f"Kaggle does not accept the files: {answer.error}",
                why="the dataset could not be created; the account may be full",
                fix="remove old datasets `graft-…` at kaggle.com/work/datasets, then run it again",
            )

    def _dataset_status(self, slug: str) -> str | None:
        try:
            answer = self._ask("get_dataset_status", owner_slug=self._user_name(), dataset_slug=slug)
        except NotThere:
            return None
        return str(answer.status.name)

    def _status(self, label: str) -> tuple[str, str] | None:
        try:
            user = self._user_name()
            answer = self._ask("get_kernel_session_status", user_name=user, kernel_slug=label)
        except NotThere:
            return None
        return str(answer.status.name), str(answer.failure_message or "")

    def _output(self, label: str) -> Iterator[tuple[str, str]]:
        token, first = "", True
        while first or token:
            answer = self._output_page(label, token)
            yield from ((str(file.file_name), str(file.url)) for file in answer.files or ())
            token, first = str(answer.next_page_token or ""), False

    def _user_name(self) -> str:
        if not self._user:
            self._user = os.environ.get("KAGGLE_USERNAME", "") or self._call(_user_of_login)
        return self._user

    def _output_page(self, label: str, token: str = "") -> Any:
        page = {"page_size": PAGE, "page_token": token}
        return self._ask("list_kernel_session_output", user_name=self._user_name(), kernel_slug=label, **page)

    def _upload(self, name: str, content: Path | bytes) -> str:
        with needs_extra("kaggle", why="the place `kaggle` is used"):
            import requests
            from kagglesdk.blobs.types.blob_api_service import ApiBlobType
        length = len(content) if isinstance(content, bytes) else content.stat().st_size
        answer = self._ask("start_blob_upload", type=ApiBlobType.DATASET, name=name, content_length=length)

        def put(_client: Any) -> None:
            with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as stream:
                requests.put(answer.create_url, data=stream, timeout=DOWNLOAD_SECONDS).raise_for_status()

        self._call(put)
        return str(answer.token)

    def _ask(self, method: str, **fields: Any) -> Any:
        """The answer to a request with these fields."""

        def ask(client: Any) -> Any:
            service, api, kind = REQUESTS[method]
            types = import_module(f"kagglesdk.{service}.types.{api}_service")
            request = _fill(getattr(types, kind)(), **fields)
            return getattr(getattr(getattr(client, service), f"{api}_client"), method)(request)

        return self._call(ask)

    def _call(self, method: Callable[[Any], Any]) -> Any:
        with needs_extra("kaggle", why="the place `kaggle` is used"):
            import requests
            from kagglesdk import KaggleClient
        from kagglesdk.kaggle_env import get_access_token_from_env
        from kagglesdk.kaggle_http_client import _get_apikey_creds

        # The client would ask without a login, and be refused.
        has_key = bool(os.environ.get("KAGGLE_USERNAME") and os.environ.get("KAGGLE_KEY"))
        if not has_key and get_access_token_from_env()[0] is None and _get_apikey_creds() is None:
            _no_login()
        try:
            with KaggleClient(
                username=os.environ.get("KAGGLE_USERNAME"), password=os.environ.get("KAGGLE_KEY")
            ) as client:
                return method(client)
        except requests.HTTPError as error:
            raise _explain(
                error.response.status_code if error.response is not None else 0, str(error)
            ) from None
        except requests.RequestException as error:
            raise PlaceUnreachable(
                f"Kaggle is not responding: {type(error).__name__}", fix="try again later"
            ) from None

    def _placed(self, label: str, gpu: str, *, created: datetime | None = None) -> PlacedJob:
        seconds = created.replace(tzinfo=UTC).timestamp() if created else 0.0
        return PlacedJob(place=self.name, id=label, label=label, gpu=gpu, created_at=seconds)


def _quota(client: Any) -> Any:
    return client.kernels.kernels_api_client.get_accelerator_quota_statistics()


def _user_of_login(client: Any) -> str:
    from kagglesdk.kaggle_env import get_access_token_from_env
    from kagglesdk.kaggle_http_client import _get_apikey_creds
    from kagglesdk.security.types.oauth_service import IntrospectTokenRequest

    token, _ = get_access_token_from_env()
    stored = _get_apikey_creds()
    if token is None and stored is not None:
        return str(stored[0])
    if not token:
        return _no_login()
    request = _fill(IntrospectTokenRequest(), token=token)
    return str(client.security.oauth_client.introspect_token(request).username)


def _fill(request: Any, **fields: Any) -> Any:
    """Kaggle's types take their fields one by one."""
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def _no_login() -> str:
    raise Refused(
        "there is no login for Kaggle",
        fix="create a token at kaggle.com/settings and set KAGGLE_API_TOKEN",
        where="KAGGLE_API_TOKEN",
    )


def _explain(status: int, message: str) -> GraftError:
    if status == 401:
        return Refused(
            "Kaggle rejected the login",
            why=message[:200],
            fix="create a token at kaggle.com/settings and set KAGGLE_API_TOKEN",
            where="KAGGLE_API_TOKEN",
        )
    if status in (403, 404):
        # Kaggle answers so for kernels and datasets that are not there, too.
        return NotThere(
            f"Kaggle has no such kernel or dataset, or does not show it: {message[:200]}",
            fix="check fleet.kaggle.user; the account must have verified its phone number for GPUs",
        )
    if status == 429 or status >= 500 or not status:
        return PlaceUnreachable(f"Kaggle answered with status {status}", fix="try again later")
    return Refused(
        f"Kaggle rejected the request: {message[:200]}",
        why=f"status {status}",
        fix="check fleet.kaggle, and the quota at kaggle.com/settings",
        where="fleet.kaggle",
    )


def _slug(ref: str) -> str:
    return ref.rpartition("/")[2]


def _hours(time: Any) -> float:
    return float(time.total_seconds()) / 3600 if time is not None else 0.0


def _hours_left(quota: Any) -> float:
    if quota is None:
        return 0.0
    return max(_hours(quota.total_time_allowed) - _hours(quota.time_used) - _hours(quota.time_reserved), 0.0)


def _download(url: str, target: IO[bytes]) -> None:
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_SECONDS) as answer:
            while piece := answer.read(PIECE):
                target.write(piece)
            if answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
    except (OSError, http.client.HTTPException) as error:
        raise PlaceUnreachable(
            "a file of the output could not be downloaded",
            why=str(error)[:200],
            fix="free some disk space, then try again",
        ) from None
