"""The logs of a project, what an audit of them needs, and which of its datasets is meant.

A dataset is named by its folder or by the first characters of its hash; without a name it is the last one
that was prepared.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.ingest.files import STANDARD_INPUT, find_sources
from graftwork.data.ingest.read import read_file
from graftwork.data.settings import DataSettings
from graftwork.files.dataset import MANIFEST, read_manifest
from graftwork.files.disk import explain_os_error, file_digest
from graftwork.grading.reward_audit import ScoreAudit, ScoredReply, audit_scores, scored_interactions
from graftwork.model.base import find_base, is_ready
from graftwork.project.folder import ProjectFolder
from graftwork.project.open_project import OpenProject, name_entry
from graftwork.records.base import Record
from graftwork.records.dataset import Dataset, SubsetSummary
from graftwork.records.errors import EnvironmentFailure, GraftError, UserError
from graftwork.records.interaction import Interaction

if TYPE_CHECKING:
    from graftwork.data.audit.findings import CountTokens
    from graftwork.data.inspect import TokenDecoder
    from graftwork.model.chat.template import ChatTemplate


def log_hashes(work: OpenProject) -> dict[str, str]:
    """Every log file that `data.logs` names, with the hash of its bytes."""
    root = work.project.root
    hashes: dict[str, str] = {}
    if is_without_logs(work):
        return hashes
    for name in find_sources(work.settings.data.logs, root=root):
        if name == STANDARD_INPUT:
            raise UserError(
                "a project's logs cannot come from standard input",
                why="it can be read only once, and a project reads its logs again",
                fix="write it to a file first, or check it with `graft data audit -`",
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
    """Without waiting for anything: the base is used only if it is available and readable."""
    context = AuditContext(settings=project.settings.data, base=project.settings.base)
    template = template or template_here(project.settings.base, project.settings.data, root=project.root)
    return context if template is None else _with_base_facts(context, template)


def template_here(base: str, settings: DataSettings, *, root: Path = Path()) -> "ChatTemplate | None":
    """The template of the base; None if the base is not available or cannot be read."""
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


class PreparedData(Record):
    """The dataset that is trained on, its folder, and the folders of all models' datasets."""

    folder: str
    dataset: Dataset
    folders: dict[str, str]
    portions: tuple[SubsetSummary, ...]


def find_latest_dataset(work: OpenProject) -> Path:
    """The dataset of the last `prepare` of this model."""
    # Only the folders are read: validating the whole output would import all that preparing needs.
    entry, main = work.ledger.get(name_entry(work, "prepare")), None
    folder_name = entry.output["folder"] if entry is not None else None
    if entry is None and (main := work.ledger.get("prepare")) is not None:
        # Preparing one model prepares the datasets of all.
        folder_name = main.output.get("folders", {}).get(work.model)
    folder = Path(folder_name) if folder_name is not None else None
    if folder is None or not (folder / MANIFEST).is_file():
        raise UserError(
            "this project has no dataset yet" if folder is None else "the dataset of the project is missing",
            fix="run `graft data prepare`",
            where=str(folder or ""),
        )
    return folder


def find_dataset_by_hash(datasets: Path, name: str) -> Path:
    candidates = (
        [folder for folder in sorted(datasets.glob("*")) if folder.name.startswith(name)] if name else []
    )
    matches = [folder for folder in candidates if (folder / MANIFEST).is_file()]
    if not matches:
        raise no_such_dataset(name, where=datasets)
    if len(matches) > 1:
        raise UserError(
            f"several datasets start with {name!r}",
            why=f"among them {', '.join(folder.name[:12] for folder in matches[:3])}",
            fix="use more characters of the hash",
            where=str(datasets),
        )
    return matches[0]


def no_such_dataset(name: str, *, where: Path) -> UserError:
    return UserError(
        f"there is no dataset {name!r}",
        why="it is neither a folder with a manifest.json nor the first characters of a dataset's hash",
        fix="omit it to use the latest dataset, or run `graft data prepare`",
        where=str(where),
    )


def open_decoder(folder: Path, root: Path) -> "TokenDecoder":
    """The tokenizer of the base that the dataset was rendered for."""
    from graftwork.model.base import find_base

    dataset = read_manifest(folder)
    base = find_base(dataset.base, project_folder=root)
    if base.revision != dataset.base_fingerprint:
        raise EnvironmentFailure(
            f"the dataset was rendered for another version of the base model {dataset.base}",
            why="the same token ids would decode to other text",
            fix="restore the base model, or run `graft data prepare` again",
            where=base.folder,
        )
    file = Path(base.folder) / "tokenizer.json"
    return _load_decoder(file, file.stat().st_mtime_ns if file.exists() else 0)


@lru_cache(maxsize=1)
def _load_decoder(file: Path, _changed: int) -> "TokenDecoder":
    """The last tokenizer stays loaded: a page shows one row after another."""
    from graftwork.data.inspect import TokenDecoder

    decoder = TokenDecoder(file)
    decoder.load()
    return decoder


def open_decoder_if_there(folder: Path, root: Path) -> "TokenDecoder | None":
    """None if the tokenizer cannot be read: a trace is useful without the text of the token."""
    try:
        return open_decoder(folder, root)
    except GraftError:
        return None


class LogScores(Record):
    file: str
    rows: int
    audit: ScoreAudit | None
    """None if no row has a score."""


class LogScoresAudit(Record):
    files: tuple[LogScores, ...]
    whole: ScoreAudit | None

    @property
    def usable(self) -> bool:
        return self.whole is not None and self.whole.usable


def audit_logs(
    paths: Sequence[str], *, root: Path = Path(), settings: DataSettings | None = None
) -> LogScoresAudit:
    """Rows of every status count: what failed must have lower scores."""
    logs: list[LogScores] = []
    everything: list[ScoredReply] = []
    for name in find_sources(paths, root=root):
        results = read_file(name, root=root, settings=settings)
        rows = [row for row in results if isinstance(row, Interaction)]
        replies = scored_interactions(rows)
        audit = audit_scores(replies) if replies else None
        logs.append(LogScores(file=name, rows=len(rows), audit=audit))
        everything += replies
    return LogScoresAudit(files=tuple(logs), whole=audit_scores(everything) if everything else None)
