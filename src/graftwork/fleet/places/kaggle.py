"""Kaggle as a place, by Kaggle's own client. Contract-tested against a stand-in, not live-validated.

In: an order. Out: a private kernel whose name is the job's label. Bundles travel as private datasets, one for
what seldom changes (data and base) and one for the rest; results are the kernel's output. A session cannot be
ended from outside: the job looks for a dataset named `<label>-stop`, and its time limit is set at Kaggle too.
"""

import http.client
import io
import json
import os
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

from graftwork.fleet.bundle import BASE, BUNDLE_FILE, DATASET, read_bundle
from graftwork.fleet.far_start import EXIT_FILE
from graftwork.fleet.place import LABEL, CloudPlace, Login, NotThere, PlaceUnreachable, Refused, unknown_job
from graftwork.fleet.places.storage import PIECE, START_SOURCE, choose_results
from graftwork.fleet.results import parse_exit, take_files
from graftwork.fleet.settings import KaggleSettings
from graftwork.records.base import fingerprint
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
"""Kaggle's machine shapes and the card of each."""
INPUT, WORKING, SCRATCH = "/kaggle/input", "/kaggle/working", "/kaggle/tmp/graftwork"
PAGE = 100
DOWNLOAD_SECONDS = 120.0


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
        """The card of the settings with what is left of this week's quota, and a machine without one."""
        quota = self._call(_Calls.quota)
        left, shape = _hours_left(quota.gpu_quota), self._settings.accelerator
        refresh = quota.quota_refresh_time
        common: dict[str, Any] = {"place": self.name, "usd_per_hour": 0.0, "dated": date.today().isoformat()}
        spare = SPARE_SECONDS / 3600
        plain = Offer(
            **common, gpu="", gpus=0, longest_hours=SESSION_HOURS - spare, source="Kaggle, without a GPU"
        )
        if not shape:
            return (plain,)
        card = Offer(
            **common,
            gpu=GPUS.get(shape, shape),
            instance=shape,
            longest_hours=max(min(SESSION_HOURS, left) - spare, 0.0),
            quota_hours=left,
            quota_until=refresh.isoformat(timespec="minutes") if refresh else "",
            source="Kaggle's quota",
        )
        return (card, plain)

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
        answer = self._call(_Calls.save_kernel, request)
        if answer.error or answer.invalid_dataset_sources:
            why = answer.error or f"unknown datasets: {', '.join(answer.invalid_dataset_sources)}"
            raise Refused("Kaggle refuses the kernel", why=why, fix="run it again; check fleet.kaggle")
        return job

    def poll(self, job: PlacedJob) -> JobPoll:
        found = self._status(job.label)
        if found is None:
            return JobPoll(phase="gone")
        state, message = found
        if state in ("QUEUED", "NEW_SCRIPT"):
            return JobPoll(phase="starting", message="waiting for a machine of Kaggle")
        if state in ("RUNNING", "CANCEL_REQUESTED"):
            return JobPoll(phase="running")
        url, content = dict(self._output(job.label)).get(f"work/{EXIT_FILE}"), io.BytesIO()
        if url:
            _download(url, content)
        ended = parse_exit(content.getvalue())
        if ended is not None:
            return ended
        if state == "CANCEL_ACKNOWLEDGED":
            return JobPoll(phase="ended", exit_code=75, message="the session was cancelled at Kaggle")
        return JobPoll(phase="ended", exit_code=1, message=message or "the session ended without a result")

    def log(self, job: PlacedJob) -> str:
        if self._status(job.label) is None:
            return ""
        text = self._call(_Calls.output, self._user_name(), job.label, "").log or ""
        try:
            # Kaggle keeps the log as JSON: a list of pieces of output with their time.
            return "".join(str(piece["data"]) for piece in json.loads(text))
        except (ValueError, TypeError, KeyError):
            return str(text)

    def fetch(self, job: PlacedJob, folder: Path) -> None:
        if self._status(job.label) is None:
            raise unknown_job(self.name, job.label)
        urls = {name.removeprefix("work/"): url for name, url in self._output(job.label)}
        chosen = choose_results([*urls])
        take_files(((name.removeprefix("run/"), partial(_download, urls[name])) for name in chosen), folder)

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        """Leave the flag; and delete the kernel, `at_once`, which takes its output along."""
        if self._status(job.label) is None:
            return
        flag = f"{job.label}-stop"
        if self._dataset_status(flag) is None:
            self._create_dataset(flag, {"stop": b"stop\n"})
        if at_once:
            self._call(_Calls.delete_kernel, self._user_name(), job.label)

    def list(self) -> tuple[PlacedJob, ...]:
        found = []
        token, page = "", 1
        while page == 1 or token:
            answer = self._call(_Calls.list_kernels, self._user_name(), token)
            found += [kernel for kernel in answer.kernels or () if LABEL.fullmatch(_slug(kernel.ref))]
            token, page = answer.next_page_token or "", page + 1
        return tuple(
            self._placed(
                _slug(kernel.ref), GPUS.get(kernel.machine_shape or "", ""), created=kernel.last_run_time
            )
            for kernel in found
            if (self._status(_slug(kernel.ref)) or ("",))[0]
            in ("QUEUED", "RUNNING", "NEW_SCRIPT", "CANCEL_REQUESTED")
        )

    def _kernel(
        self, order: JobOrder, bundle: Bundle, sources: Sequence[str], secrets: Mapping[str, str]
    ) -> Any:
        with needs_extra("kaggle", why="the place `kaggle` is used"):
            from kagglesdk.kernels.types.kernels_api_service import ApiSaveKernelRequest
        seconds = min(order.seconds, SESSION_HOURS * 3600 - SPARE_SECONDS)
        words = ["--manifest", f"{SCRATCH}/{BUNDLE_FILE}", "--blobs", INPUT, "--work", f"{WORKING}/work"]
        words += ["--scratch", SCRATCH, "--seconds", f"{seconds:.0f}", "--label", order.label]
        words += ["--flag", f"{self._user_name()}/{order.label}-stop"]
        words += ["--secrets", f"kaggle:{','.join(sorted(secrets))}"] if secrets else []
        source = START_SOURCE.read_text().partition('\nif __name__ == "__main__":')[0]
        manifest = (Path(order.bundle) / BUNDLE_FILE).read_text()
        request = ApiSaveKernelRequest()
        request.slug = f"{self._user_name()}/{order.label}"
        request.new_title = order.label
        request.text = (
            f"{source}\nPath({SCRATCH!r}).mkdir(parents=True, exist_ok=True)\n"
            f"Path({SCRATCH!r}, {BUNDLE_FILE!r}).write_text({manifest!r})\nmain({words!r})\n"
        )
        request.language, request.kernel_type = "python", "script"
        # Packages and the Hub are on the network.
        request.is_private, request.enable_internet = True, True
        request.dataset_data_sources = sources
        request.session_timeout_seconds = int(seconds) + SPARE_SECONDS
        request.enable_gpu = bool(order.gpu)
        if order.gpu:
            request.machine_shape = self._settings.accelerator
        return request

    def _require_gpu(self, order: JobOrder) -> None:
        """The GPU of the settings, and some hours of its quota."""
        shape = self._settings.accelerator
        if order.gpu not in (shape, card := GPUS.get(shape, shape)):
            raise Refused(
                f"the place kaggle is set to the card {card or 'none'}, not to {order.gpu}",
                why=f"fleet.kaggle.accelerator is {shape or 'empty'}; Kaggle has {', '.join(GPUS)}",
                fix="name that card, or change the setting",
                where="fleet.kaggle.accelerator",
            )
        quota = self._call(_Calls.quota)
        left, refresh = _hours_left(quota.gpu_quota), quota.quota_refresh_time
        if left < LEAST_HOURS:
            when = f"; it is filled up at {refresh:%Y-%m-%d %H:%M} UTC" if refresh else ""
            raise Refused(
                f"{left:.1f} h are left of this week's GPU quota at Kaggle",
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
        tokens = [self._call(_Calls.upload, name, content) for name, content in sorted(files.items())]
        answer = self._call(_Calls.create_dataset, self._user_name(), slug, tokens)
        if answer.error:
            raise Refused(
                f"Kaggle does not take the files: {answer.error}",
                why="the dataset could not be made; the account may be full",
                fix="remove old datasets `graft-…` at kaggle.com/work/datasets, then run it again",
            )

    def _dataset_status(self, slug: str) -> str | None:
        try:
            answer = self._call(_Calls.dataset_status, self._user_name(), slug)
        except NotThere:
            return None
        return str(answer.status.name)

    def _status(self, label: str) -> tuple[str, str] | None:
        try:
            answer = self._call(_Calls.status, self._user_name(), label)
        except NotThere:
            return None
        return str(answer.status.name), str(answer.failure_message or "")

    def _output(self, label: str) -> Iterator[tuple[str, str]]:
        token, first = "", True
        while first or token:
            answer = self._call(_Calls.output, self._user_name(), label, token)
            yield from ((str(file.file_name), str(file.url)) for file in answer.files or ())
            token, first = str(answer.next_page_token or ""), False

    def _user_name(self) -> str:
        if not self._user:
            self._user = os.environ.get("KAGGLE_USERNAME", "") or self._call(_Calls.user)
        return self._user

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        with needs_extra("kaggle", why="the place `kaggle` is used"):
            import requests
            from kagglesdk import KaggleClient
        from kagglesdk.kaggle_env import get_access_token_from_env
        from kagglesdk.kaggle_http_client import _get_apikey_creds

        # The client would ask without a login, and be refused.
        named = bool(os.environ.get("KAGGLE_USERNAME") and os.environ.get("KAGGLE_KEY"))
        if not named and get_access_token_from_env()[0] is None and _get_apikey_creds() is None:
            _no_login()
        try:
            with KaggleClient(
                username=os.environ.get("KAGGLE_USERNAME"), password=os.environ.get("KAGGLE_KEY")
            ) as client:
                return method(client, *arguments)
        except requests.HTTPError as error:
            raise _explain(
                error.response.status_code if error.response is not None else 0, str(error)
            ) from None
        except requests.RequestException as error:
            raise PlaceUnreachable(
                f"Kaggle does not answer: {type(error).__name__}", fix="try again later"
            ) from None

    def _placed(self, label: str, gpu: str, *, created: datetime | None = None) -> PlacedJob:
        seconds = created.replace(tzinfo=UTC).timestamp() if created else 0.0
        return PlacedJob(place=self.name, id=label, label=label, gpu=gpu, created_at=seconds)


class _Calls:
    """The requests, each with the types of Kaggle's client."""

    @staticmethod
    def quota(client: Any) -> Any:
        return client.kernels.kernels_api_client.get_accelerator_quota_statistics()

    @staticmethod
    def user(client: Any) -> str:
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

    @staticmethod
    def save_kernel(client: Any, request: Any) -> Any:
        return client.kernels.kernels_api_client.save_kernel(request)

    @staticmethod
    def status(client: Any, user: str, slug: str) -> Any:
        from kagglesdk.kernels.types.kernels_api_service import ApiGetKernelSessionStatusRequest as Request

        return client.kernels.kernels_api_client.get_kernel_session_status(
            _fill(Request(), user_name=user, kernel_slug=slug)
        )

    @staticmethod
    def output(client: Any, user: str, slug: str, token: str) -> Any:
        from kagglesdk.kernels.types.kernels_api_service import ApiListKernelSessionOutputRequest as Request

        return client.kernels.kernels_api_client.list_kernel_session_output(
            _fill(Request(), user_name=user, kernel_slug=slug, page_size=PAGE, page_token=token)
        )

    @staticmethod
    def delete_kernel(client: Any, user: str, slug: str) -> Any:
        from kagglesdk.kernels.types.kernels_api_service import ApiDeleteKernelRequest as Request

        return client.kernels.kernels_api_client.delete_kernel(
            _fill(Request(), user_name=user, kernel_slug=slug)
        )

    @staticmethod
    def list_kernels(client: Any, user: str, token: str) -> Any:
        from kagglesdk.kernels.types.kernels_api_service import ApiListKernelsRequest as Request
        from kagglesdk.kernels.types.kernels_enums import KernelsListSortType, KernelsListViewType

        group, order = KernelsListViewType.PROFILE, KernelsListSortType.DATE_RUN
        page = {"page_size": PAGE, "page_token": token}
        return client.kernels.kernels_api_client.list_kernels(
            _fill(Request(), group=group, sort_by=order, user=user, search="graft-", **page)
        )

    @staticmethod
    def dataset_status(client: Any, user: str, slug: str) -> Any:
        from kagglesdk.datasets.types.dataset_api_service import ApiGetDatasetStatusRequest as Request

        return client.datasets.dataset_api_client.get_dataset_status(
            _fill(Request(), owner_slug=user, dataset_slug=slug)
        )

    @staticmethod
    def upload(client: Any, name: str, content: Path | bytes) -> str:
        import requests
        from kagglesdk.blobs.types.blob_api_service import ApiBlobType, ApiStartBlobUploadRequest

        length = len(content) if isinstance(content, bytes) else content.stat().st_size
        request = _fill(
            ApiStartBlobUploadRequest(), type=ApiBlobType.DATASET, name=name, content_length=length
        )
        answer = client.blobs.blob_api_client.start_blob_upload(request)
        with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as stream:
            requests.put(answer.create_url, data=stream, timeout=DOWNLOAD_SECONDS).raise_for_status()
        return str(answer.token)

    @staticmethod
    def create_dataset(client: Any, user: str, slug: str, tokens: list[str]) -> Any:
        from kagglesdk.datasets.types.dataset_api_service import ApiCreateDatasetRequest, ApiDatasetNewFile

        request = _fill(ApiCreateDatasetRequest(), owner_slug=user, slug=slug, title=slug)
        _fill(request, license_name="unknown", is_private=True)
        request.files = [_fill(ApiDatasetNewFile(), token=token) for token in tokens]
        return client.datasets.dataset_api_client.create_dataset(request)


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
            "Kaggle refuses the login",
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
        f"Kaggle refuses the request: {message[:200]}",
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
            "a file of the output could not be brought",
            why=str(error)[:200],
            fix="try again later, with room on the disk",
        ) from None
