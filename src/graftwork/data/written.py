"""A dataset on disk: how its rows are written, and how they are read back and checked.

In: rows, or the folder of a dataset. Out: bytes, or rows and manifest that are proven to be the
ones that were prepared.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from graftwork.files.digest import require_digest
from graftwork.files.whole import explain_os_error
from graftwork.records.base import fingerprint
from graftwork.records.dataset import Dataset, Row, Split
from graftwork.records.errors import Damaged
from graftwork.records.report import Case

MANIFEST_FILE = "manifest.json"


def encode_rows(rows: Iterable[Row]) -> bytes:
    """One row a line, the same bytes for the same rows."""
    return "".join(row.model_dump_json() + "\n" for row in rows).encode()


def hash_manifest(dataset: Dataset) -> str:
    """The hash that names a dataset: of all its manifest says but the name itself."""
    return fingerprint(dataset.model_dump(mode="json", exclude={"content_hash"}))


def load_manifest(folder: Path) -> Dataset:
    path = folder / MANIFEST_FILE
    try:
        dataset = Dataset.from_json(path.read_bytes())
    except OSError as error:
        raise explain_os_error(error, path) from error
    except ValidationError as error:
        raise _damaged(path, "it does not read as a manifest") from error
    if hash_manifest(dataset) != dataset.content_hash:
        raise _damaged(path, "its content does not have the hash that it states")
    return dataset


def load_rows(folder: Path, split: Split, *, verify: bool = True) -> list[Row]:
    """The rows of one split, checked against the manifest unless the caller just did."""
    path = folder / f"{split}.jsonl"
    if verify:
        require_digest(path, load_manifest(folder).splits[split].sha256)
    try:
        with path.open("rb") as handle:
            return [Row.from_json(line) for line in handle]
    except OSError as error:
        raise explain_os_error(error, path) from error
    except ValidationError as error:
        raise _damaged(path, "a line does not read as a row") from error


def to_cases(rows: Sequence[Row]) -> tuple[Case, ...]:
    """Held-out rows as the cases of an evaluation."""
    return tuple(
        Case(
            id=row.id,
            origin=row.origin,
            messages=row.messages,
            reference=row.reply,
            group=row.group,
            session=row.session,
        )
        for row in rows
    )


def _damaged(path: Path, why: str) -> Damaged:
    return Damaged(f"{path.name} is damaged", why=why, fix="run `graft data prepare` again", where=str(path))
