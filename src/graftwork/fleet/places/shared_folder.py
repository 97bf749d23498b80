"""Jobs in a folder that all nodes of a cluster share: bundles are laid out here, and results read here.

In: an order. Out: `jobs/<label>` with the bundle, the work folder and the log, as on a host of its own
(`far_side.py`). What starts the job there is the work of the cluster.
"""

import json
import sys
from pathlib import Path
from typing import IO

from graftwork.fleet.bundle import BUNDLE_FILE, read_bundle
from graftwork.fleet.place import unknown_job
from graftwork.fleet.places.hosts import ProcessConnection, send_files
from graftwork.fleet.results import take_packed
from graftwork.records.fleet import JobOrder, JobPoll, PlacedJob


class SharedFolder:
    def __init__(self, place: str, folder: str) -> None:
        self._place = place
        self.root = Path(folder).expanduser()
        self._files = ProcessConnection(place, [sys.executable], root=str(self.root), far=False)

    def job(self, label: str) -> Path:
        return self.root / "jobs" / label

    def lay_out(self, order: JobOrder) -> int:
        """Put the bundle there; returns the bytes that were not there yet."""
        folder = Path(order.bundle)
        sent = send_files(self._files, folder, read_bundle(folder))
        body = json.dumps({"label": order.label, "bundle": (folder / BUNDLE_FILE).read_text()}).encode()

        def feed(stream: IO[bytes]) -> None:
            stream.write(body)

        self._files.run("prepare", feed=feed)
        return sent

    def has_ended(self, label: str) -> bool:
        """Whether the job wrote how it ended."""
        return self.status(label).phase == "ended" and (self.job(label) / "work/exit.json").exists()

    def status(self, label: str) -> JobPoll:
        """By the files of the job alone."""
        return JobPoll.from_json(self._files.run("status", label))

    def status_in_queue(self, label: str) -> JobPoll:
        """Of a job that the cluster says is running."""
        found = self.status(label)
        phase = "running" if found.beat else "starting"
        return found.model_copy(update={"phase": phase, "exit_code": None, "message": ""})

    def log(self, label: str) -> str:
        text: str = json.loads(self._files.run("log", label))
        return text

    def fetch(self, job: PlacedJob, folder: Path) -> None:
        if self.status(job.label).phase == "gone":
            raise unknown_job(self._place, job.label)
        take_packed(lambda packed: self._files.run("pack", job.label, into=packed), folder)

    def bootstrap(self, label: str, *, python: str, seconds: float) -> list[str]:
        """The command that runs the job on a node."""
        folder = self.job(label)
        words = [python or sys.executable, str(folder / "bundle" / "bootstrap.py")]
        words += ["--work", str(folder / "work"), "--cache", str(self.root / "cache")]
        return [*words, "--seconds", f"{seconds:.0f}"]
