"""Who looks on, as graft.yaml asks: the one who examines the model, the one who tells trackers.

In: a job and its settings. Out: attendants for the loop. What they lack is said here, before a
model is loaded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.files.dataset_folder import read_rows
from graftwork.records.run import Look, TrainJob
from graftwork.train.attend.attendant import TrainingCallback
from graftwork.train.ports import TrainingEvaluator
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    pass


def reporting_callbacks(
    job: TrainJob,
    settings: TrainSettings,
    *,
    examiner: TrainingEvaluator | None = None,
    crew: "DistributedStrategy | None" = None,
    pulse: Callable[[], None] = lambda: None,
    on_word: Callable[[str], None] = lambda _word: None,
    stop_asked: Callable[[], bool] = lambda: False,
) -> list[TrainingCallback]:
    from graftwork.train.attend.examine import EvaluationCallback
    from graftwork.train.attend.track import TrackerCallback
    from graftwork.train.trackers.tracker import require_installed

    folder = Path(job.folder)
    require_installed(settings.run.trackers)
    attendants: list[TrainingCallback] = []
    latest: Callable[[], Look | None] = lambda: None  # noqa: E731
    if settings.examine.every is not None:
        examine = EvaluationCallback(
            settings.examine,
            read_rows(Path(job.dataset_folder), "validation"),
            folder=folder,
            examiner=examiner,
            crew=crew,
            on_word=on_word,
            pulse=pulse,
            stop_asked=stop_asked,
        )
        attendants.append(examine)
        latest = lambda: examine.latest  # noqa: E731
    if settings.run.trackers and (crew is None or crew.rank == 0):
        track = TrackerCallback(
            settings.run.trackers,
            run_id=job.run_id,
            settings=settings.what_is_learned(),
            folder=folder,
            latest_look=latest,
            on_word=on_word,
        )
        attendants.append(track)
    return attendants
