"""How the run of a job is kept: its store and mirror, its watch, its deadline, its way to stop.

In: a job and its settings. Out: the parts that the loop is given. Builds them and does nothing else.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.files.dataset import read_rows
from graftwork.process import clock
from graftwork.records.base import HIDDEN, hide_login
from graftwork.records.dataset import Row
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.run import TrainingEvaluation, TrainJob
from graftwork.train.callbacks import TrainingCallback
from graftwork.train.callbacks.evaluation import TrainingEvaluator
from graftwork.train.callbacks.guards import DeadlineCallback, DivergenceCallback
from graftwork.train.checkpoints.store import CheckpointStore
from graftwork.train.run_folder import CHECKPOINTS
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.train.distributed.strategies import SingleProcess

MIRROR_PATIENCE = 600.0
MIRRORS_VARIABLE = "GRAFT_TRAIN_MIRRORS"
"""Where a worker finds the addresses of mirrors that hold a login: a job's file is kept, and holds none."""


def deadline_of(job: TrainJob, settings: TrainSettings) -> float | None:
    """When the place is gone, by the steady clock: as the job says, or so many minutes from now."""
    if job.deadline is not None:
        start = job.deadline_from or clock.now()
        return clock.steady() - clock.seconds_since(start) + (job.deadline - start.at)
    minutes = settings.run.deadline_minutes
    return clock.steady() + minutes * 60 if minutes is not None else None


def open_checkpoint_store(
    job: TrainJob, settings: TrainSettings, *, deadline: float | None
) -> CheckpointStore:
    """Report a mirror that cannot work before training starts."""
    mirror, address = None, find_mirror(job, settings, passed=_passed_mirrors())
    if address is not None:
        from graftwork.train.checkpoints.mirror import FsspecMirror

        mirror = FsspecMirror(address, run_id=job.run_id, keep=settings.keep_checkpoints)

    def patience() -> float:
        return MIRROR_PATIENCE if deadline is None else max(deadline - clock.steady() - 1, 0.0)

    return CheckpointStore(
        Path(job.folder) / CHECKPOINTS, keep=settings.keep_checkpoints, mirror=mirror, patience=patience
    )


def pass_mirrors(mirrors: Mapping[str, str | None]) -> dict[str, str]:
    """The environment that gives a worker the addresses of its runs' mirrors, by the run's id."""
    secret = {run: url for run, url in mirrors.items() if url is not None and hide_login(url) != url}
    return {MIRRORS_VARIABLE: json.dumps(secret)} if secret else {}


@cache
def _passed_mirrors() -> dict[str, str]:
    """What `pass_mirrors` gave. Taken out of the environment: what this process starts need not have it."""
    passed: dict[str, str] = json.loads(os.environ.pop(MIRRORS_VARIABLE, "{}"))
    return passed


def find_mirror(job: TrainJob, settings: TrainSettings, *, passed: Mapping[str, str]) -> str | None:
    """The mirror's address: from the job, or with its login as it was passed, by the run's id."""
    address = passed.get(job.run_id) or settings.run.mirror
    if address is not None and HIDDEN in address:
        raise EnvironmentLacks(
            "the login of the mirror is not known here",
            why="a job's file holds no secrets: `graft train` passes them to the process that it starts",
            fix="start the run with `graft train`",
            where="train.run.mirror",
        )
    return address or None


def guard_callbacks(
    settings: TrainSettings,
    store: CheckpointStore,
    *,
    deadline: float | None,
    peek: Callable[[int], Sequence[Row]],
    report: Callable[[str], None],
) -> list[TrainingCallback]:
    """Those who refuse a step or end the run before it is harmed."""
    # The loss of sampled answers is a sum weighted by advantages: large rewards make it jump, rightly.
    compares = settings.objective != "grpo"
    found: list[TrainingCallback] = [
        DivergenceCallback(settings.watch, compares_losses=compares, peek=peek, report=report)
    ]
    if deadline is not None:
        every, seconds = settings.examine.every, settings.examine.seconds
        found.append(
            DeadlineCallback(
                deadline,
                save_seconds=lambda: store.seconds,
                evaluation_seconds=lambda number: seconds if every and number % every == 0 else 0.0,
            )
        )
    return found


def stoppable_progress(move: Callable[..., None], stop_asked: Callable[[], bool]) -> Callable[..., None]:
    """Updates the heartbeat; on a stop request it abandons the step between two of its parts.

    Only for who works alone: of a strategy, the others would wait for ever.
    """
    from graftwork.train.loop import StepInterrupted

    def progress(*doing: str) -> None:
        move(*doing)
        if stop_asked():
            raise StepInterrupted

    return progress


def reporting_callbacks(
    job: TrainJob,
    settings: TrainSettings,
    *,
    evaluator: TrainingEvaluator | None = None,
    strategy: "SingleProcess | None" = None,
    progress: Callable[[], None] = lambda: None,
    report: Callable[[str], None] = lambda _message: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> list[TrainingCallback]:
    from graftwork.train.callbacks.evaluation import EvaluationCallback
    from graftwork.train.callbacks.reporting import TrackerCallback
    from graftwork.train.trackers import require_installed

    folder = Path(job.folder)
    require_installed(settings.run.trackers)
    callbacks: list[TrainingCallback] = []
    latest: Callable[[], TrainingEvaluation | None] = lambda: None  # noqa: E731
    if settings.examine.every is not None:
        examine = EvaluationCallback(
            settings.examine,
            read_rows(Path(job.dataset_folder), "validation"),
            folder=folder,
            evaluator=evaluator,
            report=report,
            progress=progress,
            stop_requested=stop_requested,
        )
        callbacks.append(examine)
        latest = lambda: examine.latest  # noqa: E731
    if settings.run.trackers and (strategy is None or strategy.rank == 0):
        track = TrackerCallback(
            settings.run.trackers,
            run_id=job.run_id,
            settings=settings.what_is_learned(),
            folder=folder,
            latest_evaluation=latest,
            report=report,
        )
        callbacks.append(track)
    return callbacks
