"""The folder in which a dataset lies: `manifest.json` and one file of rows a split.

In: rows, or the folder of a dataset. Out: bytes, or rows and manifest that are proven to be the
ones that were prepared. Shared by the stage that writes it and those that read it.
"""

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from graftwork.files.digest import require_digest
from graftwork.files.whole import explain_os_error
from graftwork.records.base import fingerprint
from graftwork.records.dataset import Dataset, Row, Split
from graftwork.records.errors import Damaged

MANIFEST = "manifest.json"


def encode_rows(rows: Iterable[Row]) -> bytes:
    """One row a line, the same bytes for the same rows."""
    return "".join(row.model_dump_json() + "\n" for row in rows).encode()


def hash_manifest(dataset: Dataset) -> str:
    """The hash that names a dataset: of all its manifest says but the name itself."""
    return fingerprint(dataset.model_dump(mode="json", exclude={"content_hash"}))


def read_manifest(folder: Path) -> Dataset:
    path = folder / MANIFEST
    try:
        dataset = Dataset.from_json(path.read_bytes())
    except OSError as error:
        raise explain_os_error(error, path) from error
    except ValidationError as error:
        raise _damaged(path, "it does not read as a manifest") from error
    if hash_manifest(dataset) != dataset.content_hash:
        raise _damaged(path, "its content does not have the hash that it states")
    return dataset


def split_file(folder: Path, split: Split) -> Path:
    return folder / f"{split}.jsonl"


def read_rows(folder: Path, split: Split) -> list[Row]:
    """The rows of one split, whole and unchanged, or an error."""
    path = split_file(folder, split)
    require_digest(path, read_manifest(folder).splits[split].sha256)
    try:
        with path.open("rb") as handle:
            return [Row.from_json(line) for line in handle]
    except OSError as error:
        raise explain_os_error(error, path) from error
    except ValidationError as error:
        raise _damaged(path, "a line does not read as a row") from error


def _damaged(path: Path, why: str) -> Damaged:
    return Damaged(f"{path.name} is damaged", why=why, fix="run `graft data prepare` again", where=str(path))
