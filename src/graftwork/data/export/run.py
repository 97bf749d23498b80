"""A dataset to a folder in another's format.

In: the folder of a dataset, the name of a format, a folder. Out: the files, whole or not at all, and
`graftwork.json`, which names the dataset and every file. Rows pass one by one. They were redacted when
the dataset was prepared; nothing else than rows and counts goes out.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol, cast, get_args

from graftwork.data.export.place import put_in_place, require_place
from graftwork.data.export.record import EXPORT_FILE, Export, ExportedFile, ExportOptions
from graftwork.data.export.sink import Sink
from graftwork.files.dataset import iterate_rows, read_manifest
from graftwork.files.disk import file_digest, write_atomic
from graftwork.records.dataset import SPLITS, Dataset, Row, Split
from graftwork.records.errors import UserMistake

FormatName = Literal["openai", "huggingface", "kaggle", "sagemaker", "axolotl", "llamafactory"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)


class Format(Protocol):
    """What a module of a format offers."""

    def check_options(self, options: ExportOptions) -> None: ...

    def add_row(self, sink: Sink, split: Split, row: Row) -> None: ...

    def finish(self, sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]: ...


def export_dataset(
    source: Path,
    out: Path,
    *,
    format_name: FormatName,
    splits: Sequence[Split] = SPLITS,
    options: ExportOptions | None = None,
    force: bool = False,
) -> Export:
    """Write the dataset in `source` to the folder `out`."""
    options = options or ExportOptions()
    form = cast("Format", import_module(f"graftwork.data.export.{format_name}"))
    form.check_options(options)
    dataset = read_manifest(source)
    _require_rows(dataset, splits)
    require_place(out, force=force)
    with put_in_place(out.absolute()) as folder:
        with Sink(folder) as sink:
            counts, pairs = _add_rows(form, sink, source, splits)
            notes = (*form.finish(sink, dataset, options), *_note_weights(sink, format_name))
        files = tuple(
            ExportedFile(
                file=path.relative_to(folder).as_posix(),
                rows=sink.rows.get(path.relative_to(folder).as_posix()),
                sha256=file_digest(path),
            )
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        )
        export = Export(
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


def _add_rows(
    form: Format, sink: Sink, source: Path, splits: Sequence[Split]
) -> tuple[dict[Split, int], int]:
    """Every row of the splits; counts those that found a place, and the preference pairs among them."""
    counts: dict[Split, int] = {}
    pairs = 0
    for split in dict.fromkeys(splits):
        counts[split] = 0
        for row in iterate_rows(source, split):
            before = sink.added
            form.add_row(sink, split, row)
            added = sink.added - before
            counts[split] += added
            pairs += added if row.rejected is not None else 0
            sink.weighted += row.weight != 1.0
    return counts, pairs


def _note_weights(sink: Sink, format_name: FormatName) -> tuple[str, ...]:
    if not sink.weighted or format_name in ("huggingface", "kaggle", "sagemaker"):
        return ()
    return (f"{sink.weighted} rows have a weight other than 1, which {format_name} has no place for",)


def _require_rows(dataset: Dataset, splits: Sequence[Split]) -> None:
    if not any(dataset.splits[split].rows for split in splits if split in dataset.splits):
        held = ", ".join(f"{name} {summary.rows}" for name, summary in dataset.splits.items())
        raise UserMistake(
            f"there is nothing to export in {', '.join(splits)}",
            why=f"the dataset {dataset.content_hash[:12]} holds {held} rows",
            fix="name another --split, or prepare a dataset with rows in it",
        )
