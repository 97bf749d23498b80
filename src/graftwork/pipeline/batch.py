"""One worker process for several runs, watched to its end: who is at work is told, and kept in the store.

In: jobs in order, and which model each is for. Out: nothing; each run's folder holds an outcome or a
reason. What is told and entered on the way follows from those folders alone.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from graftwork.files.journal import Journal
from graftwork.files.whole import write_whole
from graftwork.model.base import verify_base
from graftwork.pipeline.reporter import ModelReporter, Reporter
from graftwork.pipeline.steps.train import watch_over
from graftwork.pipeline.supervise import JOB_FILE, run_job
from graftwork.pipeline.vigil import Vigil
from graftwork.pipeline.workplace import Workplace, now
from graftwork.process import clock, lock
from graftwork.process.heartbeat import read_beat
from graftwork.process.worker import ERROR_FILE
from graftwork.records.base import fingerprint
from graftwork.records.errors import GraftError, Interrupted, StoppedInOrder
from graftwork.records.job import AlertKind
from graftwork.records.run import TrainBatch, TrainJob
from graftwork.train.files import ATTEMPTS, WORDS
from graftwork.train.grouping import choose_groups
from graftwork.train.safety import pass_mirrors
from graftwork.train.settled import failure_of, is_settled

MODULE = "graftwork.pipeline.training_batch"
BATCHES = "batches"
RETRIED_ALONE = "OutOfMemory"
"""The one failure that the step of a single model knows a remedy for: it plans anew, and tells of it."""


def run_batch(work: Workplace, jobs: Sequence[TrainJob], *, names: Mapping[str, str]) -> None:
    """Train them all in one process. `names` gives the model of each run's id."""
    folder = work.project.state / BATCHES / fingerprint([job.run_id for job in jobs])[:12]
    groups = choose_groups(jobs)
    batch = TrainBatch(folder=str(folder), begun=clock.now(), jobs=tuple(jobs), side_by_side=groups)
    many = f"{len(jobs)} run" + ("s" if len(jobs) > 1 else "")
    for job in jobs:
        # Whoever looks into a run's folder finds there what a run of its own would have been told.
        write_whole(Path(job.folder) / JOB_FILE, job.to_json())
    work.reporter.started("train", f"train {many} in one process")
    for group in groups:
        together = ", ".join(names[jobs[at].run_id] for at in group)
        work.reporter.info(f"side by side: {together}")
    with lock.hold(work.project.state / "pipeline"), ExitStack() as stack:
        round_ = _Round(work, batch, names, stack)
        verify_base(work.base)
        try:
            run_job(
                name="training",
                module=MODULE,
                job=batch,
                folder=folder,
                reporter=work.reporter,
                # Each run counts its own crashes and gives up by itself; this only bounds them all.
                max_restarts=sum(int(job.run.get("max_restarts", 3)) + 1 for job in jobs),
                on_poll=round_.follow,
                vigil=round_,
                at_work=lambda: [Path(job.folder) for job in round_.at_work()],
                environment=_secrets_of(work, names),
            )
        except (StoppedInOrder, Interrupted) as stopped:
            round_.stopped(stopped)
            raise
        except GraftError as failure:
            round_.failed(failure)


def _secrets_of(work: Workplace, names: Mapping[str, str]) -> dict[str, str]:
    own = {run: work.project.settings.of_model(name) for run, name in names.items()}
    return pass_mirrors({run: settings.train.run.mirror for run, settings in own.items()})


class _Round:
    """Follows the batch from run to run by what lies in their folders; a vigil over whoever is at work."""

    def __init__(
        self, work: Workplace, batch: TrainBatch, names: Mapping[str, str], stack: ExitStack
    ) -> None:
        self._work = work
        self._stack = stack
        self._vigils: dict[str, Vigil] = {}
        self._batch = batch
        self._names = names
        self._entered: set[str] = set()
        self._told: set[str] = set()
        self._heard = {job.run_id: _end_of(Journal(Path(job.folder) / WORDS)) for job in batch.jobs}

    def at_work(self) -> list[TrainJob]:
        """Runs go on until they are settled: whoever has begun and is not is being worked on."""
        return [job for job in self._batch.jobs if not is_settled(job) and self._has_begun(job)]

    def follow(self) -> None:
        """Whoever has begun is entered as running; whoever is at work is told about, and who failed."""
        for job in self._batch.jobs:
            if self._has_begun(job):
                if job.run_id not in self._entered:
                    self._entered.add(job.run_id)
                    self._work.runs.update(job.run_id, state="running", when=now())
                reporter = ModelReporter(self._work.reporter, self._names[job.run_id])
                self._pass_words_on(job, reporter)
                if not is_settled(job):
                    self._pass_beat_on(job, reporter)
            self._tell_failure(job)

    @property
    def expected_seconds(self) -> float:
        return max((self._vigil(job).expected_seconds for job in self.at_work()), default=0.0)

    def look(self, pid: int) -> None:
        for job in self.at_work():
            self._vigil(job).look(pid)

    def tell(self, kind: AlertKind, what: str, *, why: str = "", fix: str = "") -> None:
        """Of the process: it concerns those it works on, or else the one it would have come to."""
        left = [job for job in self._batch.jobs if not is_settled(job)]
        for job in self.at_work() or left[:1]:
            self._vigil(job).tell(kind, what, why=why, fix=fix)

    def ended(self) -> None:
        for vigil in self._vigils.values():
            vigil.ended()

    def stopped(self, reason: GraftError) -> None:
        for job in self._batch.jobs:
            if job.run_id in self._entered and not is_settled(job):
                self._work.runs.update(job.run_id, state="stopped", when=now(), error=reason.as_json())

    def failed(self, reason: GraftError) -> None:
        """The process itself gave up: what it was at, and what it did not come to, has failed with it."""
        for job in self._batch.jobs:
            if not is_settled(job):
                write_whole(Path(job.folder) / ERROR_FILE, json.dumps(reason.as_json()))

    def _has_begun(self, job: TrainJob) -> bool:
        if job.run_id in self._entered:
            return True
        lines = Journal(Path(job.folder) / ATTEMPTS).read()
        latest = clock.read_moment(lines[-1]) if lines else None
        return latest is not None and clock.seconds_between(self._batch.begun, latest) >= 0

    def _pass_beat_on(self, job: TrainJob, reporter: Reporter) -> None:
        beat = read_beat(Path(job.folder))
        if beat is None:
            return
        reporter.progress(
            beat.phase, beat.done, beat.total, seconds_left=beat.seconds_left, detail=beat.detail
        )

    def _tell_failure(self, job: TrainJob) -> None:
        """Once for each run; not of what its own step will try to mend."""
        said = failure_of(job) if job.run_id not in self._told else None
        if said is None:
            return
        self._told.add(job.run_id)
        if said["error"] != RETRIED_ALONE:
            self._vigil(job).tell("failed", str(said["what"]), why=str(said["why"]), fix=str(said["fix"]))

    def _vigil(self, job: TrainJob) -> Vigil:
        """Of the one run, for whoever its own model's settings name."""
        if job.run_id not in self._vigils:
            name = self._names[job.run_id]
            own = replace(self._work, asked_model=name, reporter=ModelReporter(self._work.reporter, name))
            self._vigils[job.run_id] = self._stack.enter_context(watch_over(own, job))
        return self._vigils[job.run_id]

    def _pass_words_on(self, job: TrainJob, reporter: Reporter) -> None:
        words = Journal(Path(job.folder) / WORDS)
        for line, offset in words.follow(self._heard[job.run_id]):
            self._heard[job.run_id] = offset
            reporter.info(str(line["word"]))


def _end_of(journal: Journal) -> int:
    return max((offset for _, offset in journal.follow(0)), default=0)
