"""Which files the logs of a project are, and what is in them, as the first two steps need it."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.ingest.files import STANDARD_INPUT
from graftwork.data.ingest.read import find_files
from graftwork.data.settings import DataSettings
from graftwork.files.dataset import MANIFEST, list_files
from graftwork.files.disk import explain_os_error, file_digest
from graftwork.model.base import find_base, is_ready
from graftwork.model.shape import read_config_shape
from graftwork.pipeline.engines import map_engine
from graftwork.pipeline.open_project import OpenProject, load_template
from graftwork.pipeline.reporter import progress_listener
from graftwork.pipeline.step import PipelineStep, StepOutputs
from graftwork.project.load import ProjectFolder
from graftwork.records.base import Record
from graftwork.records.dataset import Audit, Dataset, SubsetSummary
from graftwork.records.errors import GraftError, UserMistake

if TYPE_CHECKING:
    from graftwork.data.audit.lengths import CountTokens
    from graftwork.model.chat.template import ChatTemplate


def log_hashes(work: OpenProject) -> dict[str, str]:
    """Every log file that `data.logs` names, with the hash of its bytes."""
    root = work.project.root
    hashes: dict[str, str] = {}
    if is_without_logs(work):
        return hashes
    for name in find_files(work.settings.data.logs, root=root):
        if name == STANDARD_INPUT:
            raise UserMistake(
                "a project's logs cannot come from standard input",
                why="it can be read only once, and a project reads its logs again",
                fix="write it to a file first, or look at it with `graft data audit -`",
                where="data.logs",
            )
        try:
            hashes[name] = file_digest(root / name)
        except OSError as error:
            raise explain_os_error(error, root / name) from error
    return hashes


def is_without_logs(work: OpenProject) -> bool:
    """Whether no log is named and none is needed: all models learn from prompts of another source."""
    if work.settings.data.logs:
        return False
    settings = work.project.settings
    return not any(settings.of_model(name).train.needs_rows for name in settings.all_models)


def audit_context(work: OpenProject, *, template: "ChatTemplate") -> AuditContext:
    return _with_base_facts(AuditContext(settings=work.settings.data, base=work.settings.base), template)


def audit_context_here(project: ProjectFolder, *, template: "ChatTemplate | None" = None) -> AuditContext:
    """Without waiting for anything: the base counts only if it is at hand and can be read."""
    context = AuditContext(settings=project.settings.data, base=project.settings.base)
    template = template or template_here(project.settings.base, project.settings.data, root=project.root)
    return context if template is None else _with_base_facts(context, template)


def template_here(base: str, settings: DataSettings, *, root: Path = Path()) -> "ChatTemplate | None":
    """The template of the base; None where the base is not at hand or cannot be read."""
    if not is_ready(base, project_folder=root):
        return None
    try:
        from graftwork.model.chat.template import ChatTemplate

        folder = Path(find_base(base, project_folder=root).folder)
        return ChatTemplate.from_folder(folder, reasoning=settings.reasoning == "keep")
    except GraftError:
        return None


def counter_here(template: "ChatTemplate | None", settings: DataSettings) -> "CountTokens | None":
    """Counts the tokens of rows; None without a template, or without the extra that tokenizes."""
    from graftwork.data.prepare import make_counter

    if template is None or find_spec("tokenizers") is None:
        return None
    return make_counter(template, settings=settings)


def _with_base_facts(context: AuditContext, template: "ChatTemplate") -> AuditContext:
    return replace(
        context,
        control_tokens=tuple(sorted(template.control_tokens)),
        base_reasons=template.writes_reasoning,
    )


def _audit(work: OpenProject, _made: StepOutputs) -> Audit:
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
    depends_on=lambda work, _made: [
        work.settings.data.to_manifest(),
        log_hashes(work),
        work.settings.base,
        work.base.revision,
    ],
    do=_audit,
    input_names=("data", "log file", "base", "weights of the base"),
)


class PreparedData(Record):
    """The dataset that is trained on, its folder, and the folders of all models' datasets."""

    folder: str
    dataset: Dataset
    folders: dict[str, str]
    portions: tuple[SubsetSummary, ...]


def _require_context(work: OpenProject) -> None:
    """Refuse rows longer than the base reads: one of millions of tokens would fill the memory."""
    longest = work.settings.data.max_tokens
    context = read_config_shape(Path(work.base.folder) / "config.json").shape.max_positions
    if longest > context:
        raise UserMistake(
            f"data.max_tokens is {longest:,}, and {work.base.name} reads {context:,} tokens",
            why="the base was made for that many (max_position_embeddings in its config.json)",
            fix=f"set data.max_tokens to {context} or less, and data.overlong for the rows that are longer",
            where="data.max_tokens",
        )


def _prepare(work: OpenProject, _made: StepOutputs) -> PreparedData:
    from graftwork.data.prepare import PrepareJob, RenderTarget, prepare, prepare_without_logs

    _require_context(work)
    template = load_template(work)
    job = PrepareJob(
        audit_context(work, template=template),
        base=RenderTarget(name=work.base.name, fingerprint=work.base.revision, renderer=template),
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
    chosen = next(dataset for dataset in done.datasets if dataset.dataset.model == work.model)
    return PreparedData(
        folder=str(chosen.folder),
        dataset=chosen.dataset,
        folders={dataset.dataset.model: str(dataset.folder) for dataset in done.datasets},
        portions=tuple(dataset.summary for dataset in done.datasets),
    )


def _is_there(_work: OpenProject, prepared: PreparedData) -> bool:
    """Whether the files are there; what is in them is checked when they are read."""
    folders = [Path(folder) for folder in prepared.folders.values()]
    return all((folder / MANIFEST).exists() for folder in folders) and all(
        (Path(prepared.folder) / shard.file).exists() for shard in list_files(prepared.dataset)
    )


PREPARE = PipelineStep(
    name="prepare",
    title="prepare the dataset",
    needs=(),
    makes=PreparedData,
    depends_on=lambda work, _made: [
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
