"""One worker process for several runs, watched to its end: who is at work is told, and kept in the store.

In: jobs in order, and which model each is for. Out: nothing; each run's folder holds an outcome or a
reason. What is told and entered on the way follows from those folders alone.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from graftwork.coordinate.narrator import Narrator, OfModel
from graftwork.coordinate.steps.train import watch_over
from graftwork.coordinate.supervise import JOB_FILE, run_job
from graftwork.coordinate.vigil import Vigil
from graftwork.coordinate.workplace import Workplace, now
from graftwork.files.journal import Journal
from graftwork.files.whole import write_whole
from graftwork.model.base import verify_base
from graftwork.process import lock
from graftwork.process.heartbeat import read_beat
from graftwork.process.worker import ERROR_FILE
from graftwork.records.base import fingerprint
from graftwork.records.errors import GraftError, Interrupted, StoppedInOrder
from graftwork.records.run import TrainBatch, TrainJob
from graftwork.train.abreast import choose_groups
from graftwork.train.files import ATTEMPTS, OUTCOME, WORDS

MODULE = "graftwork.coordinate.training_batch"
BATCHES = "batches"


def run_batch(work: Workplace, jobs: Sequence[TrainJob], *, names: Mapping[str, str]) -> None:
    """Train them all in one process. `names` gives the model of each run's id."""
    folder = work.project.state / BATCHES / fingerprint([job.run_id for job in jobs])[:12]
    groups = choose_groups(jobs)
    batch = TrainBatch(folder=str(folder), begun=time.time(), jobs=tuple(jobs), side_by_side=groups)
    many = f"{len(jobs)} run" + ("s" if len(jobs) > 1 else "")
    for job in jobs:
        # Whoever looks into a run's folder finds there what a run of its own would have been told.
        write_whole(Path(job.folder) / JOB_FILE, job.to_json())
    work.narrator.started("train", f"train {many} in one process")
    for group in groups:
        together = ", ".join(names[jobs[at].run_id] for at in group)
        work.narrator.word(f"side by side: {together}")
    with lock.hold(work.project.state / "pipeline"), ExitStack() as stack:
        round_ = _Round(work, batch, names, stack)
        verify_base(work.base)
        try:
            run_job(
                name="training",
                module=MODULE,
                job=batch,
                folder=folder,
                narrator=work.narrator,
                # Each run counts its own attempts and gives up by itself; this only bounds them all.
                max_restarts=sum(int(job.run.get("max_restarts", 3)) + 1 for job in jobs),
                on_poll=round_.look,
            )
        except (StoppedInOrder, Interrupted) as stopped:
            round_.stopped(stopped)
            raise
        except GraftError as failure:
            round_.failed(failure)


class _Round:
    """Follows the batch from run to run by what lies in their folders."""

    def __init__(
        self, work: Workplace, batch: TrainBatch, names: Mapping[str, str], stack: ExitStack
    ) -> None:
        self._work = work
        self._stack = stack
        self._vigils: dict[str, Vigil] = {}
        self._batch = batch
        self._names = names
        self._entered: set[str] = set()
        self._heard = {job.run_id: _end_of(Journal(Path(job.folder) / WORDS)) for job in batch.jobs}

    def look(self) -> None:
        """Whoever has begun is entered as running; whoever is at work is told about."""
        for job in self._batch.jobs:
            if self._has_begun(job):
                if job.run_id not in self._entered:
                    self._entered.add(job.run_id)
                    self._work.runs.update(job.run_id, state="running", when=now())
                narrator = OfModel(self._work.narrator, self._names[job.run_id])
                self._pass_words_on(job, narrator)
                if not _is_settled(job):
                    self._pass_beat_on(job, narrator)

    def stopped(self, reason: GraftError) -> None:
        for job in self._batch.jobs:
            if job.run_id in self._entered and not _is_settled(job):
                self._work.runs.update(job.run_id, state="stopped", when=now(), error=reason.as_json())

    def failed(self, reason: GraftError) -> None:
        """The process itself gave up: what it was at, and what it did not come to, has failed with it."""
        for job in self._batch.jobs:
            if not _is_settled(job):
                write_whole(Path(job.folder) / ERROR_FILE, json.dumps(reason.as_json()))

    def _has_begun(self, job: TrainJob) -> bool:
        if job.run_id in self._entered:
            return True
        lines = Journal(Path(job.folder) / ATTEMPTS).read()
        return bool(lines) and float(lines[-1]["at"]) >= self._batch.begun

    def _pass_beat_on(self, job: TrainJob, narrator: Narrator) -> None:
        beat = read_beat(Path(job.folder))
        if beat is None:
            return
        narrator.progress(
            beat.phase, beat.done, beat.total, seconds_left=beat.seconds_left, detail=beat.detail
        )
        if job.run_id not in self._vigils:
            own = replace(self._work, asked_model=self._names[job.run_id])
            self._vigils[job.run_id] = self._stack.enter_context(watch_over(own, job))
        self._vigils[job.run_id].look(beat.pid)

    def _pass_words_on(self, job: TrainJob, narrator: Narrator) -> None:
        words = Journal(Path(job.folder) / WORDS)
        for line, offset in words.follow(self._heard[job.run_id]):
            self._heard[job.run_id] = offset
            narrator.word(str(line["word"]))


def _is_settled(job: TrainJob) -> bool:
    return (Path(job.folder) / OUTCOME).exists() or (Path(job.folder) / ERROR_FILE).exists()


def _end_of(journal: Journal) -> int:
    return max((offset for _, offset in journal.follow(0)), default=0)
