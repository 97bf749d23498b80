"""Step: from logs to a dataset that may be trained on."""

from pathlib import Path

from graftwork.coordinate.step import Made, Step
from graftwork.coordinate.steps.logs import log_hashes
from graftwork.coordinate.workplace import Workplace
from graftwork.data.prepare import prepare
from graftwork.files.dataset_folder import MANIFEST
from graftwork.model.template import Template
from graftwork.records.base import Record
from graftwork.records.dataset import Dataset


class Prepared(Record):
    """A dataset and where it lies."""

    folder: str
    dataset: Dataset


def _do(work: Workplace, _made: Made) -> Prepared:
    dataset, folder = prepare(
        work.settings.data,
        base=work.base.name,
        base_fingerprint=work.base.revision,
        renderer=Template.from_folder(Path(work.base.folder)),
        out=work.project.datasets,
        root=work.project.root,
        on_progress=lambda phase, done, total: work.narrator.progress(
            phase, done, total, seconds_left=None, detail={}
        ),
    )
    return Prepared(folder=str(folder), dataset=dataset)


STEP = Step(
    name="prepare",
    title="prepare the dataset",
    needs=(),
    makes=Prepared,
    depends_on=lambda work, _made: [
        work.settings.data.model_dump(mode="json"),
        log_hashes(work),
        work.base.revision,
    ],
    do=_do,
    identity=lambda prepared: str(prepared.dataset.content_hash),
    still_there=lambda _work, prepared: (Path(prepared.folder) / MANIFEST).exists(),
)
