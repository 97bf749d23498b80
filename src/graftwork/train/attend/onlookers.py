"""Who looks on, as graft.yaml asks: the one who examines the model, the one who tells trackers.

In: a job and its settings. Out: attendants for the loop. What they lack is said here, before a
model is loaded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.files.dataset import read_rows
from graftwork.records.run import TrainingEvaluation, TrainJob
from graftwork.train.attend.attendant import Attendant
from graftwork.train.ports import Examiner
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.train.crew import Crew


def onlookers(
    job: TrainJob,
    settings: TrainSettings,
    *,
    examiner: Examiner | None = None,
    crew: "Crew | None" = None,
    pulse: Callable[[], None] = lambda: None,
    on_word: Callable[[str], None] = lambda _word: None,
    stop_asked: Callable[[], bool] = lambda: False,
) -> list[Attendant]:
    from graftwork.train.attend.examine import Examine
    from graftwork.train.attend.track import Track
    from graftwork.train.trackers.tracker import require_installed

    folder = Path(job.folder)
    require_installed(settings.run.trackers)
    attendants: list[Attendant] = []
    latest: Callable[[], TrainingEvaluation | None] = lambda: None  # noqa: E731
    if settings.examine.every is not None:
        examine = Examine(
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
        track = Track(
            settings.run.trackers,
            run_id=job.run_id,
            settings=settings.what_is_learned(),
            folder=folder,
            latest_look=latest,
            on_word=on_word,
        )
        attendants.append(track)
    return attendants
