"""The first two steps: audit the logs, and prepare the dataset."""

from pathlib import Path

from graftwork.data.project import PreparedData, audit_context, counter_here, is_without_logs, log_hashes
from graftwork.files.dataset import MANIFEST, list_files
from graftwork.fleet.project import map_engine
from graftwork.model.shape import read_config_shape
from graftwork.pipeline.step import PipelineStep, StepOutputs
from graftwork.project.open_project import OpenProject, load_template
from graftwork.project.reporter import progress_listener
from graftwork.records.dataset import Audit
from graftwork.records.errors import UserError


def _audit(work: OpenProject, _outputs: StepOutputs) -> Audit:
    from graftwork.data.prepare import audit_logs

    template = load_template(work)
    return audit_logs(
        audit_context(work, template=template),
        folder=work.project.sifted,
        root=work.project.root,
        on_progress=progress_listener(work.reporter),
        engine=map_engine(work),
        count_tokens=counter_here(template, work.settings.data),
    )


AUDIT = PipelineStep(
    name="audit",
    title="audit the logs",
    needs=(),
    makes=Audit,
    depends_on=lambda work, _outputs: [
        work.settings.data.to_manifest(),
        log_hashes(work),
        work.settings.base,
        work.base.revision,
    ],
    do=_audit,
    input_names=("data", "log file", "base", "weights of the base"),
)


def _require_context(work: OpenProject) -> None:
    """Refuse rows longer than the base reads: one of millions of tokens would fill the memory."""
    longest = work.settings.data.max_tokens
    context = read_config_shape(Path(work.base.folder) / "config.json").max_positions
    if longest > context:
        raise UserError(
            f"data.max_tokens is {longest:,}, and {work.base.name} reads {context:,} tokens",
            why="the base was made for that many (max_position_embeddings in its config.json)",
            fix=f"set data.max_tokens to {context} or less, and data.overlong for the rows that are longer",
            where="data.max_tokens",
        )


def _prepare(work: OpenProject, _outputs: StepOutputs) -> PreparedData:
    from graftwork.data.prepare import PrepareJob, prepare, prepare_without_logs

    _require_context(work)
    template = load_template(work)
    job = PrepareJob(
        audit_context(work, template=template),
        base=work.base.name,
        base_fingerprint=work.base.revision,
        renderer=template,
        work=work.project.data,
        out=work.project.datasets,
        root=work.project.root,
        models=work.settings.all_models,
    )
    if is_without_logs(work):
        done = prepare_without_logs(job)
    else:
        done = prepare(job, on_progress=progress_listener(work.reporter), engine=map_engine(work))
    for warning in done.warnings:
        work.reporter.info(warning)
    prepared = next(dataset for dataset in done.datasets if dataset.dataset.model == work.model)
    return PreparedData(
        folder=str(prepared.folder),
        dataset=prepared.dataset,
        folders={dataset.dataset.model: str(dataset.folder) for dataset in done.datasets},
        portions=tuple(dataset.summary for dataset in done.datasets),
    )


def _is_there(_work: OpenProject, prepared: PreparedData) -> bool:
    """Return whether the files exist; their content is checked when they are read."""
    folders = [Path(folder) for folder in prepared.folders.values()]
    return all((folder / MANIFEST).exists() for folder in folders) and all(
        (Path(prepared.folder) / shard.file).exists() for shard in list_files(prepared.dataset)
    )


PREPARE = PipelineStep(
    name="prepare",
    title="prepare the dataset",
    needs=(),
    makes=PreparedData,
    depends_on=lambda work, _outputs: [
        work.settings.data.to_manifest(),
        {name: model.to_manifest() for name, model in work.settings.all_models.items()},
        work.model,
        log_hashes(work),
        work.base.revision,
    ],
    do=_prepare,
    identity=lambda prepared: str(prepared.dataset.content_hash),
    still_there=_is_there,
    input_names=("data", "models", "model", "log file", "weights of the base"),
)
