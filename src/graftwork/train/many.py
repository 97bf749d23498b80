"""Several runs in one process, one after the other or side by side, on a base that is loaded once.

In: a TrainBatch, and how a run is trained. Out: in each run's folder what a run of its own would
leave, byte by byte: adapter, checkpoints, journal, outcome; or `error.json` where one fails, and the
next goes on. Started again after a crash it takes up the first run that is not settled.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graftwork.files.journal import Journal
from graftwork.files.whole import write_whole
from graftwork.process import clock, lock
from graftwork.process.exhausted import explain_exhaustion, is_exhaustion
from graftwork.process.worker import ERROR_FILE, stop_asked
from graftwork.records.errors import EnvironmentLacks, GraftError, Interrupted, StoppedInOrder, WorkerFailed
from graftwork.records.job import Moment
from graftwork.records.run import TrainBatch, TrainJob
from graftwork.text.redact import publish_text
from graftwork.train.files import ATTEMPTS, SAVED, WAITED
from graftwork.train.held import HeldBase
from graftwork.train.settled import is_settled
from graftwork.train.worker import job_settings, load_for

Load = Callable[[TrainJob], Any]
Train = Callable[[TrainJob, Load, Any], None]
"""Trains one run on the base that the given function has for it, with the given crew or alone."""


def train_many(batch: TrainBatch, train: Train) -> None:
    """Each run that is not settled yet, in order; those of a group in one go."""
    held = HeldBase(load_for)
    for place, job in enumerate(batch.jobs):
        if is_settled(job):
            continue
        if stop_asked.is_set():
            raise StoppedInOrder("stopped in good order between two runs", fix="run the same command again")
        group = next((group for group in batch.side_by_side if place in group), (place,))
        left = [batch.jobs[at] for at in group if not is_settled(batch.jobs[at])]
        begun = time.perf_counter()
        try:
            if len(left) > 1:
                _train_abreast(left, held, train, begun=batch.begun)
            else:
                _train_one(job, held.take, train, begun=batch.begun, on_failure=held.drop)
        finally:
            for one in left:
                # Who shares the steps shares the time.
                _add_waited(Path(one.folder), (time.perf_counter() - begun) / len(left))
            free_memory()


def free_memory() -> None:
    """What a run took and left behind is there for the next, and its limit on a card is lifted."""
    import torch

    gc.collect()
    # A card that nobody has used is not woken.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)


def _train_abreast(jobs: list[TrainJob], held: HeldBase, train: Train, *, begun: Moment) -> None:
    from graftwork.train.side_by_side import Abreast, train_abreast

    def work_on(job: TrainJob) -> Callable[[Load, Abreast], None]:
        return lambda load, crew: _train_one(job, load, train, begun=begun, crew=crew)

    train_abreast(held.take(jobs[0]), [work_on(job) for job in jobs])


def _train_one(
    job: TrainJob,
    load: Load,
    train: Train,
    *,
    begun: Moment,
    crew: Any = None,
    on_failure: Callable[[], None] = lambda: None,
) -> None:
    """The run to its end, or its reason in its folder."""
    try:
        with lock.hold(Path(job.folder)):
            _require_start(job)
            _require_patience(job, begun=begun)
            train(job, load, crew)
    except (StoppedInOrder, Interrupted):
        raise
    except GraftError as error:
        on_failure()
        _leave(job, error)
    except Exception as error:
        # A fault of the program in one run is no reason to leave the others undone.
        sys.excepthook(*sys.exc_info())
        on_failure()
        _leave(job, explain_exhaustion(error) if is_exhaustion(error) else _fault(job, error))


def _leave(job: TrainJob, error: GraftError) -> None:
    write_whole(Path(job.folder) / ERROR_FILE, json.dumps(error.as_json()))


def _fault(job: TrainJob, error: Exception) -> WorkerFailed:
    return WorkerFailed(
        f"the training of run {job.run_id} failed: {type(error).__name__}",
        why=publish_text(str(error)).splitlines()[0] if str(error) else "it left no message",
        fix="look at the log; what was done so far is kept, the same command goes on from there",
        where=job.folder,
    )


def _require_start(job: TrainJob) -> None:
    if job.start_adapter is not None and not Path(job.start_adapter).is_dir():
        raise EnvironmentLacks(
            "the adapter that training should start from is not there",
            why="the run that makes it has failed or was removed",
            fix="mend that run first; `graft train --all` then goes on with this one",
            where=job.start_adapter,
        )


def _require_patience(job: TrainJob, *, begun: Moment) -> None:
    """A run that kills its process again and again must not keep the others from being trained."""
    folder = Path(job.folder)
    attempts = [_when(line, begun) for line in Journal(folder / ATTEMPTS).read()]
    saved = [(_when(line, begun), int(line["step"])) for line in Journal(folder / SAVED).read()]
    crashes = crashes_in_a_row(attempts, saved, begun=0.0)
    if crashes > job_settings(job).run.max_restarts:
        raise WorkerFailed(
            f"the training of run {job.run_id} was killed {crashes} time(s) without progress",
            why="most often the machine ran out of memory",
            fix="look at the log; what was done so far is kept, the same command goes on from there",
            where=job.folder,
        )


def _when(line: dict[str, Any], begun: Moment) -> float:
    """When a line was written, in seconds after the command began."""
    return clock.seconds_between(begun, clock.read_moment(line))


def crashes_in_a_row(attempts: Sequence[float], saved: Sequence[tuple[float, int]], *, begun: float) -> int:
    """Attempts of this command that ended badly since the run last came further. Pure.

    In: when each attempt began; when the checkpoint of which step was safe.
    """
    newest = max((step for _, step in saved), default=0)
    # Saved again, after a crash, a step is no progress.
    further = min((at for at, step in saved if step == newest), default=begun)
    since = [at for at in attempts if at >= max(begun, further)]
    # The attempt that came further was killed after that, too.
    return len(since) + (1 if further > begun and any(begun <= at < further for at in attempts) else 0)


def _add_waited(folder: Path, seconds: float) -> None:
    path = folder / WAITED
    before = float(path.read_text()) if path.exists() else 0.0
    write_whole(path, repr(before + seconds))
