"""Places without an API: a person uploads a notebook and a bundle, and downloads the result.

Input: an order. Output: `<root>/<label>/` with the packed bundle, a notebook for Colab, SageMaker Studio Lab
and others, and instructions. The job counts as running until its results are received.
"""

import json
import shutil
import zipfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from graftwork.files.disk import atomic_folder, make_folder, write_atomic
from graftwork.fleet.bundle import BUNDLE_FILE, JOB_FILE, OUTCOME, parse_exit, read_bundle, take_folder
from graftwork.fleet.far_start import EXIT_FILE
from graftwork.fleet.place import LABEL, unknown_job
from graftwork.records.errors import UserError
from graftwork.records.fleet import Bundle, JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

BUNDLE_ARCHIVE = "bundle.zip"
NOTEBOOK = "run.ipynb"
INSTRUCTIONS = "README.md"
RESULTS = "results.zip"
_RECEIVED = "received"
_STOPPED = "stopped"
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)


class ManualPlace:
    """Jobs that a person starts."""

    name = "manual"
    paid = False

    def __init__(self, root: Path) -> None:
        self._root = root

    def offer(self) -> tuple[Offer, ...]:
        today = date.today().isoformat()
        return (Offer(place=self.name, gpu="", gpus=0, source="started by hand", dated=today),)

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        """Write what a person needs to run the job. Secrets are named in the instructions, not written."""
        job = PlacedJob(place=self.name, id=order.label, label=order.label)
        if (self._root / order.label).exists():
            return job
        bundle = read_bundle(Path(order.bundle))
        make_folder(self._root)
        with atomic_folder(self._root / order.label) as folder:
            with zipfile.ZipFile(folder / BUNDLE_ARCHIVE, "w", zipfile.ZIP_STORED) as archive:
                for name in (BUNDLE_FILE, *bundle.files):
                    entry = zipfile.ZipInfo(f"bundle/{name}", _FIXED_TIME)
                    with Path(order.bundle, name).open("rb") as content, archive.open(entry, "w") as packed:
                        shutil.copyfileobj(content, packed)
            write_atomic(folder / NOTEBOOK, json.dumps(_notebook(order, secrets), indent=1))
            write_atomic(folder / INSTRUCTIONS, _instructions(order, bundle, secrets))
        return job

    def poll(self, job: PlacedJob) -> JobPoll:
        folder = self._root / job.label
        if not folder.exists():
            return JobPoll(phase="gone")
        ended = folder / _RECEIVED / EXIT_FILE
        if ended.exists() and (ended_poll := parse_exit(ended.read_bytes())) is not None:
            return ended_poll
        if (folder / _STOPPED).exists():
            return JobPoll(phase="ended", exit_code=75, message="abandoned before its results came back")
        return JobPoll(phase="starting", message="waiting for its results: `graft fleet fetch JOB RESULTS`")

    def log(self, job: PlacedJob) -> str:
        path = self._root / job.label / _RECEIVED / "run" / "worker.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def fetch(self, job: PlacedJob, folder: Path) -> None:
        received = self._root / job.label / _RECEIVED / "run"
        if received.exists():
            take_folder(received, folder)
        elif not (self._root / job.label / _STOPPED).exists():
            raise unknown_job(self.name, job.label)

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        """Only the person can stop it there; here the job is no longer waited for."""
        del at_once
        if (self._root / job.label).exists():
            write_atomic(self._root / job.label / _STOPPED, "")

    def list(self) -> tuple[PlacedJob, ...]:
        labels = sorted(path.name for path in self._root.iterdir()) if self._root.exists() else []
        jobs = (
            PlacedJob(place=self.name, id=label, label=label) for label in labels if LABEL.fullmatch(label)
        )
        return tuple(job for job in jobs if self.poll(job).phase == "starting")

    def folder_of(self, job: PlacedJob) -> Path:
        return self._root / job.label

    def receive(self, job: PlacedJob, results: Path) -> None:
        """Import the results that a person provides: the archive that the notebook made, or the work
        folder."""
        folder = self._root / job.label
        if not folder.exists():
            raise unknown_job(self.name, job.label)
        # Of a call that was interrupted: the new results would be dropped in favor of these.
        shutil.rmtree(folder / f".{_RECEIVED}", ignore_errors=True)
        with atomic_folder(folder / f".{_RECEIVED}") as part:
            if results.is_dir():
                shutil.copytree(results, part, dirs_exist_ok=True)
            else:
                _unpack(results, part)
            ended = part / EXIT_FILE
            if not ended.exists() or parse_exit(ended.read_bytes()) is None or not (part / "run").is_dir():
                raise UserError(
                    "these are not the results of a job",
                    why="they hold no readable exit.json, or no folder `run`",
                    fix=f"use {RESULTS}, which the last cell of the notebook writes, or the work folder",
                    where=str(results),
                )
            _require_same_run(folder / BUNDLE_ARCHIVE, part / "run", results)
        shutil.rmtree(folder / _RECEIVED, ignore_errors=True)
        (folder / f".{_RECEIVED}").rename(folder / _RECEIVED)


def _unpack(results: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(results) as archive:
            for entry in archive.infolist():
                path = Path(entry.filename)
                if path.is_absolute() or ".." in path.parts:
                    raise UserError(
                        "the results name a file outside of their folder",
                        why=f"{entry.filename[:100]!r} would be written elsewhere",
                        fix=f"use {RESULTS} as the notebook wrote it",
                        where=str(results),
                    )
            archive.extractall(folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(
            "the results cannot be read",
            why=str(error),
            fix=f"use {RESULTS} of the notebook",
            where=str(results),
        ) from error


def _require_same_run(bundle: Path, run: Path, results: Path) -> None:
    """Every notebook gives its results the same name: those of another run must not be mixed up with this
    one's.
    """
    with zipfile.ZipFile(bundle) as archive:
        expected = Bundle.from_json(archive.read(f"bundle/{BUNDLE_FILE}")).run_id
    for name in (JOB_FILE, OUTCOME):
        try:
            run_id = json.loads((run / name).read_bytes())["run_id"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if run_id != expected:
            raise UserError(
                f"these are results of the run {str(run_id)[:40]}, not of {expected}",
                why=f"{name} in them says so",
                fix="specify the job that they belong to: `graft fleet list` has the run of each",
                where=str(results),
            )


def _commands(order: JobOrder) -> tuple[str, str, str]:
    # Some services keep files between sessions: checkpoints and time limit of another job are not this one's.
    work = f"work-{order.job_id}"
    return (
        f"import zipfile\nzipfile.ZipFile('{BUNDLE_ARCHIVE}').extractall()",
        f"!python bundle/bootstrap.py --work {work} --seconds {order.seconds:.0f}",
        f"import shutil\nshutil.make_archive('results', 'zip', '{work}')",
    )


def _notebook(order: JobOrder, secrets: Mapping[str, str]) -> dict[str, Any]:
    unpack, run, pack = _commands(order)
    ask = "import getpass, os\n" + "\n".join(
        f"os.environ[{name!r}] = getpass.getpass({name!r})" for name in sorted(secrets)
    )
    texts: list[tuple[str, str]] = [
        (
            "markdown",
            f"# {order.label}\n\nUpload `{BUNDLE_ARCHIVE}` next to this notebook, then run all cells.",
        ),
        *([("code", ask)] if secrets else []),
        ("code", unpack),
        ("code", run),
        ("code", pack),
        ("markdown", f"Download `{RESULTS}` and run `graft fleet fetch {order.job_id} {RESULTS}`."),
    ]
    cells: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(texts):
        output: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
        cells.append({"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text, **output})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _instructions(order: JobOrder, bundle: Bundle, secrets: Mapping[str, str]) -> str:
    _, run, _ = _commands(order)
    lines = [
        f"# Run {order.label} by hand",
        "",
        f"1. Upload `{BUNDLE_ARCHIVE}` ({bundle.size / 1e6:.1f} MB) and `{NOTEBOOK}` to the service.",
        "2. Choose a machine with a GPU if the plan needs one, and run all cells.",
        f"3. Download `{RESULTS}` and run `graft fleet fetch {order.job_id} {RESULTS}` here.",
        "",
        f"On a machine with a shell: unpack the archive and run `{run.removeprefix('!')}`.",
        f"The job ends after {order.seconds / 3600:.1f} h, with a checkpoint. `graft "
        "fleet run` continues from it, at this place or another.",
    ]
    if secrets:
        lines += ["", f"The notebook asks for {', '.join(sorted(secrets))}; they are not in the bundle."]
    return "\n".join(lines) + "\n"
