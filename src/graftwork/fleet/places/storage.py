"""Jobs whose files go through a provider's storage: what is sent, the stop flag, the results.

Input: a `JobStorage`, which a place implements with its own client, and a bundle. Output: `blobs/<sha256>`,
sent once whatever job needs them; `jobs/<label>/in` for the start of a job; `jobs/<label>/out`, which the job
fills. How a job is started, shown and canceled is the work of each place.
"""

import io
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, Protocol

from pydantic import ValidationError

from graftwork.files.remote import RemoteFiles
from graftwork.fleet.bundle import BUNDLE_FILE, OUTCOME, parse_exit, read_bundle, take_files
from graftwork.fleet.far_start import EXIT_FILE, FULL, STOP_FILE
from graftwork.fleet.place import CloudPlace, KeepsForJobs, NotThere, PlaceUnreachable, Refused, unknown_job
from graftwork.records.base import hide_login
from graftwork.records.errors import EnvironmentFailure, GraftError
from graftwork.records.fleet import Beat, JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

BLOBS = "blobs"
START = "start.py"
PIECE = 2**20
CHECKPOINTS = "run/checkpoints/"
START_SOURCE = Path(__file__).parents[1] / "far_start.py"


class JobStorage(Protocol):
    """Files by name, as a bucket has them."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """The files below a prefix, with their length."""

    def put(self, name: str, source: Path) -> None: ...

    def write(self, name: str, content: bytes) -> None: ...

    def flush(self) -> None:
        """Return once every write is complete."""

    def copy(self, name: str, target: IO[bytes]) -> None:
        """Write the content of a file, piece by piece, since it may be weights. Raises `NotThere`."""


class UrlStorage:
    """The files of jobs below a folder or an fsspec URL."""

    def __init__(self, url: str, *, setting: str) -> None:
        self._setting = setting
        self._url = url if "://" in url else f"file://{Path(url).expanduser().absolute()}"

    @cached_property
    def _files(self) -> RemoteFiles:
        """Opened on first use."""
        try:
            return RemoteFiles(self._url, kind="storage", setting=self._setting)
        except EnvironmentFailure as error:
            # A package is missing here: nothing was asked of the place, and nothing is reserved for it.
            raise Refused(error.what, why=error.why, fix=error.fix, where=error.where) from error

    def sizes(self, prefix: str) -> dict[str, int]:
        entries = self._find(lambda: self._files.system.find(self._files.path(prefix), detail=True))
        start = self._files.path("")
        return {name.removeprefix(start): int(entry["size"]) for name, entry in (entries or {}).items()}

    def put(self, name: str, source: Path) -> None:
        self._do(lambda: self._files.put(source, name))

    def write(self, name: str, content: bytes) -> None:
        self._do(lambda: self._files.write(name, content))

    def flush(self) -> None:
        """Every write is complete when it returns."""

    def copy(self, name: str, target: IO[bytes]) -> None:
        self._files.system.invalidate_cache()
        source = self._find(lambda: self._files.system.open(self._files.path(name), "rb"))
        if source is None:
            raise NotThere(
                "the storage for the files of jobs has no such file", fix=f"check {self._setting}", where=name
            )
        with source:
            # A read that fails is the storage's fault, a write that of the disk here.
            while piece := self._do(lambda: source.read(PIECE)):
                target.write(piece)

    def _find(self, call: Callable[[], Any]) -> Any:
        """Return what was read; None if it does not exist."""

        def find() -> Any:
            with suppress(FileNotFoundError):
                return call()
            return None

        return self._do(find)

    def _do(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except GraftError:
            # The address was refused before anything was asked.
            raise
        except Exception as error:  # whatever a network library may raise
            full = isinstance(error, OSError) and error.errno in FULL
            raise PlaceUnreachable(
                "the storage for the files of jobs is full"
                if full
                else f"the storage for the files of jobs cannot be used: {type(error).__name__}",
                why=str(error)[:200] if full else "it is full, not mounted, or not responding",
                fix=f"check {self._setting}; the job must mount the same files",
                where=hide_login(self._url),
            ) from error


def start_command(
    label: str, seconds: float, *, root: str, work: str, scratch: str = "/tmp/graftwork"
) -> list[str]:
    """The command of a job whose storage is mounted at `root`."""
    job = f"{root}/jobs/{label}"
    command = ["python3", f"{job}/in/{START}", "--manifest", f"{job}/in/{BUNDLE_FILE}"]
    command += ["--blobs", f"{root}/{BLOBS}", "--work", work, "--scratch", scratch]
    return [*command, "--seconds", f"{seconds:.0f}", "--label", label]


def read_file(storage: JobStorage, name: str) -> bytes | None:
    """Return the content of a small file; None if there is no such file."""
    content = io.BytesIO()
    try:
        storage.copy(name, content)
    except NotThere:
        return None
    return content.getvalue()


def fetch_results(storage: JobStorage, label: str, folder: Path) -> bool:
    """Fetch the run's files; without checkpoints once there is a result. False: there are none."""
    prefix = f"jobs/{label}/out/"
    names = [name.removeprefix(prefix) for name in storage.sizes(f"{prefix}run/")]

    chosen_names = choose_results(names)
    take_files(
        ((name.removeprefix("run/"), partial(storage.copy, prefix + name)) for name in chosen_names), folder
    )
    return bool(names)


def choose_results(names: list[str]) -> list[str]:
    done = f"run/{OUTCOME}" in names
    return [
        name
        for name in sorted(names)
        if name.startswith("run/") and not (done and name.startswith(CHECKPOINTS))
    ]


class StoragePlace(CloudPlace):
    """A place that runs jobs and keeps their files in a storage."""

    paid = True
    ends_late = False
    """The provider calls a job running for a while after it has ended."""
    sent_bytes = 0
    _storage: JobStorage

    @abstractmethod
    def show(self, job: PlacedJob) -> JobPoll | None:
        """The provider's state of the job; None if it has no such job."""

    def poll(self, job: PlacedJob) -> JobPoll:
        status, out = self.show(job), f"jobs/{job.label}/out"
        has_ended = status is not None and (status.phase == "ended" or self.ends_late)
        ended = parse_exit(read_file(self._storage, f"{out}/{EXIT_FILE}")) if has_ended else None
        if status is None or status.phase == "ended" or ended is not None:
            self.forget_secrets(job.label)
        if status is None:
            return JobPoll(phase="gone")
        if ended is not None:
            return ended
        content = read_file(self._storage, f"{out}/run/heartbeat.json") if status.phase == "running" else None
        try:
            beat = Beat.from_json(content) if content is not None else None
        except ValidationError:
            beat = None
        return status.model_copy(update={"beat": beat})

    def fetch(self, job: PlacedJob, folder: Path) -> None:
        if not fetch_results(self._storage, job.label, folder) and self.show(job) is None:
            raise unknown_job(self.name, job.label)

    def ship(self, order: JobOrder) -> list[str]:
        """Send the bundle except for files that are already there; returns the hashes of its files. Raises
        `Refused` if that fails: a job is only created once its files are there.
        """
        folder, start = Path(order.bundle), f"jobs/{order.label}/in"
        files = read_bundle(folder).files
        self.sent_bytes = 0
        try:
            sizes = self._storage.sizes(f"{BLOBS}/")
            for name, file in sorted(files.items()):
                blob = f"{BLOBS}/{file.sha256}"
                if sizes.get(blob) != file.size:
                    self._storage.put(blob, folder / name)
                    sizes[blob] = file.size
                    self.sent_bytes += file.size
            self._storage.write(f"{start}/{START}", START_SOURCE.read_bytes())
            self._storage.write(f"{start}/{BUNDLE_FILE}", (folder / BUNDLE_FILE).read_bytes())
            self._storage.flush()
        except PlaceUnreachable as error:
            raise Refused(
                f"the files of the job could not be sent: {error.what}",
                why=f"{error.why}; no job was created" if error.why else "no job was created",
                fix=error.fix,
                where=error.where,
            ) from error
        return sorted({file.sha256 for file in files.values()})

    def ask_to_stop(self, label: str) -> None:
        """Set the flag that the job looks for."""
        self._storage.write(f"jobs/{label}/{STOP_FILE}", b"")
        self._storage.flush()

    def forget_secrets(self, label: str) -> None:
        """Where the place keeps any; the next call tries again."""
        if isinstance(self, KeepsForJobs):
            with suppress(GraftError):
                self.forget(label)


class MachinePrices:
    """The machines of a provider: those with a price in the settings, else those of the catalog."""

    def __init__(self, place: str, prices: Mapping[str, float], catalog: Iterable[Offer]) -> None:
        self._place, self._prices = place, prices
        self._catalog = {row.instance: row for row in catalog if row.usd_per_hour}

    def rows(self) -> tuple[Offer, ...]:
        setting = f"fleet.{self._place}.instances"
        if not self._prices:
            return tuple(row.model_copy(update={"place": self._place}) for row in self._catalog.values())
        if unknown := self._prices.keys() - self._catalog.keys():
            raise Refused(
                f"the catalog has no machine {min(unknown)}",
                why=f"it has: {', '.join(sorted(self._catalog))}",
                fix="use one of these, or add it to prices.csv: `graft plan catalog`",
                where=setting,
            )
        stated = {"place": self._place, "spot_usd_per_hour": None, "source": setting}
        stated["dated"] = date.today().isoformat()
        return tuple(
            self._catalog[instance].model_copy(update={**stated, "usd_per_hour": price})
            for instance, price in self._prices.items()
        )

    def choose(self, order: JobOrder) -> Offer:
        """The cheapest machine with the GPU of the order."""
        rows = [row for row in self.rows() if row.gpu == order.gpu and order.instance in ("", row.instance)]
        if not rows:
            raise Refused(
                f"no machine{f' {order.instance}' if order.instance else ''} of {self._place} "
                f"has the GPU {order.gpu or 'none'}",
                fix=f"use one of `graft fleet offers --place {self._place}`",
                where="--gpu",
            )
        return min(rows, key=lambda row: row.usd_per_hour or 0.0)

    def placed(self, label: str, instance: str, *, created_at: float = 0.0) -> PlacedJob:
        """A job on a machine of this kind, whose name is its label. The settings need not name it."""
        row = self._catalog.get(instance)
        gpu, price = (row.gpu, row.usd_per_hour or 0.0) if row is not None else ("", 0.0)
        price = self._prices.get(instance, price)
        return PlacedJob(
            place=self._place, id=label, label=label, gpu=gpu, usd_per_hour=price, created_at=created_at
        )
