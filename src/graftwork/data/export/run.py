"""Exports a dataset to a folder in another tool's format.

In: a dataset folder, the name of a format, a target folder. Out: the files, all or none, and
`graftwork.json`, which names the dataset and every file. Rows pass one by one; they were redacted when the
dataset was prepared. Existing files are replaced only if they belong to an earlier export.
"""

import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from graftwork.data.export.sink import EXPORT_FILE, ExportedFile, ExportOptions, ExportRecord, Sink
from graftwork.data.export.trainers import Axolotl, HuggingFace, Kaggle, LlamaFactory, OpenAI, SageMaker
from graftwork.files.dataset import iterate_rows, read_manifest
from graftwork.files.disk import atomic_folder, explain_os_error, file_digest, sync_folder, write_atomic
from graftwork.process.extensions import extension_names, load_extension
from graftwork.records.dataset import SPLITS, Dataset, Row, Split
from graftwork.records.errors import UserMistake


def require_empty_or_own(out: Path, *, force: bool) -> None:
    """Refuse a folder with files that are not from an export."""
    if out.exists() and not out.is_dir():
        raise UserMistake("this is a file, not a folder", fix="name a folder for --out", where=str(out))
    foreign = [] if force or not out.exists() else sorted(_files(out) - _own_files(out))
    if foreign:
        raise UserMistake(
            f"the folder holds other files: {', '.join(foreign[:3])}{' …' if len(foreign) > 3 else ''}",
            why="an export replaces what it finds, and these are not of an export",
            fix="name an empty folder, or add --force to write among them",
            where=str(out),
        )


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill; it replaces `out` when the block succeeds."""
    staged = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with atomic_folder(staged) as folder:
            yield folder
        if not out.exists() or not any(out.iterdir()):
            staged.replace(out)
        elif _files(out) <= _own_files(out):
            aside = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.old")
            out.replace(aside)
            try:
                staged.replace(out)
            except OSError:
                aside.replace(out)
                raise
            shutil.rmtree(aside, ignore_errors=True)
        else:
            # Among other files: one by one, the record of the export last.
            stale = _own_files(out) - _files(staged)
            for name in sorted(_files(staged), key=lambda name: (name == EXPORT_FILE, name)):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (staged / name).replace(out / name)
            for name in stale:
                (out / name).unlink(missing_ok=True)
        sync_folder(out.parent)
    except OSError as error:
        raise explain_os_error(error, out) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def _own_files(folder: Path) -> set[str]:
    """Return the files that an earlier export wrote here; none without its record."""
    try:
        export = ExportRecord.from_json((folder / EXPORT_FILE).read_bytes())
    except (OSError, ValidationError):
        return set()
    return {EXPORT_FILE, *(file.file for file in export.files)}


class Exporter(Protocol):
    """What an export format provides.

    To add one, name such an object in the entry points `graftwork.exporters`.
    """

    def check_options(self, options: ExportOptions, /) -> None:
        """Raise UserMistake for options that this format cannot use, before anything is written."""

    def add_row(self, sink: Sink, split: Split, row: Row, /) -> None:
        """Write one row to the sink, or call `sink.leave_out` with the reason."""

    def finish(self, sink: Sink, dataset: Dataset, options: ExportOptions, /) -> tuple[str, ...]:
        """Write the files that describe the others. Return notes for the user."""


REQUIRED = ("check_options", "add_row", "finish")
HOLD_WEIGHTS = ("huggingface", "kaggle", "sagemaker")
EXPORTERS: dict[str, Exporter] = {
    "openai": OpenAI(),
    "huggingface": HuggingFace(),
    "kaggle": Kaggle(),
    "sagemaker": SageMaker(),
    "axolotl": Axolotl(),
    "llamafactory": LlamaFactory(),
}


def load_exporter(name: str) -> Exporter:
    """Return the built-in exporter of this name, or the one that an installed package adds."""
    if name in EXPORTERS:
        return EXPORTERS[name]
    if name not in (added := extension_names("graftwork.exporters")):
        raise UserMistake(
            f"unknown export format: {name!r}", fix=f"use one of {', '.join((*EXPORTERS, *added))}"
        )
    exporter: Exporter = load_extension("graftwork.exporters", name, attributes=REQUIRED)
    return exporter


def export_dataset(
    source: Path,
    out: Path,
    *,
    format_name: str,
    splits: Sequence[Split] = SPLITS,
    options: ExportOptions | None = None,
    force: bool = False,
) -> ExportRecord:
    """Write the dataset in `source` to the folder `out`."""
    options = options or ExportOptions()
    form = load_exporter(format_name)
    form.check_options(options)
    dataset = read_manifest(source)
    if not any(dataset.splits[split].rows for split in splits if split in dataset.splits):
        held = ", ".join(f"{name} {summary.rows}" for name, summary in dataset.splits.items())
        raise UserMistake(
            f"there is nothing to export in {', '.join(splits)}",
            why=f"the dataset {dataset.content_hash[:12]} holds {held} rows",
            fix="name another --split, or prepare a dataset with rows in it",
        )
    require_empty_or_own(out, force=force)
    with staged_folder(out.absolute()) as folder:
        with Sink(folder) as sink:
            counts: dict[Split, int] = {}
            pairs = weighted = 0
            for split in dict.fromkeys(splits):
                first = sink.added
                for row in iterate_rows(source, split):
                    before = sink.added
                    form.add_row(sink, split, row)
                    pairs += sink.added - before if row.rejected is not None else 0
                    weighted += row.weight != 1.0
                counts[split] = sink.added - first
            notes = form.finish(sink, dataset, options)
            if weighted and format_name not in HOLD_WEIGHTS:
                rows = f"{weighted} rows have a weight other than 1"
                notes = (*notes, f"{rows}, which {format_name} has no place for")
        files = tuple(
            ExportedFile(
                file=path.relative_to(folder).as_posix(),
                rows=sink.rows.get(path.relative_to(folder).as_posix()),
                sha256=file_digest(path),
            )
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        )
        export = ExportRecord(
            format=format_name,
            dataset=dataset.content_hash,
            base=dataset.base,
            template_fingerprint=dataset.template_fingerprint,
            splits=counts,
            rows=sink.added,
            preference_rows=pairs,
            files=files,
            left_out=sink.left_out(),
            notes=notes,
        )
        write_atomic(folder / EXPORT_FILE, export.to_json() + "\n")
    return export
