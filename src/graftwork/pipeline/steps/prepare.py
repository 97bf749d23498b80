"""Step: from logs to datasets that may be trained on, one for each model of the project."""

from pathlib import Path

from graftwork.data.portions import PortionSummary
from graftwork.files.dataset_folder import MANIFEST, list_files
from graftwork.pipeline.pace import tell_pace
from graftwork.pipeline.sight import load_template, see
from graftwork.pipeline.step import Made, Step
from graftwork.pipeline.steps.logs import log_hashes
from graftwork.pipeline.workplace import Workplace
from graftwork.records.base import Record
from graftwork.records.dataset import Dataset


class Prepared(Record):
    """The dataset that is trained on, where it lies, and where those of all models lie."""

    folder: str
    dataset: Dataset
    folders: dict[str, str]
    portions: tuple[PortionSummary, ...]


def _do(work: Workplace, _made: Made) -> Prepared:
    from graftwork.data.prepare import Base, prepare

    template = load_template(work)
    models = work.settings.all_models
    done = prepare(
        see(work, template=template),
        base=Base(name=work.base.name, fingerprint=work.base.revision, renderer=template),
        work=work.project.data,
        out=work.project.datasets,
        root=work.project.root,
        models=models,
        on_progress=tell_pace(work.reporter),
    )
    for doubt in done.doubts:
        work.reporter.info(doubt)
    chosen = next(one for one in done.datasets if one.dataset.model == work.model)
    return Prepared(
        folder=str(chosen.folder),
        dataset=chosen.dataset,
        folders={one.dataset.model: str(one.folder) for one in done.datasets},
        portions=tuple(one.summary for one in done.datasets),
    )


def _is_there(_work: Workplace, prepared: Prepared) -> bool:
    """Whether the files are there; what is in them is checked when they are read."""
    folders = [Path(folder) for folder in prepared.folders.values()]
    return all((folder / MANIFEST).exists() for folder in folders) and all(
        (Path(prepared.folder) / shard.file).exists() for shard in list_files(prepared.dataset)
    )


STEP = Step(
    name="prepare",
    title="prepare the dataset",
    needs=(),
    makes=Prepared,
    depends_on=lambda work, _made: [
        work.settings.data.to_manifest(),
        {name: model.model_dump(mode="json") for name, model in work.settings.all_models.items()},
        work.model,
        log_hashes(work),
        work.base.revision,
    ],
    do=_do,
    identity=lambda prepared: str(prepared.dataset.content_hash),
    still_there=_is_there,
    input_names=("data", "models", "model", "log file", "weights of the base"),
)
