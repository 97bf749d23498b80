"""Train the models of a family at once, each as a job of the cluster that `engine` names.

In: the runs that are left, by model. Out: their results in their run folders, where each model's own step
finds them. A run that starts from another adapter waits for it. A job that does not finish leaves its error;
the others go on. Where the cluster takes no job, the runs are left to this machine.
"""

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from graftwork.files.disk import write_atomic
from graftwork.pipeline.fleet_jobs import POLL_SECONDS, FleetRequest, bring, collecting, get_job, start_run
from graftwork.pipeline.open_project import OpenProject
from graftwork.process.worker import ERROR_FILE
from graftwork.records.errors import EnvironmentLacks, GraftError, Interrupted, WorkerFailed
from graftwork.records.fleet import FleetJob
from graftwork.records.run import TrainJob
from graftwork.train.run_folder import OUTCOME, is_settled

Runs = Mapping[str, tuple[OpenProject, TrainJob]]
"""By the name of the model; the project is opened for that model."""


def train_at_engine(work: OpenProject, runs: Runs) -> bool:
    """Train them at the place of this project's engine; False if it takes no job."""
    place = work.project.settings.engine
    work.reporter.started("train", f"train {len(runs)} run(s) on {place}")
    try:
        return _Family(work, runs, place).run()
    except KeyboardInterrupt:
        raise Interrupted(
            f"no longer following; the jobs continue at {place}",
            fix="`graft fleet list` shows them, `graft fleet stop JOB` stops one; the same command resumes",
        ) from None


class _Family:
    def __init__(self, work: OpenProject, runs: Runs, place: str) -> None:
        self._work, self._place = work, place
        self._waiting = dict(runs)
        self._running: dict[str, FleetJob] = {}
        self._open = dict(runs)

    def run(self) -> bool:
        controller, pause = collecting(self._work, self._place), threading.Event()
        while self._waiting or self._running:
            if not self._start_ready():
                return False
            controller.reconcile(now=time.time())
            for name, started in list(self._running.items()):
                job = get_job(self._work, started.id)
                if not job.is_open:
                    del self._running[name]
                    self._take(name, job)
            if self._running:
                pause.wait(POLL_SECONDS)
        return True

    def _start_ready(self) -> bool:
        """Submit every run whose start is there; False if the place takes none."""
        for name, (own, run) in list(self._waiting.items()):
            start = Path(run.start_adapter) if run.start_adapter else None
            if start is not None and not start.exists() and self._running:
                continue
            del self._waiting[name]
            if is_settled(run):
                continue
            try:
                job = start_run(own, FleetRequest(place=self._place), confirm=lambda _quote: True)
            except EnvironmentLacks as error:
                if self._running or len(self._open) > len(self._waiting) + 1:
                    _leave(run, error)
                    continue
                self._work.reporter.info(f"{error.what}; training here instead")
                return False
            except GraftError as error:
                _leave(run, error)
                continue
            self._running[name] = job
        return True

    def _take(self, name: str, job: FleetJob) -> None:
        """Bring the files of an ended job; note why it did not finish."""
        own, run = self._open[name]
        job = bring(own, job)
        done = job.state == "done" and (Path(run.folder) / OUTCOME).exists()
        own.reporter.info(f"job {job.id} at {job.place}: {job.state}")
        if not done and not (Path(run.folder) / ERROR_FILE).exists():
            _leave(
                run,
                WorkerFailed(
                    f"job {job.id} did not finish at {job.place}: {job.reason or job.state}",
                    fix=f"`graft fleet logs {job.id}` shows its output; the same command resumes from there",
                    where=job.place,
                ),
            )


def _leave(run: TrainJob, error: GraftError) -> None:
    write_atomic(Path(run.folder) / ERROR_FILE, json.dumps(error.as_json()))
